//! `twofour decompress`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::file::{self, StoredDType};

use super::output::{OutputOptions, show};
use crate::{
    exit::Verdict,
    interrupt,
    present::{
        Screen,
        table::{Align, Table},
        units,
    },
};

/// Write a compressed model's weights dense again
///
/// The inverse of `compress`: same names, dtypes, shapes, metadata and bytes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Example:
  twofour decompress small.safetensors -o dense.safetensors")]
pub(crate) struct Decompress {
    /// The model: a .safetensors file, an index, or a directory
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    output: &'a PathBuf,
    copied: usize,
    weights: Vec<WeightAnswer<'a>>,
}

#[derive(Debug, Serialize)]
struct WeightAnswer<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: [usize; 2],
    bytes_before: usize,
    bytes_after: usize,
}

impl Decompress {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let overwrite = self.output.overwrite();
        let report = file::decompress(&self.input, &self.output.output, overwrite, &mut |p| show(&mut progress, p))?;
        drop(progress);
        let weights: Vec<WeightAnswer<'_>> = report
            .weights
            .iter()
            .map(|w| WeightAnswer {
                name: &w.name,
                dtype: StoredDType::from(w.dtype).name(),
                shape: w.shape,
                bytes_before: w.bytes_before,
                bytes_after: w.bytes_after,
            })
            .collect();
        if weights.is_empty() {
            screen.warn("the input holds no compressed weight; it was copied as it is");
        } else {
            let mut table = Table::new([
                ("tensor", Align::Left),
                ("dtype", Align::Left),
                ("shape", Align::Right),
                ("before", Align::Right),
                ("after", Align::Right),
            ]);
            for w in &weights {
                let sizes = [w.bytes_before, w.bytes_after].map(|b| units::bytes(b as u64));
                let [before, after] = sizes;
                table.row([w.name.to_owned(), w.dtype.to_owned(), units::shape(&w.shape), before, after]);
            }
            screen.line(table)?;
        }
        screen.line(format!(
            "\n{} decompressed, {} copied, written to {}",
            units::plural(weights.len(), "weight"),
            units::plural(report.copied, "tensor"),
            self.output.output.display()
        ))?;
        screen.json(&Answer { output: &self.output.output, copied: report.copied, weights })?;
        Ok(Verdict::Yes)
    }
}
