//! Passes over activations between GEMMs: conversions, sums, the gate. With many tokens threads share them.

use twofour::{
    Arithmetic, Element,
    kernel::{KernelElement, share},
};

use crate::{
    cpu::{nonlinearity, vector},
    engine::Nonlinearity,
};

/// Elements of a part: so few that one token's are one part, which its caller computes alone.
const PART: usize = 1 << 15;

/// Calls `f(first_row, rows_of_y)` for parts of the rows of `y`, each of `columns` elements.
pub(crate) fn for_rows<Y: Send>(y: &mut [Y], columns: usize, f: impl Fn(usize, &mut [Y]) + Sync) {
    let rows = (PART / columns.max(1)).max(1);
    share(y.chunks_mut(rows * columns.max(1)).enumerate(), || (), |(), (part, y)| f(part * rows, y));
}

/// The values as f32.
pub(crate) fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    let mut wide = bytemuck::allocation::zeroed_vec(values.len());
    for_rows(&mut wide, 1, |first, wide| {
        vector::widest(|| wide.iter_mut().zip(&values[first..]).for_each(|(wide, value)| *wide = value.to_f32()));
    });
    wide
}

/// The values rounded to `T`.
pub(crate) fn narrowed<T: Arithmetic>(values: &[f32]) -> Vec<T> {
    let mut narrow: Vec<T> = bytemuck::allocation::zeroed_vec(values.len());
    for_rows(&mut narrow, 1, |first, narrow| {
        vector::widest(|| {
            narrow.iter_mut().zip(&values[first..]).for_each(|(narrow, value)| *narrow = T::from_f32(*value));
        });
    });
    narrow
}

/// `x ← x + y`.
pub(crate) fn add<T: KernelElement>(x: &mut [f32], y: &[T]) {
    for_rows(x, 1, |first, x| {
        vector::widest(|| x.iter_mut().zip(&y[first..]).for_each(|(x, y)| *x += y.to_f32()));
    });
}

/// `function(gate) ⊙ up`, computed in f32, for rows of `x` that hold `width` elements of the gate, then `width` of
/// `up`.
pub(crate) fn gated<T: KernelElement>(function: Nonlinearity, width: usize, x: &[T]) -> Vec<T> {
    let mut y: Vec<T> = bytemuck::allocation::zeroed_vec(x.len() / 2);
    for_rows(&mut y, width, |first, y| {
        for (y, x) in y.chunks_exact_mut(width).zip(x[2 * first * width..].chunks_exact(2 * width)) {
            nonlinearity::gated_row(function, x.split_at(width), y);
        }
    });
    y
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn passes_of_any_length_compute_what_one_element_at_a_time_does() {
        fn check<T: KernelElement>() {
            for len in [0, 1, 7, PART - 1, PART, 2 * PART + 5] {
                let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
                let narrow: Vec<T> = narrowed(&values);
                assert!(narrow.iter().zip(&values).all(|(narrow, value)| *narrow == T::from_f32(*value)));
                let wide = widened(&narrow);
                assert!(wide.len() == len && wide.iter().zip(&narrow).all(|(wide, narrow)| *wide == narrow.to_f32()));
                let mut sums = values.clone();
                add(&mut sums, &narrow);
                assert!(sums.iter().zip(values.iter().zip(&wide)).all(|(sum, (a, b))| *sum == a + b));
            }
            let (rows, width) = (2 * PART / 96 + 3, 96);
            let x: Vec<T> = (0..rows * 2 * width).map(|i| T::from_f32((i as f32 * 0.11).cos() * 2.0)).collect();
            for function in [Nonlinearity::Silu, Nonlinearity::TanhGelu] {
                let mut expected = vec![0f32; rows * width];
                nonlinearity::gated(function, width, &widened(&x), &mut expected);
                assert_eq!(gated(function, width, &x), narrowed::<T>(&expected));
            }
        }
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }
}
