//! candle's `matmul`, as `candle_nn::Linear` calls it: `x.matmul(&w.t()?)`.
//!
//! For f32 and f16 that is one call of the `gemm` crate; bf16 is widened to f32 at every call.

use std::rc::Rc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, WithDType};

use super::Contender;
use crate::measure::{
    memory::Rotation,
    work::{Shape, Who},
};

#[derive(Debug)]
pub(super) struct Candle {
    weights: Rc<Rotation<Tensor>>,
    bytes: usize,
    x: Tensor,
    y: Option<Tensor>,
}

impl Candle {
    pub(super) fn new<T: WithDType>(
        weights: Rc<Rotation<Tensor>>,
        bytes: usize,
        x: &[T],
        shape: Shape,
        tokens: usize,
    ) -> Result<Self> {
        let x = Tensor::from_slice(x, (tokens, shape.inputs), &Device::Cpu)?;
        Ok(Candle { weights, bytes, x, y: None })
    }
}

impl Contender for Candle {
    fn who(&self) -> Who {
        Who::Candle
    }

    fn weight_bytes(&self) -> usize {
        self.bytes
    }

    fn multiply(&mut self) -> Result<()> {
        self.y = Some(self.x.matmul(&self.weights.next().t()?)?);
        Ok(())
    }

    fn product(&self) -> Result<Vec<f32>> {
        match &self.y {
            Some(y) => Ok(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?),
            None => Ok(Vec::new()),
        }
    }
}
