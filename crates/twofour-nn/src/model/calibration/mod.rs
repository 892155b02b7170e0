//! Running texts through a checkpoint block after block, with the weights of one block in memory at a time: what
//! pruning by activations needs.

mod decoder;
mod encoder;
mod free;
#[cfg(feature = "cuda")]
mod gpu;
mod inputs;
mod prompt;
mod runner;
#[cfg(test)]
mod tests;

use std::{cell::OnceCell, fmt, ops::Range, path::Path};

use twofour::file::Reader;
#[cfg(feature = "cuda")]
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

pub use free::{FreeFeatures, OutputOrder};
#[cfg(feature = "cuda")]
pub use gpu::GpuRunner;
pub use runner::{Gathered, Host, HostGathered, Runner, States};

use prompt::{behind, observation};

use super::{
    BlockInput, Checkpoint, CheckpointError, EncoderCheckpoint, Observation, Replace, Tokenizer,
    checkpoint::kind,
    families::{Family, Kind},
};
use crate::{Error, Result};

/// What the stored model has for the same tokens.
#[derive(Debug, Clone, Copy)]
pub enum Beside<X> {
    /// It is not run.
    Nothing,
    /// The input, `[tokens, in_features]`.
    Inputs(X),
    /// The products of the one weight that reads the input, `[tokens, out_features]`, without its bias, where they are
    /// added to the hidden states.
    Outputs(X),
}

/// What sees inputs, text by text.
pub type Observe<'f, S> =
    &'f mut dyn for<'a> FnMut(Observation<'a, <S as States>::View<'a>>, Beside<<S as States>::View<'a>>);

/// A checkpoint whose blocks are read and run one at a time: [`Checkpoint`] and [`EncoderCheckpoint`].
pub trait BlockwiseCheckpoint: fmt::Debug {
    /// The files of weights.
    fn reader(&self) -> &Reader;

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    fn tokenizer(&self) -> Result<Tokenizer>;

    /// The tokens that the model reads before and after every text: of a Gemma `<bos>`, of other decoders none.
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

    /// Reads a block into the memory of a GPU, in f32, as [`BlockwiseCheckpoint::block`] does.
    ///
    /// # Errors
    /// Those of [`BlockwiseCheckpoint::block`] and of the device's memory; [`Error::Unsupported`] for what the GPU's
    /// kernels do not have.
    #[cfg(feature = "cuda")]
    fn gpu_block(
        &self,
        context: &LayerContext,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock<DeviceBuffer> + '_>>;
}

/// What a block computed up to the input of its next linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stepped<S> {
    /// The input of the next layer; nothing where that layer reads the hidden states, which were changed.
    pub next: Option<S>,
    /// The products of a layer that changes the hidden states, without its bias, where they were asked for.
    pub products: Option<S>,
}

/// The part of an input that some linear layers read: the tokens that an expert gets.
#[derive(Debug, Clone, PartialEq)]
pub struct InputPart<S = Vec<f32>> {
    /// The values, `[tokens, features]`.
    pub x: S,
    /// Elements of a token.
    pub features: usize,
    /// The tokens, by their numbers in the text.
    pub tokens: Vec<usize>,
}

/// A block of a [`BlockwiseCheckpoint`], in memory. It is computed in steps, from one input of linear layers to the
/// next; experts read parts of one input in one step.
pub trait CheckpointBlock<S: States = Vec<f32>> {
    /// The inputs, in the order of computation.
    fn inputs(&self) -> &[BlockInput];

    /// Number of steps.
    fn steps(&self) -> usize {
        self.inputs().len()
    }

    /// The step that computes the layers which read an input.
    fn step_of(&self, index: usize) -> usize {
        index
    }

    /// The features of an input that may stand in another order, where there are any.
    fn free_features(&self, _index: usize) -> Option<&FreeFeatures> {
        None
    }

    /// Returns the input of a step, of a text that was computed up to it: from its hidden states `x: [tokens, width]`
    /// or from what the step before it returned.
    ///
    /// # Errors
    /// Those of the memory.
    fn input(&self, step: usize, x: &mut S, between: Option<S>) -> Result<S>;

    /// Returns the part of a step's input that the layers of an input's number read; nothing where they read all of it.
    ///
    /// # Errors
    /// Those of the products of a router.
    fn part(&self, _index: usize, _x: &S, _input: &S) -> Result<Option<InputPart<S>>> {
        Ok(None)
    }

    /// The step in front of which a router reads the hidden states, where the layers of an input's number read a part.
    fn routed_at(&self, _index: usize) -> Option<usize> {
        None
    }

    /// Returns what the layers of an input's number would read of these tokens, whether a router sends them there or
    /// not, from the hidden states `x: [tokens, width]` in front of [`CheckpointBlock::routed_at`]; nothing where they
    /// read all of a step's input.
    ///
    /// # Errors
    /// Those of the products; a token that is not there.
    fn part_of(&self, _index: usize, _tokens: &[usize], _x: &S) -> Result<Option<S>> {
        Ok(None)
    }

    /// Computes the layers of a step, and what follows them up to the next, for the hidden states
    /// `x: [tokens, width]`; with the products of a layer that changes them, where `shows_products` asks for it.
    ///
    /// # Errors
    /// Those of the products.
    fn step(&self, step: usize, input: &S, x: &mut S, shows_products: bool) -> Result<Stepped<S>>;
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

/// A text in front of an input of a block.
#[derive(Debug)]
struct Text<S> {
    /// The hidden states, `[tokens, width]`.
    x: S,
    /// The input, where it is not read from the hidden states.
    between: Option<S>,
}

impl<S: States> Text<S> {
    fn copied(&self) -> Result<Self> {
        let all = |values: &S| values.first(values.elements());
        Ok(Text { x: all(&self.x)?, between: self.between.as_ref().map(all).transpose()? })
    }

    /// Takes the text through steps of the block.
    fn run(&mut self, block: &dyn CheckpointBlock<S>, steps: Range<usize>) -> Result<()> {
        for step in steps {
            let input = self.input(block, step)?;
            self.between = block.step(step, &input, &mut self.x, false)?.next;
        }
        Ok(())
    }

    /// The input of the step in front of which the text is.
    fn input(&mut self, block: &dyn CheckpointBlock<S>, step: usize) -> Result<S> {
        block.input(step, &mut self.x, self.between.take())
    }
}

/// What was shown of an input that is a part of a step's.
#[derive(Debug, Clone, Copy, Default)]
struct ShownPart {
    /// Elements of a token; 0 of a whole input.
    features: usize,
    tokens: usize,
    /// Whether the stored model's is shown beside it.
    has_dense: bool,
}

impl ShownPart {
    /// Shows what the layers of an input's number read of the input `x` of their step, but for that of a text's first
    /// tokens; nothing where they read all of it. Beside it is what they would read of the same tokens in the stored
    /// block, from its hidden states, where these are there.
    fn show<S: States>(
        &mut self,
        (block, index): (&dyn CheckpointBlock<S>, usize),
        (states, x): (&S, &S),
        dense: Option<(&dyn CheckpointBlock<S>, &S)>,
        prompt: usize,
        observe: Observe<'_, S>,
    ) -> Result<bool> {
        let (Some(part), Some(input)) = (block.part(index, states, x)?, block.inputs().get(index)) else {
            return Ok(false);
        };
        let before = part.tokens.iter().filter(|token| **token < prompt).count();
        let tokens = part.tokens.len() - before;
        let x = S::last(part.x.view(), part.x.elements() - before * part.features)?;
        let of_dense = |(stored, states): (&dyn CheckpointBlock<S>, &S)| {
            stored.part_of(index, part.tokens.get(before..).unwrap_or_default(), states)
        };
        let beside = dense.map(of_dense).transpose()?.flatten();
        let shown = beside.as_ref().map_or(Beside::Nothing, |beside| Beside::Inputs(beside.view()));
        observe(Observation { input, x, tokens }, shown);
        *self = ShownPart { features: part.features, tokens: self.tokens + tokens, has_dense: beside.is_some() };
        Ok(true)
    }

    /// Shows an expert's input where it got no token of any text: as if its features were alike and independent, and
    /// those of the stored model.
    fn finish<R: Runner>(self, runner: &R, input: &BlockInput, observe: Observe<'_, R::States>) -> Result<()> {
        let ShownPart { features, tokens, has_dense } = self;
        if tokens == 0 && features > 0 {
            let mut x = vec![0.0; features * features];
            x.iter_mut().step_by(features + 1).for_each(|value| *value = 1.0);
            let x = runner.states(x)?;
            let beside = if has_dense { Beside::Inputs(x.view()) } else { Beside::Nothing };
            observe(Observation { input, x: x.view(), tokens: features }, beside);
        }
        Ok(())
    }
}

/// All texts on their way through one model.
#[derive(Debug)]
struct Texts<S> {
    texts: Vec<Text<S>>,
    /// The step in front of which they are.
    at: usize,
}

impl<S: States> Texts<S> {
    fn new(states: impl IntoIterator<Item = Result<S>>) -> Result<Self> {
        let texts = states.into_iter().map(|x| Ok(Text { x: x?, between: None })).collect::<Result<_>>()?;
        Ok(Texts { texts, at: 0 })
    }

    /// A copy of the first `count` texts.
    fn copied(&self, count: usize) -> Result<Self> {
        Ok(Texts { texts: self.texts.iter().take(count).map(Text::copied).collect::<Result<_>>()?, at: self.at })
    }

    fn states(&self) -> Vec<S::View<'_>> {
        self.texts.iter().map(|text| text.x.view()).collect()
    }

    /// Elements of all hidden states.
    fn elements(&self) -> usize {
        self.texts.iter().map(|text| text.x.elements()).sum()
    }
}

type BoxedBlock<'a, S> = Box<dyn CheckpointBlock<S> + 'a>;

/// Texts on their way through a checkpoint. In memory are the hidden states of all texts, in f32, and the weights of
/// one block; twice as many where the dense model's states are kept beside those of the pruned one.
///
/// ```no_run
/// use twofour_nn::model::{Calibration, Checkpoint};
/// let checkpoint = Checkpoint::open("model")?;
/// let text = checkpoint.tokenizer()?.encode("calibration text")?;
/// let mut calibration = Calibration::new(&checkpoint, &[text])?;
/// while !calibration.is_finished() {
///     for index in 0..calibration.inputs()?.len() {
///         // Weights that were pruned before are replaced here, so that later inputs are those of the pruned block.
///         calibration.observe(index, &|_| None, &mut |seen, _| {
///             println!("{:?}: {}", seen.input.weights, seen.tokens);
///         })?;
///     }
///     calibration.advance(&|_| None)?;
/// }
/// # Ok::<(), twofour_nn::Error>(())
/// ```
pub struct Calibration<'a, R: Runner = Host> {
    runner: &'a R,
    checkpoint: &'a dyn BlockwiseCheckpoint,
    texts: Texts<R::States>,
    /// The texts on their way through the stored model, where these are kept.
    dense: Option<Texts<R::States>>,
    /// The hidden states in front of the block, where these are kept.
    entry: Option<Vec<R::States>>,
    block: usize,
    /// The next block as it is stored, once it has been read.
    stored: OnceCell<BoxedBlock<'a, R::States>>,
    /// The next block with replaced weights, as the step of that number reads it.
    replaced: Option<(usize, BoxedBlock<'a, R::States>)>,
    /// Bytes that the inputs between two steps may take.
    room: u64,
    /// The first tokens of each text, whose inputs are not shown.
    prompt: usize,
    is_stopped: &'a dyn Fn() -> bool,
}

impl<R: Runner> fmt::Debug for Calibration<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calibration").field("texts", &self.texts.texts.len()).field("block", &self.block).finish()
    }
}

impl<'a> Calibration<'a> {
    /// Texts, as tokens, before the first block, on the CPU.
    ///
    /// # Errors
    /// Those of [`Calibration::on`].
    pub fn new(checkpoint: &'a dyn BlockwiseCheckpoint, texts: &[Vec<u32>]) -> Result<Self> {
        Self::on(&Host, checkpoint, texts)
    }
}

impl<'a, R: Runner> Calibration<'a, R> {
    /// Texts, as tokens, before the first block, where `runner` computes.
    ///
    /// # Errors
    /// A text that is empty or longer than the model's context, a token outside the vocabulary; those of reading the
    /// embedding and of the runner's memory.
    pub fn on(runner: &'a R, checkpoint: &'a dyn BlockwiseCheckpoint, texts: &[Vec<u32>]) -> Result<Self> {
        let context = checkpoint.context();
        for text in texts {
            if text.is_empty() || text.len() > context {
                let found = format!("{} tokens for a context of {context}", text.len());
                return Err(Error::Setting { what: "a calibration text", found, expected: "from 1 to the context" });
            }
        }
        let states = checkpoint.embed(texts)?.into_iter().map(|values| runner.states(values));
        Ok(Calibration {
            runner,
            checkpoint,
            texts: Texts::new(states)?,
            dense: None,
            entry: None,
            block: 0,
            stored: OnceCell::new(),
            replaced: None,
            room: 0,
            prompt: 0,
            is_stopped: &|| false,
        })
    }

    /// Keeps the hidden states of the stored model, too, from here on, of the first `count` texts:
    /// [`Calibration::observe`] shows both.
    ///
    /// # Errors
    /// Those of the runner's memory.
    pub fn beside_dense_of(self, count: usize) -> Result<Self> {
        Ok(Calibration { dense: Some(self.texts.copied(count)?), ..self })
    }

    /// Keeps the hidden states in front of each block until the texts are through it: [`Calibration::entry`].
    ///
    /// # Errors
    /// Those of the runner's memory.
    pub fn keeping_entry(self) -> Result<Self> {
        Ok(Calibration { entry: Some(copies(&self.texts)?), ..self })
    }

    /// Keeps the inputs of a block's last layers until the next call, where those of all texts take at most so many
    /// bytes. They are several times as large as the hidden states; otherwise they are computed once more.
    #[must_use]
    pub fn with_room(self, bytes: u64) -> Self {
        Calibration { room: bytes, ..self }
    }

    /// Shows no inputs of the first tokens of each text: those of a prompt, where the model wrote what follows.
    #[must_use]
    pub fn behind_prompt(self, tokens: usize) -> Self {
        Calibration { prompt: tokens, ..self }
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

    /// Returns the inputs of the next block's linear layers, in the order of computation.
    ///
    /// # Errors
    /// Those of reading the block's weights; a call after the last block.
    pub fn inputs(&self) -> Result<Vec<BlockInput>> {
        Ok(self.stored()?.inputs().to_vec())
    }

    /// Returns the features of an input of the next block that may stand in another order, where there are any.
    ///
    /// # Errors
    /// Those of [`Calibration::inputs`].
    pub fn free_features(&self, index: usize) -> Result<Option<FreeFeatures>> {
        Ok(self.stored()?.free_features(index).cloned())
    }

    /// Runs every text through the next block, as far as the input of that number, and shows it, text by text: of the
    /// block with the weights that `replace` returns in place of the stored ones, and, where they are kept
    /// ([`Calibration::beside_dense_of`]), of the stored block on the stored model's hidden states. Calls go from one
    /// input to a later one; weights that read earlier ones must not change between them. After an error the texts are
    /// of no more use.
    ///
    /// For an expert, the part of each text that it gets is shown; beside it is what the stored expert would read of
    /// the same tokens, which the stored model may send elsewhere. For an expert that gets no token of any text, the
    /// rows of an identity matrix are shown: by them all features count alike.
    ///
    /// # Errors
    /// Those of [`Calibration::inputs`] and of the products; a replaced weight of another length; an input that the
    /// texts are past; [`twofour::Error::Interrupted`] where [`Calibration::stopped_by`] asks for it.
    pub fn observe(&mut self, index: usize, replace: Replace<'_>, observe: Observe<'_, R::States>) -> Result<()> {
        let step = self.stored()?.step_of(index);
        let block = match self.replaced.take() {
            Some((of, block)) if of == step => block,
            _ => self.next_block(Some(replace))?,
        };
        let dense_at = self.dense.as_ref().map_or(step, |dense| dense.at);
        let Some(input) = block.inputs().get(index).filter(|_| self.texts.at <= step && dense_at <= step) else {
            let found = index.to_string();
            return Err(Error::Setting { what: "an input of a block", found, expected: "one that comes next" });
        };
        let width = self.checkpoint.width().max(1);
        let (mut keeps, mut part) = (None, ShownPart::default());
        let routed_at = block.routed_at(index);
        for number in 0..self.texts.texts.len() {
            go_on(self.is_stopped)?;
            let mut text = self.texts.texts[number].copied()?;
            text.run(block.as_ref(), self.texts.at..step)?;
            let is_between = text.between.is_some();
            let x = text.input(block.as_ref(), step)?;
            let tokens = text.x.elements() / width;
            let of_dense = self.dense.as_mut().and_then(|dense| Some((dense.texts.get_mut(number)?, dense.at)));
            let mut of_dense = self.stored.get().map(Box::as_ref).zip(of_dense);
            let dense = match (routed_at, &mut of_dense) {
                (Some(at), Some((stored, (text, dense_at)))) => {
                    text.run(*stored, *dense_at..at)?;
                    Some((*stored, &text.x))
                }
                _ => None,
            };
            if !part.show((block.as_ref(), index), (&text.x, &x), dense, self.prompt, observe)? {
                let observation = observation::<R::States>(input, &x, tokens, self.prompt)?;
                match of_dense {
                    Some((stored, (text, dense_at))) => {
                        text.run(stored, dense_at..step)?;
                        let inputs = text.input(stored, step)?;
                        let Stepped { next, products } = stored.step(step, &inputs, &mut text.x, true)?;
                        text.between = next;
                        let beside = match products.as_ref().filter(|_| input.weights.len() == 1) {
                            Some(outputs) => Beside::Outputs(behind::<R::States>(outputs, tokens, self.prompt)?),
                            None => Beside::Inputs(behind::<R::States>(&inputs, tokens, self.prompt)?),
                        };
                        observe(observation, beside);
                    }
                    None => observe(observation, Beside::Nothing),
                }
            }
            let keeps = *keeps.get_or_insert_with(|| {
                let states = self.texts.elements();
                let features = x.elements() / tokens.max(1);
                let bytes = (states / width).saturating_mul(features * size_of::<f32>()) as u64;
                !is_between || features <= 2 * width || bytes <= self.room
            });
            if keeps {
                if is_between {
                    text.between = Some(x);
                }
                self.texts.texts[number] = text;
            }
        }
        part.finish(self.runner, input, observe)?;
        if keeps == Some(true) {
            self.texts.at = step;
        }
        if let Some(dense) = &mut self.dense {
            dense.at = routed_at.map_or(step + 1, |at| dense.at.max(at));
        }
        self.replaced = Some((step, block));
        Ok(())
    }

    /// Runs the next tokens, at most `tokens` of whole texts but at least one text, through the next block as it is
    /// stored, and shows the inputs of its layers. The texts stay where they are, in front of the block.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`].
    pub fn preview(&self, tokens: usize, observe: Observe<'_, R::States>) -> Result<()> {
        let block = self.stored()?;
        if self.texts.at > 0 {
            let found = self.texts.at.to_string();
            return Err(Error::Setting { what: "an input of a block", found, expected: "the first" });
        }
        let (mut seen, mut parts) = (0, vec![ShownPart::default(); block.inputs().len()]);
        for text in &self.texts.texts {
            go_on(self.is_stopped)?;
            let mut text = text.copied()?;
            let own = text.x.elements() / self.checkpoint.width().max(1);
            for step in 0..block.steps() {
                let x = text.input(block, step)?;
                for ((index, input), part) in block.inputs().iter().enumerate().zip(&mut parts) {
                    if block.step_of(index) == step
                        && !part.show((block, index), (&text.x, &x), None, self.prompt, observe)?
                    {
                        observe(observation::<R::States>(input, &x, own, self.prompt)?, Beside::Nothing);
                    }
                }
                text.between = block.step(step, &x, &mut text.x, false)?.next;
            }
            seen += own;
            if seen >= tokens {
                break;
            }
        }
        for (input, part) in block.inputs().iter().zip(parts) {
            part.finish(self.runner, input, observe)?;
        }
        Ok(())
    }

    /// Runs every text to the end of the next block, with the weights that `replace` returns in place of the stored
    /// ones. After an error the texts are of no more use.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`].
    pub fn advance(&mut self, replace: Replace<'_>) -> Result<()> {
        let is_stopped = self.is_stopped;
        let run = |block: &dyn CheckpointBlock<R::States>, texts: &mut Texts<R::States>| {
            let end = block.steps();
            texts.texts.iter_mut().try_for_each(|text| {
                go_on(is_stopped)?;
                text.run(block, texts.at..end)
            })?;
            texts.at = 0;
            Ok::<(), Error>(())
        };
        if let Some(mut texts) = self.dense.take() {
            run(self.stored()?, &mut texts)?;
            self.dense = Some(texts);
        }
        (self.stored, self.replaced) = (OnceCell::new(), None);
        let block = self.next_block(Some(replace))?;
        run(block.as_ref(), &mut self.texts)?;
        if self.entry.is_some() {
            self.entry = Some(copies(&self.texts)?);
        }
        self.block += 1;
        Ok(())
    }

    /// The hidden states of each text, `[tokens, width]`: between two blocks those in front of the next.
    pub fn texts(&self) -> Vec<<R::States as States>::View<'_>> {
        self.texts.states()
    }

    /// The hidden states of each text in front of the block, `[tokens, width]`, wherever the text is by now; nothing
    /// without [`Calibration::keeping_entry`].
    pub fn entry(&self) -> Option<Vec<<R::States as States>::View<'_>>> {
        self.entry.as_ref().map(|entry| entry.iter().map(States::view).collect())
    }

    /// The hidden states of each text in the stored model, `[tokens, width]`; nothing without
    /// [`Calibration::beside_dense_of`]. Once the last input of a block was observed, they are the block's outputs; in
    /// a block of experts, the states in front of its feed-forward block.
    pub fn dense_texts(&self) -> Option<Vec<<R::States as States>::View<'_>>> {
        self.dense.as_ref().map(Texts::states)
    }

    /// Puts the texts of the pruned model back in front of the block, where [`Calibration::keeping_entry`] kept them:
    /// after weights that read earlier inputs changed. The stored model's stay where they are.
    ///
    /// # Errors
    /// Those of the runner's memory.
    pub fn rewind(&mut self) -> Result<()> {
        if let Some(entry) = &self.entry {
            self.texts = Texts::new(entry.iter().map(|x| x.first(x.elements())))?;
            self.replaced = None;
        }
        Ok(())
    }

    fn stored(&self) -> Result<&(dyn CheckpointBlock<R::States> + 'a)> {
        let block = match self.stored.get() {
            Some(block) => block,
            None => {
                let block = self.next_block(None)?;
                self.stored.get_or_init(|| block)
            }
        };
        Ok(block.as_ref())
    }

    fn next_block(&self, replace: Option<Replace<'_>>) -> Result<BoxedBlock<'a, R::States>> {
        if self.is_finished() {
            let found = self.block.to_string();
            return Err(Error::Setting { what: "block", found, expected: "one of the model's" });
        }
        self.runner.block(self.checkpoint, self.block, replace)
    }
}

/// Copies of the texts' hidden states.
fn copies<S: States>(texts: &Texts<S>) -> Result<Vec<S>> {
    texts.texts.iter().map(|text| text.x.first(text.x.elements())).collect()
}

fn go_on(is_stopped: &dyn Fn() -> bool) -> Result<()> {
    if is_stopped() { Err(twofour::Error::Interrupted.into()) } else { Ok(()) }
}
