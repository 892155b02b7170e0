//! What weights are made of, and where there are products for that.

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
    /// 8-bit integers with a scale for each row.
    I8,
    /// 4-bit integers with a scale for every 128 columns, against dense bf16; on a GPU, up to 64 tokens.
    Int4,
}

/// What a GPU multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnGpu {
    /// Elements of one type.
    Plain(DataType),
    /// Four-bit weights with activations in bf16.
    FourBits,
}

impl DType {
    /// Of a product on a CPU.
    pub(super) fn on_cpu(self) -> Result<WeightDType> {
        Ok(match self {
            DType::F32 => WeightDType::F32,
            DType::Bf16 => WeightDType::Bf16,
            DType::F16 => WeightDType::F16,
            DType::I8 => WeightDType::I8,
            DType::Int4 => {
                bail!(Usage(
                    "--dtype int4: there is a product for it on a GPU only; add --device cuda, or use i8".into()
                ))
            }
        })
    }

    /// Of products with so many tokens on a GPU.
    pub(super) fn on_gpu(self, tokens: &[u32]) -> Result<OnGpu> {
        Ok(match self {
            DType::Bf16 => OnGpu::Plain(DataType::BF16),
            DType::F16 => OnGpu::Plain(DataType::F16),
            DType::I8 => OnGpu::Plain(DataType::I8),
            DType::Int4 => {
                let most = twofour_cuda::gemm::int4::MOST_TOKENS;
                if let Some(many) = tokens.iter().find(|tokens| **tokens as usize > most) {
                    bail!(Usage(format!("--tokens {many}: with int4 {most} at most; try --tokens 1,16,{most}")))
                }
                OnGpu::FourBits
            }
            DType::F32 => {
                bail!(Usage("--dtype f32: tensor cores have no 2:4 for it; use bf16, f16, i8 or int4".into()))
            }
        })
    }
}
