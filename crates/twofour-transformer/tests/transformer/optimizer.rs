//! The gradient norm and AdamW.

use half::{bf16, f16};
use twofour::{Arithmetic, MatrixRef, adamw_step::ChangeMean, estimate::masked_decay};
use twofour_cuda::{
    DataType,
    layer::{DeviceBuffer, LayerContext, SparseLinear, SparseLinearSettings},
    raw::adamw::AdamWSettings,
};
use twofour_transformer::cuda::{
    AdamWPhase, AdamWTensors, ClippedGradients, GradientClip, PrunedDecay, SecondMoment, StepSchedule, adamw,
    adamw_in_phase, clip_gradients,
};

use crate::{context, reference::numbers, unwritten, up};

const SETTINGS: AdamWSettings =
    AdamWSettings { learning_rate: f64::NAN, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// Norm, scale and flag of gradients.
fn clipped(context: &LayerContext, gradients: &[Vec<f32>], clip: f32, loss_scale: f32) -> (f32, f32, u32) {
    let there: Vec<DeviceBuffer> = gradients.iter().map(|gradient| up(context, gradient)).collect();
    let slices: Vec<_> = there.iter().map(DeviceBuffer::as_slice).collect();
    let loss_scale = up(context, &[loss_scale]);
    let (mut norm, mut scale) = (unwritten::<f32>(context, 1), unwritten::<f32>(context, 1));
    let mut flag = DeviceBuffer::from_ids(context, &[7]).unwrap();
    let to =
        ClippedGradients { norm: norm.as_slice_mut(), scale: scale.as_slice_mut(), non_finite: flag.as_slice_mut() };
    let clip = GradientClip { loss_scale: Some(loss_scale.as_slice()), ..GradientClip::to(clip) };
    clip_gradients(context, &slices, clip, to).unwrap();
    (norm.to_host().unwrap()[0], scale.to_host().unwrap()[0], flag.ids_to_host().unwrap()[0])
}

#[test]
fn the_norm_is_that_of_f64_and_clips() {
    let Some(context) = context() else { return };
    for lens in [vec![1], vec![3, 0, 1000], (0..150).map(|i| i * i % 977).collect(), vec![1_000_003, 5]] {
        let gradients: Vec<Vec<f32>> = lens.iter().enumerate().map(|(i, len)| numbers(*len, i as u64 + 1)).collect();
        let squares: f64 = gradients.iter().flatten().map(|g| f64::from(*g).powi(2)).sum();
        for (clip, loss_scale) in [(1.0, 8.0), (f32::INFINITY, 1024.0), (1e9, 1.0)] {
            let (norm, scale, flag) = clipped(&context, &gradients, clip, loss_scale);
            let expected = squares.sqrt() / f64::from(loss_scale);
            let factor = (f64::from(clip) / (expected + 1e-6)).min(1.0) / f64::from(loss_scale);
            assert!((f64::from(norm) - expected).abs() <= 1e-6 * expected, "{lens:?}: {norm}, expected {expected}");
            assert!((f64::from(scale) - factor).abs() <= 1e-6 * factor, "{lens:?}: {scale}, expected {factor}");
            assert_eq!(flag, 0, "{lens:?}");
            assert_eq!(clipped(&context, &gradients, clip, loss_scale), (norm, scale, flag), "{lens:?}: another run");
        }
    }
}

#[test]
fn gradients_that_are_not_finite_are_flagged() {
    let Some(context) = context() else { return };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut gradient: Vec<f32> = numbers(5000, 1);
        gradient[4321] = bad;
        let (_, scale, flag) = clipped(&context, &[numbers(100, 2), gradient], 1.0, 1.0);
        assert_eq!((scale, flag), (0.0, 1), "{bad}");
    }
}

/// The optimizer on a CPU.
fn on_the_cpu(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], learning_rate: f64, step: u64) {
    let AdamWSettings { beta1, beta2, epsilon, weight_decay, .. } = SETTINGS;
    let corrected = |beta: f64| (1.0 / (1.0 - beta.powf(step as f64))) as f32;
    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        *m = *m * beta1 as f32 + g * (1.0 - beta1) as f32;
        *v = *v * beta2 as f32 + g * g * (1.0 - beta2) as f32;
        let step = *m * corrected(beta1) / ((*v * corrected(beta2)).sqrt() + epsilon as f32);
        *w = *w * (1.0 - learning_rate * weight_decay) as f32 - step * learning_rate as f32;
    }
}

fn check_steps<C: Arithmetic>(context: &LayerContext, (rows, cols): (usize, usize)) {
    let len = rows * cols;
    let mut w: Vec<f32> = numbers(len, 1);
    let (mut m, mut v) = (vec![0f32; len], vec![0f32; len]);
    let [mut w_there, mut m_there, mut v_there] = [&w, &m, &v].map(|values| up(context, values));
    let mut copy = unwritten::<C>(context, len);
    let (mut flag, scale) = (DeviceBuffer::from_ids(context, &[0]).unwrap(), up(context, &[0.5f32]));
    let mut schedule = StepSchedule::new(context).unwrap();
    let mut taken = 0;
    for (round, skips) in [false, false, true, false].into_iter().enumerate() {
        let g: Vec<f32> = numbers(len, 10 + round as u64);
        let (g_there, rate) = (up(context, &g), 1e-2 / (round + 1) as f64);
        flag.write_ids(&[u32::from(skips)]).unwrap();
        schedule.set_learning_rate(rate).unwrap();
        schedule.advance(SETTINGS, Some(flag.as_slice())).unwrap();
        let tensors = AdamWTensors {
            weight: w_there.as_slice_mut(),
            copy: Some(copy.as_slice_mut()),
            gradient: g_there.as_slice(),
            first: m_there.as_slice_mut(),
            second: v_there.as_slice_mut(),
            gradient_scale: Some(scale.as_slice()),
            skip: Some(flag.as_slice()),
        };
        adamw(context, (rows, cols), tensors, None, &schedule, SETTINGS).unwrap();
        if !skips {
            taken += 1;
            let g: Vec<f32> = g.iter().map(|g| g * 0.5).collect();
            on_the_cpu(&mut w, &g, &mut m, &mut v, rate, taken);
        }
        for (name, found, expected) in [("weight", &w_there, &w), ("first", &m_there, &m), ("second", &v_there, &v)] {
            assert!(found.to_host::<f32>().unwrap() == *expected, "[{rows}, {cols}]: {name} after round {round}");
        }
        let narrow: Vec<C> = w.iter().map(|w| C::from_f32(*w)).collect();
        assert!(copy.to_host::<C>().unwrap() == narrow, "[{rows}, {cols}]: copy after round {round}");
        assert_eq!(schedule.steps().unwrap(), taken);
    }
}

#[test]
fn steps_are_those_of_the_cpu_write_a_copy_and_can_be_skipped() {
    let Some(context) = context() else { return };
    for shape in [(1, 1), (3, 111), (64, 100)] {
        check_steps::<bf16>(&context, shape);
        check_steps::<f16>(&context, shape);
    }
}

#[test]
fn a_sparse_layers_masked_decay_is_that_of_the_cpu() {
    let Some(context) = context() else { return };
    let (rows, cols, strength, rate) = (64, 100, 0.02, 1e-2);
    let mut w: Vec<f32> = numbers(rows * cols, 1);
    let mut g: Vec<f32> = numbers(rows * cols, 2);
    let (mut m, mut v) = (vec![0f32; w.len()], vec![0f32; w.len()]);
    let [mut w_there, mut m_there, mut v_there] = [&w, &m, &v].map(|values| up(&context, values));
    let (g_there, settings) = (up(&context, &g), SparseLinearSettings::default());
    let layer = SparseLinear::new(&context, w_there.as_slice(), (rows, cols), DataType::BF16, settings).unwrap();
    let mut schedule = StepSchedule::new(&context).unwrap();
    schedule.set_learning_rate(rate).unwrap();
    schedule.advance(SETTINGS, None).unwrap();
    let tensors = AdamWTensors {
        weight: w_there.as_slice_mut(),
        copy: None,
        gradient: g_there.as_slice(),
        first: m_there.as_slice_mut(),
        second: v_there.as_slice_mut(),
        gradient_scale: None,
        skip: None,
    };
    adamw(&context, (rows, cols), tensors, Some((&layer, strength)), &schedule, SETTINGS).unwrap();
    let mask = layer.mask().unwrap();
    masked_decay(&mut g, MatrixRef::new(rows, cols, &w).unwrap(), &mask, strength).unwrap();
    on_the_cpu(&mut w, &g, &mut m, &mut v, rate, 1);
    assert!(w_there.to_host::<f32>().unwrap() == w);
}

#[test]
fn a_watched_step_sums_changes_and_a_frozen_one_makes_none() {
    let Some(context) = context() else { return };
    let (rows, cols, strength, rate) = (64, 100, 0.7, 1e-2);
    let (before, g) = (numbers::<f32>(rows * cols, 1), numbers::<f32>(rows * cols, 2));
    let (mut w, mut m, mut v) = (before.clone(), vec![0f32; before.len()], vec![0f32; before.len()]);
    let [mut w_there, mut m_there, mut v_there] = [&w, &m, &v].map(|values| up(&context, values));
    let (g_there, settings) = (up(&context, &g), SparseLinearSettings::default());
    let layer = SparseLinear::new(&context, w_there.as_slice(), (rows, cols), DataType::BF16, settings).unwrap();
    let mask = layer.mask().unwrap();
    let mut changes = unwritten::<f32>(&context, 1);
    let mut schedule = StepSchedule::new(&context).unwrap();
    schedule.set_learning_rate(rate).unwrap();
    let mut step = |second_moment: SecondMoment<'_>, pruned_decay: Option<PrunedDecay>| {
        schedule.advance(SETTINGS, None).unwrap();
        let tensors = AdamWTensors {
            weight: w_there.as_slice_mut(),
            copy: None,
            gradient: g_there.as_slice(),
            first: m_there.as_slice_mut(),
            second: v_there.as_slice_mut(),
            gradient_scale: None,
            skip: None,
        };
        let phase = AdamWPhase { second_moment, pruned_decay: pruned_decay.map(|decay| (&layer, decay)) };
        adamw_in_phase(&context, (rows, cols), tensors, phase, &schedule, SETTINGS).unwrap();
        [&w_there, &m_there, &v_there].map(|buffer| buffer.to_host::<f32>().unwrap())
    };
    let decay = Some(PrunedDecay::Weight { strength });
    let found = step(SecondMoment::Watched { changes: changes.as_slice_mut(), mean: ChangeMean::Arithmetic }, decay);
    on_the_cpu(&mut w, &g, &mut m, &mut v, rate, 1);
    // Pruned weights decay by more.
    let left = |decay: f64| (1.0 - rate * decay) as f32;
    let corrected = |beta: f64| (1.0 / (1.0 - beta)) as f32;
    for i in (0..w.len()).filter(|i| !mask.is_kept(i / cols, i % cols)) {
        let root = (v[i] * corrected(SETTINGS.beta2)).sqrt() + SETTINGS.epsilon as f32;
        let step = m[i] * corrected(SETTINGS.beta1) / root;
        w[i] = before[i] * left(SETTINGS.weight_decay + strength) - step * rate as f32;
    }
    assert!(found == [w, m, v.clone()]);
    let (sum, expected) = (changes.to_host::<f32>().unwrap()[0], v.iter().map(|v| f64::from(*v)).sum::<f64>());
    assert!((f64::from(sum) - expected).abs() <= 1e-6 * expected, "{sum}, not {expected}");
    let [after, _, frozen] = step(SecondMoment::Frozen { at: 1 }, None);
    assert!(frozen == v && after != found[0]);
}
