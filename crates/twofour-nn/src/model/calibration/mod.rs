//! Running texts through a checkpoint block after block, with the weights of one block in memory at a time: what
//! pruning by activations needs.

mod decoder;
mod encoder;
#[cfg(test)]
mod tests;

use std::{cell::OnceCell, fmt, ops::ControlFlow, path::Path};

use twofour::file::Reader;

use super::{
    Checkpoint, CheckpointError, EncoderCheckpoint, Tokenizer,
    checkpoint::kind,
    families::{Family, Kind},
};
use crate::{Error, Result};

/// The input of linear layers.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The names of the weights that are multiplied with it, as the checkpoint has them: queries, keys and values share
    /// one input, and so do gate and up.
    pub weights: &'a [String],
    /// The input, `[tokens, in_features]`.
    pub x: &'a [f32],
    /// Number of tokens.
    pub tokens: usize,
    /// Whether the weights are stored as `[in_features, out_features]` (GPT-2).
    pub is_transposed: bool,
}

/// The values of a weight that replaces the stored one, by its name and in its stored shape; none to leave it.
pub type Replace<'a> = &'a dyn Fn(&str) -> Option<Vec<f32>>;

/// What sees the inputs of linear layers. After a break the block computes no further.
pub type Observe<'a> = &'a mut dyn FnMut(Observation<'_>) -> ControlFlow<()>;

/// A checkpoint whose blocks are read and run one at a time: [`Checkpoint`] and [`EncoderCheckpoint`].
pub trait BlockwiseCheckpoint: fmt::Debug {
    /// The files of weights.
    fn reader(&self) -> &Reader;

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    fn tokenizer(&self) -> Result<Tokenizer>;

    /// The tokens that the model reads before and after every text: none of a decoder, which goes on from anywhere.
    ///
    /// # Errors
    /// Those of [`Tokenizer::framing`].
    fn framing(&self, tokenizer: &Tokenizer) -> Result<[Vec<u32>; 2]>;

    /// The longest text, in tokens.
    fn context(&self) -> usize;

    /// Elements of a token's hidden state.
    fn width(&self) -> usize;

    /// Number of blocks.
    fn blocks(&self) -> usize;

    /// The hidden states of each text before the first block, `[tokens, width]`. Texts have from 1 token to
    /// [`BlockwiseCheckpoint::context`].
    ///
    /// # Errors
    /// A token outside the vocabulary; those of reading the embedding.
    fn embed(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>>;

    /// Reads a block, with the weights that `replace` returns in place of the stored ones.
    ///
    /// # Errors
    /// Those of reading; a replaced weight of another length.
    fn block(&self, index: usize, replace: Option<Replace<'_>>) -> Result<Box<dyn CheckpointBlock + '_>>;
}

/// A block of a [`BlockwiseCheckpoint`], in memory.
pub trait CheckpointBlock {
    /// Runs one text's hidden states `x: [tokens, width]` through the block, in place, and shows the inputs of its
    /// linear layers. Where `observe` breaks, `x` is of no more use.
    ///
    /// # Errors
    /// Those of the products.
    fn run(&self, x: &mut Vec<f32>, observe: Observe<'_>) -> Result<()>;
}

/// Opens a directory with a decoder or an encoder, as its configuration says.
///
/// # Errors
/// Those of [`Checkpoint::open`] and [`EncoderCheckpoint::open`]; a `model_type` that neither reads.
pub fn open_blockwise(directory: impl AsRef<Path>) -> Result<Box<dyn BlockwiseCheckpoint>> {
    let directory = directory.as_ref();
    match kind(directory)? {
        Some(Kind::Encoder) => Ok(Box::new(EncoderCheckpoint::open(directory)?)),
        _ => Checkpoint::open(directory).map_err(also_encoders).map(|checkpoint| Box::new(checkpoint) as _),
    }
}

/// Names encoders, too, among what is supported.
fn also_encoders(error: Error) -> Error {
    match error {
        Error::Checkpoint(CheckpointError::UnsupportedModel { path, found, .. }) => {
            let supported = Family::names(&[Kind::Decoder, Kind::Encoder]);
            CheckpointError::UnsupportedModel { path, found, supported }.into()
        }
        other => other,
    }
}

/// Texts on their way through a checkpoint. In memory are the hidden states of all texts, in f32, and the weights of
/// one block; twice as many where the dense model's states are kept beside those of the pruned one.
///
/// ```no_run
/// use twofour_nn::model::{Calibration, Checkpoint};
/// let checkpoint = Checkpoint::open("model")?;
/// let text = checkpoint.tokenizer()?.encode("calibration text")?;
/// let mut calibration = Calibration::new(&checkpoint, &[text])?;
/// while !calibration.is_finished() {
///     calibration.observe(&mut |input| println!("{:?}: {} tokens", input.weights, input.tokens))?;
///     // Prune the block's weights here, and go on with what the pruned block computes.
///     calibration.advance(&|_| None)?;
/// }
/// # Ok::<(), twofour_nn::Error>(())
/// ```
pub struct Calibration<'a> {
    checkpoint: &'a dyn BlockwiseCheckpoint,
    /// The hidden states of each text, `[tokens, width]`.
    texts: Vec<Vec<f32>>,
    /// The same in the model as it is stored, where these are kept.
    dense: Option<Vec<Vec<f32>>>,
    block: usize,
    /// The next block as it is stored, once it has been read.
    stored: OnceCell<Box<dyn CheckpointBlock + 'a>>,
    is_stopped: &'a dyn Fn() -> bool,
}

impl fmt::Debug for Calibration<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calibration").field("texts", &self.texts.len()).field("block", &self.block).finish()
    }
}

impl<'a> Calibration<'a> {
    /// Texts, as tokens, before the first block.
    ///
    /// # Errors
    /// A text that is empty or longer than the model's context, a token outside the vocabulary; those of reading the
    /// embedding.
    pub fn new(checkpoint: &'a dyn BlockwiseCheckpoint, texts: &[Vec<u32>]) -> Result<Self> {
        let context = checkpoint.context();
        for text in texts {
            if text.is_empty() || text.len() > context {
                let found = format!("{} tokens for a context of {context}", text.len());
                return Err(Error::Setting { what: "a calibration text", found, expected: "from 1 to the context" });
            }
        }
        Ok(Calibration {
            checkpoint,
            texts: checkpoint.embed(texts)?,
            dense: None,
            block: 0,
            stored: OnceCell::new(),
            is_stopped: &|| false,
        })
    }

    /// Keeps the hidden states of the stored model, too, from here on: [`Calibration::observe_input`] shows both.
    #[must_use]
    pub fn beside_dense(self) -> Self {
        Calibration { dense: Some(self.texts.clone()), ..self }
    }

    /// Asks before each text whether to stop.
    #[must_use]
    pub fn stopped_by(self, is_stopped: &'a dyn Fn() -> bool) -> Self {
        Calibration { is_stopped, ..self }
    }

    /// The block that [`Calibration::observe`] and [`Calibration::advance`] run next.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Whether the texts are through the last block.
    pub fn is_finished(&self) -> bool {
        self.block >= self.checkpoint.blocks()
    }

    /// Runs every text through the next block with its stored weights, and shows the inputs of the block's linear
    /// layers, text by text. The texts stay in front of the block.
    ///
    /// # Errors
    /// Those of reading the block's weights and of its products; a call after the last block;
    /// [`twofour::Error::Interrupted`] where [`Calibration::stopped_by`] asks for it.
    pub fn observe(&self, observe: &mut dyn FnMut(Observation<'_>)) -> Result<()> {
        let block = self.stored()?;
        self.texts.iter().try_for_each(|text| {
            go_on(self.is_stopped)?;
            block.run(&mut text.clone(), &mut |input| {
                observe(input);
                ControlFlow::Continue(())
            })
        })
    }

    /// Returns the names of the weights that read each input of the next block's linear layers, in the order of
    /// computation.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`].
    pub fn inputs(&self) -> Result<Vec<Vec<String>>> {
        let block = self.stored()?;
        let mut inputs = vec![];
        if let Some(text) = self.texts.first() {
            // One token passes all layers.
            let mut token = text[..self.checkpoint.width()].to_vec();
            block.run(&mut token, &mut |input| {
                inputs.push(input.weights.to_vec());
                ControlFlow::Continue(())
            })?;
        }
        Ok(inputs)
    }

    /// Runs every text through the next block, as far as the linear layers that read the same input as the weight
    /// `name`, and shows that input, text by text: of the block with the weights that `replace` returns in place of the
    /// stored ones, and, where they are kept ([`Calibration::beside_dense`]), of the stored block on the stored model's
    /// hidden states. The texts stay in front of the block.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`]; a replaced weight of another length.
    pub fn observe_input(
        &self,
        name: &str,
        replace: Replace<'_>,
        observe: &mut dyn FnMut(Observation<'_>, Option<&[f32]>),
    ) -> Result<()> {
        let block = self.next_block(Some(replace))?;
        let stored = self.dense.as_ref().map(|_| self.stored()).transpose()?;
        let reads = |input: &Observation<'_>| input.weights.iter().any(|weight| weight == name);
        for (index, text) in self.texts.iter().enumerate() {
            go_on(self.is_stopped)?;
            let mut beside = None;
            if let (Some(stored), Some(texts)) = (&stored, &self.dense) {
                stored.run(&mut texts[index].clone(), &mut |input| match reads(&input) {
                    true => {
                        beside = Some(input.x.to_vec());
                        ControlFlow::Break(())
                    }
                    false => ControlFlow::Continue(()),
                })?;
            }
            block.run(&mut text.clone(), &mut |input| match reads(&input) {
                true => {
                    observe(input, beside.as_deref());
                    ControlFlow::Break(())
                }
                false => ControlFlow::Continue(()),
            })?;
        }
        Ok(())
    }

    /// Runs every text through the next block, with the weights that `replace` returns in place of the stored ones.
    /// After an error the texts are of no more use.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`]; a replaced weight of another length.
    pub fn advance(&mut self, replace: Replace<'_>) -> Result<()> {
        let is_stopped = self.is_stopped;
        let run = |block: &dyn CheckpointBlock, texts: &mut [Vec<f32>]| {
            texts.iter_mut().try_for_each(|x| {
                go_on(is_stopped)?;
                block.run(x, &mut |_| ControlFlow::Continue(()))
            })
        };
        if let Some(mut texts) = self.dense.take() {
            run(self.stored()?, &mut texts)?;
            self.dense = Some(texts);
        }
        self.stored = OnceCell::new();
        let block = self.next_block(Some(replace))?;
        run(block.as_ref(), &mut self.texts)?;
        self.block += 1;
        Ok(())
    }

    /// The hidden states of each text in front of the next block, `[tokens, width]`.
    pub fn texts(&self) -> &[Vec<f32>] {
        &self.texts
    }

    fn stored(&self) -> Result<&(dyn CheckpointBlock + 'a)> {
        let block = match self.stored.get() {
            Some(block) => block,
            None => {
                let block = self.next_block(None)?;
                self.stored.get_or_init(|| block)
            }
        };
        Ok(block.as_ref())
    }

    fn next_block(&self, replace: Option<Replace<'_>>) -> Result<Box<dyn CheckpointBlock + 'a>> {
        if self.is_finished() {
            let found = self.block.to_string();
            return Err(Error::Setting { what: "block", found, expected: "one of the model's" });
        }
        self.checkpoint.block(self.block, replace)
    }
}

fn go_on(is_stopped: &dyn Fn() -> bool) -> Result<()> {
    if is_stopped() { Err(twofour::Error::Interrupted.into()) } else { Ok(()) }
}
