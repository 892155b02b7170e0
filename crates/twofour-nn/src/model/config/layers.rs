//! The linear layers and the parameters of a description.

use super::{ModelInput, ModelOutput, NormKind, NormPlace, Positions, TransformerConfig};

impl TransformerConfig {
    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let width = self.width;
        let block = |layer: usize| {
            let first = (format!("blocks.{layer}.attn.qkv"), self.attention_outputs(), width);
            let of_latents = self.of_latents().into_iter();
            let of_latents =
                of_latents.map(move |(name, outputs, of)| (format!("blocks.{layer}.{name}"), outputs, of.len()));
            let out = (format!("blocks.{layer}.attn.out"), width, self.value_width());
            let attention = [first].into_iter().chain(of_latents).chain([out]);
            attention.chain(self.feed_forward_layers(layer))
        };
        let patches = match self.input {
            ModelInput::Tokens(_) => None,
            ModelInput::Image(input) => Some(("patches".to_owned(), width, input.patch_len())),
        };
        let head = match self.output {
            ModelOutput::Vocabulary { .. } => Some((self.vocabulary(), self.table_width())),
            ModelOutput::Hidden { head } => head.map(|head| (head.classes, head.input.elements(width))),
            ModelOutput::Neck { .. } => None,
        };
        let head = head.map(|(outputs, inputs)| ("head".to_owned(), outputs, inputs));
        let table_width = self.table_width();
        let projected = |name: &str, outputs, inputs| self.is_projected().then(|| (name.to_owned(), outputs, inputs));
        let before = patches.into_iter().chain(projected("project_in", width, table_width));
        let behind = projected("project_out", table_width, width).into_iter().chain(head);
        before.chain((0..self.layers).flat_map(block)).chain(behind).collect()
    }

    /// Number of parameters, without those of a neck and of relative positions.
    pub fn parameters(&self) -> usize {
        let TransformerConfig { width, layers, .. } = *self;
        let linear =
            |(name, out, inputs): (String, usize, usize)| out * inputs + if self.has_bias(&name) { out } else { 0 };
        let linears: usize = self.linear_layers().into_iter().map(linear).sum();
        let norm = if self.norm.kind == NormKind::Layer { 2 * width } else { width };
        let norms = match self.norm.place {
            NormPlace::Before | NormPlace::Parallel => 2 * layers + 1,
            NormPlace::After => 2 * layers,
            NormPlace::Around => 4 * layers + 1,
        };
        let scales = if self.layer_scale { 2 * layers * width } else { 0 };
        let heads = if self.attention.head_norms { 2 * self.attention.head_dim * layers } else { 0 };
        let latents = layers * self.of_latents().into_iter().map(|(_, _, of)| of.len()).sum::<usize>();
        let tables = match self.input {
            ModelInput::Tokens(input) => {
                let positions = if self.positions == Positions::Learned { input.context } else { 0 };
                let words = if self.is_tied() { 0 } else { input.vocabulary };
                let norm = if input.is_normalized { norm } else { 0 };
                words * self.table_width() + (positions + input.token_types) * width + norm
            }
            // A class token is part of its position.
            ModelInput::Image(input) => input.tokens() * width,
        };
        linears + norms * norm + scales + heads + latents + tables
    }

    /// Whether the linear layer of that name has a bias.
    pub(crate) fn has_bias(&self, linear: &str) -> bool {
        match linear.rsplit('.').next() {
            Some("qkv") => self.attention.qkv_bias,
            Some("out") => self.attention.out_bias,
            Some("up" | "down") => self.feed_forward.bias,
            // The head of a decoder has none.
            _ => !matches!(self.output, ModelOutput::Vocabulary { .. }),
        }
    }
}
