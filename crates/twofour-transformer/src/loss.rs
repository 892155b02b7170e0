//! Losses beside the cross-entropy.

/// The parts of the loss of a student, `divergence · KL(teacher ‖ student) + cross_entropy · -log student[target]`, in
/// nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistillationWeights {
    /// The weight of the divergence of the student's probabilities from the teacher's.
    pub divergence: f32,
    /// The weight of the cross-entropy of targets.
    pub cross_entropy: f32,
}

/// The error of a row `x` that is to be `target`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorMeasure {
    /// `‖x - target‖²`.
    Squared,
    /// `‖x - target‖² / ‖target‖²`; 0 where the target is 0.
    RelativeSquared,
}
