//! The phases of a training step.

/// A phase of a training step, for measuring where its time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepPhase {
    /// The forward pass, with the loss.
    Forward,
    /// The backward pass.
    Backward,
    /// The gradient norm and the optimizer.
    Update,
    /// Masks, and packed weights of the next step.
    Masks,
    /// What comes after the last phase of a step; not measured.
    Rest,
}

impl StepPhase {
    /// The name, as in `forward`.
    pub fn name(self) -> &'static str {
        match self {
            StepPhase::Forward => "forward",
            StepPhase::Backward => "backward",
            StepPhase::Update => "update",
            StepPhase::Masks => "masks",
            StepPhase::Rest => "rest",
        }
    }
}
