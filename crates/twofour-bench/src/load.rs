//! What else keeps the machine busy.

use anyhow::Result;
use twofour_cli::{
    measure::Machine,
    present::{
        Screen,
        style::{self, paint},
        units,
    },
};

/// The largest share of the machine's threads that other processes may use without a warning.
const BUSY: f64 = 0.25;

/// Warns where other processes kept the machine busy before the measurement.
pub(crate) fn warn_if_busy(screen: &mut Screen, load_average: Option<f64>, machine: &Machine) -> Result<()> {
    let Some(load) = load_average.filter(|load| *load > BUSY * machine.hardware_threads as f64) else { return Ok(()) };
    let has = units::plural(machine.hardware_threads, "hardware thread");
    let text = format!("load average {load:.1} on {has} at the start: other work disturbs these figures");
    screen.line(paint(style::WARNING, text))
}
