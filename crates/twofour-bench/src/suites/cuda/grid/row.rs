//! The record of a cell of the grid.

use serde::{Deserialize, Serialize};

/// One contender's time in one cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct GridRow {
    /// Data type of W and X.
    pub(crate) dtype: String,
    /// Data type of the result.
    pub(crate) output: String,
    /// Tokens, input features, output features.
    pub(crate) shape: [usize; 3],
    /// `twofour`, `cusparselt`, `cublaslt`, or `dispatch`: the fastest of them in rounds before those that count.
    pub(crate) contender: String,
    /// The contender's fastest kernel.
    pub(crate) kernel: String,
    /// Median, microseconds.
    pub(crate) us: f64,
    /// The minimum, microseconds.
    pub(crate) min_us: f64,
    /// The maximum, microseconds.
    pub(crate) max_us: f64,
    /// Dense-equivalent TFLOP/s.
    pub(crate) tflops: f64,
    /// Bytes of the weight a second, dense or 2:4 as the contender reads it.
    pub(crate) gb_per_s: f64,
    /// In rows of `twofour`: the kernel that the cost model chooses without measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unmeasured: Option<Unmeasured>,
    /// The layers of models that have this weight.
    pub(crate) layers: Vec<String>,
}

/// The kernel that the cost model chooses without measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Unmeasured {
    /// The kernel's name.
    pub(crate) kernel: String,
    /// Median, microseconds, in the same rounds.
    pub(crate) us: f64,
    /// Its time divided by that of the fastest kernel of this project.
    pub(crate) over_best: f64,
}

/// A weight that this project's kernels do not support.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Unsupported {
    /// Data type of W and X.
    pub(crate) dtype: String,
    /// Output and input features.
    pub(crate) weight: [usize; 2],
    /// The error.
    pub(crate) reason: String,
}

/// A kernel that was excluded because its results differ from the dense ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fault {
    /// Data type of W and X.
    pub(crate) dtype: String,
    /// Tokens, input features, output features.
    pub(crate) shape: [usize; 3],
    /// The contender.
    pub(crate) contender: String,
    /// Its kernel.
    pub(crate) kernel: String,
    /// The difference between the results.
    pub(crate) difference: String,
}
