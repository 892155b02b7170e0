//! Operands of norms.

/// The parameters of a norm, [`Kind::Wide`](super::Kind::Wide), `[width]` each: layer normalization where there is a
/// bias, `(x - mean) / sqrt(variance + epsilon) · gain + bias`; otherwise root-mean-square normalization, `x /
/// sqrt(mean of x² + epsilon) · gain`.
#[derive(Debug, Clone, Copy)]
pub struct NormParameters<'a, B> {
    /// The gain.
    pub gain: &'a B,
    /// The bias of layer normalization.
    pub bias: Option<&'a B>,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
}

/// What a norm normalizes, `[tokens, width]`.
#[derive(Debug)]
pub enum NormInput<'a, B> {
    /// A tensor.
    Tensor(&'a B),
    /// The sum of both, which overwrites the second: as where a norm follows a residual addition.
    Sum(&'a B, &'a mut B),
}

/// What a norm's backward pass reads beside its input, [`Kind::Wide`](super::Kind::Wide), `[tokens]` each. An engine
/// may leave those of root-mean-square normalization as they are.
#[derive(Debug, Clone, Copy)]
pub struct NormStatistics<B> {
    /// The means, of layer normalization alone.
    pub mean: Option<B>,
    /// Reciprocal deviations.
    pub rstd: B,
}

/// The gradients of a norm's parameters, [`Kind::Wide`](super::Kind::Wide), `[width]` each.
#[derive(Debug)]
pub struct NormGradients<'a, B> {
    /// Of the gain.
    pub gain: &'a mut B,
    /// Of the bias, where there is one.
    pub bias: Option<&'a mut B>,
}
