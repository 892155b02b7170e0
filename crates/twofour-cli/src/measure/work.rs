//! The unit of measurement, a GEMM of a weight with tokens, and its results.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::weight_format::WeightFormat;

/// Output and input features of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// Output features.
    pub out: usize,
    /// Input features.
    pub inputs: usize,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Larger weights than this do not fit the memory that their copies would need.
        const MAX_ELEMENTS: usize = 1 << 28;
        let (out, inputs) = text.split_once('x').ok_or("write it as OUTxIN, for example 14336x4096")?;
        let number =
            |s: &str| s.parse::<usize>().ok().filter(|n| *n > 0).ok_or(format!("`{s}` is not a number above 0"));
        let shape = Shape { out: number(out)?, inputs: number(inputs)? };
        match shape.out.checked_mul(shape.inputs) {
            Some(elements) if elements <= MAX_ELEMENTS => Ok(shape),
            _ => Err("more than 2^28 elements".to_owned()),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.out, self.inputs)
    }
}

/// The kind of a GEMM, by its number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Decode: a language model generates its next token, for a few sequences at most; memory-bound.
    Decode,
    /// Prefill: a prompt, or a batch; compute-bound.
    Prefill,
}

/// The most tokens that count as decoding.
const DECODE_TOKENS: usize = 16;

/// One GEMM to time: `[tokens, inputs]` by a weight `[out, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The weight's shape.
    pub shape: Shape,
    /// The weight's format.
    pub dtype: WeightFormat,
    /// Rows of the activations.
    pub tokens: usize,
}

impl Work {
    /// Returns the kind that its number of tokens makes it.
    pub fn kind(&self) -> Kind {
        if self.tokens <= DECODE_TOKENS { Kind::Decode } else { Kind::Prefill }
    }
}

/// Returns the name that `--only` matches: `decode/bf16/14336x4096/1`.
impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind() {
            Kind::Decode => "decode",
            Kind::Prefill => "prefill",
        };
        write!(f, "{kind}/{}/{}/{}", self.dtype, self.shape, self.tokens)
    }
}

/// The library of a timed GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Who {
    /// This project's 2:4 kernels.
    #[serde(rename = "twofour 2:4")]
    Sparse,
    /// This project's 2:4 kernels in f32, beside a GEMM of another dtype.
    #[serde(rename = "twofour 2:4 f32")]
    SparseF32,
    /// This project's 2:4 kernels in int8, beside those in int4.
    #[serde(rename = "twofour 2:4 i8")]
    SparseI8,
    /// This project's dense kernels; int8 beside int4.
    #[serde(rename = "twofour dense")]
    Dense,
    /// The `gemm` crate, called directly.
    #[serde(rename = "gemm")]
    Gemm,
}

impl Who {
    /// Returns whether it multiplies the whole weight.
    pub fn is_dense(self) -> bool {
        !matches!(self, Who::Sparse | Who::SparseF32 | Who::SparseI8)
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Who::Sparse => "twofour 2:4",
            Who::SparseF32 => "twofour 2:4 f32",
            Who::SparseI8 => "twofour 2:4 i8",
            Who::Dense => "twofour dense",
            Who::Gemm => "gemm",
        })
    }
}

/// One contender's times for one piece of work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The kind of the work.
    pub work: Kind,
    /// The weight's format.
    pub dtype: WeightFormat,
    /// Output and input features.
    pub shape: [usize; 2],
    /// Rows of the activations.
    pub tokens: usize,
    /// Threads.
    pub threads: usize,
    /// The library.
    pub contender: Who,
    /// Median, microseconds.
    pub median_us: f64,
    /// The minimum, microseconds.
    pub min_us: f64,
    /// The maximum, microseconds.
    pub max_us: f64,
    /// Samples taken.
    pub rounds: usize,
    /// Bytes of this contender's weight.
    pub weight_bytes: usize,
    /// Its weight's bytes divided by the median time, in 10^9 bytes a second.
    pub gb_per_s: f64,
    /// The dense weight's bytes divided by the 2:4 weight's: the speedup of a memory-bound GEMM.
    pub byte_limit: f64,
    /// The read bandwidth with as many bytes as the dense weight has, interleaved with the contenders; decode only.
    pub read_gb_per_s: Option<f64>,
    /// `gb_per_s` as a share of `read_gb_per_s`.
    pub read_share: Option<f64>,
}

impl Row {
    /// The work that was measured.
    pub fn what(&self) -> Work {
        let [out, inputs] = self.shape;
        Work { shape: Shape { out, inputs }, dtype: self.dtype, tokens: self.tokens }
    }
}

/// The rows of one piece of work, by role.
#[derive(Debug, Clone, Copy)]
pub struct Outcome<'a> {
    /// The 2:4 kernel.
    pub sparse: &'a Row,
    /// The fastest dense baseline.
    pub best_dense: &'a Row,
}

impl<'a> Outcome<'a> {
    /// Returns the outcome of the rows of one piece of work, or nothing where 2:4 or dense is missing.
    pub fn of(rows: &'a [Row]) -> Option<Self> {
        let sparse = rows.iter().find(|row| row.contender == Who::Sparse)?;
        let dense = rows.iter().filter(|row| row.contender.is_dense());
        let best_dense = dense.min_by(|a, b| a.median_us.total_cmp(&b.median_us))?;
        Some(Outcome { sparse, best_dense })
    }

    /// Returns the time of the best dense GEMM divided by that of the 2:4 GEMM.
    pub fn speed_up(&self) -> f64 {
        self.best_dense.median_us / self.sparse.median_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use twofour::DataType;

    #[test]
    fn shapes_are_read_or_refused() {
        assert_eq!("14336x4096".parse(), Ok(Shape { out: 14336, inputs: 4096 }));
        for bad in ["", "4096", "0x4", "4x", "-1x4", "99999999x99999999", "4x4x4"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
    }

    #[test]
    fn work_has_a_name_to_choose_it_by() {
        let shape = Shape { out: 8, inputs: 4 };
        let names = [1, 16, 17].map(|tokens| Work { shape, dtype: DataType::I8.into(), tokens }.to_string());
        assert_eq!(names, ["decode/i8/8x4/1", "decode/i8/8x4/16", "prefill/i8/8x4/17"]);
    }
}
