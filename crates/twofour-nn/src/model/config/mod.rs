//! The description of a transformer: decoders, encoders and image encoders, for training and for inference.

mod alibi;
mod attention;
mod experts;
mod gpt;
mod image;
mod latent;
mod layers;
mod named;
mod rope;
mod shapes;
mod stored;
#[cfg(test)]
mod tests;
mod validate;

use self::validate::expect_size;
use crate::{Error, Result, engine::Nonlinearity};

pub use self::{
    alibi::Alibi,
    attention::AttentionConfig,
    experts::{ClampedGate, ExpertGroups, ExpertsConfig, Routing, ScoreFunction, SharedExpert},
    gpt::GptConfig,
    image::{ImageHead, ImageHeadInput, ImageInput},
    latent::LatentConfig,
    rope::{Rope, RopeScaling},
};

/// A transformer: what enters, layers of an attention block and a feed-forward block each, and what follows the last
/// layer.
///
/// As JSON it has the form of model files and of training checkpoints. Serializing an option that this form lacks is an
/// error.
#[derive(Debug, Clone, PartialEq)]
pub struct TransformerConfig {
    /// What enters the first layer.
    pub input: ModelInput,
    /// How positions enter.
    pub positions: Positions,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// The norms of the blocks.
    pub norm: NormConfig,
    /// The attention blocks.
    pub attention: AttentionConfig,
    /// The feed-forward blocks.
    pub feed_forward: FeedForwardConfig,
    /// The experts, in a model whose feed-forward blocks have them.
    pub experts: Option<ExpertsConfig>,
    /// Whether the output of each block is multiplied by learned factors, one for each element (DINOv2's layer scale).
    pub layer_scale: bool,
    /// What follows the last layer.
    pub output: ModelOutput,
}

/// What enters the first layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ModelInput {
    /// Embeddings of tokens.
    Tokens(TokenInput),
    /// Embeddings of the patches of images.
    Image(ImageInput),
}

/// Embeddings of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenInput {
    /// Number of tokens.
    pub vocabulary: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Number of token types, each with an embedding that is added; 0 where there are none.
    pub token_types: usize,
    /// Whether the sum of the embeddings is normalized.
    pub is_normalized: bool,
    /// The factor of embeddings.
    pub scale: Option<f32>,
    /// The width of the table of tokens, where it is another than the model's: a linear layer leads from it to the
    /// first layer, and one from the last layer to it (OPT-350M).
    pub table_width: Option<usize>,
    /// Whether every window of a text must begin with the token that texts begin with: the model predicts badly
    /// without it.
    pub begins_windows: bool,
}

/// How positions enter a model.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// Queries and keys are rotated.
    Rotary(Rope),
    /// A learned vector for each position is added to the embedding.
    Learned,
    /// Scores of attention fall with the distance.
    Alibi(Alibi),
}

/// The norms of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    /// Where blocks have them.
    pub place: NormPlace,
    /// Their kind.
    pub kind: NormKind,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
}

/// Where a block has its norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormPlace {
    /// A norm of its input, and one after the last layer.
    Before,
    /// A norm of the sum of its input and its output.
    After,
    /// A norm of its input, one of its output before it is added, and one after the last layer.
    Around,
    /// A norm of its input, and one after the last layer. Both blocks of a layer read the same hidden states, and both
    /// outputs are added to them.
    Parallel,
}

/// The kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// Layer normalization, with gain and bias.
    Layer,
    /// Root-mean-square normalization, with a gain.
    RootMeanSquare,
}

/// The feed-forward blocks of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeedForwardConfig {
    /// Width of the hidden layer.
    pub hidden: usize,
    /// The function of the hidden layer.
    pub activation: Nonlinearity,
    /// Whether the hidden layer is `activation(gate) ⊙ up`, of twice as many output features of the first layer: the
    /// gate's, then the other's.
    pub gated: bool,
    /// Whether the linear layers have biases.
    pub bias: bool,
}

/// What follows the last layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ModelOutput {
    /// Scores of the next token: a norm, and a linear layer without a bias.
    Vocabulary {
        /// Whether its weight is the embedding's.
        tied: bool,
        /// The bound of scores: `soft_cap * tanh(score / soft_cap)`.
        soft_cap: Option<f32>,
    },
    /// The hidden states, behind a norm where blocks have theirs before them.
    Hidden {
        /// The linear layer that scores classes of images.
        head: Option<ImageHead>,
    },
    /// SAM's neck: a convolution of 1x1 to so many channels, a norm over them, a convolution of 3x3, and a norm.
    Neck {
        /// Channels of the output.
        channels: usize,
    },
}

impl TokenInput {
    /// Embeddings of tokens alone, as they are.
    pub fn plain(vocabulary: usize, context: usize) -> Self {
        TokenInput {
            vocabulary,
            context,
            token_types: 0,
            is_normalized: false,
            scale: None,
            table_width: None,
            begins_windows: false,
        }
    }
}

impl TransformerConfig {
    /// Rows and columns of an image's hidden states: tokens, and their elements.
    pub fn hidden_shape(&self) -> [usize; 2] {
        match self.output {
            ModelOutput::Neck { channels } => [self.context(), channels],
            ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => [self.context(), self.width],
        }
    }

    /// Size of the vocabulary; 0 for a model of images.
    pub fn vocabulary(&self) -> usize {
        match self.input {
            ModelInput::Tokens(input) => input.vocabulary,
            ModelInput::Image(_) => 0,
        }
    }

    /// Number of token types; 0 where there are none.
    pub fn token_types(&self) -> usize {
        match self.input {
            ModelInput::Tokens(input) => input.token_types,
            ModelInput::Image(_) => 0,
        }
    }

    /// The longest sequence, in tokens; for a model of images, the tokens of an image.
    pub fn context(&self) -> usize {
        match self.input {
            ModelInput::Tokens(input) => input.context,
            ModelInput::Image(input) => input.tokens(),
        }
    }

    /// The width of the table of tokens.
    pub fn table_width(&self) -> usize {
        match self.input {
            ModelInput::Tokens(TokenInput { table_width: Some(width), .. }) => width,
            _ => self.width,
        }
    }

    /// Whether linear layers lead from the table of tokens to the first layer, and from the last layer back.
    pub(crate) fn is_projected(&self) -> bool {
        self.table_width() != self.width
    }

    /// Whether every window of a text must begin with the token that texts begin with.
    pub fn begins_windows(&self) -> bool {
        matches!(self.input, ModelInput::Tokens(TokenInput { begins_windows: true, .. }))
    }

    /// Returns this description with another context, in tokens.
    #[must_use]
    pub fn with_context(mut self, context: usize) -> Self {
        if let ModelInput::Tokens(input) = &mut self.input {
            input.context = context;
        }
        self
    }

    /// Returns this description with another size of the vocabulary.
    #[must_use]
    pub fn with_vocabulary(mut self, vocabulary: usize) -> Self {
        if let ModelInput::Tokens(input) = &mut self.input {
            input.vocabulary = vocabulary;
        }
        self
    }

    /// Whether the model is a decoder: it scores the token that follows each of a text.
    pub fn is_decoder(&self) -> bool {
        matches!((self.input, self.output), (ModelInput::Tokens(_), ModelOutput::Vocabulary { .. }))
            && self.attention.is_causal
    }

    /// The first option of a model that LLaMA and GPT-2 do not have, in words; none where it has none.
    pub(crate) fn beyond_llama(&self) -> Option<&'static str> {
        let AttentionConfig { scale, soft_cap, ref local_rope, .. } = self.attention;
        if let Some(what) = self.untrainable() {
            return Some(what);
        }
        let embedding_scale = self.tokens().ok().and_then(|tokens| tokens.scale);
        [
            (self.norm.place != NormPlace::Before, "norms of the outputs of blocks"),
            (embedding_scale.is_some(), "scaled embeddings"),
            (scale.is_some(), "a scale of the scores of attention"),
            (soft_cap.is_some(), "bounded scores of attention"),
            (self.logit_soft_cap().is_some(), "bounded scores of tokens"),
            (local_rope.is_some(), "another rotation in windows"),
        ]
        .into_iter()
        .find_map(|(has, what)| has.then_some(what))
    }

    /// The first option of a model that training lacks, in words; none where it has none.
    pub(crate) fn untrainable(&self) -> Option<&'static str> {
        [
            (self.experts.is_some(), "experts"),
            (self.attention.sinks, "sinks of attention"),
            (self.attention.latent.is_some(), "keys and values of latents"),
            (self.norm.place == NormPlace::Parallel, "attention and feed-forward blocks side by side"),
            (self.attention.rotated.is_some(), "heads of which a part is rotated"),
            (matches!(self.positions, Positions::Alibi(_)), "positions by distance (ALiBi)"),
            (self.attention.qkv_bound.is_some(), "bounded queries, keys and values"),
            (self.is_decoder() && self.layer_scale, "a decoder with factors of the outputs of blocks"),
            (self.is_projected(), "a table of tokens of another width"),
            (self.is_decoder() && self.norm.place == NormPlace::After, "a decoder with norms after blocks"),
            (self.rotates_by_length(), "rotations that depend on the length of a text (longrope)"),
        ]
        .into_iter()
        .find_map(|(has, what)| has.then_some(what))
    }

    /// Whether the head's weight is the embedding's.
    pub fn is_tied(&self) -> bool {
        matches!(self.output, ModelOutput::Vocabulary { tied: true, .. })
    }

    /// The bound of the head's scores.
    pub fn logit_soft_cap(&self) -> Option<f32> {
        match self.output {
            ModelOutput::Vocabulary { soft_cap, .. } => soft_cap,
            _ => None,
        }
    }

    /// Elements of the queries of a token.
    pub fn query_width(&self) -> usize {
        self.attention.heads * self.attention.head_dim
    }

    /// Elements of the keys of a token, and of its values.
    pub fn kv_width(&self) -> usize {
        self.attention.kv_heads * self.attention.head_dim
    }

    /// Elements of queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }

    /// Output features of the feed-forward block's first layer.
    pub fn up_width(&self) -> usize {
        self.up_width_of(self.feed_forward.hidden)
    }

    /// The window of a layer; none for the whole sequence.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.attention.windows.get(layer).copied().flatten()
    }

    /// Rows and columns of the tokens that a layer's queries see; of text, one row.
    pub(in crate::model) fn span(&self, layer: usize) -> [usize; 2] {
        match self.input {
            ModelInput::Image(image) => self.window(layer).map_or(image.grid(), |side| [side; 2]),
            ModelInput::Tokens(tokens) => [1, tokens.context],
        }
    }

    /// The factor of scores.
    pub fn score_scale(&self) -> f32 {
        self.attention.scale.unwrap_or_else(|| 1.0 / (self.attention.head_dim as f32).sqrt())
    }

    /// The rotation of queries and keys in a layer.
    pub fn rope(&self, layer: usize) -> Option<&Rope> {
        let Positions::Rotary(rope) = &self.positions else { return None };
        Some(self.attention.local_rope.as_ref().filter(|_| self.window(layer).is_some()).unwrap_or(rope))
    }

    /// All rotations of queries and keys.
    fn ropes(&self) -> impl Iterator<Item = &Rope> {
        let Positions::Rotary(rope) = &self.positions else { return None.into_iter().chain(None) };
        Some(rope).into_iter().chain(self.attention.local_rope.as_ref())
    }

    /// Whether the rotation of a text's tokens depends on the text's length.
    pub(crate) fn rotates_by_length(&self) -> bool {
        self.ropes().any(|rope| rope.is_stretched(usize::MAX))
    }

    /// Elements of a head that are rotated, where heads are.
    pub fn rotated(&self) -> usize {
        self.attention.rotated.unwrap_or(self.attention.head_dim)
    }

    /// The images that enter.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model of text.
    pub fn image(&self) -> Result<&ImageInput> {
        match &self.input {
            ModelInput::Image(image) => Ok(image),
            ModelInput::Tokens(_) => Err(of_other("a model of text", "a model of images")),
        }
    }

    /// The tokens that enter.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model of images.
    pub fn tokens(&self) -> Result<&TokenInput> {
        match &self.input {
            ModelInput::Tokens(tokens) => Ok(tokens),
            ModelInput::Image(_) => Err(of_other("a model of images", "a model of text")),
        }
    }
}

fn of_other(found: &str, expected: &'static str) -> Error {
    Error::Setting { what: "the model", found: found.to_owned(), expected }
}
