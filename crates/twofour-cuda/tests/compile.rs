//! Every kernel of this crate compiles, keeps its values in registers and draws no warning. Needs NVRTC, and no GPU.

#[path = "support/compile.rs"]
mod support;

use support::compiler;
use twofour_cuda::{Architecture, cache::Cache, kernels, source::Source};

#[test]
fn the_representative_pairs_have_every_template_for_its_architectures_and_many_sources_of_each() {
    support::expect_representative(&kernels::all());
}

#[test]
fn kernels_compile_without_spills_and_warnings() {
    support::expect_compiled(&kernels::all());
}

fn named(name: &str) -> Source {
    kernels::all().into_iter().find(|source| source.name() == name).unwrap()
}

/// Nothing but the folder is shared, as by processes.
#[test]
fn many_that_compile_the_same_at_once_get_the_same() {
    if compiler().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = named("read");
    let code = || Cache::at(folder.path()).code(&source, Architecture::SM_80).unwrap();
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| [code(), code()])).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(all.iter().all(|found| *found == all[0]));
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = files.as_slice() else { panic!("one file expected: {files:?}") };
    assert_eq!(std::fs::read(file).unwrap()[32..], all[0]);
}

#[test]
fn the_cache_gives_what_was_compiled_and_compiles_again_what_is_damaged() {
    if compiler().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let source = named("prune-bf16-rows");
    let code = cache.code(&source, Architecture::SM_80).unwrap();
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = files.as_slice() else { panic!("one file expected: {files:?}") };
    let whole = std::fs::read(file).unwrap();
    assert_eq!(whole[32..], code);
    std::fs::write(file, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(cache.code(&source, Architecture::SM_80).unwrap(), code);
    assert_eq!(std::fs::read(file).unwrap(), whole, "the damaged file was not replaced");
}
