//! The description of a transformer: decoders, encoders and image encoders, for training and for inference.

mod alibi;
mod experts;
mod gpt;
mod latent;
mod named;
mod rope;
mod stored;
#[cfg(test)]
mod tests;

use crate::{Error, Result, engine::Nonlinearity, text::VOCABULARY};

pub use self::{
    alibi::Alibi,
    experts::{ClampedGate, ExpertGroups, ExpertsConfig, Routing, ScoreFunction, SharedExpert},
    gpt::GptConfig,
    latent::LatentConfig,
    rope::{Rope, RopeScaling},
};

/// A transformer: what enters, layers of an attention block and a feed-forward block each, and what follows the last
/// layer.
///
/// As JSON it has the form in which files and checkpoints of training keep it; that of a model without such files does
/// not exist.
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
    /// What embeddings are multiplied by.
    pub scale: Option<f32>,
    /// The width of the table of tokens, where it is another than the model's: a linear layer leads from it to the
    /// first layer, and one from the last layer to it (OPT-350M).
    pub table_width: Option<usize>,
    /// Whether every window of a text must begin with the token that texts begin with: the model predicts badly
    /// without it.
    pub begins_windows: bool,
}

/// Embeddings of the patches of images of one size, behind learned tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInput {
    /// Height and width of an image, in pixels; multiples of the patch.
    pub image: [usize; 2],
    /// Values of a pixel.
    pub channels: usize,
    /// Height and width of a patch, in pixels.
    pub patch: usize,
    /// Whether a learned token stands before the patches.
    pub class_token: bool,
    /// Learned tokens between the class token and the patches, without positions (Darcet et al., "Vision Transformers
    /// Need Registers", 2024).
    pub registers: usize,
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

/// The attention blocks of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`, which share them in groups.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether a token attends to no token behind it.
    pub is_causal: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output has a bias.
    pub out_bias: bool,
    /// Whether queries and keys are normalized, head by head, before they are rotated.
    pub head_norms: bool,
    /// What scores are multiplied by; `1 / √head_dim` where there is no number.
    pub scale: Option<f32>,
    /// The bound of scores: `soft_cap * tanh(score / soft_cap)`.
    pub soft_cap: Option<f32>,
    /// The largest magnitude of queries, keys and values, to which they are clamped (MPT).
    pub qkv_bound: Option<f32>,
    /// For each layer its window; none for the whole sequence. Empty where no layer has one. Of causal attention it is
    /// how many tokens back, itself included, a token
    /// attends to; of an image the side of square windows of patches, which are padded with zeros at the right and the
    /// lower edge.
    pub windows: Vec<Option<usize>>,
    /// The rotation in layers with a window, where it is another.
    pub local_rope: Option<Rope>,
    /// How many elements of a head are rotated, from the first on, where not all are.
    pub rotated: Option<usize>,
    /// Whether scores have a term for the distance of query and key, of rows and of columns (SAM).
    pub relative_positions: bool,
    /// Whether each head has a sink: a score beside those of the keys, of which the softmax makes a weight that falls
    /// on no value (gpt-oss).
    pub sinks: bool,
    /// How keys and values are made of latents, where they are.
    pub latent: Option<LatentConfig>,
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

/// The linear layer that scores classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHead {
    /// Number of classes.
    pub classes: usize,
    /// What it reads.
    pub input: ImageHeadInput,
}

/// What scores classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageHeadInput {
    /// The class token (ViT).
    ClassToken,
    /// The class token, and behind it the mean of the patches (DINOv2).
    ClassTokenAndMean,
    /// The mean of the patches.
    Mean,
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

impl ImageHeadInput {
    /// Its elements for a model of that width.
    pub fn elements(self, width: usize) -> usize {
        match self {
            ImageHeadInput::ClassToken | ImageHeadInput::Mean => width,
            ImageHeadInput::ClassTokenAndMean => 2 * width,
        }
    }
}

impl ImageInput {
    /// Rows and columns of patches.
    pub fn grid(&self) -> [usize; 2] {
        self.image.map(|side| side / self.patch.max(1))
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        let [rows, columns] = self.grid();
        rows.saturating_mul(columns)
    }

    /// Tokens of an image: the class token, registers, and its patches.
    pub fn tokens(&self) -> usize {
        self.learned_tokens().saturating_add(self.patches())
    }

    /// Tokens before the patches: the class token and registers.
    pub fn learned_tokens(&self) -> usize {
        usize::from(self.class_token).saturating_add(self.registers)
    }

    /// Values of an image.
    pub fn image_len(&self) -> usize {
        self.channels * self.image[0] * self.image[1]
    }

    /// Values of a patch.
    pub fn patch_len(&self) -> usize {
        self.channels * self.patch * self.patch
    }

    fn validate(&self) -> Result<()> {
        let ImageInput { image, channels, patch, registers, .. } = *self;
        for size in [image[0], image[1], channels, patch] {
            expect_size("a size of the images", size, 20)?;
        }
        if image.iter().any(|side| !side.is_multiple_of(patch)) {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "a divisor of the image's height and width" });
        }
        if channels.saturating_mul(patch * patch) > 1 << 20 || self.patches() > 1 << 20 {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "at most 2^20 values, and 2^20 patches" });
        }
        if registers > 1 << 20 {
            let found = registers.to_string();
            return Err(Error::Setting { what: "registers", found, expected: "at most 2^20" });
        }
        Ok(())
    }
}

/// An error for a size that is zero or above a power of two: it bounds the sizes of a hostile file before anything is
/// allocated by them.
fn expect_size(what: &'static str, size: usize, bits: u32) -> Result<()> {
    if (1..=1 << bits).contains(&size) {
        return Ok(());
    }
    let expected = if bits == 20 { "between 1 and 2^20" } else { "between 1 and 2^24" };
    Err(Error::Setting { what, found: size.to_string(), expected })
}

impl TransformerConfig {
    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, a patch that does not divide the image, heads that do not
    /// fit each other, a head of an odd number of elements that is to
    /// be rotated, experts that do not fit each other, windows for another number of layers, numbers that are not above
    /// 0, a class token beside windows, relative positions or a neck, and a head for classes or registers without one.
    pub fn validate(&self) -> Result<()> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.attention;
        let sizes = match self.input {
            ModelInput::Tokens(TokenInput { vocabulary, context, .. }) => [vocabulary, context],
            ModelInput::Image(image) => {
                image.validate()?;
                [1, image.tokens()]
            }
        };
        for (what, size) in [
            ("vocabulary", sizes[0]),
            ("context", sizes[1]),
            ("layers", self.layers),
            ("width", self.width),
            ("heads", heads),
            ("key-value heads", kv_heads),
            ("elements of a head", head_dim),
            ("feed_forward", self.feed_forward.hidden),
        ] {
            expect_size(what, size, 24)?;
        }
        if let ModelInput::Tokens(TokenInput { token_types: types @ 1.., .. }) = self.input {
            expect_size("token types", types, 24)?;
        }
        expect_size("the width of the table of tokens", self.table_width(), 24)?;
        if !heads.is_multiple_of(kv_heads) {
            let found = format!("{kv_heads} for {heads} heads");
            return Err(Error::Setting { what: "key-value heads", found, expected: "a divisor of the heads" });
        }
        if !self.attention.is_causal && self.query_width() != self.width {
            let found = format!("{heads} for width {}", self.width);
            return Err(Error::Setting { what: "heads", found, expected: "a divisor of the width" });
        }
        if matches!(self.positions, Positions::Rotary(_)) && !self.rotated().is_multiple_of(2) {
            let found = self.rotated().to_string();
            return Err(Error::Setting { what: "elements of a head", found, expected: "even, as rotation requires" });
        }
        if self.rotated() > head_dim {
            let (what, found) = ("rotated elements of a head", self.rotated().to_string());
            return Err(Error::Setting { what, found, expected: "no more than a head has" });
        }
        for rope in self.ropes() {
            rope.validate(self.rotated())?;
        }
        self.experts.as_ref().map_or(Ok(()), ExpertsConfig::validate)?;
        self.attention.latent.as_ref().map_or(Ok(()), |latent| latent.validate(&self.attention))?;
        self.expect_windows()?;
        let scale = match self.input {
            ModelInput::Tokens(input) => input.scale,
            ModelInput::Image(_) => None,
        };
        let AttentionConfig { scale: of_scores, soft_cap, qkv_bound, .. } = self.attention;
        for (what, number) in [
            ("the scale of embeddings", scale),
            ("the scale of scores", of_scores),
            ("the bound of scores", soft_cap),
            ("the bound of queries, keys and values", qkv_bound),
            ("the bound of the head's scores", self.logit_soft_cap()),
        ] {
            if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
                return Err(Error::Setting { what, found: number.to_string(), expected: "a number above 0" });
            }
        }
        self.expect_output()
    }

    fn expect_windows(&self) -> Result<()> {
        let windows = &self.attention.windows;
        if windows.is_empty() || windows.len() == self.layers && !windows.contains(&Some(0)) {
            return Ok(());
        }
        let found = match windows.iter().position(|window| *window == Some(0)) {
            Some(layer) => format!("0 for layer {layer}"),
            None => format!("{} for {} layers", windows.len(), self.layers),
        };
        Err(Error::Setting { what: "sliding windows", found, expected: "a positive number or none for each layer" })
    }

    fn expect_output(&self) -> Result<()> {
        let is_neck = matches!(self.output, ModelOutput::Neck { .. });
        let is_grid = !self.attention.windows.is_empty() || self.attention.relative_positions || is_neck;
        if let ModelOutput::Neck { channels: size }
        | ModelOutput::Hidden { head: Some(ImageHead { classes: size, .. }) } = self.output
        {
            expect_size("classes or channels", size, 20)?;
        }
        let ModelInput::Image(ImageInput { class_token, registers, .. }) = self.input else {
            if is_neck || self.attention.relative_positions {
                let (what, found) = ("the neck or relative positions", "in a model of text".to_owned());
                return Err(Error::Setting { what, found, expected: "in a model of images" });
            }
            return Ok(());
        };
        let reads_class = match self.output {
            ModelOutput::Hidden { head: Some(ImageHead { input, .. }) } => input != ImageHeadInput::Mean,
            _ => false,
        };
        if class_token && is_grid || !class_token && (reads_class || registers > 0) {
            let found = if class_token { "beside windows, relative positions or a neck" } else { "absent" };
            let expected = "there for a head or registers, and absent where patches form a grid";
            return Err(Error::Setting { what: "the class token", found: found.to_owned(), expected });
        }
        Ok(())
    }

    /// Rows and columns of an image's hidden states: tokens, and their elements.
    pub fn hidden_shape(&self) -> [usize; 2] {
        match self.output {
            ModelOutput::Neck { channels } => [self.context(), channels],
            ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => [self.context(), self.width],
        }
    }

    /// Number of tokens; 0 of a model of images.
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

    /// The longest sequence, in tokens: of a model of images the tokens of an image.
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

    /// What scores are multiplied by.
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

impl From<&GptConfig> for TransformerConfig {
    fn from(sizes: &GptConfig) -> Self {
        let llama = TransformerConfig::llama(sizes, sizes.heads, VOCABULARY);
        TransformerConfig {
            norm: NormConfig { kind: NormKind::Layer, ..llama.norm },
            attention: AttentionConfig { qkv_bias: true, out_bias: true, ..llama.attention },
            feed_forward: FeedForwardConfig {
                activation: Nonlinearity::Gelu,
                gated: false,
                bias: true,
                ..llama.feed_forward
            },
            ..llama
        }
    }
}

impl TransformerConfig {
    /// A decoder as LLaMA: root-mean-square norms, rotary positions, SiLU with a gate, no biases, and a head of its
    /// own.
    pub fn llama(sizes: &GptConfig, kv_heads: usize, vocabulary: usize) -> Self {
        let GptConfig { layers, width, heads, context, feed_forward } = *sizes;
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput::plain(vocabulary, context)),
            positions: Positions::Rotary(Rope { base: 10_000.0, scaling: None }),
            layers,
            width,
            norm: NormConfig { place: NormPlace::Before, kind: NormKind::RootMeanSquare, epsilon: 1e-5 },
            attention: AttentionConfig::causal(heads, kv_heads, width / heads.max(1)),
            feed_forward: FeedForwardConfig {
                hidden: feed_forward,
                activation: Nonlinearity::Silu,
                gated: true,
                bias: false,
            },
            experts: None,
            layer_scale: false,
            output: ModelOutput::Vocabulary { tied: false, soft_cap: None },
        }
    }

    /// An encoder as BERT: layer norms after the blocks, full attention, learned positions, two token types and GELU.
    pub fn bert(sizes: &GptConfig, vocabulary: usize) -> Self {
        let GptConfig { layers, width, heads, context, feed_forward } = *sizes;
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput {
                token_types: 2,
                is_normalized: true,
                ..TokenInput::plain(vocabulary, context)
            }),
            positions: Positions::Learned,
            layers,
            width,
            norm: NormConfig { place: NormPlace::After, kind: NormKind::Layer, epsilon: 1e-12 },
            attention: AttentionConfig::full(width, heads),
            feed_forward: FeedForwardConfig {
                hidden: feed_forward,
                activation: Nonlinearity::Gelu,
                gated: false,
                bias: true,
            },
            experts: None,
            layer_scale: false,
            output: ModelOutput::Hidden { head: None },
        }
    }

    /// An encoder of images as ViT: layer norms before the blocks, full attention, learned positions and GELU. The
    /// context among the sizes is not used.
    pub fn vit(sizes: &GptConfig, image: ImageInput) -> Self {
        let bert = Self::bert(sizes, 0);
        TransformerConfig {
            input: ModelInput::Image(image),
            norm: NormConfig { place: NormPlace::Before, kind: NormKind::Layer, epsilon: 1e-6 },
            ..bert
        }
    }

    /// SAM's image encoder for square images of that side, with windows of a side in all layers but those with global
    /// attention.
    pub fn sam(sizes: &GptConfig, side: usize, (window, global): (usize, &[usize])) -> Self {
        let image = ImageInput { image: [side; 2], channels: 3, patch: 16, class_token: false, registers: 0 };
        let vit = Self::vit(sizes, image);
        let windows = (0..sizes.layers).map(|layer| (!global.contains(&layer)).then_some(window)).collect();
        TransformerConfig {
            attention: AttentionConfig { windows, relative_positions: true, ..vit.attention },
            output: ModelOutput::Neck { channels: 256 },
            ..vit
        }
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

impl AttentionConfig {
    /// Causal attention over the whole sequence, without biases, norms and bounds.
    pub fn causal(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        AttentionConfig {
            heads,
            kv_heads,
            head_dim,
            is_causal: true,
            qkv_bias: false,
            out_bias: false,
            head_norms: false,
            scale: None,
            soft_cap: None,
            qkv_bound: None,
            windows: vec![],
            local_rope: None,
            rotated: None,
            relative_positions: false,
            sinks: false,
            latent: None,
        }
    }

    /// Full attention of so many heads that divide the width, with biases.
    pub fn full(width: usize, heads: usize) -> Self {
        let causal = Self::causal(heads, heads, width / heads.max(1));
        AttentionConfig { is_causal: false, qkv_bias: true, out_bias: true, ..causal }
    }
}
