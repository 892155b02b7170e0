//! Rotary position embedding (Su et al., 2021), element `i` paired with element `i + d/2`.

use std::ops::Range;

/// Rotates one row of `2 * cos.len()` elements.
#[inline(always)]
pub fn rotate(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = row.split_at_mut(cos.len());
    for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// The inverse of [`rotate`], which is also its transpose: the gradient.
#[inline(always)]
pub fn rotate_back(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = row.split_at_mut(cos.len());
    for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c + *b * s, *b * c - *a * s);
    }
}

/// Cosines and sines of the angles of every pair of elements at consecutive positions.
#[derive(Debug, Clone)]
pub struct Table {
    positions: usize,
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Table {
    /// The wavelength base that the method's paper uses.
    const BASE: f64 = 10_000.0;

    /// The table for the first `positions` positions and heads of `2 * half` elements, where pair `i` turns by
    /// `10000^(-i / half)` from one position to the next.
    pub fn new(positions: usize, half: usize) -> Self {
        let frequencies: Vec<f64> = (0..half).map(|i| Self::BASE.powf(-(i as f64) / half as f64)).collect();
        Self::of(0..positions, &frequencies)
    }

    /// The table of these positions, where pair `i` turns by `frequencies[i]` from one position to the next.
    /// [`Table::at`] counts from the first of them.
    pub fn of(positions: Range<usize>, frequencies: &[f64]) -> Self {
        let angles = positions.clone().flat_map(|position| frequencies.iter().map(move |f| position as f64 * f));
        let (sin, cos) = angles.map(|angle| (angle.sin() as f32, angle.cos() as f32)).unzip();
        Table { positions: positions.len(), half: frequencies.len(), cos, sin }
    }

    /// The table of a rotation that multiplies by a number, too.
    #[must_use]
    pub fn times(mut self, factor: f64) -> Self {
        self.cos.iter_mut().chain(&mut self.sin).for_each(|value| *value *= factor as f32);
        self
    }

    /// How many positions it has.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        2 * self.half
    }

    /// Cosines and sines at one position, which must be below [`Table::positions`].
    #[inline(always)]
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
