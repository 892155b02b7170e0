//! What changes from step to step beside the model.

use twofour::adamw_step::PhaseSwitch;

use super::LossScale;

/// What changes from step to step beside the model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Progress {
    /// Steps done, skipped ones among them.
    pub(super) step: u64,
    /// Updates done.
    pub(super) updates: u64,
    pub(super) skipped: u64,
    /// Skipped steps since the last update.
    pub(super) skipped_in_a_row: u64,
    pub(super) loss_scale: LossScale,
    /// STEP's switch from dense to 2:4.
    pub(super) switch: Option<PhaseSwitch>,
}
