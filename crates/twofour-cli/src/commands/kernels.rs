//! `twofour kernels`.

use std::sync::{
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cuda::{Architecture, cache::Cache, kernels, source::Source};
use twofour_transformer::cuda;

use crate::{
    exit::{Usage, Verdict},
    present::{Screen, escape, table::Table, units},
    threads,
};

/// Compile the GPU kernels ahead of time
///
/// GPU kernels are compiled by NVRTC when they are first used, and cached in the folder that TWOFOUR_CACHE names, or
/// else in twofour in the user's cache folder. This command fills the cache, also for GPUs that are not installed, so
/// that the cache can be copied to a machine with a driver but no compiler. Kernels that are in it are not compiled
/// again, so that an interrupted command goes on where it was. It requires NVRTC (of the CUDA toolkit, or of the Python
/// package nvidia-cuda-nvrtc; TWOFOUR_NVRTC names its folder), but no GPU.
/// Kernels for sm_90a (H100, H200) were tuned and timed; those for other architectures were only compiled.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour kernels --arch sm_90a
  TWOFOUR_CACHE=./kernels twofour kernels --arch sm_80,sm_86,sm_89,sm_90a")]
pub(crate) struct Kernels {
    /// Architectures to compile for [default: all]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    arch: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Answer {
    cache: String,
    kernels: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    source: String,
    architecture: String,
    bytes: usize,
    /// Whether this command compiled it; otherwise it was in the cache.
    compiled: bool,
    /// Register spills, and warnings; of a kernel that was in the cache, none.
    complaints: Vec<String>,
}

impl Kernels {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let architectures = self.architectures()?;
        let cache = Cache::of_user();
        let mut answer = Answer { cache: cache.folder().display().to_string(), kernels: Vec::new() };
        let mut progress = screen.progress();
        let sources: Vec<Source> = kernels::all().into_iter().chain(cuda::sources()).collect();
        let of = |architecture: Architecture| {
            sources.iter().filter(move |source| source.is_for(architecture)).map(move |source| (architecture, source))
        };
        let work: Vec<(Architecture, &Source)> =
            architectures.iter().flat_map(|architecture| of(*architecture)).collect();
        let compile = |(architecture, source): &(Architecture, &Source)| -> Result<Row> {
            let (bytes, compiled, complaints) = match cache.get(source, *architecture) {
                Some(code) => (code.len(), false, Vec::new()),
                None => {
                    let compiled = cache.compile(source, *architecture)?;
                    let complaints = compiled.complaints().into_iter().map(str::to_owned).collect();
                    (compiled.code.len(), true, complaints)
                }
            };
            let (source, architecture) = (source.name().to_owned(), architecture.to_string());
            Ok(Row { source, architecture, bytes, compiled, complaints })
        };
        answer.kernels = on_all_cores(&work, compile, |done, (architecture, source)| {
            progress.steps(&format!("{} for {architecture}", source.name()), done as u64, work.len() as u64);
        })?;
        drop(progress);
        let mut table = Table::of(["kernels", "for"], ["size"]);
        for row in &answer.kernels {
            table.row([row.source.clone(), row.architecture.clone(), units::bytes(row.bytes as u64)]);
        }
        screen.line(table)?;
        for row in &answer.kernels {
            for complaint in &row.complaints {
                screen.line(format!("{} for {}: {complaint}", row.source, row.architecture))?;
            }
        }
        let compiled = answer.kernels.iter().filter(|row| row.compiled).count();
        let held = answer.kernels.len() - compiled;
        screen.line(format!("\n{compiled} compiled, {held} were there; kept in {}", escape::line(&answer.cache)))?;
        screen.next(&["twofour advise MODEL --device cuda".to_owned()])?;
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    fn architectures(&self) -> Result<Vec<Architecture>> {
        if self.arch.is_empty() {
            return Ok(Architecture::ALL.to_vec());
        }
        let known = || Architecture::ALL.map(|a| a.to_string()).join(", ");
        let find = |name: &String| match Architecture::ALL.into_iter().find(|a| a.to_string() == *name) {
            Some(architecture) => Ok(architecture),
            None => bail!(Usage(format!("--arch {name}: not an architecture with kernels; known: {}", known()))),
        };
        self.arch.iter().map(find).collect()
    }
}

/// Returns the results of all work, in its order, computed by as many threads as there are cores. `done` is called on
/// this thread with the number of finished items and the last one. After a failure no more work begins, and the error
/// returned is that of the first item, in the order of `work`, that fails.
fn on_all_cores<T: Sync, R: Send, E: Send>(
    work: &[T],
    each: impl Fn(&T) -> Result<R, E> + Sync,
    mut done: impl FnMut(usize, &T),
) -> Result<Vec<R>, E> {
    let threads = threads::of_machine().min(work.len());
    let next = AtomicUsize::new(0);
    let mut results: Vec<Option<Result<R, E>>> = work.iter().map(|_| None).collect();
    let compute = |sender: mpsc::Sender<(usize, Result<R, E>)>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = work.get(index) else { return };
            let result = each(item);
            if result.is_err() {
                // Items are claimed in order, so those before this one are finished or in progress.
                next.store(work.len(), Ordering::Relaxed);
            }
            if sender.send((index, result)).is_err() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let start = |sender| std::thread::Builder::new().spawn_scoped(scope, || compute(sender)).is_ok();
        let started = (0..threads).take_while(|_| start(sender.clone())).count();
        if started == 0 {
            // The system starts no thread: this one does all of it.
            compute(sender.clone());
        }
        drop(sender);
        for (finished, (index, result)) in receiver.into_iter().enumerate() {
            results[index] = Some(result);
            done(finished + 1, &work[index]);
        }
    });
    // Items that were not begun come after a failure.
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, time::Duration};

    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_work_and_every_one_is_counted() {
        let work: Vec<u64> = (0..50).collect();
        let mut counts = Vec::new();
        let square = |n: &u64| {
            std::thread::sleep(Duration::from_micros(50 * (n % 7)));
            Ok::<_, ()>(n * n)
        };
        let squares = on_all_cores(&work, square, |done, _| counts.push(done)).unwrap();
        assert_eq!(squares, work.iter().map(|n| n * n).collect::<Vec<_>>());
        assert_eq!(counts, (1..=50).collect::<Vec<_>>());
        assert_eq!(on_all_cores(&[0u64; 0], square, |_, _| ()), Ok(Vec::new()));
    }

    #[test]
    fn the_first_failure_in_order_is_returned_and_ends_the_work() {
        let begun = AtomicUsize::new(0);
        let work: Vec<u32> = (0..1000).collect();
        let fail = |n: &u32| {
            begun.fetch_add(1, Ordering::Relaxed);
            // The first to fail takes longest.
            std::thread::sleep(Duration::from_millis(if *n == 3 { 50 } else { 1 }));
            if *n >= 3 { Err(*n) } else { Ok(()) }
        };
        assert_eq!(on_all_cores(&work, fail, |_, _| ()), Err(3));
        assert!(begun.into_inner() < work.len());
    }

    #[test]
    fn as_many_are_at_work_as_there_are_cores() {
        let cores = threads::of_machine();
        // Each waits until all have started: with fewer threads none would return.
        let barrier = Barrier::new(cores);
        let meet = |_: &()| {
            barrier.wait();
            Ok::<_, ()>(())
        };
        assert!(on_all_cores(&vec![(); cores], meet, |_, _| ()).is_ok());
    }
}
