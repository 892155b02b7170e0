//! The kernels' sources, which this crate carries.

use sha2::{Digest, Sha256};

/// A CUDA C++ source: what its file says after what all share and a few definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its file's name without the ending, and what it is defined for.
    pub name: &'static str,
    definitions: &'static str,
    text: &'static str,
}

const COMMON: &str = include_str!("kernels/common.cuh");

const fn prune(name: &'static str, definitions: &'static str) -> Source {
    Source { name, definitions, text: include_str!("kernels/prune.cu") }
}

impl Source {
    /// Pruning and compressing ([`crate::prune`]) f32 weights to f16 values.
    pub const PRUNE_F32_F16: Source = prune("prune-f32-f16", "#define IN F32\n#define OUT F16\n");
    /// The same from f32 to bf16.
    pub const PRUNE_F32_BF16: Source = prune("prune-f32-bf16", "#define IN F32\n#define OUT BF16\n");
    /// The same in f16.
    pub const PRUNE_F16: Source = prune("prune-f16", "#define IN F16\n#define OUT F16\n");
    /// The same in bf16.
    pub const PRUNE_BF16: Source = prune("prune-bf16", "#define IN BF16\n#define OUT BF16\n");

    /// All of them.
    pub const ALL: [Source; 4] = [Self::PRUNE_F32_F16, Self::PRUNE_F32_BF16, Self::PRUNE_F16, Self::PRUNE_BF16];

    /// The whole text.
    pub fn text(&self) -> String {
        format!("{}#line 1 \"common.cuh\"\n{COMMON}\n#line 1 \"{}.cu\"\n{}", self.definitions, self.name, self.text)
    }

    /// The text's SHA-256.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.text()).into()
    }
}
