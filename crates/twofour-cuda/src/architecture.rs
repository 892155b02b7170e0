//! GPU architectures that kernels are compiled for.

use std::fmt;

use crate::{Error, Result};

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

    /// Returns the most shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        1024 * match (self.major, self.minor) {
            (8, 0 | 7) => 163,
            (8, _) | (12, _) => 99,
            _ => 227,
        }
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
