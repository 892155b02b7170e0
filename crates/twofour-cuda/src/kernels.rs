//! The list of this crate's kernel sources, for compiling them ahead of time.

use sha2::{Digest, Sha256};

use crate::{
    measure,
    raw::{self, gemm},
    source::Source,
};

/// Returns every source that a program can need.
pub fn all() -> Vec<Source> {
    raw::sources().into_iter().chain([measure::read::source()]).collect()
}

/// Returns the first 64 bits, in hexadecimal, of the SHA-256 of the GEMM sources without comments. Timings recorded with another digest are those of other kernels.
pub fn gemm_digest() -> String {
    let mut digest = Sha256::new();
    gemm::sources().iter().for_each(|source| digest.update(without_comments(&source.text())));
    digest.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a source's lines of code, each without its comment and surrounding space.
fn without_comments(text: &str) -> String {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or("").trim());
    code.filter(|line| !line.is_empty() && !line.starts_with("#line")).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_digest_repeats() {
        let digest = gemm_digest();
        assert_eq!((digest.len(), &digest), (16, &gemm_digest()));
    }

    #[test]
    fn comments_and_their_lines_do_not_count() {
        assert_eq!(
            without_comments("#line 1 \"a.cu\"\n// What it is.\n\n  int a; // One.\nint b;\n"),
            "int a;\nint b;\n"
        );
    }

    #[test]
    fn names_and_texts_are_unique() {
        let all = all();
        let names: HashSet<&str> = all.iter().map(Source::name).collect();
        let texts: HashSet<String> = all.iter().map(Source::text).collect();
        assert_eq!((names.len(), texts.len()), (all.len(), all.len()));
    }
}
