//! GPU architectures that kernels are compiled for.

use std::fmt;

use crate::{Error, Result};

/// What a GPU can do, as far as the choice and the code of kernels depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// The most shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// 8-bit floats: conversions, and products of tensor cores.
    pub float8: Float8,
    /// `wgmma.sp`, the products of a warpgroup, with its operands by bulk tensor copies (TMA).
    pub wgmma: bool,
    /// The most CTAs of a cluster for which kernels are written; 1 without clusters.
    pub cluster: u32,
    /// `tcgen05.mma.sp`, with accumulators in tensor memory. No kernel uses it yet.
    pub tcgen05: bool,
    /// Whether the kernels were tuned and timed there: the model of time has its coefficients. Elsewhere they are
    /// compiled, and shapes are chosen by how well they balance the SMs.
    pub measured: bool,
}

/// 8-bit floats on an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Float8 {
    /// None.
    Missing,
    /// `mma.sp` is emulated by other instructions, which take registers that only small tiles have left.
    Emulated,
    /// `mma.sp` is an instruction of its own.
    Native,
}

const fn kib(kib: u32) -> u32 {
    kib << 10
}

/// The features of Ampere data-centre GPUs, to which other rows compare.
const AMPERE: Features = Features {
    shared_bytes: kib(163),
    float8: Float8::Missing,
    wgmma: false,
    cluster: 1,
    tcgen05: false,
    measured: false,
};

/// The capabilities at which features change, in order.
const TABLE: [(Architecture, Features); 8] = [
    (Architecture::SM_80, AMPERE),
    (Architecture::SM_86, Features { shared_bytes: kib(99), ..AMPERE }),
    // Jetson Orin.
    (Architecture { major: 8, minor: 7 }, AMPERE),
    (Architecture { major: 8, minor: 8 }, Features { shared_bytes: kib(99), ..AMPERE }),
    (Architecture::SM_89, Features { shared_bytes: kib(99), float8: Float8::Native, ..AMPERE }),
    (
        Architecture::SM_90,
        Features {
            shared_bytes: kib(227),
            float8: Float8::Emulated,
            wgmma: true,
            cluster: 8,
            tcgen05: false,
            measured: true,
        },
    ),
    (
        Architecture::SM_100,
        Features { shared_bytes: kib(227), float8: Float8::Emulated, cluster: 8, tcgen05: true, ..AMPERE },
    ),
    (Architecture::SM_120, Features { shared_bytes: kib(99), float8: Float8::Native, ..AMPERE }),
];

/// A GPU architecture with sparse tensor cores: compute capability 8.0 and newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Architecture {
    major: u32,
    minor: u32,
}

impl Architecture {
    /// Ampere data-centre (A100).
    pub const SM_80: Self = Self { major: 8, minor: 0 };
    /// Ampere (RTX 30, A10, A40).
    pub const SM_86: Self = Self { major: 8, minor: 6 };
    /// Ada (RTX 40, L4, L40S).
    pub const SM_89: Self = Self { major: 8, minor: 9 };
    /// Hopper (H100, H200).
    pub const SM_90: Self = Self { major: 9, minor: 0 };
    /// Blackwell data-centre (B200).
    pub const SM_100: Self = Self { major: 10, minor: 0 };
    /// Blackwell (RTX 50).
    pub const SM_120: Self = Self { major: 12, minor: 0 };

    /// The architectures for which tests compile every kernel.
    pub const ALL: [Self; 6] = [Self::SM_80, Self::SM_86, Self::SM_89, Self::SM_90, Self::SM_100, Self::SM_120];

    /// Returns the architecture of a compute capability.
    ///
    /// # Errors
    /// [`Error::Unsupported`] below 8.0.
    ///
    /// ```
    /// use twofour_cuda::Architecture;
    /// assert_eq!(Architecture::of(9, 0)?.to_string(), "sm_90a");
    /// assert!(Architecture::of(7, 5).is_err());
    /// # Ok::<(), twofour_cuda::Error>(())
    /// ```
    pub fn of(major: u32, minor: u32) -> Result<Self> {
        if major >= 8 {
            Ok(Self { major, minor })
        } else {
            Err(Error::Unsupported { operation: "2:4 on the GPU", major, minor, needs: "8.0 (Ampere) or newer" })
        }
    }

    /// Returns what the GPU can do: that of its capability, or else of the last known one before it.
    pub const fn features(self) -> Features {
        let mut row = TABLE.len() - 1;
        while row > 0 && TABLE[row].0.number() > self.number() {
            row -= 1;
        }
        TABLE[row].1
    }

    const fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// Returns the compute capability.
    pub fn capability(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

/// Writes the compilers' name, with architecture-specific instructions where there are any: `sm_86`, `sm_90a`.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = if self.major >= 9 { "a" } else { "" };
        write!(f, "sm_{}{}{own}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_a_capability_has_the_last_row_before_it() {
        assert!(TABLE.is_sorted_by(|a, b| a.0 < b.0));
        let shared = |(major, minor)| Architecture { major, minor }.features().shared_bytes >> 10;
        let capabilities =
            [(8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)];
        assert_eq!(capabilities.map(shared), [163, 99, 163, 99, 99, 227, 227, 227, 227, 99, 99]);
        assert!(Architecture::ALL.iter().all(|known| TABLE.iter().any(|(row, _)| row == known)));
    }

    /// `wgmma` is Hopper's alone: Blackwell has other instructions in its place.
    #[test]
    fn no_architecture_has_the_tensor_cores_of_another() {
        let with = |has: fn(Features) -> bool| Architecture::ALL.map(|known| has(known.features()));
        assert_eq!(with(|features| features.wgmma), [false, false, false, true, false, false]);
        assert_eq!(with(|features| features.tcgen05), [false, false, false, false, true, false]);
        assert!(Architecture::ALL.iter().all(|known| known.features().wgmma == known.features().measured));
    }
}
