//! Linear layers on a GPU.

use twofour::{
    layer::{Accumulate, SparseLinearSettings},
    select::Transposable,
};
use twofour_cuda::{layer, layer::DenseLinear};

use super::{CudaBuffer, CudaEngine, CudaPackedActivation, CudaSparseLinear, activation, rows_of};
use crate::{
    Result, cuda as kernels,
    engine::{Buffer as _, Kept, LinearOperations, LinearShape, SparsePrecision},
};

impl LinearOperations for CudaEngine {
    type PackedActivation = CudaPackedActivation;
    type SparseLinear = CudaSparseLinear;

    fn linear(
        &self,
        shape: LinearShape,
        x: &CudaBuffer,
        weight: &CudaBuffer,
        bias: Option<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        let (linear, x) = (dense(shape), (x.slice(), shape.tokens));
        let bias = bias.map(CudaBuffer::slice);
        Ok(linear.forward(&self.context, x, weight.slice(), bias, y.slice_mut())?)
    }

    fn input_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        weight: &CudaBuffer,
        dx: &mut CudaBuffer,
    ) -> Result<()> {
        let (dy, weight) = ((dy.slice(), shape.tokens), weight.slice());
        Ok(dense(shape).input_gradient(&self.context, dy, weight, Accumulate::Overwrite, dx.slice_mut())?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        x: &CudaBuffer,
        accumulate: Accumulate,
        dw: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, tokens) = (&self.context, shape.tokens);
        Ok(dense(shape).weight_gradient(context, dy.slice(), x.slice(), tokens, accumulate, dw.slice_mut())?)
    }

    fn bias_gradient(&self, dy: &CudaBuffer, accumulate: Accumulate, db: &mut CudaBuffer) -> Result<()> {
        let tokens = rows_of(dy, db.len());
        Ok(layer::bias_gradient(&self.context, dy.slice(), tokens, accumulate, db.slice_mut())?)
    }

    fn sparse_linear(
        &self,
        master: &CudaBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
        precision: SparsePrecision,
    ) -> Result<CudaSparseLinear> {
        CudaSparseLinear::new(&self.context, master, shape, (self.compute, precision), settings)
    }

    fn prune(
        &self,
        which: Kept<'_, CudaBuffer>,
        weight: &CudaBuffer,
        cols: usize,
        kept: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, weight, kept) = (&self.context, weight.slice(), kept.slice_mut());
        match which {
            Kept::OfFour(count) => kernels::keep_of_four(context, count, weight, cols, kept)?,
            Kept::Mask(mask) => kernels::apply_mask(context, mask.slice(), cols, weight, kept)?,
        }
        Ok(())
    }

    fn mask_in_place(&self, mask: &CudaBuffer, cols: usize, values: &mut CudaBuffer) -> Result<()> {
        Ok(kernels::apply_mask_in_place(&self.context, mask.slice(), cols, values.slice_mut())?)
    }

    fn round_to_grid(
        &self,
        largest: f32,
        scales: &CudaBuffer,
        weight: &CudaBuffer,
        rounded: &mut CudaBuffer,
    ) -> Result<()> {
        Ok(kernels::round_to_grid(&self.context, largest, scales.slice(), weight.slice(), rounded.slice_mut())?)
    }

    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &CudaBuffer,
        width: usize,
        old: Option<CudaPackedActivation>,
    ) -> Result<CudaPackedActivation> {
        activation::pack(&self.context, rule, (x, width), old)
    }
}

fn dense(shape: LinearShape) -> DenseLinear {
    DenseLinear { out_features: shape.out_features, in_features: shape.in_features }
}
