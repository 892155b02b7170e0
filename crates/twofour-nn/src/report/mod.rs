//! What a training run leaves behind for people and scripts.
//!
//! | item | |
//! |---|---|
//! | [`StepMetrics`] | a line of `metrics.jsonl`: one optimizer step |
//! | [`MetricsLog`] | that file while it is written, and cut back to a checkpoint's step when a run goes on |

mod log;
mod metrics;

pub use log::{MetricsError, MetricsLog};
pub use metrics::{LayerMetrics, StepMetrics};
