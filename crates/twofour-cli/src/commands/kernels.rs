//! `twofour kernels`.

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cuda::{Architecture, cache::Cache, source::Source};

use crate::{
    exit::{Usage, Verdict},
    present::{
        Screen,
        table::{Align, Table},
        units,
    },
};

/// Compile the GPU kernels ahead of time
///
/// GPU kernels are compiled when they are first used, by NVRTC, and kept in a cache: the folder that TWOFOUR_CACHE names, or twofour in the
/// user's folder for caches. This command fills the cache, also for GPUs that are not here, so that a machine with a driver and no
/// compiler can be given a copy of it. It needs NVRTC (of the CUDA toolkit, or of the Python package nvidia-cuda-nvrtc; TWOFOUR_NVRTC names
/// its folder), and no GPU.
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
    /// Spills to memory, and warnings.
    complaints: Vec<String>,
}

impl Kernels {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let architectures = self.architectures()?;
        let cache = Cache::of_user();
        let mut answer = Answer { cache: cache.folder().display().to_string(), kernels: Vec::new() };
        let mut progress = screen.progress();
        let work: Vec<(Architecture, Source)> = architectures
            .iter()
            .flat_map(|a| Source::all().into_iter().filter(|s| s.is_for(*a)).map(|s| (*a, s)))
            .collect();
        for (done, (architecture, source)) in work.iter().enumerate() {
            progress.steps(&format!("{} for {architecture}", source.name()), done as u64, work.len() as u64);
            let compiled = cache.compile(*source, *architecture)?;
            let complaints = compiled.complaints().into_iter().map(str::to_owned).collect();
            let (bytes, architecture) = (compiled.code.len(), architecture.to_string());
            answer.kernels.push(Row { source: source.name(), architecture, bytes, complaints });
        }
        drop(progress);
        let mut table = Table::new([("kernels", Align::Left), ("for", Align::Left), ("size", Align::Right)]);
        for row in &answer.kernels {
            table.row([row.source.clone(), row.architecture.clone(), units::bytes(row.bytes as u64)]);
        }
        screen.line(table)?;
        for row in &answer.kernels {
            for complaint in &row.complaints {
                screen.line(format!("{} for {}: {complaint}", row.source, row.architecture))?;
            }
        }
        screen.line(format!("\nkept in {}", answer.cache))?;
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
