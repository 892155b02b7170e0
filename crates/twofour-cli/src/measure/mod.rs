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

pub use alternate::medians;
pub use contender::random_int4;
pub use gpu::{Gpu, gpu};
pub use machine::{Machine, load_average, machine};
pub use ratio::{Pass, SpeedUp, median, speed_up};
pub use read::ReadBandwidth;
pub use work::{Outcome, Row, Shape, Who, Work};
pub use worker::{Arithmetic, Bandwidth, Message, Request, Single, WORKER, measure, work};
