//! The factors of an adapter: what their kind makes of a weight, and their gradients.

use rayon::prelude::*;

use super::{KIND, SparsityPlan};
use crate::settings::{Named, name_of};

/// How an adapter changes a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterKind {
    /// The product of its factors is added to all elements.
    Lora,
    /// The product of its factors is added where the weight is not zero.
    #[default]
    Lors,
    /// The elements are multiplied.
    Spp,
}

impl Named for AdapterKind {
    const ALL: &'static [(&'static str, Self)] =
        &[("lora", AdapterKind::Lora), ("lors", AdapterKind::Lors), ("spp", AdapterKind::Spp)];
}

impl AdapterKind {
    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        name_of(self)
    }

    /// The kind of a plan's layers.
    pub(super) fn of(plan: &SparsityPlan) -> Self {
        let word = plan.own.word(KIND.key);
        Self::ALL.iter().find(|(name, _)| word == Some(*name)).map_or(AdapterKind::default(), |(_, kind)| *kind)
    }
}

/// The factors of an adapter of one weight.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterFactors {
    /// How they change it.
    pub kind: AdapterKind,
    /// Their rank.
    pub rank: usize,
    /// The factor of the update times the rank.
    pub alpha: f64,
    /// Rows and columns of the weight.
    pub shape: [usize; 2],
    /// `A`, `[rank, in]`.
    pub a: Vec<f32>,
    /// `B`, `[out, rank]`; of SPP `b`, `[out]`.
    pub b: Vec<f32>,
}

/// Columns whose gradients one task adds up.
const COLUMNS: usize = 128;

impl AdapterFactors {
    /// The factor of the update.
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Rows of the weight that share one of `A` in SPP.
    pub fn repeated(&self) -> usize {
        (self.shape[0] / self.rank).max(1)
    }

    /// Writes the update of a row of the weight, in the order of operations of
    /// [`Merge`](twofour::file::Merge).
    fn update(&self, row: usize, weight: &[f32], update: &mut [f32]) {
        let (cols, scale) = (self.shape[1], self.scale());
        match self.kind {
            AdapterKind::Spp => {
                let columns = &self.a[row / self.repeated() * cols..][..cols];
                for ((update, weight), column) in update.iter_mut().zip(weight).zip(columns) {
                    *update = column * self.b[row] * weight * scale;
                }
            }
            AdapterKind::Lora | AdapterKind::Lors => {
                update.fill(0.0);
                for (factor, a) in self.b[row * self.rank..][..self.rank].iter().zip(self.a.chunks(cols)) {
                    update.iter_mut().zip(a).for_each(|(update, a)| *update += factor * a);
                }
                update.iter_mut().for_each(|update| *update *= scale);
                if self.kind == AdapterKind::Lors {
                    let zeros = update.iter_mut().zip(weight).filter(|(_, weight)| **weight == 0.0);
                    zeros.for_each(|(update, _)| *update = 0.0);
                }
            }
        }
    }

    /// What the layer of a weight computes with.
    pub(super) fn updated(&self, weight: &[f32]) -> Vec<f32> {
        let cols = self.shape[1];
        let mut updated = vec![0f32; weight.len()];
        updated.par_chunks_mut(cols).zip(weight.par_chunks(cols)).enumerate().for_each(|(row, (updated, weight))| {
            self.update(row, weight, updated);
            updated.iter_mut().zip(weight).for_each(|(updated, weight)| *updated += weight);
        });
        updated
    }

    /// The gradients of both factors by that of what the layer of a weight computes with.
    pub(super) fn gradients(&self, weight: &[f32], gradient: &[f32]) -> [Vec<f32>; 2] {
        let ([rows, cols], scale, rank) = (self.shape, self.scale(), self.rank);
        // The rows of A that a row of the weight has, and their elements of B.
        let of_row = |row: usize| match self.kind {
            AdapterKind::Spp => (row / self.repeated(), &self.b[row..=row]),
            AdapterKind::Lora | AdapterKind::Lors => (0, &self.b[row * rank..][..rank]),
        };
        // What the gradients of both are taken from, of some columns of a row.
        let taken = |row: usize, columns: std::ops::Range<usize>| -> Vec<f32> {
            let at = row * cols + columns.start..row * cols + columns.end;
            let pairs = gradient[at.clone()].iter().zip(&weight[at]);
            match self.kind {
                AdapterKind::Lora => pairs.map(|(gradient, _)| *gradient).collect(),
                AdapterKind::Lors => pairs.map(|(gradient, w)| if *w == 0.0 { 0.0 } else { *gradient }).collect(),
                AdapterKind::Spp => pairs.map(|(gradient, w)| gradient * w).collect(),
            }
        };
        let mut b = vec![0f32; self.b.len()];
        b.par_chunks_mut(self.b.len() / rows).enumerate().for_each(|(row, b)| {
            let (taken, (first, _)) = (taken(row, 0..cols), of_row(row));
            for (b, a) in b.iter_mut().zip(self.a[first * cols..].chunks(cols)) {
                *b = scale * taken.iter().zip(a).map(|(taken, a)| taken * a).sum::<f32>();
            }
        });
        let of_columns = |first: usize| {
            let width = COLUMNS.min(cols - first);
            let mut sums = vec![0f32; rank * width];
            for row in 0..rows {
                let (taken, (k, b)) = (taken(row, first..first + width), of_row(row));
                for (sums, b) in sums[k * width..].chunks_mut(width).zip(b) {
                    sums.iter_mut().zip(&taken).for_each(|(sum, taken)| *sum += b * taken);
                }
            }
            sums
        };
        let starts: Vec<usize> = (0..cols).step_by(COLUMNS).collect();
        let parts: Vec<Vec<f32>> = starts.par_iter().map(|first| of_columns(*first)).collect();
        let mut a = vec![0f32; rank * cols];
        for (first, part) in starts.into_iter().zip(parts) {
            let width = COLUMNS.min(cols - first);
            for (k, part) in part.chunks(width).enumerate() {
                let row = &mut a[k * cols + first..][..width];
                row.iter_mut().zip(part).for_each(|(a, sum)| *a = scale * sum);
            }
        }
        [a, b]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn gradients_of_factors_are_those_of_differences() {
        let (shape, rank) = ([6usize, 8], 3usize);
        let stream = Stream::new(5, "factors");
        let random = |first: u64, count: usize| -> Vec<f32> {
            (0..count).map(|at| stream.normal(first + at as u64) as f32).collect()
        };
        let mut weight = random(0, 48);
        weight.iter_mut().enumerate().filter(|(at, _)| at % 4 < 2).for_each(|(_, value)| *value = 0.0);
        let gradient = random(100, 48);
        for kind in [AdapterKind::Lora, AdapterKind::Lors, AdapterKind::Spp] {
            let b = random(300, if kind == AdapterKind::Spp { 6 } else { 18 });
            let factors = AdapterFactors { kind, rank, alpha: 2.0, shape, a: random(200, 24), b };
            let loss = |factors: &AdapterFactors| -> f64 {
                let updated = factors.updated(&weight);
                updated.iter().zip(&gradient).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum()
            };
            let found = factors.gradients(&weight, &gradient);
            for (which, found) in found.iter().enumerate() {
                for (at, found) in found.iter().enumerate() {
                    let moved = |by: f32| {
                        let mut other = factors.clone();
                        [&mut other.a, &mut other.b][which][at] += by;
                        loss(&other)
                    };
                    let expected = (moved(0.125) - moved(-0.125)) / 0.25;
                    assert!((f64::from(*found) - expected).abs() < 1e-4, "{kind:?} {which} {at}: {found}, {expected}");
                }
            }
        }
    }
}
