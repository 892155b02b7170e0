//! Digests of the GEMM sources, by which timings and choices are known to be of these kernels.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use crate::source::Source;

/// Returns the first 64 bits, in hexadecimal, of the SHA-256 of the GEMM sources without comments. Timings recorded
/// with another digest are those of other kernels.
pub fn gemm_digest() -> String {
    hexadecimal(sources_digest(super::sources()))
}

/// Returns a digest, as [`gemm_digest`], of the GEMM sources and of the model of time that says which methods are worth
/// measuring. A choice made with another one is stale.
pub(crate) fn choice_digest() -> String {
    hexadecimal(sources_digest(super::sources()).chain_update(super::coefficients()))
}

fn sources_digest(mut sources: Vec<Source>) -> Sha256 {
    sources.sort_by(|a, b| a.name().cmp(b.name()));
    let (mut digest, mut added) = (Sha256::new(), HashSet::new());
    sources.iter().for_each(|source| source.add_code_to(&mut digest, |file| added.insert(file)));
    digest
}

fn hexadecimal(digest: Sha256) -> String {
    digest.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_repeats_whatever_the_order_and_differs_with_any_source() {
        let digest = gemm_digest();
        assert_eq!((digest.len(), &digest), (16, &gemm_digest()));
        let mut sources = super::super::sources();
        sources.reverse();
        assert_eq!(hexadecimal(sources_digest(sources.clone())), digest);
        sources.pop();
        assert_ne!(hexadecimal(sources_digest(sources)), digest);
        assert_ne!(choice_digest(), digest);
    }
}
