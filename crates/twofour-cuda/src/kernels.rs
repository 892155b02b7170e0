//! The list of this crate's kernel sources, for compiling them ahead of time.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use crate::{
    compare,
    raw::{self, gemm},
    source::Source,
};

/// Returns every source that a program can need.
pub fn all() -> Vec<Source> {
    raw::sources().into_iter().chain([compare::read::source()]).collect()
}

/// Returns the first 64 bits, in hexadecimal, of the SHA-256 of the GEMM sources without comments. Timings recorded
/// with another digest are those of other kernels.
pub fn gemm_digest() -> String {
    hexadecimal(sources_digest(gemm::sources()))
}

/// Returns a digest, as [`gemm_digest`], of the GEMM sources and of the model of time that says which methods are worth
/// measuring. A choice made with another one is stale.
pub(crate) fn choice_digest() -> String {
    hexadecimal(sources_digest(gemm::sources()).chain_update(gemm::coefficients()))
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
        let mut sources = gemm::sources();
        sources.reverse();
        assert_eq!(hexadecimal(sources_digest(sources.clone())), digest);
        sources.pop();
        assert_ne!(hexadecimal(sources_digest(sources)), digest);
        assert_ne!(choice_digest(), digest);
    }

    #[test]
    fn names_and_texts_are_unique() {
        let all = all();
        let names: HashSet<&str> = all.iter().map(Source::name).collect();
        let texts: HashSet<String> = all.iter().map(Source::text).collect();
        assert_eq!((names.len(), texts.len()), (all.len(), all.len()));
    }
}
