//! What a measurement has found.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::engine::Engine;

/// What one engine took at best, or one kind of methods.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured<How = Engine> {
    /// Who, and how.
    pub how: How,
    /// The kernel's name, as far as the engine tells it.
    pub kernel: String,
    /// Median of device time, microseconds.
    pub us: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}), {:.1} us", self.how.name(), self.kernel, self.us)
    }
}
