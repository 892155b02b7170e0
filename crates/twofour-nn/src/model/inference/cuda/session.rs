//! Sequences that are being read and written on a GPU.

use rayon::prelude::*;
use twofour_cuda::layer::{Accumulate, CapturedWork, DeviceBuffer, DeviceSliceMut};
use twofour_transformer::cuda::{
    IGNORED_TARGET, Rotary, cross_entropy_loss,
    decode::{CacheShape, CachedAttention, ChosenTokens, choose_tokens},
};

use super::{
    CudaInference, CudaStack, Work,
    cached::{Caches, Step},
    hidden::{download, first},
};
use crate::{
    Error, Result,
    cpu::rope::Table,
    model::{Likelihood, Sampling},
};

/// Tokens that go through the layers at once.
const MAX_AT_ONCE: usize = 512;

/// Rows of logits that are computed at once where all tokens are scored.
const MAX_ROWS: usize = 128;

/// A batch of sequences in progress: their keys and values, in a cache of fixed size, and the graph of a step.
#[derive(Debug)]
pub struct CudaSession<'a> {
    model: &'a CudaInference,
    batch: usize,
    capacity: usize,
    /// Attention of one token of each sequence.
    step: CachedAttention,
    /// Attention of a prompt's tokens, of one sequence.
    prefill: CachedAttention,
    caches: Vec<[DeviceBuffer; 2]>,
    /// Cosines and sines of layers over the whole sequence; then of layers with a window, where they differ.
    rotary: Vec<[DeviceBuffer; 2]>,
    /// Tokens of each sequence that are in the cache, and their copy on the device.
    lengths: Vec<usize>,
    positions: DeviceBuffer,
    ids: DeviceBuffer,
    history: DeviceBuffer,
    /// Scores of the next token of each sequence.
    logits: DeviceBuffer,
    work: Work,
    graph: Option<CapturedWork>,
    /// Whether a step ran without a graph, so that everything is planned.
    is_warm: bool,
}

impl CudaInference {
    /// Begins `batch` sequences of up to `capacity` tokens each.
    ///
    /// # Errors
    /// [`Error::Setting`] for no sequences, or a capacity of zero or above the context; those of the device's memory.
    pub fn session(&self, batch: usize, capacity: usize) -> Result<CudaSession<'_>> {
        if batch == 0 {
            return Err(Error::Setting { what: "sequences", found: "0".into(), expected: "one or more" });
        }
        if capacity == 0 || capacity > self.config().context() {
            let found = format!("{capacity} for a context of {}", self.config().context());
            return Err(Error::Setting { what: "the capacity of a cache", found, expected: "from 1 to the context" });
        }
        let CudaStack { config, context, dtype, .. } = &self.stack;
        let dtype = *dtype;
        let shape = CacheShape {
            batch,
            heads: config.attention.heads,
            kv_heads: config.attention.kv_heads,
            head_dim: config.attention.head_dim,
            capacity,
        };
        let cached = shape.len()?;
        let zeros = |len: usize| DeviceBuffer::zeros(context, dtype, len);
        let caches = (0..config.layers).map(|_| Ok([zeros(cached)?, zeros(cached)?])).collect::<Result<_>>()?;
        let uploaded = |table: &Table| -> Result<[DeviceBuffer; 2]> {
            let (mut cos, mut sin) = (vec![], vec![]);
            for position in 0..capacity {
                let (c, s) = table.at(position);
                cos.extend_from_slice(c);
                sin.extend_from_slice(s);
            }
            Ok([DeviceBuffer::from_host(context, &cos)?, DeviceBuffer::from_host(context, &sin)?])
        };
        let tables = self.rotations.as_ref().map(|rotations| rotations.tables(0..capacity, capacity));
        let tables = tables.iter().flat_map(|tables| [Some(&tables.all), tables.windowed.as_ref()]).flatten();
        let rotary = tables.map(uploaded).collect::<Result<_>>()?;
        let ids = |len: usize| DeviceBuffer::from_ids(context, &vec![0; len]);
        Ok(CudaSession {
            model: self,
            batch,
            capacity,
            step: CachedAttention::new(context, dtype, shape)?,
            prefill: CachedAttention::new(context, dtype, CacheShape { batch: 1, ..shape })?,
            caches,
            rotary,
            lengths: vec![0; batch],
            positions: ids(batch)?,
            ids: ids(batch)?,
            history: ids(batch * capacity)?,
            logits: zeros(batch * config.vocabulary())?,
            work: Work::new(&self.stack, batch.max(MAX_AT_ONCE.min(capacity)), self.head.takes_integers())?,
            graph: None,
            is_warm: false,
        })
    }

    /// Continues each prompt by `count` most likely tokens, all sequences at once. Prompts may differ in length.
    ///
    /// # Errors
    /// [`Error::Setting`] for no prompts, an empty one, or one that with its tokens exceeds the context;
    /// [`Error::Operation`] for one outside the vocabulary.
    pub fn generate_batch(&self, prompts: &[&[u32]], count: usize) -> Result<Vec<Vec<u32>>> {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let mut session = self.session(prompts.len(), longest + count)?;
        for (sequence, prompt) in prompts.iter().enumerate() {
            session.prefill(sequence, prompt)?;
        }
        if count == 0 {
            return Ok(vec![vec![]; prompts.len()]);
        }
        session.choose()?;
        for _ in 1..count {
            session.decode()?;
        }
        session.texts(prompts, count)
    }
}

impl CudaSession<'_> {
    /// Sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// How many more tokens fit a sequence.
    pub fn remaining(&self, sequence: usize) -> usize {
        self.capacity - self.lengths.get(sequence).copied().unwrap_or(self.capacity)
    }

    /// Forgets all tokens of a sequence but the first.
    pub(super) fn truncate(&mut self, sequence: usize, tokens: usize) {
        if let Some(length) = self.lengths.get_mut(sequence) {
            *length = tokens.min(*length);
        }
    }

    /// Begins all sequences anew.
    pub fn reset(&mut self) {
        self.lengths.fill(0);
    }

    /// Feeds tokens to one sequence; the scores of the token that follows them are then [`CudaSession::scores`].
    ///
    /// # Errors
    /// [`Error::Setting`] for no tokens, more than [`CudaSession::remaining`] or a sequence that does not exist;
    /// [`Error::Operation`] for one outside the vocabulary.
    pub fn prefill(&mut self, sequence: usize, tokens: &[u32]) -> Result<()> {
        let last = self.feed(sequence, tokens, |_, _, _| Ok(()))?;
        let vocabulary = self.model.config().vocabulary();
        let mut logits = self.logits.as_slice_mut();
        let logits = logits.part(sequence * vocabulary..(sequence + 1) * vocabulary)?;
        self.model.head(&mut self.work, (last, last), logits)
    }

    /// Runs tokens through the layers, in chunks, and calls `f` with each chunk's first token and length; returns the
    /// length of the last chunk.
    fn feed(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        mut f: impl FnMut(&mut Work, usize, usize) -> Result<()>,
    ) -> Result<usize> {
        if sequence >= self.batch || tokens.is_empty() || tokens.len() > self.remaining(sequence) {
            let found = format!("{} for sequence {sequence}, where {} fit", tokens.len(), self.remaining(sequence));
            return Err(Error::Setting { what: "number of tokens to feed", found, expected: "from 1 to what fits" });
        }
        let (model, vocabulary) = (self.model, self.model.config().vocabulary());
        if let Some((position, &token)) = tokens.iter().enumerate().find(|(_, token)| **token as usize >= vocabulary) {
            return Err(Error::token("inputs", token, position, vocabulary));
        }
        let most = self.work.tokens().min(MAX_AT_ONCE);
        let mut last = 0;
        for (index, chunk) in tokens.chunks(most).enumerate() {
            let ids = DeviceBuffer::from_ids(model.context(), chunk)?;
            let positions = DeviceBuffer::from_ids(model.context(), &[self.lengths[sequence] as u32])?;
            let step = Step {
                attention: &self.prefill,
                count: chunk.len(),
                ids: ids.as_slice(),
                positions: positions.as_slice(),
                rotary: rotary(&self.rotary),
            };
            let each = self.prefill.shape().len()?;
            let caches = caches(&mut self.caches, sequence * each..(sequence + 1) * each)?;
            model.run(&mut self.work, step, caches)?;
            self.lengths[sequence] += chunk.len();
            last = chunk.len();
            f(&mut self.work, index * most, last)?;
        }
        Ok(last)
    }

    /// The scores of the token that follows a sequence, `[vocabulary]`; waits for the device.
    ///
    /// # Errors
    /// Those of the device.
    pub fn scores(&self, sequence: usize) -> Result<Vec<f32>> {
        let (vocabulary, all) = (self.model.config().vocabulary(), download(&self.logits)?);
        let row = all.get(sequence * vocabulary..(sequence + 1) * vocabulary);
        Ok(row.unwrap_or_default().to_vec())
    }

    /// Chooses the most likely token of each sequence by its scores, the lower of equals: the next step's input.
    ///
    /// # Errors
    /// [`Error::Setting`] where a sequence has no tokens yet; those of the device.
    pub fn choose(&mut self) -> Result<()> {
        if self.lengths.contains(&0) {
            return Err(Error::Setting {
                what: "a sequence",
                found: "empty".into(),
                expected: "fed before a token is chosen",
            });
        }
        // The choice counts its token.
        let before: Vec<u32> = self.lengths.iter().map(|length| *length as u32 - 1).collect();
        self.positions.write_ids(&before)?;
        self.launch_choice()
    }

    /// Replaces the tokens that were chosen on the device by others, chosen on the host by the same scores.
    pub(super) fn choose_by(&mut self, samplings: &[Sampling], index: u64) -> Result<Vec<u32>> {
        let (vocabulary, mut scores) = (self.model.config().vocabulary(), download(&self.logits)?);
        let rows = scores.par_chunks_mut(vocabulary).zip(samplings);
        let chosen: Vec<u32> = rows.map(|(row, sampling)| sampling.choose(row, index)).collect::<Result<_>>()?;
        self.ids.write_ids(&chosen)?;
        Ok(chosen)
    }

    /// The chosen tokens; waits for the device.
    ///
    /// # Errors
    /// Those of the device.
    pub fn chosen(&self) -> Result<Vec<u32>> {
        Ok(self.ids.ids_to_host()?)
    }

    /// Feeds each sequence its chosen token and chooses the next, by a replayed graph. The first call launches the step
    /// itself, the second captures it. Where the host chooses experts, each call launches the step.
    ///
    /// # Errors
    /// [`Error::Setting`] where a cache is full; those of the device.
    pub fn decode(&mut self) -> Result<()> {
        self.expect_room()?;
        if !self.is_warm || self.model.stack.is_routed() {
            self.launch_step()?;
            self.is_warm = true;
        } else {
            let replayed = match &mut self.graph {
                Some(graph) => graph.replay()?,
                None => false,
            };
            if !replayed {
                self.graph = None;
                let context = self.model.context().clone();
                let mut graph = CapturedWork::capture(&context, || self.launch_step())?;
                graph.replay()?;
                self.graph = Some(graph);
            }
        }
        self.lengths.iter_mut().for_each(|length| *length += 1);
        Ok(())
    }

    /// [`CudaSession::decode`] without a graph.
    ///
    /// # Errors
    /// As there.
    pub fn decode_launched(&mut self) -> Result<()> {
        self.expect_room()?;
        self.launch_step()?;
        self.lengths.iter_mut().for_each(|length| *length += 1);
        Ok(())
    }

    fn expect_room(&self) -> Result<()> {
        if self.lengths.iter().all(|length| *length < self.capacity) {
            return Ok(());
        }
        let found = format!("full with {} tokens", self.capacity);
        Err(Error::Setting { what: "a sequence's cache", found, expected: "room for another token" })
    }

    fn launch_step(&mut self) -> Result<()> {
        let step = Step {
            attention: &self.step,
            count: 1,
            ids: self.ids.as_slice(),
            positions: self.positions.as_slice(),
            rotary: rotary(&self.rotary),
        };
        let all = self.step.shape().len()?;
        self.model.run(&mut self.work, step, caches(&mut self.caches, 0..all)?)?;
        self.model.head(&mut self.work, (self.batch, 1), self.logits.as_slice_mut())?;
        self.launch_choice()
    }

    fn launch_choice(&mut self) -> Result<()> {
        let to = ChosenTokens {
            ids: self.ids.as_slice_mut(),
            positions: self.positions.as_slice_mut(),
            history: self.history.as_slice_mut(),
        };
        let shape = (self.batch, self.model.config().vocabulary(), self.capacity);
        Ok(choose_tokens(self.model.context(), shape, self.logits.as_slice(), to)?)
    }

    /// Feeds tokens to an empty first sequence and returns their last hidden states, behind the last norm, `[tokens,
    /// width]`.
    ///
    /// # Errors
    /// Those of [`CudaSession::prefill`].
    pub fn last_hidden(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (model, width) = (self.model, self.model.config().width);
        let mut hidden = DeviceBuffer::zeros(model.context(), model.dtype(), self.work.tokens() * width)?;
        let mut all = Vec::with_capacity(tokens.len() * width);
        self.feed(0, tokens, |work, _, len| {
            work.finish_to(&model.stack, &model.norm, len, first(&mut hidden, len * width)?)?;
            all.extend_from_slice(&download(&hidden)?[..len * width]);
            Ok(())
        })?;
        Ok(all)
    }

    /// The tokens that were chosen after each prompt.
    fn texts(&self, prompts: &[&[u32]], count: usize) -> Result<Vec<Vec<u32>>> {
        let (history, last) = (self.history.ids_to_host()?, self.chosen()?);
        let text = |(sequence, prompt): (usize, &&[u32])| {
            // The token at the capacity has no place in the history.
            let token = |at: usize| match prompt.len() + at {
                position if position < self.capacity => history[sequence * self.capacity + position],
                _ => last[sequence],
            };
            (0..count).map(token).collect()
        };
        Ok(prompts.iter().enumerate().map(text).collect())
    }

    /// Feeds tokens to an empty first sequence and returns the sum of `-log p`, in nats, of each of the last `count` of
    /// them given those before it.
    pub(super) fn negative_log_likelihood(&mut self, tokens: &[u32], count: usize) -> Result<f64> {
        if count >= tokens.len() {
            let found = format!("{count} of {}", tokens.len());
            return Err(Error::Setting { what: "tokens to score", found, expected: "fewer than are fed" });
        }
        let (model, vocabulary) = (self.model, self.model.config().vocabulary());
        let targets: Vec<u32> = (1..=tokens.len())
            .map(|next| if next + count >= tokens.len() && next < tokens.len() { tokens[next] } else { IGNORED_TARGET })
            .collect();
        let targets = DeviceBuffer::from_ids(model.context(), &targets)?;
        let mut logits = DeviceBuffer::zeros(model.context(), model.dtype(), MAX_ROWS.min(tokens.len()) * vocabulary)?;
        let mut loss = DeviceBuffer::from_host(model.context(), &[0f32])?;
        let mut status = DeviceBuffer::from_ids(model.context(), &[0])?;
        let mut sum = 0.0;
        self.feed(0, tokens, |work, begin, len| {
            work.finish(&model.stack, &model.norm, model.head.takes_integers(), (len, 1))?;
            loss.write(&[0f32])?;
            for from in (0..len).step_by(MAX_ROWS) {
                let rows = MAX_ROWS.min(len - from);
                let there = || -> Result<_> { Ok(targets.as_slice().part(begin + from..begin + from + rows)?) };
                let mut all = logits.as_slice_mut();
                model.scores(work, from..from + rows, all.part(0..rows * vocabulary)?)?;
                let (scores, shape) = (logits.as_slice().part(0..rows * vocabulary)?, (rows, vocabulary));
                let (to, add) = (loss.as_slice_mut(), Accumulate::Add);
                cross_entropy_loss(model.context(), shape, scores, there()?, to, add, status.as_slice_mut())?;
            }
            sum += f64::from(loss.to_host::<f32>()?[0]);
            Ok(())
        })?;
        Ok(sum)
    }

    /// Feeds tokens to the first sequence and returns how likely `targets` are, the last of which follows them.
    pub(super) fn likelihood(&mut self, tokens: &[u32], targets: &[u32]) -> Result<Likelihood> {
        let (model, vocabulary) = (self.model, self.model.config().vocabulary());
        Likelihood::expect_targets(tokens, targets, vocabulary)?;
        // The first token that a target follows.
        let first = tokens.len() - targets.len();
        let mut found = Likelihood::NONE;
        self.feed(0, tokens, |work, begin, len| {
            let from = first.saturating_sub(begin);
            if from < len {
                work.finish(&model.stack, &model.norm, model.head.takes_integers(), (len, 1))?;
            }
            for from in (from..len).step_by(MAX_ROWS) {
                let rows = MAX_ROWS.min(len - from);
                let mut logits = DeviceBuffer::zeros(model.context(), model.dtype(), rows * vocabulary)?;
                model.scores(work, from..from + rows, logits.as_slice_mut())?;
                let targets = &targets[begin + from - first..][..rows];
                found = found.then(&download(&logits)?, vocabulary, targets)?;
            }
            Ok(())
        })?;
        Ok(found)
    }
}

fn rotary(tables: &[[DeviceBuffer; 2]]) -> [Option<Rotary<'_>>; 2] {
    [0, 1].map(|index| tables.get(index).map(|[cos, sin]| Rotary { cos: cos.as_slice(), sin: sin.as_slice() }))
}

/// A part of the keys and values of every layer.
fn caches(all: &mut [[DeviceBuffer; 2]], range: std::ops::Range<usize>) -> Result<Caches<'_>> {
    let mut parts = Vec::with_capacity(all.len());
    for [keys, values] in all {
        parts.push([part_of(keys, &range)?, part_of(values, &range)?]);
    }
    Ok(parts)
}

fn part_of<'a>(buffer: &'a mut DeviceBuffer, range: &std::ops::Range<usize>) -> Result<DeviceSliceMut<'a>> {
    let (_, from) = buffer.as_slice_mut().split_at(range.start)?;
    Ok(from.split_at(range.len())?.0)
}
