//! The result of a measurement.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Engine;

/// The best time of one engine, or of one kind of methods.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured<How = Engine> {
    /// The engine or method.
    pub how: How,
    /// The kernel's name: for the libraries, the number of the algorithm or heuristic.
    pub kernel: String,
    /// Median of device time, microseconds.
    pub us: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}), {:.1} us", self.how.name(), self.kernel, self.us)
    }
}
