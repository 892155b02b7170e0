//! Measurements on this machine: interleaved contenders in one process, weights that are not in a cache, and medians.

mod alternate;
mod contender;
pub(crate) mod cuda;
pub(crate) mod encoder;
pub(crate) mod generation;
pub(crate) mod image;
mod latency;
mod machine;
mod memory;
pub(crate) mod random;
mod ratio;
mod read;
mod work;
mod worker;

pub(crate) use alternate::medians;
pub(crate) use latency::{Between, Latencies, LatencyRow};
pub(crate) use machine::{Machine, load_average, machine};
pub(crate) use ratio::{Interval, Pass, SpeedUp, median, speed_up};
pub(crate) use read::ReadBandwidth;
pub(crate) use work::{Outcome, Row, Shape, Who, Work};
pub(crate) use worker::{Arithmetic, Bandwidth, Message, Request, Single, measure, work};
