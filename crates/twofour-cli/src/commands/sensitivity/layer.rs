//! A linear layer with what pruning it costs.

use twofour::file::StoredDType;

/// A linear layer that was pruned alone.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    /// Its weight's name.
    pub(super) name: String,
    /// As it is stored.
    pub(super) shape: [usize; 2],
    pub(super) dtype: StoredDType,
    /// The squared change of the outputs by their square, by method.
    pub(super) errors: Vec<f64>,
    /// Of the model with this layer alone pruned by the last method, where it was measured.
    pub(super) perplexity: Option<f64>,
}

impl Layer {
    /// Elements of the weight.
    pub(super) fn weights(&self) -> u64 {
        self.shape[0] as u64 * self.shape[1] as u64
    }

    /// Bytes that compressing the pruned weight saves: half of the elements, less two bits for each of the others.
    pub(super) fn saved(&self) -> u64 {
        let bytes = self.dtype.bytes(&self.shape).unwrap_or(0) as u64;
        (bytes / 2).saturating_sub(self.weights() / 8)
    }

    /// What pruning it costs: the logarithm of the factor on the dense perplexity, or, where none was measured, the
    /// last method's error.
    pub(super) fn cost(&self, dense: Option<f64>) -> f64 {
        match (self.perplexity, dense) {
            (Some(perplexity), Some(dense)) => (perplexity / dense).ln().max(0.0),
            _ => self.errors.last().copied().unwrap_or(0.0),
        }
    }
}
