//! Terms of the scores for the distance of query and key, of rows and of columns (Li et al., "MViTv2", 2022).

use twofour::kernel::KernelElement;

use super::parts::Parts;
use crate::{Result, cpu::vector};

/// A vector for each distance of rows and for each distance of columns, `[2 · span - 1, head_dim]` each. The query `q`
/// and the key `k` have vector `q - k + span - 1`.
#[derive(Debug)]
pub(in crate::model) struct RelativePositions {
    /// Rows and columns of the tokens that a query sees.
    span: [usize; 2],
    /// The vectors for distances of rows, and for distances of columns.
    tables: [Vec<f32>; 2],
}

impl RelativePositions {
    /// The names of both tables in a block.
    pub(in crate::model) const NAMES: [&'static str; 2] = ["attn.relative_rows", "attn.relative_columns"];

    pub(in crate::model) fn read<T: KernelElement>(
        parts: &impl Parts<T>,
        at: impl Fn(&str) -> String,
        span: [usize; 2],
        head_dim: usize,
    ) -> Result<Self> {
        let table = |axis: usize| parts.vector(&at(Self::NAMES[axis]), (2 * span[axis] - 1) * head_dim);
        Ok(RelativePositions { span, tables: [table(0)?, table(1)?] })
    }

    /// Adds the terms to the scores of one head, `[tokens, tokens]`. Query `i` begins at element `i * stride`.
    pub(in crate::model) fn add(&self, queries: &[f32], (head_dim, stride): (usize, usize), scores: &mut [f32]) {
        let [rows, columns] = self.span;
        let mut terms = [vec![0f32; rows], vec![0f32; columns]];
        vector::widest(|| {
            for (query, scores) in scores.chunks_exact_mut(rows * columns).enumerate() {
                let q = &queries[query * stride..][..head_dim];
                for ((terms, table), at) in terms.iter_mut().zip(&self.tables).zip([query / columns, query % columns]) {
                    let len = terms.len();
                    for (key, term) in terms.iter_mut().enumerate() {
                        let vector = &table[(at + len - 1 - key) * head_dim..][..head_dim];
                        *term = vector::sum2(q, vector, |q, r| q * r);
                    }
                }
                for (of_row, scores) in terms[0].iter().zip(scores.chunks_exact_mut(columns)) {
                    scores.iter_mut().zip(&terms[1]).for_each(|(score, of_column)| *score += of_row + of_column);
                }
            }
        });
    }
}
