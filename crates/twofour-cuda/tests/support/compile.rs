//! Sources compile, keep their values in registers and draw no warning.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicUsize, Ordering},
};

use twofour_cuda::{Architecture, compiler::Compiler, source::Source};

/// NVRTC, or a word on why the test does nothing.
pub(crate) fn compiler() -> Option<Compiler> {
    let compiler = Compiler::find();
    if compiler.is_none() {
        // Where the compiler is meant to be there, its absence is a failure.
        assert!(std::env::var_os("TWOFOUR_NVRTC").is_none(), "TWOFOUR_NVRTC is set and NVRTC is not there");
        eprintln!("skipped: no NVRTC; name its folder in TWOFOUR_NVRTC");
    }
    compiler
}

/// A kernel's source and what it is compiled for.
type Pair<'a> = (&'a Source, Architecture);

/// The kernel that a source is an instance of: its `.cu` file, as the compiler is told to name it.
fn template(source: &Source) -> String {
    let text = source.text();
    let mut files = text.lines().filter_map(|line| line.strip_prefix("#line 1 \"")?.strip_suffix(".cu\""));
    match (files.next(), files.next()) {
        (Some(file), None) => file.to_owned(),
        _ => panic!("{} is not made from exactly one .cu file", source.name()),
    }
}

/// Every source for every architecture that it is for.
fn all_pairs(sources: &[Source]) -> Vec<Pair<'_>> {
    let of =
        |source| Architecture::ALL.into_iter().filter(move |a| Source::is_for(source, *a)).map(move |a| (source, a));
    sources.iter().flat_map(of).collect()
}

/// Instances of a template that are compiled where not all are: they differ in tiles, stages and types.
const INSTANCES: usize = 16;

/// At most [`INSTANCES`] sources of each template, those with the least hash of their name.
fn representatives(sources: &[Source]) -> Vec<&Source> {
    let hash = |source: &&Source| {
        let mut hasher = DefaultHasher::new();
        source.name().hash(&mut hasher);
        hasher.finish()
    };
    let mut by_hash: Vec<&Source> = sources.iter().collect();
    by_hash.sort_by_key(hash);
    let mut taken: HashMap<String, usize> = HashMap::new();
    by_hash.retain(|source| {
        let taken = taken.entry(template(source)).or_default();
        *taken += 1;
        *taken <= INSTANCES
    });
    by_hash
}

/// Compute capabilities that stand for all: the oldest, Hopper's and the newest are on both sides of every version that
/// a kernel asks for.
const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90, Architecture::SM_120];

/// Every template for those of [`ARCHITECTURES`] that it is for, or for all where it is for none of these.
fn template_pairs(sources: &[Source]) -> Vec<Pair<'_>> {
    let stands = |source: &Source| ARCHITECTURES.into_iter().any(|architecture| source.is_for(architecture));
    all_pairs(sources).into_iter().filter(|pair| ARCHITECTURES.contains(&pair.1) || !stands(pair.0)).collect()
}

/// Every representative for one architecture, and those of [`template_pairs`]. The sources of a template are spread
/// over the architectures.
fn representative_pairs(sources: &[Source]) -> Vec<Pair<'_>> {
    let all = all_pairs(sources);
    let template_of: HashMap<&str, String> = sources.iter().map(|source| (source.name(), template(source))).collect();
    // How often a template was taken for an architecture.
    let mut taken: HashMap<(&str, Architecture), usize> = HashMap::new();
    let mut pairs = Vec::new();
    for source in representatives(sources) {
        let template = template_of[source.name()].as_str();
        let times = |pair: &&Pair| taken.get(&(template, pair.1)).copied().unwrap_or(0);
        let rarest = all.iter().filter(|pair| pair.0 == source).min_by_key(times);
        let pair = *rarest.unwrap_or_else(|| panic!("{} is for no architecture", source.name()));
        *taken.entry((template, pair.1)).or_default() += 1;
        pairs.push(pair);
    }
    for pair in template_pairs(sources) {
        let times = taken.entry((&template_of[pair.0.name()], pair.1)).or_default();
        if *times == 0 {
            *times = 1;
            pairs.push(pair);
        }
    }
    pairs
}

/// Expects of the representative pairs that every template is there for its architectures, and many sources of each.
pub(crate) fn expect_representative(sources: &[Source]) {
    let pairs = representative_pairs(sources);
    let compiled: HashSet<_> = pairs.iter().map(|pair| (template(pair.0), pair.1)).collect();
    for pair in template_pairs(sources) {
        assert!(compiled.contains(&(template(pair.0), pair.1)), "{} for {}", pair.0.name(), pair.1);
    }
    let names: HashSet<&str> = pairs.iter().map(|pair| pair.0.name()).collect();
    let count = |of: &str, names: &HashSet<&str>| {
        sources.iter().filter(|source| template(source) == of && names.contains(source.name())).count()
    };
    let every = sources.iter().map(Source::name).collect();
    for template in sources.iter().map(template).collect::<HashSet<_>>() {
        assert!(count(&template, &names) >= INSTANCES.min(count(&template, &every)), "too few of {template}");
    }
    assert!(pairs.iter().all(|(source, architecture)| source.is_for(*architecture)));
}

/// Compiles sources, and expects no spill and no warning. With `TWOFOUR_COMPILE_ALL` set, every source for every
/// architecture that it is for. With `TWOFOUR_COMPILE_ONLY`, those whose names contain its value.
pub(crate) fn expect_compiled(sources: &[Source]) {
    let Some(compiler) = compiler() else { return };
    let every = std::env::var_os("TWOFOUR_COMPILE_ALL").is_some();
    let work = if every { all_pairs(sources) } else { representative_pairs(sources) };
    let only = std::env::var("TWOFOUR_COMPILE_ONLY").unwrap_or_default();
    let work: Vec<_> = work.into_iter().filter(|(source, _)| source.name().contains(&only)).collect();
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

fn check(compiler: Compiler, source: &Source, architecture: Architecture) {
    let compiled = compiler.compile(source, architecture).unwrap();
    assert!(compiled.code.starts_with(b"\x7fELF"), "{} for {architecture} is no cubin", source.name());
    assert_eq!(compiled.complaints(), Vec::<&str>::new(), "{} for {architecture}\n{}", source.name(), compiled.log);
    // The log would say so if there were any.
    assert!(compiled.log.contains("0 bytes spill stores"), "no word on spills:\n{}", compiled.log);
}
