//! Names of the crates' items in README.md and docs exist: each is compiled here, and none is missing from this list.
//!
//! The test is in this crate because no other sees all of the libraries.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Imports each path, which fails to compile once an item is gone, and returns all of them as text.
macro_rules! items {
    ($($path:path),* $(,)?) => {{
        $( #[allow(unused_imports)] use $path as _; )*
        [$(stringify!($path)),*]
    }};
}

/// The same for methods, which cannot be imported: they are evaluated as values.
macro_rules! methods {
    ($($path:expr),* $(,)?) => {{
        $( let _ = $path; )*
        [$(stringify!($path)),*]
    }};
}

fn compiled() -> BTreeSet<String> {
    let items = items![
        twofour::Compressed,
        twofour::MatrixRef,
        twofour::Result,
        twofour::estimate,
        twofour::file,
        twofour::file::Reader,
        twofour::file::Convert,
        twofour::file::Adapter,
        twofour::file::Merge,
        twofour::file::Export,
        twofour::file::PruneAndQuantize,
        twofour::file::Quantize,
        twofour::file::Unchanged,
        twofour::int4,
        twofour::kernel,
        twofour::kernel::SparseWeight,
        twofour::kernel::share,
        twofour::layer,
        twofour::layout::lanes,
        twofour::role,
        twofour::select,
        twofour::solve,
        twofour::solve::round,
        twofour::verify,
        twofour_candle::SparseActivationLinear,
        twofour_candle::SparseLinear,
        twofour_candle::linear,
        twofour_cuda::cache,
        twofour_cuda::compare,
        twofour_cuda::layer,
        twofour_cuda::layer::SparseLinear,
        twofour_cuda::raw::adamw,
        twofour_cuda::raw::compress,
        twofour_cuda::raw::gemm,
        twofour_cuda::raw::gemm::int4,
        twofour_cuda::raw::prune,
        twofour_nn::model,
        twofour_nn::model::Bert,
        twofour_nn::model::Calibration,
        twofour_nn::model::Encoder,
        twofour_nn::model::ImageEncoder,
        twofour_nn::model::LanguageModel,
        twofour_nn::model::SavedModel,
        twofour_nn::model::Shrinking,
        twofour_nn::model::Vit,
        twofour_nn::questions,
        twofour_nn::recipe,
        twofour_nn::text,
        twofour_nn::text::ChatTemplate,
        twofour_nn::train,
    ];
    let methods = methods![
        twofour_nn::train::methods::Method::ADAPTERS,
        twofour::Compressed::<f32>::from_pruned,
        twofour::Mask::density,
        twofour::Mask::flip_rate,
        twofour::Mask::of_nonzeros::<f32>,
        twofour::Mask::kept_l1::<f32>,
        twofour::Mask::kept_l2::<f32>,
        twofour::MatrixRef::<f32>::new,
        twofour::kernel::SparseWeight::<f32>::pack,
        twofour_candle::linear::SparseLinear::flip_rate,
        twofour_nn::model::Inference::<f32>::random,
    ];
    items.into_iter().chain(methods).map(|name| name.replace(' ', "").replace("::<f32>", "")).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README.md and every document below docs.
fn documents() -> Vec<PathBuf> {
    let mut found = vec![root().join("README.md")];
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// Paths such as `twofour_cuda::layer` in a text.
fn named(text: &str) -> BTreeSet<String> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c| !is_path(c)).map(|word| word.trim_matches(':'));
    let ours = |word: &&str| {
        ["twofour::", "twofour_cuda::", "twofour_nn::", "twofour_candle::"].iter().any(|name| word.starts_with(name))
    };
    words.filter(ours).map(str::to_owned).collect()
}

#[test]
fn every_name_in_the_documents_exists() {
    let known = compiled();
    let documents = documents();
    assert!(documents.len() > 5, "{documents:?}");
    let mut unknown = Vec::new();
    for path in documents {
        for name in named(&fs::read_to_string(&path).unwrap()) {
            if !known.contains(&name) {
                unknown.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(unknown.is_empty(), "not in this test's list, which compiles what it lists: {unknown:#?}");
}

#[test]
fn names_are_found_in_text_tables_and_code() {
    let text =
        "| train | | `twofour_candle::sparsify` |\ntwofour::file::Reader; my_twofour::no, `twofour_cuda::a::b(c)`";
    let expected = ["twofour::file::Reader", "twofour_candle::sparsify", "twofour_cuda::a::b"];
    assert_eq!(named(text), expected.map(str::to_owned).into());
}
