//! What the layouts of image encoders have in common.

use super::super::layout::{Layout, StoredLinear};
use crate::model::config::ImageInput;

impl Layout {
    /// Adds a norm's parameters, `[width]` each.
    pub(super) fn norm(&mut self, ours: &str, theirs: &str, width: usize) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{ours}.{part}"), format!("{theirs}.{part}"), [width]);
        }
    }

    /// Adds the embedding of patches, a convolution.
    pub(super) fn patches(&mut self, width: usize, input: &ImageInput, theirs: &str) {
        let ImageInput { channels, patch, .. } = *input;
        self.tensor("patch.weight", format!("{theirs}.weight"), [width, channels, patch, patch]);
        self.tensor("patch.bias", format!("{theirs}.bias"), [width]);
    }

    /// Adds a linear layer of one weight with a bias.
    pub(super) fn one_linear(&mut self, ours: String, theirs: String, (outputs, inputs): (usize, usize)) {
        let parts = vec![(theirs, outputs)];
        self.linear(ours, StoredLinear { parts, inputs, has_bias: true, is_transposed: false });
    }
}
