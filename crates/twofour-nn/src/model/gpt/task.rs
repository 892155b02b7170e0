//! Predicting the next token.

use twofour::layer::Accumulate;

use crate::{
    Error, Result,
    block::{BatchShape, Workspace},
    engine::{Buffer as _, Elementwise, Engine, Nonlinearity},
    linear::Linear,
    model::{
        GptConfig, IndexBatch, Positions, Saved, Task, TransformerConfig,
        file::{DECODER_KEY, GPT_KEY},
        transformer::{Builder, INITIAL_DEVIATION, SavedEmbedding, TokenEmbedding, TokenIds, expect_below},
    },
    parameter::Parameter,
};

/// The embedding of a decoder, and the head that scores the next token.
#[derive(Debug)]
pub struct NextToken<E: Engine> {
    embedding: TokenEmbedding<E>,
    head: Linear<E>,
    tied: bool,
    /// The bound of scores.
    soft_cap: Option<f32>,
}

/// The scores before they are bounded, where they are.
#[derive(Debug)]
pub struct SavedScores<E: Engine>(Option<E::Buffer>);

impl<E: Engine> Saved<E> for SavedScores<E> {
    fn into_buffers(self) -> Vec<E::Buffer> {
        self.0.into_iter().collect()
    }
}

impl<E: Engine> NextToken<E> {
    fn ids(batch: &IndexBatch<E>) -> TokenIds<'_, E> {
        TokenIds { tokens: &batch.inputs, types: None }
    }
}

impl<E: Engine> Task<E> for NextToken<E> {
    type Config = TransformerConfig;
    type Batch = IndexBatch<E>;
    type Input = TokenEmbedding<E>;
    type Head = Linear<E>;
    type SavedInput = SavedEmbedding<E>;
    type SavedHead = SavedScores<E>;

    fn transformer(config: &TransformerConfig) -> Result<TransformerConfig> {
        config.validate()?;
        expect_trainable(config)?;
        Ok(config.clone())
    }

    fn deviation(config: &TransformerConfig, name: &str) -> f64 {
        let ends_block = name.ends_with("attn.out.weight") || name.ends_with("mlp.down.weight");
        let ending = 1.0 / ((2 * config.layers) as f64).sqrt();
        if ends_block { INITIAL_DEVIATION * ending } else { INITIAL_DEVIATION }
    }

    fn build(builder: &Builder<'_, E>, config: &TransformerConfig) -> Result<Self> {
        let (tied, shape) = (config.is_tied(), (config.vocabulary(), config.width));
        Ok(NextToken {
            embedding: TokenEmbedding::new(builder, tied)?,
            head: builder.linear("head", shape, false)?,
            tied,
            soft_cap: config.logit_soft_cap(),
        })
    }

    fn input(&self) -> &TokenEmbedding<E> {
        &self.embedding
    }

    fn head(&self) -> &Linear<E> {
        &self.head
    }

    fn input_and_head_mut(&mut self) -> (&mut TokenEmbedding<E>, &mut Linear<E>) {
        (&mut self.embedding, &mut self.head)
    }

    fn table(&self) -> Option<&Parameter<E>> {
        self.tied.then_some(self.head.weight())
    }

    fn positions(config: &TransformerConfig) -> usize {
        config.context()
    }

    fn note_squared_relu(config: &mut TransformerConfig) -> Result<()> {
        config.feed_forward.activation = Nonlinearity::SquaredRelu;
        Ok(())
    }

    fn metadata(config: &TransformerConfig) -> serde_json::Result<(&'static str, String)> {
        Ok(match GptConfig::of(config) {
            Some(config) => (GPT_KEY, serde_json::to_string(&config)?),
            None => (DECODER_KEY, serde_json::to_string(config)?),
        })
    }

    fn expect_shape(&self, config: &TransformerConfig, shape: BatchShape) -> Result<()> {
        expect_sequences(shape, config.context())
    }

    fn expect_batch(&self, config: &TransformerConfig, batch: (&[u32], &[u32]), shape: BatchShape) -> Result<()> {
        for (what, ids) in [("inputs", batch.0), ("targets", batch.1)] {
            if ids.len() != shape.tokens() {
                return Err(Error::length(what, shape.tokens(), ids.len()));
            }
            expect_below(what, ids, config.vocabulary())?;
        }
        Ok(())
    }

    fn upload(
        &self,
        engine: &E,
        _: &TransformerConfig,
        batch: (&[u32], &[u32]),
        _: BatchShape,
        to: &mut Option<IndexBatch<E>>,
    ) -> Result<()> {
        IndexBatch::upload(engine, batch, to)
    }

    fn targets(batch: &IndexBatch<E>) -> &E::Buffer {
        &batch.targets
    }

    fn classes(&self, _: BatchShape) -> usize {
        self.head.out_features()
    }

    fn embed(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (_, batch): (&TransformerConfig, &IndexBatch<E>),
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedEmbedding<E>)> {
        let table = self.tied.then_some(self.head.weight());
        self.embedding.forward(engine, workspace, &Self::ids(batch), table, shape)
    }

    fn embed_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, batch): (SavedEmbedding<E>, &IndexBatch<E>),
        dx: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<()> {
        let table = self.tied.then_some(self.head.weight_mut());
        self.embedding.backward(engine, workspace, (saved, &Self::ids(batch), table), dx, shape, accumulate)
    }

    fn scores(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (hidden, _): (&E::Buffer, &IndexBatch<E>),
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedScores<E>)> {
        let mut scores = workspace.compute(engine, shape.tokens() * self.head.out_features())?;
        self.head.forward(engine, hidden, shape.tokens(), &mut scores)?;
        let Some(cap) = self.soft_cap else { return Ok((scores, SavedScores(None))) };
        let mut bounded = workspace.compute(engine, scores.len())?;
        engine.activation(Elementwise::SoftCap(cap), &scores, &mut bounded)?;
        Ok((bounded, SavedScores(Some(scores))))
    }

    fn scores_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (hidden, SavedScores(unbounded), _): (E::Buffer, SavedScores<E>, &IndexBatch<E>),
        mut d_scores: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        if let (Some(cap), Some(unbounded)) = (self.soft_cap, unbounded) {
            engine.activation_gradient(Elementwise::SoftCap(cap), &unbounded, &mut d_scores, None)?;
            workspace.give([unbounded]);
        }
        self.head.parameter_gradients(engine, &d_scores, &hidden, shape.tokens(), accumulate)?;
        let mut d_hidden = hidden;
        self.head.input_gradient(engine, &d_scores, shape.tokens(), &mut d_hidden)?;
        workspace.give([d_scores]);
        Ok(d_hidden)
    }
}

/// An error for sequences that are none, empty, or longer than the context.
pub(in crate::model) fn expect_sequences(shape: BatchShape, context: usize) -> Result<()> {
    let BatchShape { batch, positions } = shape;
    if batch == 0 || positions == 0 || positions > context {
        let found = format!("{batch} sequences of {positions} tokens");
        let expected = "at least one sequence of at least one token and at most the context";
        return Err(Error::Setting { what: "the batch", found, expected });
    }
    Ok(())
}

/// Checks that a decoder trains.
///
/// # Errors
/// [`Error::Setting`] for a context whose rotary tables would be too large: they hold an angle for each position and
/// pair of elements, and no tensor of a file vouches for them.
pub(crate) fn expect_trainable(config: &TransformerConfig) -> Result<()> {
    const MAX_ANGLES: usize = 1 << 25;
    if let Some(what) = config.untrainable() {
        let remedy = "leave training and tuning out: such models run, are scored and are pruned without";
        return Err(Error::Unsupported { engine: "training", what: what.into(), remedy });
    }
    let (context, head_dim) = (config.context(), config.attention.head_dim);
    if matches!(config.positions, Positions::Rotary(_)) && context * (head_dim / 2) > MAX_ANGLES {
        let found = format!("{context} with heads of {head_dim} elements");
        let expected = "at most 2^26 elements of all positions of one head together";
        return Err(Error::Setting { what: "context", found, expected });
    }
    Ok(())
}
