//! Assembles the kernels' sources.

use super::Sm90Kernel;
use crate::{
    raw::{
        gemm::wgmma::{self, Weights},
        headers,
    },
    source::{File, Source, Support},
};

impl Sm90Kernel {
    pub(in crate::raw::gemm) fn source(&self) -> Source {
        let products = wgmma::products((self.element, self.x_element), self.tile.tokens, self.x, Weights::Shared);
        let kernel = File::new("gemm/sm90/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("gemm-sm90-{}", self.name()), Support::Only((9, 0))).define(self.definitions()).with([
            headers::COMMON,
            headers::HOPPER,
            products,
            headers::EPILOGUE,
            headers::PANELS,
            kernel,
        ])
    }
}
