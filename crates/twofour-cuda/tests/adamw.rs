//! On a device: a step of AdamW with masked decay gives the bits of the same operations on a CPU. Without a device the
//! tests skip.

mod support;

use cudarc::driver::DeviceRepr;
use half::{bf16, f16};
use support::{Bench, bench, numbers::Random};
use twofour::{Arithmetic, Mask, MatrixRef, adamw_step::ChangeMean, estimate::masked_decay};
use twofour_cuda::{
    DataType, Error,
    raw::adamw::{
        AdamW, AdamWPhase, AdamWSchedule, AdamWSettings, AdamWState, AdamWStep, MaskedDecay, SecondMoment, StepNumber,
    },
};

const SETTINGS: AdamWSettings =
    AdamWSettings { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// The optimizer of `twofour-candle`, after masked decay.
fn on_the_cpu(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], settings: AdamWSettings, number: u64) {
    let AdamWSettings { learning_rate, beta1, beta2, epsilon, weight_decay } = settings;
    let corrected = |beta: f64| (1.0 / (1.0 - beta.powf(number as f64))) as f32;
    for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
        *m = *m * beta1 as f32 + g * (1.0 - beta1) as f32;
        *v = *v * beta2 as f32 + g * g * (1.0 - beta2) as f32;
        let step = *m * corrected(beta1) / ((*v * corrected(beta2)).sqrt() + epsilon as f32);
        *w = *w * (1.0 - learning_rate * weight_decay) as f32 - step * learning_rate as f32;
    }
}

fn check<G: Arithmetic + DeviceRepr>(bench: &Bench, element: DataType, rows: usize, cols: usize, masked: bool) {
    let what = format!("[{rows}, {cols}] {element}, masked {masked}");
    let mut random = Random((rows * 31 + cols) as u64);
    let adamw = AdamW::new(&bench.device, element).unwrap();
    let mut w: Vec<f32> = (0..rows * cols).map(|_| random.number()).collect();
    let (mut m, mut v) = (vec![0f32; rows * cols], vec![0f32; rows * cols]);
    let strength = 0.01;
    let scale = 0.37f32;
    let kept: Vec<u16> = (0..rows * cols / 16).map(|_| random.bits() as u16).collect();
    let mask =
        Mask::from_fn(rows, cols, |r, c| !masked || kept[r / 4 * (cols / 4) + c / 4] >> (r % 4 * 4 + c % 4) & 1 == 1);
    let (w_there, m_there, v_there) = (bench.up(&w), bench.up(&m), bench.up(&v));
    let (tiles, scale_there) = (bench.up(&if masked { kept } else { vec![0] }), bench.up(&[scale]));
    for number in 1..4 {
        let g: Vec<G> = (0..rows * cols).map(|_| G::from_f32(random.number())).collect();
        let there = bench.up(&g);
        let parameter = AdamWState {
            weight: bench.at(&w_there),
            gradient: bench.at(&there),
            first: bench.at(&m_there),
            second: bench.at(&v_there),
            copy: None,
            rows,
            cols,
        };
        let step = AdamWStep {
            number: StepNumber::Host(number),
            masked_decay: masked.then(|| MaskedDecay { tiles: bench.at(&tiles), strength }),
            gradient_scale: Some(bench.at(&scale_there)),
            skip: None,
        };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        let run = || unsafe { adamw.step(bench.stream(), parameter, SETTINGS, step) }.unwrap();
        if number < 3 {
            run();
        } else {
            bench.wait();
            bench.captured(run).launch().unwrap();
        }
        let mut g: Vec<f32> = g.into_iter().map(|g| g.to_f32() * scale).collect();
        masked_decay(&mut g, MatrixRef::new(rows, cols, &w).unwrap(), &mask, strength).unwrap();
        on_the_cpu(&mut w, &g, &mut m, &mut v, SETTINGS, number);
        for (name, found, expected) in [("weight", &w_there, &w), ("first", &m_there, &m), ("second", &v_there, &v)] {
            assert!(bench.down(found) == *expected, "{what}: {name} after step {number}");
        }
    }
}

#[test]
fn steps_are_those_of_the_cpu() {
    let Some(bench) = bench() else { return };
    for (rows, cols) in [(4, 4), (64, 100), (252, 516)] {
        for masked in [false, true] {
            check::<f32>(&bench, DataType::F32, rows, cols, masked);
            check::<f16>(&bench, DataType::F16, rows, cols, masked);
            check::<bf16>(&bench, DataType::BF16, rows, cols, masked);
        }
    }
    // Not a multiple of anything.
    check::<f32>(&bench, DataType::F32, 1, 1, false);
    check::<bf16>(&bench, DataType::BF16, 3, 111, false);
}

/// The engine of `twofour-nn` on a CPU: a frozen second moment if there is a step that it is frozen at, and the
/// strengths of pruned elements' decay by the gradient and beside the moments. Returns the sum of the magnitudes of the
/// second moment's changes.
fn in_phase(
    [w, m, v]: [&mut [f32]; 3],
    g: &[f32],
    pruned: impl Fn(usize) -> bool,
    (number, frozen): (u64, Option<u64>),
    (by_gradient, by_weight): (f32, f64),
) -> f64 {
    let AdamWSettings { learning_rate, beta1, beta2, epsilon, weight_decay } = SETTINGS;
    let corrected = |beta: f64, since: u64| (1.0 / (1.0 - beta.powf(since as f64))) as f32;
    let (first_scale, second_scale) = (corrected(beta1, number), corrected(beta2, frozen.unwrap_or(number)));
    let epsilon = frozen.map_or(epsilon, |_| epsilon.powf(0.75)) as f32;
    let mut sum = 0.0;
    for i in 0..w.len() {
        let (mut g, mut decay) = (g[i], weight_decay);
        if pruned(i) {
            g += by_gradient * w[i];
            decay += by_weight;
        }
        m[i] = m[i] * beta1 as f32 + g * (1.0 - beta1) as f32;
        let before = v[i];
        if frozen.is_none() {
            v[i] = v[i] * beta2 as f32 + g * g * (1.0 - beta2) as f32;
        }
        let step = m[i] * first_scale / ((v[i] * second_scale).sqrt() + epsilon);
        w[i] = w[i] * (1.0 - learning_rate * decay) as f32 - step * learning_rate as f32;
        sum += f64::from((v[i] - before).abs());
    }
    sum
}

/// Three steps that are watched, then one that moves, then two that are frozen, with decay of pruned elements if there
/// is a mask. With the step's number on the device, the steps are graphs.
fn check_phases<G: Arithmetic + DeviceRepr>(
    bench: &Bench,
    element: DataType,
    (rows, cols): (usize, usize),
    decay: Option<(f32, f64)>,
    on_device: bool,
) {
    let what = format!("[{rows}, {cols}] {element}, decay {decay:?}, on the device {on_device}");
    let len = rows * cols;
    let mut random = Random((rows * 37 + cols) as u64);
    let adamw = AdamW::new(&bench.device, element).unwrap();
    let mut w: Vec<f32> = (0..len).map(|_| random.number()).collect();
    let (mut m, mut v) = (vec![0f32; len], vec![0f32; len]);
    let kept: Vec<u16> = (0..len.div_ceil(16)).map(|_| random.bits() as u16).collect();
    let pruned = |i: usize| {
        let (r, c) = (i / cols, i % cols);
        decay.is_some() && kept[r / 4 * (cols / 4) + c / 4] >> (r % 4 * 4 + c % 4) & 1 == 0
    };
    let (w_there, m_there, v_there, tiles) = (bench.up(&w), bench.up(&m), bench.up(&v), bench.up(&kept));
    let partial = bench.up(&vec![f64::NAN; AdamW::watched_bytes(len) / 8]);
    let (steps, rate, numbers) = (bench.up(&[0u64]), bench.up(&[SETTINGS.learning_rate]), bench.up(&[f32::NAN; 4]));
    let schedule =
        AdamWSchedule { step: bench.at(&steps), learning_rate: bench.at(&rate), numbers: bench.at(&numbers) };
    for number in 1..7 {
        let g: Vec<G> = (0..len).map(|_| G::from_f32(random.number())).collect();
        let (there, changes) = (bench.up(&g), bench.up(&[f32::NAN]));
        let parameter = AdamWState {
            weight: bench.at(&w_there),
            gradient: bench.at(&there),
            first: bench.at(&m_there),
            second: bench.at(&v_there),
            copy: None,
            rows,
            cols,
        };
        let step = AdamWStep {
            number: if on_device { StepNumber::Device(schedule) } else { StepNumber::Host(number) },
            masked_decay: decay.map(|(strength, _)| MaskedDecay { tiles: bench.at(&tiles), strength }),
            gradient_scale: None,
            skip: None,
        };
        let (second_moment, frozen) = match number {
            1..=3 => (
                SecondMoment::Watched {
                    changes: bench.at(&changes),
                    partial: bench.at(&partial),
                    mean: ChangeMean::Arithmetic,
                },
                None,
            ),
            4 => (SecondMoment::Moving, None),
            _ => (SecondMoment::Frozen { at: 4 }, Some(4)),
        };
        let phase = AdamWPhase { second_moment, pruned_weight_decay: decay.map_or(0.0, |(_, strength)| strength) };
        // On the device, the rate of the settings is not read.
        let settings =
            AdamWSettings { learning_rate: if on_device { f64::NAN } else { SETTINGS.learning_rate }, ..SETTINGS };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        let run = || unsafe {
            if on_device {
                adamw.advance(bench.stream(), schedule, settings).unwrap();
            }
            adamw.step_in_phase(bench.stream(), parameter, settings, step, phase).unwrap();
        };
        bench.wait();
        if on_device {
            bench.captured(run).launch().unwrap()
        } else {
            run()
        }
        let g: Vec<f32> = g.into_iter().map(G::to_f32).collect();
        let sum = in_phase([&mut w, &mut m, &mut v], &g, pruned, (number, frozen), decay.unwrap_or_default());
        for (name, found, expected) in [("weight", &w_there, &w), ("first", &m_there, &m), ("second", &v_there, &v)] {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
            assert!(bits(&bench.down(found)) == bits(expected), "{what}: {name} after step {number}");
        }
        let found = bench.down(&changes)[0];
        match second_moment {
            SecondMoment::Watched { .. } => {
                assert!((f64::from(found) - sum).abs() <= 1e-6 * sum, "{what}: {found}, not {sum}, in step {number}");
            }
            _ => assert!(found.is_nan(), "{what}: the sum of step {number}"),
        }
    }
}

#[test]
fn every_phase_and_decay_is_that_of_the_cpu() {
    let Some(bench) = bench() else { return };
    for on_device in [false, true] {
        for decay in [None, Some((0.3, 0.0)), Some((0.0, 0.7)), Some((0.3, 0.7))] {
            for shape in [(4, 4), (64, 100), (252, 516)] {
                check_phases::<f32>(&bench, DataType::F32, shape, decay, on_device);
                check_phases::<f16>(&bench, DataType::F16, shape, decay, on_device);
                check_phases::<bf16>(&bench, DataType::BF16, shape, decay, on_device);
            }
        }
        for shape in [(1, 1), (3, 111), (1, 1027)] {
            check_phases::<f32>(&bench, DataType::F32, shape, None, on_device);
        }
    }
}

#[test]
fn the_sum_of_changes_repeats_and_is_zero_where_nothing_changes() {
    let Some(bench) = bench() else { return };
    let adamw = AdamW::new(&bench.device, DataType::F32).unwrap();
    let (rows, cols) = (1, 3_000_001);
    let mut random = Random(8);
    let g: Vec<f32> = (0..rows * cols).map(|_| random.number()).collect();
    let zeros = vec![0f32; rows * cols];
    let sum = |cols: usize, skip: u32| {
        let (w, g, m, v) = (bench.up(&zeros), bench.up(&g), bench.up(&zeros), bench.up(&zeros));
        let (changes, partial) = (bench.up(&[f32::NAN]), bench.up(&vec![f64::NAN; 1 + AdamW::watched_bytes(cols) / 8]));
        let skip = bench.up(&[skip]);
        let [weight, gradient, first, second] = [&w, &g, &m, &v].map(|buffer| bench.at(buffer));
        let parameter = AdamWState { weight, gradient, first, second, copy: None, rows, cols };
        let number = StepNumber::Host(1);
        let step = AdamWStep { number, masked_decay: None, gradient_scale: None, skip: Some(bench.at(&skip)) };
        let second_moment = SecondMoment::Watched {
            changes: bench.at(&changes),
            partial: bench.at(&partial),
            mean: ChangeMean::Arithmetic,
        };
        let phase = AdamWPhase { second_moment, ..Default::default() };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        unsafe { adamw.step_in_phase(bench.stream(), parameter, SETTINGS, step, phase) }.unwrap();
        bench.down(&changes)[0]
    };
    let expected: f64 = g.iter().map(|g| f64::from(g * g * (1.0 - SETTINGS.beta2) as f32)).sum();
    let found = sum(cols, 0);
    assert!((f64::from(found) - expected).abs() <= 1e-6 * expected, "{found}, not {expected}");
    assert_eq!(sum(cols, 0).to_bits(), found.to_bits());
    assert_eq!((sum(cols, 1), sum(0, 0)), (0.0, 0.0));
}

#[test]
fn a_graph_of_a_step_counts_and_follows_the_learning_rate() {
    let Some(bench) = bench() else { return };
    let (rows, cols, rates) = (20, 36, [1e-2, 7e-3, 3e-4, 1e-5]);
    let mut random = Random(5);
    let mut w: Vec<f32> = (0..rows * cols).map(|_| random.number()).collect();
    let g: Vec<f32> = (0..rows * cols).map(|_| random.number()).collect();
    let (mut m, mut v) = (vec![0f32; rows * cols], vec![0f32; rows * cols]);
    let adamw = AdamW::new(&bench.device, DataType::F32).unwrap();
    let (w_there, m_there, v_there, g_there) = (bench.up(&w), bench.up(&m), bench.up(&v), bench.up(&g));
    let (steps, mut rate, numbers) = (bench.up(&[0u64]), bench.up(&[0f64]), bench.up(&[f32::NAN; 4]));
    let schedule =
        AdamWSchedule { step: bench.at(&steps), learning_rate: bench.at(&rate), numbers: bench.at(&numbers) };
    let parameter = AdamWState {
        weight: bench.at(&w_there),
        gradient: bench.at(&g_there),
        first: bench.at(&m_there),
        second: bench.at(&v_there),
        copy: None,
        rows,
        cols,
    };
    let step = AdamWStep { number: StepNumber::Device(schedule), masked_decay: None, gradient_scale: None, skip: None };
    // The learning rate of the settings is not read.
    let settings = AdamWSettings { learning_rate: f64::NAN, ..SETTINGS };
    bench.wait();
    // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been waited
    // for.
    let graph = bench.captured(|| unsafe {
        adamw.advance(bench.stream(), schedule, settings).unwrap();
        adamw.step(bench.stream(), parameter, settings, step).unwrap();
    });
    for (i, learning_rate) in rates.into_iter().enumerate() {
        bench.write(&[learning_rate], &mut rate);
        graph.launch().unwrap();
        on_the_cpu(&mut w, &g, &mut m, &mut v, AdamWSettings { learning_rate, ..SETTINGS }, i as u64 + 1);
        assert!(bench.down(&w_there) == w, "step {i}");
    }
    assert_eq!(bench.down(&steps), [rates.len() as u64]);
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let adamw = AdamW::new(&bench.device, DataType::BF16).unwrap();
    let memory = bench.poisoned(64, 0u32);
    let at = bench.at(&memory);
    let parameter = AdamWState { weight: at, gradient: at, first: at, second: at, copy: None, rows: 4, cols: 4 };
    let step = AdamWStep { number: StepNumber::Host(1), masked_decay: None, gradient_scale: None, skip: None };
    // SAFETY: each of these calls returns an error before it launches anything.
    let run = |parameter, step| unsafe { adamw.step(bench.stream(), parameter, SETTINGS, step) };
    let masked = |tiles| AdamWStep { masked_decay: Some(MaskedDecay { tiles, strength: 1.0 }), ..step };
    assert!(matches!(
        run(AdamWState { first: at + 4, ..parameter }, step),
        Err(Error::Pointer { what: "first moment", .. })
    ));
    assert!(matches!(run(parameter, masked(0)), Err(Error::Pointer { what: "mask of tiles", .. })));
    assert!(matches!(run(AdamWState { rows: 3, ..parameter }, masked(at)), Err(Error::Multiple { found: 3, .. })));
    assert!(matches!(run(parameter, AdamWStep { number: StepNumber::Host(0), ..step }), Err(Error::Dimension { .. })));
    assert!(matches!(run(AdamWState { rows: usize::MAX, ..parameter }, step), Err(Error::TooLarge { .. })));
    // SAFETY: each of these calls returns an error before it launches anything.
    let in_phase = |second_moment| unsafe {
        let phase = AdamWPhase { second_moment, ..Default::default() };
        adamw.step_in_phase(bench.stream(), parameter, SETTINGS, step, phase)
    };
    assert!(matches!(in_phase(SecondMoment::Frozen { at: 0 }), Err(Error::Dimension { size: 0, .. })));
    let watched = |changes, partial| in_phase(SecondMoment::Watched { changes, partial, mean: ChangeMean::Arithmetic });
    assert!(matches!(watched(0, at), Err(Error::Pointer { what: "sum of changes", .. })));
    assert!(matches!(watched(at, at + 4), Err(Error::Pointer { what: "partial sums of changes", .. })));
    assert!(run(AdamWState { rows: 0, weight: 0, ..parameter }, step).is_ok());
    assert!(matches!(AdamW::new(&bench.device, DataType::E4M3), Err(Error::Gradient { .. })));
}
