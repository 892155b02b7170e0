//! The file of a grid's results, which a later run continues.

use std::{collections::HashSet, fmt::Write as _, fs, io::ErrorKind, path::Path};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use twofour_cli::{exit::Usage, measure::Gpu};

use super::{
    super::libraries::Versions,
    cell::CellTimes,
    layers::{GridCell, GridEpilogue},
    row::{Fault, GridRow, Unsupported},
};

/// Results of the suite `grid`; `bench/tables/readme_tables.py` reads its JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::suites) struct GridRecord {
    /// The GPU.
    pub(super) machine: Gpu,
    /// Versions of the libraries.
    pub(super) libraries: Versions,
    /// [`twofour_cuda::kernels::gemm_digest`] of the kernels.
    pub(super) kernels: String,
    /// What the GEMMs do with their sums.
    #[serde(default)]
    pub(super) epilogue: GridEpilogue,
    /// The last command.
    pub(super) command: String,
    /// Weights that this project's kernels do not support.
    pub(super) unsupported: Vec<Unsupported>,
    /// Kernels that were excluded.
    pub(super) faults: Vec<Fault>,
    /// Times.
    pub(super) rows: Vec<GridRow>,
}

/// The key of a cell.
pub(super) type CellKey = (String, [usize; 3]);

impl GridRecord {
    /// A record without rows.
    pub(super) fn new(machine: Gpu, libraries: Versions, epilogue: GridEpilogue, command: String) -> Self {
        let kernels = twofour_cuda::kernels::gemm_digest();
        let (unsupported, faults, rows) = (Vec::new(), Vec::new(), Vec::new());
        Self { machine, libraries, kernels, epilogue, command, unsupported, faults, rows }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Usage`] where the file is not a grid's; the system's where it cannot be read.
    pub(in crate::suites) fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = fs::read(path).with_context(|| format!("{shown}: reading"))?;
        match serde_json::from_slice(&text) {
            Ok(record) => Ok(record),
            Err(error) => bail!(Usage(format!("{shown}: not the JSON of `twofour-bench cuda grid`: {error}"))),
        }
    }

    /// Takes over what an earlier run has written to a file, if it is there.
    ///
    /// # Errors
    /// Those of [`GridRecord::read`], and [`Usage`] where it was measured on another machine, or with other libraries,
    /// kernels or another epilogue.
    pub(super) fn continue_from(&mut self, path: &Path) -> Result<()> {
        if let Err(error) = fs::metadata(path)
            && error.kind() == ErrorKind::NotFound
        {
            return Ok(());
        }
        let earlier = Self::read(path)?;
        let of = |record: &Self| {
            let Gpu { gpu, architecture, multiprocessors, driver, .. } = &record.machine;
            let Versions { cublaslt, cusparselt } = &record.libraries;
            [
                ("GPU", format!("{gpu}, {architecture}, {multiprocessors} SMs")),
                ("driver", driver.clone()),
                ("cuBLASLt", cublaslt.clone()),
                ("cuSPARSELt", cusparselt.clone()),
                ("kernels", record.kernels.clone()),
                ("epilogue", record.epilogue.name().to_owned()),
            ]
        };
        for ((what, before), (_, now)) in of(&earlier).into_iter().zip(of(self)) {
            if before != now {
                bail!(Usage(format!(
                    "{}: measured with {what} {before}, and here it is {now}; name another file, or begin anew with \
                     --force",
                    path.display()
                )));
            }
        }
        (self.rows, self.faults) = (earlier.rows, earlier.faults);
        Ok(())
    }

    /// The cells that have rows.
    pub(super) fn finished(&self) -> HashSet<CellKey> {
        self.rows.iter().map(|row| (row.dtype.clone(), row.shape)).collect()
    }

    /// Adds a cell.
    pub(super) fn add(&mut self, times: CellTimes) {
        self.rows.extend(times.rows);
        self.faults.extend(times.faults);
    }

    /// Notes why the cells of a weight have no rows, once for each weight and data type.
    pub(super) fn add_unsupported(&mut self, cell: &GridCell<'_>, reason: String) {
        let (dtype, weight) = (cell.element.to_string(), [cell.layer.out, cell.layer.inputs]);
        if !self.unsupported.iter().any(|other| other.dtype == dtype && other.weight == weight) {
            self.unsupported.push(Unsupported { dtype, weight, reason });
        }
    }

    /// The JSON, with a line for each row: thousands of rows, of which a version control system shows those that
    /// changed.
    pub(super) fn json(&self) -> Result<String> {
        let Self { machine, libraries, kernels, epilogue, command, unsupported, faults, rows } = self;
        let mut text = String::from("{\n");
        writeln!(text, "  \"machine\": {},", line(machine)?)?;
        writeln!(text, "  \"libraries\": {},", line(libraries)?)?;
        writeln!(text, "  \"kernels\": {},", line(kernels)?)?;
        writeln!(text, "  \"epilogue\": {},", line(epilogue)?)?;
        writeln!(text, "  \"command\": {},", line(command)?)?;
        writeln!(text, "  \"unsupported\": {},", lines(unsupported)?)?;
        writeln!(text, "  \"faults\": {},", lines(faults)?)?;
        writeln!(text, "  \"rows\": {}", lines(rows)?)?;
        text.push_str("}\n");
        Ok(text)
    }
}

fn line(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).context("writing JSON")
}

/// A list with a line for each element.
fn lines(list: &[impl Serialize]) -> Result<String> {
    let lines = list.iter().map(|value| Ok(format!("    {}", line(value)?))).collect::<Result<Vec<_>>>()?;
    Ok(if lines.is_empty() { "[]".to_owned() } else { format!("[\n{}\n  ]", lines.join(",\n")) })
}
