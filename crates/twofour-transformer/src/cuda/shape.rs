//! Lengths of attention's tensors, checked.

use twofour_cuda::{
    Error, Result,
    arguments::{MAX_DIMENSION, expect_multiple, positive, product, side},
};

use crate::AttentionShape;

impl AttentionShape {
    /// Returns the number of elements of all heads of the tokens.
    fn elements(&self, heads: usize) -> Result<usize> {
        product(product(self.batch, self.positions)?, product(heads, self.head_dim)?)
    }

    /// Returns the number of elements of queries, or of the result.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn query_len(&self) -> Result<usize> {
        self.elements(self.heads)
    }

    /// Returns the number of elements of keys, or of values.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn key_len(&self) -> Result<usize> {
        self.elements(self.kv_heads)
    }

    /// Returns the number of elements of the fused projection.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn fused_len(&self) -> Result<usize> {
        self.elements(self.projected_heads()?)
    }

    /// Returns the number of a token's heads in the fused projection: queries, keys and values.
    pub(crate) fn projected_heads(&self) -> Result<usize> {
        product(self.kv_heads, 2)?
            .checked_add(self.heads)
            .ok_or(Error::TooLarge { rows: self.heads, cols: self.kv_heads })
    }

    /// Returns the number of log-sum-exps: one for each query.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn lse_len(&self) -> Result<usize> {
        product(product(self.batch, self.positions)?, self.heads)
    }

    /// Returns an error for a shape that no kernel supports.
    pub(crate) fn validate(&self) -> Result<()> {
        positive("heads", self.heads)?;
        positive("kv_heads", self.kv_heads)?;
        positive("head_dim", self.head_dim)?;
        side("batch", self.batch)?;
        side("queries", self.lse_len()?)?;
        expect_multiple("heads, by kv_heads", self.heads, self.kv_heads)?;
        expect_multiple("head_dim", self.head_dim, 2)?;
        match self.scores.fault() {
            Some((what, found, expected)) => Err(Error::Setting { what, found, expected }),
            None => Ok(()),
        }
    }

    /// Returns the window as kernels take it: more than all positions where there is none.
    pub(crate) fn window(&self) -> u32 {
        self.scores.window.map_or(MAX_DIMENSION, |window| window.min(MAX_DIMENSION)) as u32
    }

    /// Returns the soft cap as kernels take it: 0 where there is none.
    pub(crate) fn soft_cap(&self) -> f32 {
        self.scores.soft_cap.unwrap_or(0.0)
    }
}
