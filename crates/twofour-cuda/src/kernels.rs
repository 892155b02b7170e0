//! The list of this crate's kernel sources, for compiling them ahead of time.

pub use crate::raw::gemm::digest::gemm_digest;
use crate::{compare, raw, source::Source};

/// Returns every source that a program can need.
pub fn all() -> Vec<Source> {
    raw::sources().into_iter().chain([compare::read::source()]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_and_texts_are_unique() {
        let all = all();
        let names: HashSet<&str> = all.iter().map(Source::name).collect();
        let texts: HashSet<String> = all.iter().map(Source::text).collect();
        assert_eq!((names.len(), texts.len()), (all.len(), all.len()));
    }
}
