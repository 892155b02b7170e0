//! Clipping by the global norm.

/// The factor that brings gradients of this global norm to at most `limit`; no limit if that is 0 or infinite.
///
/// ```
/// use twofour_transformer::engine::clip_factor;
/// assert_eq!((clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, 0.0)), (0.25, 1.0, 1.0));
/// ```
pub fn clip_factor(norm: f64, limit: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / norm } else { 1.0 }
}
