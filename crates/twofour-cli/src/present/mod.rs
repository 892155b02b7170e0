//! What people and scripts see.

pub(crate) mod escape;
pub(crate) mod layers;
pub(crate) mod log;
pub(crate) mod progress;
mod screen;
pub(crate) mod shell;
pub(crate) mod style;
pub(crate) mod table;
mod terminal;
pub(crate) mod units;
mod wrap;

pub(crate) use progress::Progress;
pub(crate) use screen::Screen;
pub(crate) use wrap::shortened;
