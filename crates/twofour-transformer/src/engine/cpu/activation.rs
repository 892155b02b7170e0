//! 2:4 activations of the CPU engine.

use twofour::{
    MatrixRef,
    layer::{Accumulate, InputActivation, PackedActivation, SparseActivationLinear, SparseActivationSettings},
    select::Transposable,
};

use super::{CpuBuffer, buffer::expect_length, rows_of};
use crate::{
    Result,
    engine::{Buffer as _, LinearShape, SparseActivation},
};

fn layer(rule: Transposable) -> SparseActivationLinear {
    let activation = InputActivation::SquaredRelu;
    SparseActivationLinear::new(SparseActivationSettings { rule, activation, ..Default::default() })
}

pub(super) fn pack(rule: Transposable, x: &CpuBuffer, width: usize) -> Result<PackedActivation<f32>> {
    let tokens = rows_of("an activation", x, width)?;
    Ok(layer(rule).pack(x.floats()?, tokens, width)?)
}

fn expect_shape(shape: LinearShape, x: &PackedActivation<f32>) -> Result<()> {
    expect_length("a packed activation", shape.tokens * shape.in_features, x.tokens() * x.in_features())
}

impl SparseActivation<CpuBuffer> for PackedActivation<f32> {
    fn linear(
        &self,
        shape: LinearShape,
        weight: &CpuBuffer,
        bias: Option<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        expect_shape(shape, self)?;
        let weight = MatrixRef::new(shape.out_features, shape.in_features, weight.floats()?)?;
        let bias = bias.map(CpuBuffer::floats).transpose()?;
        // The rule has done its work.
        Ok(layer(Transposable::GreedyAbs).forward(self, weight, bias, y.floats_mut()?)?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CpuBuffer,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        expect_shape(shape, self)?;
        expect_length("the weight gradient", shape.out_features * shape.in_features, dw.len())?;
        Ok(layer(Transposable::GreedyAbs).weight_gradient(dy.floats()?, self, accumulate, dw.floats_mut()?)?)
    }
}
