//! The dtypes of weights, and which device has a GEMM for each.

use anyhow::{Result, bail};
use clap::ValueEnum;
use serde::Serialize;
use twofour_cuda::DataType;

use crate::{exit::Usage, measure::WeightDType};

/// The dtype of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum DType {
    /// IEEE single; on a CPU.
    F32,
    /// Brain floating point.
    #[default]
    Bf16,
    /// IEEE half.
    F16,
    /// 8-bit floating point, 4 bits of exponent and 3 of mantissa; on a GPU.
    E4m3,
    /// 8-bit floating point, 5 bits of exponent and 2 of mantissa; on a GPU, against dense e4m3, since cuBLASLt multiplies no two tensors of e5m2.
    E5m2,
    /// 8-bit integers with a scale for each row.
    I8,
    /// 4-bit integers with a scale for every 128 columns, against dense bf16; on a GPU, up to 64 tokens.
    Int4,
}

/// The operands of a GEMM on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnGpu {
    /// Weight and activations of one element type, which may differ between the 2:4 and the dense GEMM where the sizes are the same.
    Plain { sparse: DataType, dense: DataType },
    /// Int4 weights with activations in bf16.
    FourBits,
}

impl OnGpu {
    /// The element type of the dense contender.
    pub(super) fn dense(self) -> DataType {
        match self {
            OnGpu::Plain { dense, .. } => dense,
            OnGpu::FourBits => DataType::BF16,
        }
    }
}

impl DType {
    /// As the CPU kernels have it.
    pub(super) fn on_cpu(self) -> Result<WeightDType> {
        Ok(match self {
            DType::F32 => WeightDType::F32,
            DType::Bf16 => WeightDType::Bf16,
            DType::F16 => WeightDType::F16,
            DType::I8 => WeightDType::I8,
            DType::E4m3 | DType::E5m2 | DType::Int4 => {
                let name = self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
                bail!(Usage(format!("--dtype {name}: only a GPU has a GEMM for it; add --device cuda, or use i8")))
            }
        })
    }

    /// As the GPU kernels have it, for these numbers of tokens.
    pub(super) fn on_gpu(self, tokens: &[u32]) -> Result<OnGpu> {
        let plain = |element| OnGpu::Plain { sparse: element, dense: element };
        Ok(match self {
            DType::Bf16 => plain(DataType::BF16),
            DType::F16 => plain(DataType::F16),
            DType::E4m3 => plain(DataType::E4M3),
            DType::E5m2 => OnGpu::Plain { sparse: DataType::E5M2, dense: DataType::E4M3 },
            DType::I8 => plain(DataType::I8),
            DType::Int4 => {
                let most = twofour_cuda::raw::gemm::int4::MOST_TOKENS;
                if let Some(many) = tokens.iter().find(|tokens| **tokens as usize > most) {
                    bail!(Usage(format!("--tokens {many}: with int4 {most} at most; try --tokens 1,16,{most}")))
                }
                OnGpu::FourBits
            }
            DType::F32 => {
                bail!(Usage(
                    "--dtype f32: tensor cores have no 2:4 for it; use bf16, f16, e4m3, e5m2, i8 or int4".into()
                ))
            }
        })
    }
}
