//! `twofour decompress`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::file::{self, Reader, StoredDType};

use super::{
    effect::expect_to_decompress,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    interrupt,
    present::{
        Screen,
        layers::by_layer,
        table::{Align, Table},
        units,
    },
};

/// Write a compressed model's weights dense again
///
/// The inverse of `compress`: same names, dtypes, shapes, metadata and bytes. Integers with scales become f32. A directory gives a directory that other programs load.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour decompress small.safetensors -o dense.safetensors
  twofour decompress int8/ -o dense/")]
pub(crate) struct Decompress {
    /// The model: a .safetensors file, an index, or a directory
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    copied: usize,
    weights: Vec<WeightAnswer<'a>>,
    beside: BesideAnswer,
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
        let (input, output, overwrite) = (&self.input, &self.output.output, self.output.overwrite());
        let reader = Reader::open(input)?;
        file::check_output(&reader, output, overwrite)?;
        expect_to_decompress(&reader)?;
        drop(reader);
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let report = file::decompress(input, output, overwrite, &mut |p| show(&mut progress, p))?;
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
        let mut table = Table::new([
            (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
            ("dtype", Align::Left),
            ("shape", Align::Right),
            ("before", Align::Right),
            ("after", Align::Right),
        ]);
        let alike = |w: &WeightAnswer<'_>| (w.dtype, w.shape);
        for (label, row) in by_layer(&weights, screen.is_detailed(), |w| (w.name, alike(w))) {
            let (dtype, shape) = alike(row[0]);
            let sum = |of: fn(&WeightAnswer<'_>) -> usize| units::bytes(row.iter().map(|w| of(w) as u64).sum());
            let (before, after) = (sum(|w| w.bytes_before), sum(|w| w.bytes_after));
            table.row([label, dtype.to_owned(), units::shape(&shape), before, after]);
        }
        screen.line(table)?;
        screen.line(format!(
            "\n{} decompressed, {} copied, written to {}",
            units::plural(weights.len(), "weight"),
            units::plural(report.copied, "tensor"),
            output.display()
        ))?;
        let beside = BesideAnswer::of(input, output)?;
        beside.tell(screen)?;
        screen.next(&[next::check(output)])?;
        screen.json(&Answer { output, copied: report.copied, weights, beside })?;
        Ok(Verdict::Yes)
    }
}
