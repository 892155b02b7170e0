//! Layers on candle's tape: one operator, with a bias or without, wherever its tensors are.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Shape, Tensor};

use crate::Result;

/// An argument's elements in host memory.
pub(crate) type CpuArgument<'a> = (&'a CpuStorage, &'a Layout);

/// An argument's elements in device memory.
#[cfg(feature = "cuda")]
pub(crate) type CudaArgument<'a> = (&'a CudaStorage, &'a Layout);

/// The input of a layer, and its parameters (the weight of a norm is its gain): they are arguments so that their
/// gradients reach them.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<A> {
    pub(crate) x: A,
    pub(crate) weight: A,
    pub(crate) bias: Option<A>,
}

/// The gradients of input, weight and bias, each where its argument is on the tape.
pub(crate) type Gradients = [Option<Tensor>; 3];

/// A layer with hand-written gradients. Shapes and dtypes of its arguments have been checked.
pub(crate) trait TapeOperator: Send + Sync + 'static {
    /// The operator's name in candle's errors.
    const NAME: &'static str;

    /// The output on the CPU; an error where the layer is for CUDA tensors alone.
    fn on_cpu(&self, _: Arguments<CpuArgument<'_>>) -> Result<(CpuStorage, Shape)> {
        Err(candle_core::Error::Msg(format!("{} on CUDA tensors was given one of the CPU", Self::NAME)).into())
    }

    /// The output on a GPU; an error where the layer is for the CPU alone.
    #[cfg(feature = "cuda")]
    fn on_cuda(&self, _: Arguments<CudaArgument<'_>>) -> Result<(CudaStorage, Shape)> {
        Err(candle_core::Error::Msg(format!("{} on the CPU was given a CUDA tensor", Self::NAME)).into())
    }

    /// The gradients of the arguments from that of the output.
    fn gradients(&self, arguments: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients>;
}

/// The layer's output, recorded on candle's tape where an argument is. Arguments must be contiguous.
pub(crate) fn record<L: TapeOperator>(layer: L, arguments: Arguments<&Tensor>) -> Result<Tensor> {
    let operator = Operator(layer);
    let Arguments { x, weight, bias } = arguments;
    Ok(match bias {
        None => x.apply_op2(weight, operator)?,
        Some(bias) => x.apply_op3(weight, bias, operator)?,
    })
}

struct Operator<L>(L);

impl<L: TapeOperator> CustomOp2 for Operator<L> {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok(self.0.on_cpu(Arguments { x: (x, layout), weight: (weight, weight_layout), bias: None })?)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.0.on_cuda(Arguments { x: (x, layout), weight: (weight, weight_layout), bias: None })?)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, _] = self.0.gradients(Arguments { x, weight, bias: None }, dy)?;
        Ok((dx, dw))
    }
}

impl<L: TapeOperator> CustomOp3 for Operator<L> {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (weight, bias) = ((weight, weight_layout), Some((bias, bias_layout)));
        Ok(self.0.on_cpu(Arguments { x: (x, layout), weight, bias })?)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (weight, bias) = ((weight, weight_layout), Some((bias, bias_layout)));
        Ok(self.0.on_cuda(Arguments { x: (x, layout), weight, bias })?)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, db] = self.0.gradients(Arguments { x, weight, bias: Some(bias) }, dy)?;
        Ok((dx, dw, db))
    }
}
