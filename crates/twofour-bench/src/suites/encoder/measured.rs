//! What was measured.

use std::fmt;

use anyhow::Result;
use serde::Serialize;
use twofour_cli::{
    measure::{Gpu, Machine},
    present::{Screen, units},
};

use crate::load;

/// The processor that computed.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Measured {
    Cpu(Machine),
    Gpu(Gpu),
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Measured::Cpu(Machine { cpu, engine, threads, .. }) => {
                write!(f, "{cpu}, engine {engine}, {}", units::plural(*threads, "thread"))
            }
            Measured::Gpu(Gpu { gpu, architecture, .. }) => write!(f, "{gpu}, {architecture}"),
        }
    }
}

impl Measured {
    /// Warns where other processes kept a CPU busy.
    pub(super) fn warn_if_busy(&self, load_average: Option<f64>, screen: &mut Screen) -> Result<()> {
        match self {
            Measured::Cpu(machine) => load::warn_if_busy(screen, load_average, machine),
            Measured::Gpu(_) => Ok(()),
        }
    }
}
