//! `twofour decompress`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::file::{self, Convert, Reader, StoredDType};

use super::{
    converted::{self, Converted},
    effect::expect_to_decompress,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    interrupt,
    present::{Screen, escape, units},
};

/// Write a compressed model's weights dense again
///
/// The inverse of `compress`: same names, dtypes, shapes, metadata and bytes. Integers with scales become f32. A
/// directory gives a directory that other programs load.
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
    weights: Vec<Converted<'a>>,
    beside: BesideAnswer,
}

impl Decompress {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let (input, output, overwrite) = (&self.input, &self.output.output, self.output.overwrite());
        let reader = Reader::open(input)?;
        file::check_output(&reader, output, overwrite)?;
        expect_to_decompress(&reader)?;
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let report = convert.run(output, file::Decompress)?;
        drop(progress);
        let weights: Vec<Converted<'_>> = report
            .changed()
            .map(|(w, made)| Converted {
                name: &w.name,
                dtype: StoredDType::from(made.dtype).name(),
                shape: &w.shape,
                bytes_before: w.bytes_before,
                bytes_after: w.bytes_after,
            })
            .collect();
        let copied = report.tensors.len() - weights.len();
        let mut table = converted::table(screen, &[]);
        for row in converted::rows(screen, &weights, |_| ()) {
            table.row(row.cells);
        }
        screen.line(table)?;
        screen.line(format!(
            "\n{} decompressed, {} copied, written to {}",
            units::plural(weights.len(), "weight"),
            units::plural(copied, "tensor"),
            escape::path(output)
        ))?;
        let beside = BesideAnswer::of(input, output)?;
        beside.tell(screen)?;
        screen.next(&[next::check(output)])?;
        screen.json(&Answer { output, copied, weights, beside })?;
        Ok(Verdict::Yes)
    }
}
