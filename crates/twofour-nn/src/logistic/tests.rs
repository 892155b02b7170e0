//! The regression against finite differences, its optimum, and known cases.

use super::*;
use crate::random::Stream;

/// Three overlapping clouds.
fn clouds(count: usize, seed: u64) -> (Vec<f32>, Vec<u32>) {
    let stream = Stream::new(seed, "clouds");
    let labels: Vec<u32> = (0..count).map(|i| (i % 3) as u32).collect();
    let value = |at: usize| {
        let (sample, feature) = (at / 5, at % 5);
        let center = if labels[sample] as usize == feature { 2.0 } else { 0.0 };
        // Features of other scales and means.
        ((center + stream.normal(at as u64)) * [1.0, 100.0, 1e-3, 5.0, 1.0][feature]
            + [0.0, -300.0, 7.0, 0.0, 1.0][feature]) as f32
    };
    ((0..5 * count).map(value).collect(), labels)
}

#[test]
fn derivatives_agree_with_finite_differences_and_vanish_at_the_solution() {
    // More than a chunk.
    let (features, labels) = clouds(600, 3);
    let samples = Samples::new(&features, &labels, 5, 3).unwrap();
    let fitted = LogisticRegression::fit(&samples, 1.0).unwrap();
    let decay = 1.0 / 600.0;
    let stream = Stream::new(1, "weights");
    let weights: Vec<f64> = (0..18).map(|i| stream.normal(i)).collect();
    let (_, gradient) = fitted.objective(&samples, &weights, decay);
    for at in 0..18 {
        let moved = |by: f64| {
            let mut weights = weights.clone();
            weights[at] += by;
            fitted.objective(&samples, &weights, decay).0
        };
        let numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((numeric - gradient[at]).abs() < 1e-8, "{at}: {numeric}, {}", gradient[at]);
    }
    let (_, gradient) = fitted.objective(&samples, &fitted.weights, decay);
    assert!(gradient.iter().all(|derivative| derivative.abs() <= TOLERANCE), "{gradient:?}");
    assert!(fitted.iterations() > 3 && fitted.iterations() < MAX_ITERATIONS);
}

#[test]
fn unseen_samples_are_classified_about_as_well_as_can_be() {
    let ((features, labels), (others, classes)) = (clouds(3000, 3), clouds(3000, 4));
    let fitted = LogisticRegression::fit(&Samples::new(&features, &labels, 5, 3).unwrap(), 1.0).unwrap();
    let unseen = Samples::new(&others, &classes, 5, 3).unwrap();
    // The best rule takes the largest standardized coordinate of the first three.
    let best = others.chunks(5).zip(&classes).filter(|(sample, class)| {
        let of = [sample[0], (sample[1] + 300.0) / 100.0, (sample[2] - 7.0) / 1e-3];
        (0..3).all(|other| of[other] <= of[**class as usize])
    });
    let best = best.count() as f64 / 3000.0;
    let found = fitted.accuracy(&unseen);
    assert!((found - best).abs() < 0.01 && best > 0.7, "{found}, {best}");
}

#[test]
fn features_that_never_change_and_classes_that_never_occur_do_no_harm() {
    let features = [[1f32, 7.0], [2.0, 7.0], [8.0, 7.0], [9.0, 7.0]].concat();
    let samples = Samples::new(&features, &[0, 0, 2, 2], 2, 4).unwrap();
    let fitted = LogisticRegression::fit(&samples, 1.0).unwrap();
    assert_eq!(fitted.accuracy(&samples), 1.0);
    assert!(fitted.weights.iter().all(|weight| weight.is_finite()));
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let (features, labels) = clouds(1000, 5);
    let fit = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| LogisticRegression::fit(&Samples::new(&features, &labels, 5, 3).unwrap(), 1.0).unwrap())
    };
    assert_eq!(fit(1), fit(3));
}

#[test]
fn samples_that_are_none_are_errors() {
    for (features, labels, width, classes, word) in [
        (&[][..], &[][..], 1, 2, "at least one"),
        (&[1.0], &[0], 0, 2, "at least one"),
        (&[1.0], &[0], 1, 0, "at least one"),
        (&[1.0, 2.0, 3.0], &[0, 1], 2, 2, "features"),
        (&[1.0, 2.0], &[0, 2], 1, 2, "2"),
        (&[1.0, 2.0, f32::NAN, 3.0], &[0, 1], 2, 2, "feature 0 of sample 1"),
    ] {
        let message = Samples::new(features, labels, width, classes).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    let samples = Samples::new(&[1.0, 2.0], &[0, 1], 1, 2).unwrap();
    for strength in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(LogisticRegression::fit(&samples, strength).is_err());
    }
}
