//! Measurements on this machine: interleaved contenders in one process, weights that are not in a cache, and medians.

mod alternate;
mod contender;
mod gpu;
mod machine;
mod memory;
pub mod random;
mod ratio;
mod read;
mod work;
mod worker;

use std::time::Duration;

pub use alternate::medians;
pub use contender::random_int4;
pub use gpu::{Gpu, gpu};
pub use machine::{Machine, load_average, machine};
pub use ratio::{Pass, SpeedUp, median, speed_up};
pub use read::ReadBandwidth;
pub use work::{Outcome, Row, Shape, Who, Work};
pub use worker::{Arithmetic, Bandwidth, Message, Request, Single, WORKER, measure, work};

use crate::exit::Usage;

/// Returns the time of an option that has so many seconds.
///
/// # Errors
/// [`Usage`] for a number that is no time.
pub fn time(option: &str, seconds: f64) -> Result<Duration, Usage> {
    Duration::try_from_secs_f64(seconds).map_err(|error| Usage(format!("{option} {seconds}: {error}")))
}
