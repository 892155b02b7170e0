//! NVIDIA's libraries as baselines.

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use twofour_cuda::{Device, compare::cusparselt::CusparseLt, cublaslt::CublasLt};

/// NVIDIA's libraries, or why one is missing.
#[derive(Debug)]
pub(crate) struct Libraries {
    dense: twofour_cuda::Result<CublasLt>,
    sparse: twofour_cuda::Result<CusparseLt>,
}

/// Versions of NVIDIA's libraries.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Versions {
    pub(crate) cublaslt: String,
    pub(crate) cusparselt: String,
}

/// The version of a library that is missing.
const NOT_INSTALLED: &str = "not installed";

impl Libraries {
    /// Opens the libraries that are installed.
    pub(crate) fn open(device: &Device) -> Self {
        Self { dense: CublasLt::open(device), sparse: CusparseLt::open(device) }
    }

    /// Returns the library of dense GEMMs, for suites that are nothing without it.
    pub(super) fn dense(&self) -> Result<&CublasLt> {
        self.dense.as_ref().map_err(|error| anyhow!("{error}"))
    }

    /// Returns for each missing library that it is left out, and why.
    pub(crate) fn missing(&self) -> Vec<String> {
        let errors = [self.dense.as_ref().err(), self.sparse.as_ref().err()];
        errors.into_iter().flatten().map(|error| format!("left out of the comparison: {error}")).collect()
    }

    /// Returns their versions.
    pub(crate) fn versions(&self) -> Result<Versions> {
        let dotted = |(a, b, c): (usize, usize, usize)| format!("{a}.{b}.{c}");
        let missing = || NOT_INSTALLED.to_owned();
        Ok(Versions {
            cublaslt: self.dense.as_ref().map_or_else(|_| missing(), |library| dotted(library.version())),
            cusparselt: match &self.sparse {
                Ok(library) => {
                    let (a, b, c) = library.version()?;
                    format!("{a}.{b}.{c}")
                }
                Err(_) => missing(),
            },
        })
    }
}
