//! Predicting masked tokens, and finding answers to questions.

use twofour::layer::Accumulate;

use super::{
    BertBatch, BertConfig, EncoderTask,
    head::{BertHead, MaskedHead, SavedBertHead},
    inputs::Unpacked,
};
use crate::{
    Error, Result,
    block::{BatchShape, Workspace},
    engine::Engine,
    model::{
        Task, TransformerConfig,
        gpt::expect_sequences,
        transformer::{Builder, INITIAL_DEVIATION, SavedEmbedding, TokenEmbedding, TokenIds},
    },
    parameter::Parameter,
};

/// The metadata key that holds an encoder's [`BertConfig`] as JSON.
const BERT_KEY: &str = "twofour.bert";

/// The embeddings of an encoder, and the head of its [`EncoderTask`].
#[derive(Debug)]
pub struct EncoderTasks<E: Engine> {
    embedding: TokenEmbedding<E>,
    head: BertHead<E>,
}

impl<E: Engine> EncoderTasks<E> {
    fn ids(batch: &BertBatch<E>) -> TokenIds<'_, E> {
        TokenIds { tokens: &batch.tokens, types: Some(&batch.types) }
    }
}

impl<E: Engine> Task<E> for EncoderTasks<E> {
    type Config = BertConfig;
    type Batch = BertBatch<E>;
    type Input = TokenEmbedding<E>;
    type Head = BertHead<E>;
    type SavedInput = SavedEmbedding<E>;
    type SavedHead = SavedBertHead<E>;

    fn transformer(config: &BertConfig) -> Result<TransformerConfig> {
        config.validate()?;
        Ok(config.encoder.clone())
    }

    fn deviation(_: &BertConfig, _: &str) -> f64 {
        INITIAL_DEVIATION
    }

    fn build(builder: &Builder<'_, E>, config: &BertConfig) -> Result<Self> {
        let (width, vocabulary) = (config.encoder.width, config.encoder.vocabulary());
        let head = match config.task {
            EncoderTask::MaskedTokens => {
                let transform = builder.linear("head.transform", (width, width), true)?;
                let decoder = builder.linear("embedding", (vocabulary, width), true)?;
                let head = MaskedHead::new(
                    transform,
                    builder.norm("head.norm")?,
                    decoder,
                    config.encoder.feed_forward.activation,
                );
                BertHead::Masked(Box::new(head))
            }
            EncoderTask::Answers => BertHead::Answers(builder.linear("answers", (2, width), true)?),
        };
        Ok(EncoderTasks { embedding: TokenEmbedding::new(builder, config.task == EncoderTask::MaskedTokens)?, head })
    }

    fn input(&self) -> &TokenEmbedding<E> {
        &self.embedding
    }

    fn head(&self) -> &BertHead<E> {
        &self.head
    }

    fn input_and_head_mut(&mut self) -> (&mut TokenEmbedding<E>, &mut BertHead<E>) {
        (&mut self.embedding, &mut self.head)
    }

    fn table(&self) -> Option<&Parameter<E>> {
        self.head.table()
    }

    fn positions(config: &BertConfig) -> usize {
        config.positions
    }

    fn note_squared_relu(_: &mut BertConfig) -> Result<()> {
        Err(Error::Unsupported {
            engine: "training",
            what: "squared ReLU in an encoder".to_owned(),
            remedy: "choose another method than \"activation\"",
        })
    }

    fn metadata(config: &BertConfig) -> serde_json::Result<(&'static str, String)> {
        Ok((BERT_KEY, serde_json::to_string(config)?))
    }

    fn expect_shape(&self, config: &BertConfig, shape: BatchShape) -> Result<()> {
        expect_sequences(shape, config.encoder.context())
    }

    /// Samples are checked as they are brought to the engine's memory.
    fn expect_batch(&self, _: &BertConfig, _: (&[u32], &[u32]), _: BatchShape) -> Result<()> {
        Ok(())
    }

    fn upload(
        &self,
        engine: &E,
        config: &BertConfig,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        to: &mut Option<BertBatch<E>>,
    ) -> Result<()> {
        let unpacked = Unpacked::of(config.task, inputs, shape)?;
        let samples = unpacked.samples(targets, shape);
        match to {
            Some(there) => there.write(engine, config, samples),
            None => {
                *to = Some(BertBatch::new(engine, config, samples)?);
                Ok(())
            }
        }
    }

    fn targets(batch: &BertBatch<E>) -> &E::Buffer {
        &batch.targets
    }

    fn classes(&self, shape: BatchShape) -> usize {
        self.head.classes(shape)
    }

    fn embed(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (_, batch): (&BertConfig, &BertBatch<E>),
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedEmbedding<E>)> {
        let EncoderTasks { embedding, head } = self;
        embedding.forward(engine, workspace, &Self::ids(batch), head.table(), shape)
    }

    fn embed_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, batch): (SavedEmbedding<E>, &BertBatch<E>),
        dx: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<()> {
        let EncoderTasks { embedding, head } = self;
        let saved = (saved, &Self::ids(batch), head.table_mut());
        embedding.backward(engine, workspace, saved, dx, shape, accumulate)
    }

    fn scores(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        hidden: (&E::Buffer, &BertBatch<E>),
        _: BatchShape,
    ) -> Result<(E::Buffer, SavedBertHead<E>)> {
        self.head.scores(engine, workspace, hidden)
    }

    fn scores_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: (E::Buffer, SavedBertHead<E>, &BertBatch<E>),
        d_scores: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        self.head.gradient(engine, workspace, saved, d_scores, shape.tokens(), accumulate)
    }
}
