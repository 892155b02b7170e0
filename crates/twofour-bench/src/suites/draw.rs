//! The suite `draw`: the picture of a grid.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use twofour::file::{Overwrite, write_whole};

use twofour_cli::{
    exit::{Usage, Verdict},
    present::{Screen, escape},
};

use super::cuda::grid::{GridRecord, heat_map, picture_of};
use crate::output;

/// Draw the heat map of a grid's results
///
/// Writes an SVG with a panel for each data type and library: weights by size, numbers of tokens, and the speedup in
/// each cell. Needs no GPU.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench draw bench/results/h200/grid.json -o docs/grid-h200.svg --force")]
pub(crate) struct Draw {
    /// The JSON of `twofour-bench cuda grid`
    file: PathBuf,

    /// The picture [default: beside FILE, as .svg]
    #[arg(long, short, value_name = "SVG")]
    output: Option<PathBuf>,

    /// Replace an existing picture
    #[arg(long, short)]
    force: bool,
}

impl Draw {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let picture = self.output.unwrap_or_else(|| picture_of(&self.file));
        let shown = picture.display().to_string();
        if picture == self.file {
            bail!(Usage(format!("{shown} is what is to be read; name another picture with -o")));
        }
        let record = GridRecord::read(&self.file)?;
        output::expect_file(&picture)?;
        if picture.exists() && !self.force {
            bail!(Usage(format!("{shown} exists; replace it with --force")));
        }
        write_whole(&picture, Overwrite::Yes, heat_map(&record).as_bytes())?;
        screen.line(format!("wrote {}", escape::path(&picture)))?;
        screen.json(&serde_json::json!({ "picture": shown }))?;
        Ok(Verdict::Yes)
    }
}
