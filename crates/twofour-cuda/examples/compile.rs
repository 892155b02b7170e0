//! Compiles every kernel, ahead of time, into the cache, and shows what the compiler says of it:
//! `cargo run -p twofour-cuda --example compile -- [sm_90a ...]`; without arguments for all architectures.

use twofour_cuda::{Architecture, cache::Cache, source::Source};

fn main() -> twofour_cuda::Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let cache = Cache::of_user();
    for architecture in Architecture::ALL {
        if !asked.is_empty() && !asked.contains(&architecture.to_string()) {
            continue;
        }
        for source in Source::ALL {
            let compiled = cache.compile(source, architecture)?;
            println!("{} for {architecture}: {} bytes", source.name, compiled.code.len());
            let lines = compiled
                .log
                .lines()
                .filter(|l| ["Compiling", "registers", "spill", "warning"].iter().any(|w| l.contains(w)));
            lines.for_each(|line| println!("  {}", line.trim_start_matches("ptxas info    : ")));
        }
    }
    println!("kept in {}", cache.folder().display());
    Ok(())
}
