//! Every kernel compiles for every architecture, keeps its values in registers and draws no warning. Needs NVRTC, and no GPU.

use std::sync::atomic::{AtomicUsize, Ordering};

use twofour_cuda::{Architecture, cache::Cache, compiler::Compiler, kernels, source::Source};

/// NVRTC, or a word on why the test does nothing.
fn compiler() -> Option<Compiler> {
    let compiler = Compiler::find();
    if compiler.is_none() {
        // Where the compiler is meant to be there, its absence is a failure.
        assert!(std::env::var_os("TWOFOUR_NVRTC").is_none(), "TWOFOUR_NVRTC is set and NVRTC is not there");
        eprintln!("skipped: no NVRTC; name its folder in TWOFOUR_NVRTC");
    }
    compiler
}

#[test]
fn all_kernels_compile_for_all_architectures() {
    let Some(compiler) = compiler() else { return };
    let all = kernels::all();
    let of = |source: &'_ Source| {
        Architecture::ALL.into_iter().filter(|architecture| source.is_for(*architecture)).collect::<Vec<_>>()
    };
    let work: Vec<_> =
        all.iter().flat_map(|source| of(source).into_iter().map(move |architecture| (source, architecture))).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(&(source, architecture)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(compiler, source, architecture);
                }
            });
        }
    });
}

fn named(name: &str) -> Source {
    kernels::all().into_iter().find(|source| source.name() == name).unwrap()
}

fn check(compiler: Compiler, source: &Source, architecture: Architecture) {
    let compiled = compiler.compile(source, architecture).unwrap();
    assert!(compiled.code.starts_with(b"\x7fELF"), "{} for {architecture} is no cubin", source.name());
    assert_eq!(compiled.complaints(), Vec::<&str>::new(), "{} for {architecture}\n{}", source.name(), compiled.log);
    // The log would say so if there were any.
    assert!(compiled.log.contains("0 bytes spill stores"), "no word on spills:\n{}", compiled.log);
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
    let source = named("prune-bf16");
    let code = cache.code(&source, Architecture::SM_80).unwrap();
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = files.as_slice() else { panic!("one file expected: {files:?}") };
    let whole = std::fs::read(file).unwrap();
    assert_eq!(whole[32..], code);
    std::fs::write(file, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(cache.code(&source, Architecture::SM_80).unwrap(), code);
    assert_eq!(std::fs::read(file).unwrap(), whole, "the damaged file was not replaced");
}
