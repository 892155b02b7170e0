//! Random operands of an epilogue, for trials of problems that have one.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};

use super::random;
use crate::{
    Activation, DataType, Result,
    problem::{EpilogueKind, Order},
    raw::gemm::Epilogue,
};

/// The operands of an epilogue.
#[derive(Debug)]
pub(super) struct EpilogueTensors {
    /// One value for each feature or each token, whichever axis of the result is contiguous.
    bias: CudaSlice<u8>,
    /// Of features, and of tokens.
    scales: [CudaSlice<u8>; 2],
}

impl EpilogueTensors {
    /// Returns random operands for results of a type.
    pub(super) fn random(
        stream: &Arc<CudaStream>,
        output: DataType,
        (features, tokens): (usize, usize),
    ) -> Result<Self> {
        let bias = random(stream, output, features.max(tokens), 2)?;
        let scales = [random(stream, DataType::F32, features, 3)?, random(stream, DataType::F32, tokens, 4)?];
        Ok(Self { bias, scales })
    }

    /// Returns the epilogue of a kind with these operands.
    pub(super) fn of(&self, kind: EpilogueKind, order: Order, stream: &Arc<CudaStream>) -> Epilogue {
        let at = |memory: &CudaSlice<u8>| Some(memory.device_ptr(stream).0);
        let bias = at(&self.bias);
        // The bias of a layer, whose operands are exchanged where features are not contiguous.
        let (bias, token_bias) = match order {
            Order::TokensFirst => (bias, None),
            Order::FeaturesFirst => (None, bias),
        };
        let [feature_scales, token_scales] = if kind.has_scales() { self.scales.each_ref().map(at) } else { [None; 2] };
        let activation = if kind.has_activation() { Activation::Gelu } else { Activation::Identity };
        Epilogue { feature_scales, token_scales, bias, token_bias, activation, ..Epilogue::default() }
    }
}
