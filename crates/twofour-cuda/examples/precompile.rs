//! Compiles the kernels whose names contain a word for sm_90a into the cache (`TWOFOUR_CACHE`), on all cores, and prints what the compiler complains of.
use rayon::prelude::*;
use twofour_cuda::{Architecture, cache::Cache, compiler::Compiler, source::Source};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let architecture: Architecture = std::env::var("ARCH").map_or(Architecture::SM_90, |a| Architecture::ALL.into_iter().find(|x| x.to_string() == a).unwrap());
    let compiler = Compiler::find().expect("NVRTC");
    let sources: Vec<Source> = twofour_cuda::kernels::all()
        .into_iter()
        .filter(|s| s.is_for(architecture) && (words.is_empty() || words.iter().any(|word| s.name().contains(word))))
        .collect();
    println!("{} kernels", sources.len());
    sources.par_iter().for_each(|source| {
        let begun = std::time::Instant::now();
        let compiled = compiler.compile(source, architecture).unwrap();
        let complaints = compiled.complaints();
        let lines: Vec<&str> = compiled.log.lines().filter(|l| l.contains("registers")).collect();
        println!("{} {:.1}s {} {:?}", source.name(), begun.elapsed().as_secs_f64(), lines.join(" "), complaints);
        Cache::of_user().code(source, architecture).unwrap();
    });
}
