//! Linear layers on the CPU.

use twofour::{
    kernel::Epilogue,
    layer::{self, Accumulate, Activation, PackedActivation, SparseLinearSettings},
    select::Transposable,
};

use super::{CpuBuffer, CpuEngine, CpuSparseLinear, activation, buffer::expect_length, rows_of};
use crate::{
    Result, cpu,
    engine::{Buffer as _, Kept, LinearOperations, LinearShape, SparsePrecision, mask_words_of_row},
};

impl LinearOperations for CpuEngine {
    type PackedActivation = PackedActivation<f32>;
    type SparseLinear = CpuSparseLinear;

    fn linear(
        &self,
        shape: LinearShape,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        bias: Option<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let dims = shape.expect(x, y, weight)?;
        let bias = bias.map(CpuBuffer::floats).transpose()?;
        expect_length("the bias of a linear layer", shape.out_features, bias.map_or(shape.out_features, <[f32]>::len))?;
        let epilogue = Epilogue { bias, activation: Activation::Identity };
        cpu::dense::forward(x.floats()?, weight.floats()?, dims, epilogue, y.floats_mut()?)
    }

    fn input_gradient(&self, shape: LinearShape, dy: &CpuBuffer, weight: &CpuBuffer, dx: &mut CpuBuffer) -> Result<()> {
        let dims = shape.expect(dx, dy, weight)?;
        cpu::dense::input_gradient(dy.floats()?, weight.floats()?, dims, dx.floats_mut()?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CpuBuffer,
        x: &CpuBuffer,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        let dims = shape.expect(x, dy, dw)?;
        cpu::dense::weight_gradient(dy.floats()?, x.floats()?, dims, accumulate, dw.floats_mut()?)
    }

    fn bias_gradient(&self, dy: &CpuBuffer, accumulate: Accumulate, db: &mut CpuBuffer) -> Result<()> {
        let tokens = rows_of("the output gradient", dy, db.len())?;
        Ok(layer::bias_gradient(dy.floats()?, tokens, accumulate, db.floats_mut()?)?)
    }

    fn sparse_linear(
        &self,
        master: &CpuBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
        precision: SparsePrecision,
    ) -> Result<CpuSparseLinear> {
        CpuSparseLinear::new(master, shape, settings, precision)
    }

    fn prune(&self, which: Kept<'_, CpuBuffer>, weight: &CpuBuffer, cols: usize, kept: &mut CpuBuffer) -> Result<()> {
        let rows = rows_of("a weight to prune", weight, cols)?;
        expect_length("a pruned weight", weight.len(), kept.len())?;
        match which {
            Kept::OfFour(count) => cpu::keep_of_four::keep(count, weight.floats()?, cols, kept.floats_mut()?),
            Kept::Mask(mask) => {
                expect_length("a mask", rows * mask_words_of_row(cols), mask.len())?;
                cpu::masking::apply(mask.ids()?, cols, weight.floats()?, kept.floats_mut()?);
            }
        }
        Ok(())
    }

    fn mask_in_place(&self, mask: &CpuBuffer, cols: usize, values: &mut CpuBuffer) -> Result<()> {
        let rows = rows_of("values to mask", values, cols)?;
        expect_length("a mask", rows * mask_words_of_row(cols), mask.len())?;
        cpu::masking::apply_in_place(mask.ids()?, cols, values.floats_mut()?);
        Ok(())
    }

    fn round_to_grid(
        &self,
        largest: f32,
        scales: &CpuBuffer,
        weight: &CpuBuffer,
        rounded: &mut CpuBuffer,
    ) -> Result<()> {
        expect_length("scales of a weight", weight.len(), scales.len())?;
        expect_length("a rounded weight", weight.len(), rounded.len())?;
        cpu::grid::round(largest, scales.floats()?, weight.floats()?, rounded.floats_mut()?);
        Ok(())
    }

    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &CpuBuffer,
        width: usize,
        old: Option<PackedActivation<f32>>,
    ) -> Result<PackedActivation<f32>> {
        drop(old);
        activation::pack(rule, x, width)
    }
}
