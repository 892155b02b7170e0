//! Optimizers, STEP's switch and S-STE's scale against a numpy oracle: `fixtures/optimizers.py` makes
//! `fixtures/optimizers.json`.

use serde_json::Value;
use twofour::{
    MatrixRef,
    adamw_step::{ChangeMean, PhaseSwitch},
    estimate::soft_threshold_scale,
    layer::SparseLinearSettings,
};
use twofour_transformer::engine::{
    AdamWStep, Kind, LinearOperations as _, Memory as _, OptimizerStep, ParameterState, PrunedDecay, SecondMoment,
    SgdStep, SparsePrecision, StepOperations as _, cpu::CpuEngine,
};

const SHAPE: (usize, usize) = (4, 8);
const STEPS: u64 = 40;
const LAMBDA: f64 = 0.5;

fn oracle() -> Value {
    serde_json::from_str(include_str!("fixtures/optimizers.json")).unwrap()
}

fn weight() -> Vec<f32> {
    (0..SHAPE.0 * SHAPE.1).map(|i| (1.7 * i as f64 + 0.3).sin() as f32).collect()
}

fn gradient(step: u64) -> Vec<f32> {
    let of = |i: usize| (0.37 * i as f64 + 0.9 * step as f64).sin() * (-0.12 * step as f64).exp();
    (0..SHAPE.0 * SHAPE.1).map(|i| of(i) as f32).collect()
}

fn buffer(values: &[f32]) -> twofour_transformer::engine::cpu::CpuBuffer {
    let mut buffer = CpuEngine.zeros(Kind::Wide, values.len()).unwrap();
    CpuEngine.write(&mut buffer, values).unwrap();
    buffer
}

#[track_caller]
fn close(found: &[f32], expected: &Value, what: &str) {
    let expected: Vec<f64> = expected.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((f64::from(*found) - expected).abs() < 2e-5, "{what}, {i}: {found}, not {expected}");
    }
}

fn decay(target: &str) -> PrunedDecay {
    match target {
        "gradient" => PrunedDecay::Gradient { strength: LAMBDA as f32 },
        "weight" => PrunedDecay::Weight { strength: LAMBDA },
        _ => PrunedDecay::None,
    }
}

/// The weight after all steps, and the step after which the switch froze second moments.
fn adamw(pruned_decay: PrunedDecay, mut switch: Option<(PhaseSwitch, SecondMoment)>) -> (Vec<f32>, Option<u64>) {
    let mut master = buffer(&weight());
    // The mask of the first weights is kept.
    let sparse =
        CpuEngine.sparse_linear(&master, SHAPE, SparseLinearSettings::default(), SparsePrecision::Activations).unwrap();
    let [mut first, mut second] = [buffer(&[0.0; 32]), buffer(&[0.0; 32])];
    for number in 1..=STEPS {
        let at = switch.as_ref().and_then(|(switch, _)| switch.switched_at());
        let second_moment = match (at, &switch) {
            (Some(at), _) => SecondMoment::Frozen { at },
            (None, Some((_, watched))) => *watched,
            (None, None) => SecondMoment::Moving,
        };
        let step = AdamWStep {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 4e-3,
            weight_decay: 0.1,
            step: number,
            gradient_scale: 1.0,
            second_moment,
            pruned_decay,
        };
        let gradient = buffer(&gradient(number));
        let state = ParameterState {
            master: &mut master,
            gradient: &gradient,
            first: &mut first,
            second: Some(&mut second),
            copy: None,
            sparse: Some(&sparse),
        };
        let changes = CpuEngine.step(&OptimizerStep::AdamW(step), vec![state], None).unwrap();
        if let Some((switch, _)) = &mut switch {
            switch.advance();
            switch.observe(changes, 32, 4e-3);
        }
    }
    (CpuEngine.read(&master).unwrap(), switch.and_then(|(switch, _)| switch.switched_at()))
}

#[test]
fn adamw_and_its_decays_are_those_of_the_oracle() {
    for target in ["none", "gradient", "weight"] {
        close(&adamw(decay(target), None).0, &oracle()["adamw"][target], target);
    }
}

#[test]
fn step_switches_where_the_oracle_does_and_goes_on_as_it_does() {
    for case in oracle()["step"].as_array().unwrap() {
        let (mean, watched) = match case["mean"].as_str() {
            Some("arithmetic") => (ChangeMean::Arithmetic, SecondMoment::Watched),
            _ => (ChangeMean::Geometric, SecondMoment::WatchedByLogarithm),
        };
        let bounds = case["bounds"].as_array().map(|b| [b[0].as_u64().unwrap(), b[1].as_u64().unwrap()]);
        let switch = PhaseSwitch::new(mean, 20, bounds).unwrap();
        let (found, at) = adamw(PrunedDecay::None, Some((switch, watched)));
        assert_eq!(at, case["switched_at"].as_u64(), "{mean:?}, {bounds:?}");
        close(&found, &case["weight"], &format!("{mean:?}, {bounds:?}"));
    }
}

#[test]
fn gradient_descent_and_its_decays_are_those_of_the_oracle() {
    for target in ["none", "gradient", "weight"] {
        for momentum in [0.0, 0.9] {
            let mut master = buffer(&weight());
            let sparse = CpuEngine
                .sparse_linear(&master, SHAPE, SparseLinearSettings::default(), SparsePrecision::Activations)
                .unwrap();
            let mut velocity = buffer(&[0.0; 32]);
            for number in 1..=STEPS {
                let step = SgdStep {
                    learning_rate: 0.01,
                    momentum,
                    weight_decay: 0.1,
                    gradient_scale: 1.0,
                    pruned_decay: decay(target),
                };
                let gradient = buffer(&gradient(number));
                let state = ParameterState {
                    master: &mut master,
                    gradient: &gradient,
                    first: &mut velocity,
                    second: None,
                    copy: None,
                    sparse: Some(&sparse),
                };
                CpuEngine.step(&OptimizerStep::Sgd(step), vec![state], None).unwrap();
            }
            let expected = &oracle()["sgd"][target][format!("{momentum:.1}")];
            close(&CpuEngine.read(&master).unwrap(), expected, &format!("{target}, momentum {momentum}"));
        }
    }
}

#[test]
fn the_scale_of_the_soft_threshold_is_that_of_the_oracle() {
    let weight = weight();
    let found = soft_threshold_scale(MatrixRef::new(SHAPE.0, SHAPE.1, &weight).unwrap()).unwrap();
    assert!((f64::from(found) - oracle()["scale"].as_f64().unwrap()).abs() < 1e-6, "{found}");
}
