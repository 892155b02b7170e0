//! Rotary position embedding (Su et al., 2021), element `i` paired with element `i + d/2`.

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

/// Cosines and sines of `position * base^(-i / half)` for every position below `positions` and `i < half`.
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

    /// The table for `positions` positions and heads of `2 * half` elements.
    pub fn new(positions: usize, half: usize) -> Self {
        let angle = |k: usize| (k / half) as f64 * Self::BASE.powf(-((k % half) as f64) / half as f64);
        let (sin, cos) = (0..positions * half).map(angle).map(|a| (a.sin() as f32, a.cos() as f32)).unzip();
        Table { positions, half, cos, sin }
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
