//! Inverses of symmetric positive definite matrices: a Cholesky factorization in blocks.
//!
//! With `A = L Lᵀ` cut in two,
//!
//! ```text
//! L₂₁ = A₂₁ L₁₁⁻ᵀ        L₂₂ L₂₂ᵀ = A₂₂ - L₂₁ L₂₁ᵀ        (L⁻¹)₂₁ = -L₂₂⁻¹ L₂₁ L₁₁⁻¹
//! ```
//!
//! so that a recursion over halves returns `L⁻¹` by GEMMs alone, but for blocks of 64 rows, which one kernel does in
//! f64. Then `A⁻¹ = L⁻ᵀ L⁻¹`. Blocks are copied out of their matrix: GEMMs read whole ones.

use twofour::DataType;

use super::GpuBackend;
use crate::{
    Result,
    arguments::{Memory as _, product, side},
    layer::{Accumulate, DenseLinear, DeviceBuffer},
    raw::solve::{BASE, SolveKernel, SolveParameters},
};

/// A part of a matrix with rows of `stride` elements.
#[derive(Debug, Clone, Copy)]
struct Part {
    stride: usize,
    row: usize,
    col: usize,
}

/// What a row without a positive pivot is told apart by.
const NONE: u32 = u32::MAX;

impl GpuBackend {
    /// The inverse of a symmetric matrix `[order, order]`, whose lower half is read; or the first row whose pivot is
    /// not positive.
    pub(super) fn inverse_of(
        &self,
        matrix: &DeviceBuffer,
        order: usize,
    ) -> Result<std::result::Result<DeviceBuffer, usize>> {
        if order == 0 {
            return Ok(Ok(self.zeros(0)?));
        }
        let failed = DeviceBuffer::from_ids(&self.context, &[NONE])?;
        let factor = self.inverse_factor(matrix, (0, order), &failed)?;
        let mut inverse = self.zeros(product(order, order)?)?;
        let (shape, own) = (DenseLinear { out_features: order, in_features: order }, factor.as_slice());
        shape.weight_gradient(&self.context, own, own, order, Accumulate::Overwrite, inverse.as_slice_mut())?;
        Ok(match failed.ids_to_host()?.first() {
            Some(&row) if row != NONE => Err(row as usize),
            _ => Ok(inverse),
        })
    }

    /// `L⁻¹` of a matrix of so many rows, the first of which has that number.
    fn inverse_factor(
        &self,
        matrix: &DeviceBuffer,
        (first, rows): (usize, usize),
        failed: &DeviceBuffer,
    ) -> Result<DeviceBuffer> {
        let mut whole = self.zeros(product(rows, rows)?)?;
        if rows <= BASE {
            let (context, len) = (&self.context, rows * rows);
            let parameters = SolveParameters {
                a: matrix.as_slice().at("a block", context, DataType::F32, len)?,
                x: whole.as_slice_mut().at("the factor", context, DataType::F32, len)?,
                count: failed.as_slice().at("the row that failed", context, DataType::I32, 1)?,
                rows: side("rows", rows)?,
                first: side("rows", first)?,
                ..SolveParameters::default()
            };
            // SAFETY: the slices have been found to be as long as the kernel requires.
            unsafe { self.launch(SolveKernel::InvertFactor, &parameters) }?;
            return Ok(whole);
        }
        let upper = first_half(rows);
        let lower = rows - upper;
        let at = |row, col| Part { stride: rows, row, col };
        let block = |row, col, shape: (usize, usize)| -> Result<DeviceBuffer> {
            let mut block = self.zeros(product(shape.0, shape.1)?)?;
            self.copy_part((matrix, at(row, col)), (&mut block, Part { stride: shape.1, row: 0, col: 0 }), shape, 1.0)?;
            Ok(block)
        };
        let square = |order: usize| DenseLinear { out_features: order, in_features: order };
        let inverse = self.inverse_factor(&block(0, 0, (upper, upper))?, (first, upper), failed)?;
        // L₂₁
        let mut below = self.zeros(product(lower, upper)?)?;
        let given = block(upper, 0, (lower, upper))?;
        let (context, weight) = (&self.context, inverse.as_slice());
        square(upper).forward(context, (given.as_slice(), lower), weight, None, below.as_slice_mut())?;
        let mut rest = block(upper, upper, (lower, lower))?;
        let mut own = self.zeros(product(lower, lower)?)?;
        let shape = DenseLinear { out_features: lower, in_features: upper };
        shape.forward(context, (below.as_slice(), lower), below.as_slice(), None, own.as_slice_mut())?;
        self.subtract(&own, &mut rest)?;
        drop((own, given));
        let inverse_below = self.inverse_factor(&rest, (first + upper, lower), failed)?;
        // (L⁻¹)₂₁, but for its sign.
        let (mut half, mut product_below) = (self.zeros(lower * upper)?, self.zeros(lower * upper)?);
        let (x, y) = ((inverse_below.as_slice(), lower), half.as_slice_mut());
        shape.input_gradient(context, x, below.as_slice(), Accumulate::Overwrite, y)?;
        self.multiply((half.as_slice(), lower), (inverse.as_slice(), upper), product_below.as_slice_mut())?;
        let of = |order| Part { stride: order, row: 0, col: 0 };
        self.copy_part((&inverse, of(upper)), (&mut whole, at(0, 0)), (upper, upper), 1.0)?;
        self.copy_part((&product_below, of(upper)), (&mut whole, at(upper, 0)), (lower, upper), -1.0)?;
        self.copy_part((&inverse_below, of(lower)), (&mut whole, at(upper, upper)), (lower, lower), 1.0)?;
        Ok(whole)
    }

    /// Copies a block of a shape from a part of one matrix to a part of another, times a factor.
    fn copy_part(
        &self,
        (from, part): (&DeviceBuffer, Part),
        (to, place): (&mut DeviceBuffer, Part),
        (rows, cols): (usize, usize),
        factor: f32,
    ) -> Result<()> {
        let context = &self.context;
        let range = |part: Part| {
            let begin = part.row * part.stride + part.col;
            begin..begin + (rows - 1) * part.stride + cols
        };
        let (source, target) = (range(part), range(place));
        let mut to = to.as_slice_mut();
        let parameters = SolveParameters {
            a: from.as_slice().part(source.clone())?.at("a block", context, DataType::F32, source.len())?,
            x: to.part(target.clone())?.at("the place of a block", context, DataType::F32, target.len())?,
            rows: side("rows", rows)?,
            cols: side("columns", cols)?,
            stride: side("columns", part.stride)?,
            to_stride: side("columns", place.stride)?,
            factor,
            ..SolveParameters::default()
        };
        // SAFETY: the parts have been found to have the block's rows.
        unsafe { self.launch(SolveKernel::CopyBlock, &parameters) }
    }

    fn subtract(&self, values: &DeviceBuffer, from: &mut DeviceBuffer) -> Result<()> {
        let (context, len) = (&self.context, from.len());
        let parameters = SolveParameters {
            a: values.as_slice().at("what is subtracted", context, DataType::F32, len)?,
            x: from.as_slice_mut().at("the difference", context, DataType::F32, len)?,
            elements: len as u64,
            ..SolveParameters::default()
        };
        // SAFETY: both have been found to be equally long.
        unsafe { self.launch(SolveKernel::Subtract, &parameters) }
    }
}

/// Where more than [`BASE`] rows are cut: the largest power of two times it, so that blocks have few sizes.
fn first_half(rows: usize) -> usize {
    let mut half = BASE;
    while 2 * half < rows {
        half *= 2;
    }
    half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_cut_at_powers_of_two_and_both_parts_have_rows() {
        for (rows, half) in [(65, 64), (128, 64), (129, 128), (896, 512), (4864, 4096), (8192, 4096), (11008, 8192)] {
            assert_eq!(first_half(rows), half, "{rows}");
        }
        assert!((BASE + 1..3000).all(|rows| (1..rows).contains(&first_half(rows))));
    }
}
