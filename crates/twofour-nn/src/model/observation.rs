//! What linear layers read, as an observer sees it.

/// An input of a block's linear layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockInput {
    /// The names of the weights that are multiplied with it, as the checkpoint has them: queries, keys and values share
    /// one input, and so do gate and up.
    pub weights: Vec<String>,
    /// Whether the weights are stored as `[in_features, out_features]` (GPT-2).
    pub is_transposed: bool,
}

/// A text's input of linear layers, in the memory of what runs the model.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a, X = &'a [f32]> {
    /// Its name.
    pub input: &'a BlockInput,
    /// The values, `[tokens, in_features]`.
    pub x: X,
    /// Number of tokens.
    pub tokens: usize,
}
