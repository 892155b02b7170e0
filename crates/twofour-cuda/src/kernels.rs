//! The list of this crate's kernels, for compiling them ahead of time.

use crate::{
    adamw, column_sums, compress, elementwise, gemm, measure, prune, quantize, soft_threshold, source::Source, unpack,
};

/// Returns every source that a program may need.
pub fn all() -> Vec<Source> {
    let weights = prune::sources().into_iter().chain(compress::sources()).chain(adamw::sources());
    let layers = elementwise::sources().into_iter().chain(column_sums::sources()).chain(quantize::sources());
    let layers = layers.chain(unpack::sources()).chain(soft_threshold::sources());
    weights.chain(layers).chain([measure::read::source()]).chain(gemm::sources()).collect()
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
