//! What people and scripts see.

pub mod escape;
mod global;
pub(crate) mod layers;
pub mod log;
pub mod progress;
mod screen;
pub(crate) mod shell;
pub mod style;
pub mod table;
mod terminal;
pub mod units;
mod wrap;

pub use global::Global;
pub use progress::Progress;
pub use screen::Screen;
pub(crate) use wrap::shortened;
