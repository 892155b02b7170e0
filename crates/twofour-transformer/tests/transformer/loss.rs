//! Losses.

use twofour::Arithmetic;
use twofour_cuda::layer::{Accumulate, DeviceBuffer, LayerContext};
use twofour_transformer::{
    DistillationWeights, ErrorMeasure,
    cuda::{IGNORED_TARGET, LossFactor, cross_entropy, cross_entropy_loss, distillation, squared_error},
};

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

/// A student of some classes.
struct Student(usize, usize);

impl Check for Student {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Student(rows, classes) = *self;
        let what = format!("student of [{rows}, {classes}] {:?}", T::DTYPE);
        let scores = |seed| -> Vec<T> {
            numbers::<T>(rows * classes, seed).iter().map(|x| T::from_f32(4.0 * x.to_f32())).collect()
        };
        let (logits, teacher) = (scores(1), scores(2));
        let mut targets: Vec<u32> = (0..rows).map(|row| (row * 7919 % classes) as u32).collect();
        if rows > 2 {
            (targets[1], targets[2]) = (IGNORED_TARGET, classes as u32);
        }
        let (host, device, weights) = (0.25f32, 3.0f32, DistillationWeights { divergence: 0.75, cross_entropy: 0.5 });
        let logs = |row: &[f64]| -> Vec<f64> {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
            row.iter().map(|x| x - sum).collect()
        };
        let (mut loss, mut gradient) = (0.0, vec![]);
        for ((row, taught), target) in wide(&logits).chunks(classes).zip(wide(&teacher).chunks(classes)).zip(&targets) {
            let (own, taught, target) = (logs(row), logs(taught), *target as usize);
            if target >= classes {
                gradient.extend(vec![0.0; classes]);
                continue;
            }
            let apart: f64 = taught.iter().zip(&own).map(|(t, o)| t.exp() * (t - o)).sum();
            loss += 0.75 * apart - 0.5 * own[target];
            let of = |(class, (own, taught)): (usize, (&f64, &f64))| {
                let hot = f64::from(u8::from(class == target));
                f64::from(host * device) * (1.25 * own.exp() - 0.75 * taught.exp() - 0.5 * hot)
            };
            gradient.extend(own.iter().zip(&taught).enumerate().map(of));
        }
        let targets_there = DeviceBuffer::from_ids(context, &targets).unwrap();
        let mut status = DeviceBuffer::from_ids(context, &[0]).unwrap();
        let (scale, taught, mut sum) = (up(context, &[device]), up(context, &teacher), up(context, &[10f32]));
        let mut there = up(context, &logits);
        let factor = LossFactor { host, device: Some(scale.as_slice()) };
        let both = (there.as_slice_mut(), taught.as_slice());
        let (sum_there, add, status_there) = (sum.as_slice_mut(), Accumulate::Add, status.as_slice_mut());
        let t = targets_there.as_slice();
        distillation(context, weights, (rows, classes), both, t, factor, sum_there, add, status_there).unwrap();
        expect_close(&format!("{what}: loss"), &sum.to_host::<f32>().unwrap(), &[10.0 + loss], 1e-5);
        expect_close_to(&what, &there.to_host::<T>().unwrap(), &gradient, tolerance, 1e-2);
        assert!(taught.to_host::<T>().unwrap() == teacher, "{what}: the teacher's logits changed");
        assert_eq!(status.ids_to_host().unwrap(), [if rows > 2 { 3 } else { 0 }], "{what}: status");
    }
}

#[test]
fn losses_and_gradients_of_students_are_those_of_f64() {
    for (rows, classes) in [(1, 1), (5, 3), (40, 256), (7, 50_257), (3, 151_936), (1500, 33)] {
        for_each_type(&Student(rows, classes));
    }
}

/// Rows of some width with an error.
struct Rows(usize, usize);

impl Check for Rows {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Rows(rows, width) = *self;
        let (x, target) = (numbers::<T>(rows * width, 3), numbers::<T>(rows * width, 4));
        for measure in [ErrorMeasure::Squared, ErrorMeasure::RelativeSquared] {
            let what = format!("{measure:?} of [{rows}, {width}] {:?}", T::DTYPE);
            let (mut loss, mut gradient) = (0.0, vec![]);
            for (x, target) in wide(&x).chunks(width).zip(wide(&target).chunks(width)) {
                let size: f64 = target.iter().map(|t| t * t).sum();
                let weight = match measure {
                    ErrorMeasure::Squared => 3.0,
                    ErrorMeasure::RelativeSquared if size == 0.0 => 0.0,
                    ErrorMeasure::RelativeSquared => 3.0 / size,
                };
                loss += weight * x.iter().zip(target).map(|(x, t)| (x - t) * (x - t)).sum::<f64>();
                gradient.extend(x.iter().zip(target).map(|(x, t)| 2.0 * 0.5 * weight * (x - t)));
            }
            let (there, target_there, mut sum) = (up(context, &x), up(context, &target), up(context, &[10f32]));
            let mut dx = unwritten::<T>(context, rows * width);
            let both = (there.as_slice(), target_there.as_slice());
            let (dx_there, sum_there) = (dx.as_slice_mut(), sum.as_slice_mut());
            squared_error(context, measure, (rows, width), both, (3.0, 0.5), dx_there, sum_there).unwrap();
            expect_close(&format!("{what}: loss"), &sum.to_host::<f32>().unwrap(), &[10.0 + loss], 1e-5);
            expect_close_to(&what, &dx.to_host::<T>().unwrap(), &gradient, tolerance, 1e-2);
        }
    }
}

#[test]
fn errors_of_rows_and_their_gradients_are_those_of_f64() {
    for (rows, width) in [(1, 1), (5, 3), (40, 896), (3, 16_384), (1500, 33)] {
        for_each_type(&Rows(rows, width));
    }
}
