//! The formats of weights that are measured, and which device has a GEMM for each.

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use twofour::DataType;

use crate::{dtype, exit::Usage, weight_format::WeightFormat};

impl WeightFormat {
    const PLAIN: [DataType; 6] =
        [DataType::F32, DataType::BF16, DataType::F16, DataType::E4M3, DataType::E5M2, DataType::I8];

    /// The parser of the option that names a format.
    pub(super) fn parser() -> impl TypedValueParser<Value = Self> {
        let formats = Self::PLAIN.map(WeightFormat::Plain).into_iter().chain([WeightFormat::Int4]);
        PossibleValuesParser::new(formats.map(dtype::possible)).try_map(|name| name.parse::<Self>())
    }

    /// As the CPU kernels have it.
    pub(super) fn on_cpu(self) -> Result<Self> {
        if dtype::ON_CPU.contains(&self) {
            return Ok(self);
        }
        bail!(Usage(format!("--dtype {self}: only a GPU has a GEMM for it; add --device cuda, or use int8")))
    }

    /// As the GPU kernels have it, for these numbers of tokens.
    pub(super) fn on_gpu(self, tokens: &[u32]) -> Result<OnGpu> {
        Ok(match self {
            WeightFormat::Plain(DataType::E5M2) => OnGpu::Plain { sparse: DataType::E5M2, dense: DataType::E4M3 },
            WeightFormat::Plain(DataType::F32 | DataType::I32) => {
                bail!(Usage(format!(
                    "--dtype {self}: tensor cores have no 2:4 for it; use bf16, f16, e4m3, e5m2, int8 or int4"
                )))
            }
            WeightFormat::Plain(data_type) => OnGpu::Plain { sparse: data_type, dense: data_type },
            WeightFormat::Int4 => {
                let most = twofour_cuda::raw::gemm::int4::MAX_TOKENS;
                if let Some(many) = tokens.iter().find(|tokens| **tokens as usize > most) {
                    bail!(Usage(format!("--tokens {many}: with int4 {most} at most; try --tokens 1,16,{most}")))
                }
                OnGpu::FourBits
            }
        })
    }
}

/// The operands of a GEMM on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnGpu {
    /// Weight and activations of one element type, which may differ between the 2:4 and the dense GEMM where the sizes
    /// are the same.
    Plain { sparse: DataType, dense: DataType },
    /// Int4 weights with activations in bf16.
    FourBits,
}

impl OnGpu {
    /// The element type of the dense baseline.
    pub(super) fn dense(self) -> DataType {
        match self {
            OnGpu::Plain { dense, .. } => dense,
            OnGpu::FourBits => DataType::BF16,
        }
    }
}
