//! Cross-entropy.

use twofour::Arithmetic;
use twofour_cuda::layer::{Accumulate, DeviceBuffer, LayerContext};
use twofour_transformer::cuda::{IGNORED_TARGET, LossFactor, cross_entropy, cross_entropy_loss};

use crate::{
    Check, for_each_type,
    reference::{expect_close, expect_close_to, numbers, wide},
    unwritten, up,
};

struct Case(usize, usize);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case(rows, classes) = *self;
        let what = format!("[{rows}, {classes}] {:?}", T::DTYPE);
        let logits: Vec<T> = numbers::<T>(rows * classes, 1).iter().map(|x| T::from_f32(4.0 * x.to_f32())).collect();
        let mut targets: Vec<u32> = (0..rows).map(|row| (row * 7919 % classes) as u32).collect();
        targets[0] = (classes - 1) as u32;
        if rows > 2 {
            (targets[1], targets[2]) = (IGNORED_TARGET, classes as u32);
        }
        let (host, device) = (0.25f32, 3.0f32);
        let (mut loss, mut gradient) = (0.0, Vec::new());
        for (row, target) in wide(&logits).chunks(classes).zip(&targets) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
            let counts = (*target as usize) < classes;
            loss += if counts { largest + sum.ln() - row[*target as usize] } else { 0.0 };
            let probability = |x: &f64| if counts { (x - largest).exp() / sum } else { 0.0 };
            let hot = |class: usize| f64::from(u8::from(counts && class == *target as usize));
            gradient.extend(row.iter().enumerate().map(|(i, x)| f64::from(host * device) * (probability(x) - hot(i))));
        }
        let targets_there = DeviceBuffer::from_ids(context, &targets).unwrap();
        let mut status = DeviceBuffer::from_ids(context, &[0]).unwrap();
        let scale = up(context, &[device]);
        let mut sum = unwritten::<f32>(context, 1);
        let plain = up(context, &logits);
        let shape = (rows, classes);
        let to = (sum.as_slice_mut(), Accumulate::Overwrite, status.as_slice_mut());
        cross_entropy_loss(context, shape, plain.as_slice(), targets_there.as_slice(), to.0, to.1, to.2).unwrap();
        assert!(plain.to_host::<T>().unwrap() == logits, "{what}: logits changed");
        let alone = sum.to_host::<f32>().unwrap();
        expect_close(&format!("{what}: loss"), &alone, &[loss], 1e-5);
        let mut run = |accumulate| {
            let mut there = up(context, &logits);
            let factor = LossFactor { host, device: Some(scale.as_slice()) };
            let (l, t) = (there.as_slice_mut(), targets_there.as_slice());
            let (s, status) = (sum.as_slice_mut(), status.as_slice_mut());
            cross_entropy(context, shape, l, t, factor, s, accumulate, status).unwrap();
            (there.to_host::<T>().unwrap(), sum.to_host::<f32>().unwrap())
        };
        let (found, once) = run(Accumulate::Overwrite);
        assert_eq!(once, alone, "{what}");
        expect_close_to(&what, &found, &gradient, tolerance, 1e-2);
        let (again, twice) = run(Accumulate::Add);
        assert!(again == found && twice[0] == once[0] + once[0], "{what}: another run");
        assert_eq!(status.ids_to_host().unwrap(), [if rows > 2 { 3 } else { 0 }], "{what}: status");
    }
}

#[test]
fn losses_and_gradients_are_those_of_f64() {
    for (rows, classes) in [(1, 1), (5, 3), (40, 256), (7, 50_257), (3, 262_144), (1500, 33)] {
        for_each_type(&Case(rows, classes));
    }
}

/// Logits of -inf have no probability; a row with NaN has a loss that is NaN.
struct Special;

impl Check for Special {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let inf = f32::INFINITY;
        let logits = [[0.0, -inf, 0.0, -inf], [f32::NAN, 0.0, 0.0, 0.0]].concat();
        let logits: Vec<T> = logits.into_iter().map(T::from_f32).collect();
        let mut status = DeviceBuffer::from_ids(context, &[0]).unwrap();
        let losses: Vec<f32> = (0..2)
            .map(|row| {
                let (there, targets) =
                    (up(context, &logits[4 * row..4 * row + 4]), DeviceBuffer::from_ids(context, &[0]).unwrap());
                let mut sum = unwritten::<f32>(context, 1);
                let (to, status) = (sum.as_slice_mut(), status.as_slice_mut());
                let (x, t) = (there.as_slice(), targets.as_slice());
                cross_entropy_loss(context, (1, 4), x, t, to, Accumulate::Overwrite, status).unwrap();
                sum.to_host::<f32>().unwrap()[0]
            })
            .collect();
        assert!((losses[0] - 2f32.ln()).abs() < 1e-5, "{losses:?}");
        assert!(losses[1].is_nan(), "{losses:?}");
    }
}

#[test]
fn infinities_have_no_probability_and_nan_shows() {
    for_each_type(&Special);
}
