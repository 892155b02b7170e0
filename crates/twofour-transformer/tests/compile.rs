//! Every kernel of this crate compiles, keeps its values in registers and draws no warning. Needs NVRTC, and no GPU.

#[path = "support/compile.rs"]
mod support;

use std::collections::HashSet;

use twofour_cuda::{kernels, source::Source};
use twofour_transformer::cuda;

#[test]
fn the_representative_pairs_have_every_template_for_its_architectures_and_many_sources_of_each() {
    support::expect_representative(&cuda::sources());
}

#[test]
fn kernels_compile_without_spills_and_warnings() {
    support::expect_compiled(&cuda::sources());
}

/// Modules are loaded by their name, and kept in the cache by their text.
#[test]
fn names_and_texts_are_unique_those_of_the_kernels_below_included() {
    let all: Vec<Source> = kernels::all().into_iter().chain(cuda::sources()).collect();
    let names: HashSet<&str> = all.iter().map(Source::name).collect();
    let texts: HashSet<String> = all.iter().map(Source::text).collect();
    assert_eq!((names.len(), texts.len()), (all.len(), all.len()));
}
