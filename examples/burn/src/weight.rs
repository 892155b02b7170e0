//! A packed weight, and the parameters as which burn sees it.

use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Element, Int, Tensor, TensorData};
use half::{bf16, f16};
use twofour::layer::{Activation, PackedElement, PackedLinear};
use twofour::{Arithmetic, Compressed, DataType, MatrixRef, compressed};

use crate::{Error, Result};

/// A float of burn's tensors that kernels multiply.
pub trait Float: Element + PackedElement + Arithmetic {}

impl Float for f32 {}
impl Float for f16 {}
impl Float for bf16 {}

/// Runs `$body` with `$float` bound to the float of a burn type; returns an error for others.
macro_rules! for_float {
    ($what:expr, $dtype:expr, $float:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F32 => {
                type $float = f32;
                $body
            }
            burn::tensor::DType::F16 => {
                type $float = half::f16;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $float = half::bf16;
                $body
            }
            found => return Err($crate::Error::DType { what: $what, found }),
        }
    };
}
pub(crate) use for_float;

/// What records hold of a layer, and what visitors and mappers see: the canonical form of the weight.
#[derive(Module, Debug)]
pub(crate) struct Parts {
    /// The kept values, `[out, 2 * ceil(in / 4)]`.
    pub values: Param<Tensor<2>>,
    /// Their positions, 4 bits for each group of four, `[out, ceil(in / 32)]`.
    pub meta: Param<Tensor<2, Int>>,
    /// The bias, `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
}

/// The weight as kernels read it, or why it could not be packed.
#[derive(Debug, Clone)]
pub(crate) enum Weight {
    Packed(Arc<PackedLinear>),
    Refused(Box<(Param<Tensor<2>>, Param<Tensor<2, Int>>)>, Error),
}

impl Weight {
    pub fn new<T: Float>(weight: Compressed<T>) -> Result<Self> {
        Ok(Weight::Packed(Arc::new(PackedLinear::new(weight, None, Activation::Identity)?)))
    }

    /// The weight of a dense one, `[out, in]`: pruned by magnitude, or 2:4 already.
    pub fn of_dense(weight: Tensor<2>, prune: bool) -> Result<Self> {
        let what = "the weight";
        let [rows, cols] = weight.dims();
        let data = weight.try_into_data().map_err(Error::read(what))?;
        for_float!(what, data.dtype(), T => {
            let values = data.try_into_vec::<T>().map_err(Error::read(what))?;
            let matrix = MatrixRef::new(rows, cols, &values)?;
            matrix.expect_finite()?;
            Self::new(if prune { Compressed::from_pruned(matrix)? } else { Compressed::from_dense(matrix)? })
        })
    }

    /// The weight of parameters; where they cannot be packed it keeps them, with the reason.
    pub fn of_parts(values: Param<Tensor<2>>, meta: Param<Tensor<2, Int>>, cols: usize) -> Self {
        Self::packed(&values, &meta, cols).unwrap_or_else(|why| Weight::Refused(Box::new((values, meta)), why))
    }

    fn packed(values: &Param<Tensor<2>>, meta: &Param<Tensor<2, Int>>, cols: usize) -> Result<Self> {
        let [rows, kept] = values.val().dims();
        // A reparameterization has parameters of its own.
        if values.num_params() != rows * kept {
            return Err(Error::Adapted { what: "the weight" });
        }
        let words = meta.val().try_into_data_as::<i64>().map_err(Error::read("the metadata"))?;
        let words = words.iter::<i64>().map(|word| word as u32).collect();
        let what = "the weight";
        for_float!(what, values.val().dtype(), T => {
            let values = values.val().try_into_data_as::<T>().map_err(Error::read(what))?;
            Self::new(Compressed::from_parts(rows, cols, values.iter::<T>().collect(), words)?)
        })
    }

    pub fn packed_layer(&self) -> Result<&PackedLinear> {
        match self {
            Weight::Packed(layer) => Ok(layer),
            Weight::Refused(_, why) => Err(why.clone()),
        }
    }

    /// The parameters, frozen, under the ids that they had.
    pub fn parts(&self, ids: [ParamId; 2], device: &Device) -> (Param<Tensor<2>>, Param<Tensor<2, Int>>) {
        match self {
            Weight::Refused(parts, _) => (**parts).clone(),
            Weight::Packed(layer) => match layer.dtype() {
                Some(DataType::BF16) => params::<bf16>(layer, ids, device, DType::BF16),
                Some(DataType::F16) => params::<f16>(layer, ids, device, DType::F16),
                _ => params::<f32>(layer, ids, device, DType::F32),
            },
        }
    }

    /// The dense weight `[in, out]`, as burn has it.
    pub fn dense(&self, device: &Device) -> Result<Tensor<2>> {
        fn of<T: Float>(layer: &PackedLinear, device: &Device, dtype: DType) -> Tensor<2> {
            let values = layer.to_compressed::<T>().map(|weight| weight.to_dense()).unwrap_or_default();
            let data = TensorData::new(values, [layer.out_features(), layer.in_features()]);
            Tensor::<2>::from_data(data, (device, dtype)).transpose()
        }
        let layer = self.packed_layer()?;
        Ok(match layer.dtype() {
            Some(DataType::BF16) => of::<bf16>(layer, device, DType::BF16),
            Some(DataType::F16) => of::<f16>(layer, device, DType::F16),
            _ => of::<f32>(layer, device, DType::F32),
        })
    }
}

fn params<T: Float>(
    layer: &PackedLinear,
    [values_id, meta_id]: [ParamId; 2],
    device: &Device,
    dtype: DType,
) -> (Param<Tensor<2>>, Param<Tensor<2, Int>>) {
    let (rows, cols) = (layer.out_features(), layer.in_features());
    let (values, meta) = layer.to_compressed::<T>().map(Compressed::into_parts).unwrap_or_default();
    // Words of 32 bits, whatever their sign.
    let words: Vec<i32> = meta.into_iter().map(|word| word as i32).collect();
    let values = TensorData::new(values, [rows, compressed::groups_per_row(cols) * 2]);
    let words = TensorData::new(words, [rows, compressed::meta_words_per_row(cols)]);
    (
        Param::initialized(values_id, Tensor::from_data(values, (device, dtype))),
        Param::initialized(meta_id, Tensor::from_data(words, (device, DType::I32))),
    )
}
