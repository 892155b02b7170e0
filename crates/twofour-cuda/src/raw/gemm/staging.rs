//! Copies before and after a GEMM kernel, and the workspace that they need.

use super::{
    GemmOperands, GemmProblem, Order, XOrder,
    copies::{Copies, Rows},
};
use crate::{Device, Result, Stream, arguments::expect_pointers};

/// The alignment of addresses and rows that kernels copy by TMA, in bytes.
const ALIGNMENT: usize = 16;

/// Alignment of each buffer in the workspace, in bytes.
const PART: usize = 256;

/// The layout of X that a plan's kernel reads, and whether its results need a copy.
#[derive(Debug, Clone)]
pub(super) struct Staging {
    /// The caller's problem.
    problem: GemmProblem,
    /// Whether the kernel reads the transpose of the caller's X.
    transposed: bool,
    /// Rows of X that the kernel reads, and elements of each.
    x_rows: usize,
    x_row: usize,
    /// Whether the kernel requires an output that is aligned to 16 bytes.
    aligned_out: bool,
    copies: Copies,
}

impl Staging {
    /// Plans the copies for a kernel that computes `computed` for `problem`, and reads rows of X of `x_row` elements.
    pub(super) fn new(
        device: &Device,
        (problem, computed): (GemmProblem, GemmProblem),
        x_row: usize,
        aligned_out: bool,
    ) -> Result<Self> {
        let x_rows = match computed.x {
            XOrder::TokensFirst => computed.tokens,
            XOrder::ReductionFirst => computed.reduction,
        };
        let transposed = problem.x != computed.x;
        Ok(Self { problem, transposed, x_rows, x_row, aligned_out, copies: Copies::new(device)? })
    }

    /// Returns the bytes of a copy of X.
    fn x_bytes(&self) -> usize {
        self.x_rows.saturating_mul(self.x_row).saturating_mul(self.problem.element.bytes()).next_multiple_of(PART)
    }

    /// Returns the bytes of a copy of the results.
    fn out_bytes(&self) -> usize {
        let GemmProblem { features, tokens, output, .. } = self.problem;
        features.saturating_mul(tokens).saturating_mul(output.bytes())
    }

    /// Returns the elements of a row of the caller's X.
    fn row(&self) -> usize {
        match self.problem.x {
            XOrder::TokensFirst => self.problem.reduction,
            XOrder::ReductionFirst => self.problem.tokens,
        }
    }

    /// Returns whether X is copied at any address.
    fn copies_x(&self) -> bool {
        self.transposed || self.row() != self.x_row
    }

    /// Returns the bytes of workspace where X and the result are aligned to 16 bytes.
    pub(super) fn bytes(&self) -> usize {
        if self.copies_x() { self.x_bytes() } else { 0 }
    }

    /// Returns the bytes of workspace where X or the result is not aligned to 16 bytes.
    pub(super) fn unaligned_bytes(&self) -> usize {
        self.x_bytes() + if self.aligned_out { self.out_bytes() } else { 0 }
    }

    /// Launches a kernel between the copies that it needs, with operands that it supports.
    ///
    /// # Errors
    /// [`crate::Error::Pointer`] where a copy is needed and there is no workspace; those of launching, and of the
    /// kernel.
    ///
    /// # Safety
    /// The operands are valid for what the problem reads and writes until the stream has passed this call, and so is
    /// the workspace; the stream is of the device.
    pub(super) unsafe fn run(
        &self,
        stream: Stream,
        operands: GemmOperands,
        kernel: impl FnOnce(GemmOperands) -> Result<()>,
    ) -> Result<()> {
        let is_aligned = |address: u64| address.is_multiple_of(ALIGNMENT as u64);
        let x = self.copies_x() || !is_aligned(operands.x);
        let out = self.aligned_out && !is_aligned(operands.out);
        if !x && !out {
            return kernel(operands);
        }
        expect_pointers(&[("workspace", operands.workspace, ALIGNMENT as u64)])?;
        let mut inner = operands;
        if x {
            inner.x = operands.workspace;
            // SAFETY: X and the workspace are valid, as this function requires.
            unsafe { self.copy_x(stream, operands) }?;
        }
        if !out {
            return kernel(inner);
        }
        inner.out = operands.workspace + self.x_bytes() as u64;
        let GemmProblem { features, tokens, output, order, accumulate, .. } = self.problem;
        let (rows, row) = match order {
            Order::TokensFirst => (tokens, features * output.bytes()),
            Order::FeaturesFirst => (features, tokens * output.bytes()),
        };
        let there = Rows { data: operands.out, pitch: row };
        let here = Rows { data: inner.out, pitch: row };
        if accumulate {
            // SAFETY: the result and the workspace are valid, as this function requires.
            unsafe { self.copies.rows(stream, (there, here), rows, row, row) }?;
        }
        kernel(inner)?;
        // SAFETY: the result and the workspace are valid, as this function requires.
        unsafe { self.copies.rows(stream, (here, there), rows, row, row) }
    }

    /// # Safety
    /// That of [`Staging::run`].
    unsafe fn copy_x(&self, stream: Stream, operands: GemmOperands) -> Result<()> {
        let width = self.problem.element.bytes();
        if self.transposed {
            let GemmProblem { tokens, reduction, .. } = self.problem;
            let (places, shape) = ((operands.x, operands.workspace), (reduction, tokens));
            // SAFETY: X and the workspace are valid, as this function requires.
            return unsafe { self.copies.transpose(stream, places, shape, width, self.x_row) };
        }
        let (bytes, length) = (self.row() * width, self.x_row * width);
        let from = Rows { data: operands.x, pitch: bytes };
        let to = Rows { data: operands.workspace, pitch: length };
        // SAFETY: X and the workspace are valid, as this function requires.
        unsafe { self.copies.rows(stream, (from, to), self.x_rows, bytes, length) }
    }
}
