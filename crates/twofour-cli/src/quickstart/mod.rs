//! Training a small model dense and 2:4 on a text that is part of the program, and comparing the two.
//!
//! | file | holds |
//! |---|---|
//! | `plan` | what is trained and for how long |
//! | `folder` | the output directory: what is in it, and whether it is ours |
//! | `training` | both models side by side, with checkpoints |
//! | `comparison` | loss, size and speed of the two |
//! | `report` | `report.json` |
//! | `picture` | `report.svg` |

mod comparison;
mod folder;
mod picture;
mod plan;
mod report;
mod training;

pub(crate) use comparison::compare;
pub(crate) use folder::Folder;
pub(crate) use picture::draw;
pub(crate) use plan::Plan;
pub(crate) use report::{Report, Side};
pub(crate) use training::{Losses, Training};

/// The text: 1.1 MB of the plays of William Shakespeare, which are in the public domain.
pub(crate) const TEXT: &[u8] = include_bytes!("plays.txt");

/// The share of the text that is kept for validation.
pub(crate) const VALIDATION_SHARE: f64 = 0.1;
