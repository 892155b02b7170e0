//! A trainable 2:4 weight where its master is: on the CPU or on a GPU.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, WithDType};
use twofour::{
    Mask, MatrixRef,
    layer::{SparseLinear, SparseLinearSettings},
};

use super::weight::{Stored, Weight, for_layer};
#[cfg(feature = "cuda")]
use crate::cuda::linear as cuda;
use crate::float::{Float, for_float, with_elements};
use crate::{Error, Result};

/// Mask and packed weight, shared with forward passes that wait for their backward pass.
#[derive(Debug)]
pub(super) enum Trainable {
    /// On the CPU: one of the trainable kinds.
    Host(Weight),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Layer),
}

impl Trainable {
    /// A layer over a master weight that has been checked, for activations of a dtype, on the CPU the master's.
    pub(super) fn new(master: &Tensor, activations: DType, settings: SparseLinearSettings) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if master.device().is_cuda() {
            return Ok(Trainable::Cuda(cuda::Layer::new(master, activations, settings)?));
        }
        for_float!("the activations", activations, T => with_master::<T, _>(master, |matrix| {
            Ok(Trainable::Host(T::wrap(Arc::new(SparseLinear::new(matrix, settings)?))))
        }))
    }

    /// Chooses the mask anew from the master and packs what it keeps.
    pub(super) fn remask(&mut self, master: &Tensor) -> Result<()> {
        match self {
            Trainable::Host(weight) => for_float!("the weight", master.dtype(), T => {
                let layer = layer_mut::<T>(weight)?;
                with_master::<T, _>(master, |matrix| Ok(layer.remask(matrix).map(drop)?))
            }),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.remask(master),
        }
    }

    /// Packs the master's present values under the mask as it is.
    pub(super) fn repack(&mut self, master: &Tensor) -> Result<()> {
        match self {
            Trainable::Host(weight) => for_float!("the weight", master.dtype(), T => {
                let layer = layer_mut::<T>(weight)?;
                with_master::<T, _>(master, |matrix| Ok(layer.repack(matrix)?))
            }),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.repack(master),
        }
    }

    /// Sets the mask and packs what it keeps.
    pub(super) fn set_mask(&mut self, master: &Tensor, mask: Mask) -> Result<()> {
        match self {
            Trainable::Host(weight) => for_float!("the weight", master.dtype(), T => {
                let layer = layer_mut::<T>(weight)?;
                with_master::<T, _>(master, |matrix| Ok(layer.set_mask(matrix, mask).map(drop)?))
            }),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.set_mask(master, &mask),
        }
    }

    /// An error for a mask that [`Trainable::set_mask`] refuses.
    pub(super) fn check_mask(&self, mask: &Mask) -> Result<()> {
        match self {
            Trainable::Host(weight) => for_layer!(weight, layer => Ok(layer.check_mask(mask)?), _ => Ok(())),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.check_mask(mask),
        }
    }

    /// The mask. On a GPU a copy, for which the call waits.
    pub(super) fn mask(&self) -> Result<Mask> {
        match self {
            Trainable::Host(weight) => Ok(for_layer!(weight, layer => layer.mask().clone(), _ => Mask::empty(0, 0))),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.mask(),
        }
    }

    /// The share of mask elements that the last change of the mask flipped. On a GPU the call waits for it.
    pub(super) fn flip_rate(&self) -> Result<f64> {
        match self {
            Trainable::Host(weight) => Ok(for_layer!(weight, layer => layer.flip_rate(), _ => 0.0)),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.flip_rate(),
        }
    }

    /// An error for a NaN that a mask on a GPU was chosen from; on the CPU choosing it was an error.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Trainable::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.check(),
        }
    }

    /// Makes the packed weight ready for other threads, which then multiply with it and pack nothing.
    pub(super) fn publish(&self) -> Result<()> {
        match self {
            Trainable::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.publish(),
        }
    }

    /// What the mask keeps of the master as it is now, dense, of the master's dtype and on its device.
    pub(super) fn kept(&self, master: &Tensor) -> Result<Tensor> {
        match self {
            Trainable::Host(weight) => for_float!("the weight", master.dtype(), T => {
                let mut weight = weight.clone();
                let layer = layer_mut::<T>(&mut weight)?;
                with_master::<T, _>(master, |matrix| Ok(layer.repack(matrix)?))?;
                Ok(Tensor::from_vec(layer.packed().to_dense(), master.shape(), &Device::Cpu)?)
            }),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.kept(master),
        }
    }

    /// Bytes of packed weight and metadata; on a GPU of all that the layer holds.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Trainable::Host(weight) => weight.bytes(),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(layer) => layer.bytes(),
        }
    }
}

/// The layer of a weight of `T`s, to be changed: in place unless an earlier forward pass still waits for its backward
/// pass.
fn layer_mut<T: Stored>(weight: &mut Weight) -> Result<&mut SparseLinear<T>> {
    match T::layer_mut(weight) {
        Some(layer) => Ok(Arc::make_mut(layer)),
        // A master keeps its dtype, so this is another one.
        None => Err(Error::DType {
            what: "the weight",
            found: <T as WithDType>::DTYPE,
            expected: "the dtype that the layer was made with".to_owned(),
        }),
    }
}

fn with_master<T: Float, R>(master: &Tensor, f: impl FnOnce(MatrixRef<'_, T>) -> Result<R>) -> Result<R> {
    let (rows, cols) = master.dims2()?;
    with_elements::<T, _>("the weight", master, |data| f(MatrixRef::new(rows, cols, data)?))
}
