//! A feed-forward block of experts on a GPU. The host chooses the experts of each token by the router's scores, as on
//! the CPU. The inputs of each expert's tokens are copied to rows beside each other and go through its layers; the
//! outputs are added with the weights of their tokens. An expert without a token launches nothing.

use std::ops::Range;

use twofour::{DataType, kernel::KernelElement};
use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use twofour_transformer::cuda::{Embedding, RowSums, embedding_forward, weighted_rows};

use super::{
    Build, CudaLinear, CudaStack, Input,
    feed_forward::{HiddenLayer, HiddenWork},
    hidden::{download, first},
};
use crate::{
    Result,
    model::{
        config::{ExpertsConfig, SharedExpert},
        inference::{experts::Routed, parts::Parts},
    },
};

/// Each expert's rows begin at a multiple of so many, so that the operands of GEMMs are aligned.
const ALIGNED: usize = 16;

/// The token of a row that no token has: zeros are copied there.
const NO_TOKEN: u32 = u32::MAX;

/// The router and the experts of a layer.
#[derive(Debug)]
pub(super) struct Experts {
    config: ExpertsConfig,
    /// What scores the experts, and behind them the shared one.
    router: CudaLinear,
    /// What is added to the weights of experts where they are chosen.
    correction: Option<Vec<f32>>,
    experts: Vec<HiddenLayer>,
    /// The expert that gets every token.
    shared: Option<HiddenLayer>,
}

/// Room for the experts of any layer, for one number of tokens.
#[derive(Debug)]
pub(super) struct ExpertsWork {
    tokens: usize,
    /// `[tokens, experts]`, the shared one included.
    scores: DeviceBuffer,
    /// The token of each row; then of each token its rows, and the weights of their outputs.
    listed: DeviceBuffer,
    inputs: DeviceBuffer,
    outputs: DeviceBuffer,
    /// What copying rows writes about those without a token.
    status: DeviceBuffer,
}

/// Where the inputs and outputs of experts lie.
#[derive(Debug, PartialEq)]
struct Rows {
    /// The rows that go through each expert.
    of_experts: Vec<Range<usize>>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// The rows of each token, in the order of experts, with the weights of their outputs. Rows of the shared expert
    /// are behind all others.
    of_tokens: Vec<Vec<(u32, f32)>>,
}

/// Rows that an expert's GEMMs have for so many tokens: a multiple of 16 from 16 on, since GEMMs are planned for each
/// number.
pub(super) fn at_once(tokens: usize) -> usize {
    if tokens < ALIGNED { tokens } else { tokens.next_multiple_of(ALIGNED) }
}

/// The shared expert, where a score of each token weighs it.
fn scored(experts: &ExpertsConfig) -> Option<SharedExpert> {
    experts.shared.filter(|shared| shared.has_gate)
}

impl Rows {
    fn of(routed: &[Routed], shared: Option<&Routed>, tokens: usize) -> Self {
        let mut rows = Rows { of_experts: vec![], tokens: vec![], of_tokens: vec![vec![]; tokens] };
        for routed in routed {
            let begin = rows.tokens.len();
            rows.of_experts.push(begin..begin + at_once(routed.len()));
            rows.list(begin, routed);
            rows.tokens.extend(routed.iter().map(|(token, _)| *token as u32));
            rows.tokens.resize(rows.tokens.len().next_multiple_of(ALIGNED), NO_TOKEN);
        }
        if let Some(shared) = shared {
            rows.list(rows.tokens.len(), shared);
        }
        rows
    }

    /// Lists the rows from `begin` on for the tokens that have them.
    fn list(&mut self, begin: usize, routed: &Routed) {
        for (row, (token, weight)) in (begin..).zip(routed) {
            self.of_tokens[*token].push((row as u32, *weight));
        }
    }

    /// The most rows without those of the shared expert.
    fn most(experts: &ExpertsConfig, tokens: usize) -> usize {
        let all = tokens * experts.per_token;
        (all + (ALIGNED - 1) * experts.count.min(all)).next_multiple_of(ALIGNED)
    }
}

impl Experts {
    /// Builds the experts whose parts' names begin with `at`.
    pub(super) fn build<T: KernelElement, P: Parts<T>>(
        build: &Build<'_, T, P>,
        experts: &ExpertsConfig,
        at: &str,
    ) -> Result<Self> {
        let layer = |name: String, width: usize| HiddenLayer::build(build, &format!("{at}.{name}"), width);
        let width = build.config().width;
        let mut scoring = vec![(format!("{at}.router"), (experts.count, width))];
        scoring.extend(scored(experts).map(|_| (format!("{at}.shared_gate"), (1, width))));
        let all = (0..experts.count).map(|expert| layer(format!("experts.{expert}"), experts.hidden));
        Ok(Experts {
            config: experts.clone(),
            router: build.joined(&scoring)?,
            correction: build.correction(experts, at)?,
            experts: all.collect::<Result<_>>()?,
            shared: experts.shared.map(|own| layer("shared".to_owned(), own.hidden)).transpose()?,
        })
    }

    /// All hidden layers.
    pub(super) fn hidden_layers(&self) -> impl Iterator<Item = &HiddenLayer> {
        self.experts.iter().chain(&self.shared)
    }

    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        self.router.bytes() + self.hidden_layers().map(HiddenLayer::bytes).sum::<usize>()
    }

    /// Launches the experts of inputs `x: [tokens, width]`; waits for the router's scores.
    pub(super) fn forward(
        &self,
        stack: &CudaStack,
        (x, tokens): (DeviceSlice<'_>, usize),
        (work, hidden): (&mut Option<ExpertsWork>, &mut HiddenWork),
        out: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, width) = (&stack.context, stack.config.width);
        let work = ExpertsWork::of(work, stack, &self.config, tokens)?;
        let routed = self.route(stack, (x, tokens), work)?;
        let (own, shared) = routed.split_at(self.experts.len());
        let rows = Rows::of(own, shared.first(), tokens);
        let (gathered, all) = (rows.tokens.len(), rows.tokens.len() + shared.first().map_or(0, Vec::len));
        let (of_tokens, weights) = work.list(&rows)?;
        let listed = work.listed.as_slice();
        let embedding = Embedding { tokens: gathered, vocabulary: tokens, width, positions: 0 };
        let (inputs, status) = (first(&mut work.inputs, gathered * width)?, work.status.as_slice_mut());
        embedding_forward(context, embedding, listed.part(0..gathered)?, (x, None), inputs, status)?;
        let mut outputs = work.outputs.as_slice_mut();
        for (layer, rows) in self.experts.iter().zip(rows.of_experts).filter(|(_, rows)| !rows.is_empty()) {
            let elements = rows.start * width..rows.end * width;
            let input = Input::Floats(work.inputs.as_slice().part(elements.clone())?);
            layer.forward(stack, input, rows.len(), hidden, outputs.part(elements)?)?;
        }
        if let Some(shared) = &self.shared {
            let to = outputs.part(gathered * width..all * width)?;
            shared.forward(stack, Input::Floats(x), tokens, hidden, to)?;
        }
        let sums = RowSums { tokens, each: of_tokens.len() / tokens.max(1), rows: all, width };
        let listed = (listed.part(of_tokens)?, listed.part(weights)?.as_type(DataType::F32)?);
        weighted_rows(context, sums, work.outputs.as_slice().part(0..all * width)?, listed, out)?;
        Ok(())
    }

    /// The tokens of each expert, and behind them those of the shared one; waits for their scores.
    fn route(
        &self,
        stack: &CudaStack,
        (x, tokens): (DeviceSlice<'_>, usize),
        work: &mut ExpertsWork,
    ) -> Result<Vec<Routed>> {
        self.router.forward(&stack.context, Input::Floats(x), tokens, work.scores.as_slice_mut())?;
        let scores = download(&work.scores)?;
        let correction = self.correction.as_deref();
        if scored(&self.config).is_none() {
            return Ok(self.config.route(scores, correction, None));
        }
        let rows = || scores.chunks_exact(self.config.count + 1).map(|row| row.split_at(self.config.count));
        let own = rows().flat_map(|(own, _)| own).copied().collect();
        let shared = rows().flat_map(|(_, shared)| shared).copied().collect();
        Ok(self.config.route(own, correction, Some(shared)))
    }
}

impl ExpertsWork {
    /// The room for so many tokens, made anew where it was for another number.
    fn of<'a>(
        room: &'a mut Option<Self>,
        stack: &CudaStack,
        experts: &ExpertsConfig,
        tokens: usize,
    ) -> Result<&'a mut Self> {
        match room.take() {
            Some(there) if there.tokens == tokens => Ok(room.insert(there)),
            _ => Ok(room.insert(Self::new(stack, experts, tokens)?)),
        }
    }

    fn new(stack: &CudaStack, experts: &ExpertsConfig, tokens: usize) -> Result<Self> {
        let (context, width, rows) = (&stack.context, stack.config.width, Rows::most(experts, tokens));
        let zeros = |len: usize| DeviceBuffer::zeros(context, stack.dtype, len);
        let ids = |len: usize| DeviceBuffer::zeros(context, DataType::I32, len);
        let of_shared = if experts.shared.is_some() { tokens } else { 0 };
        let of_gate = if scored(experts).is_some() { tokens } else { 0 };
        Ok(ExpertsWork {
            tokens,
            scores: zeros(tokens * experts.count + of_gate)?,
            listed: ids(rows + 2 * (tokens * experts.per_token + of_shared))?,
            inputs: zeros(rows * width)?,
            outputs: zeros((rows + of_shared) * width)?,
            status: ids(1)?,
        })
    }

    /// Copies the lists of rows to the device. Returns where the rows of tokens lie, and their weights.
    fn list(&mut self, rows: &Rows) -> Result<(Range<usize>, Range<usize>)> {
        let of_tokens = || rows.of_tokens.iter().flatten();
        let each = of_tokens().count();
        let mut listed = rows.tokens.clone();
        listed.resize(self.listed.len().saturating_sub(2 * each), NO_TOKEN);
        let begin = listed.len();
        listed.extend(of_tokens().map(|(row, _)| *row));
        listed.extend(of_tokens().map(|(_, weight)| weight.to_bits()));
        self.listed.enqueue_ids(&listed)?;
        Ok((begin..begin + each, begin + each..begin + 2 * each))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Routing;

    /// Tokens 0 to 16 to the first expert, the last of them to the third one, too; one row of the shared one each.
    #[test]
    fn rows_of_experts_begin_at_multiples_and_tokens_list_theirs_in_the_order_of_experts() {
        let routed = [(0..17).map(|token| (token, 0.25)).collect(), vec![], vec![(16, 0.5)]];
        let shared = (0..17).map(|token| (token, 1.0)).collect();
        let rows = Rows::of(&routed, Some(&shared), 17);
        assert_eq!(rows.of_experts, [0..32, 32..32, 32..33]);
        assert_eq!(rows.tokens.len(), 48);
        assert_eq!([16, 17, 31, 32, 33].map(|row| rows.tokens[row]), [16, NO_TOKEN, NO_TOKEN, 16, NO_TOKEN]);
        assert_eq!(rows.of_tokens[3], [(3, 0.25), (51, 1.0)]);
        assert_eq!(rows.of_tokens[16], [(16, 0.25), (32, 0.5), (64, 1.0)]);
    }

    #[test]
    fn rows_never_exceed_their_room() {
        for (count, per_token, tokens) in [(1, 1, 1), (8, 2, 1), (8, 2, 3), (5, 3, 40), (128, 8, 512), (3, 3, 17)] {
            let experts = ExpertsConfig {
                count,
                per_token,
                hidden: 4,
                shared: None,
                routing: Routing::default(),
                is_normalized: true,
                dense_layers: vec![],
                clamped_gate: None,
            };
            // As unevenly as can be, and evenly.
            for spread in [1, count] {
                let mut routed = vec![vec![]; count];
                for token in 0..tokens {
                    (0..per_token).for_each(|i| routed[(token % spread + i) % count].push((token, 1.0)));
                }
                let rows = Rows::of(&routed, None, tokens);
                assert!(rows.tokens.len() <= Rows::most(&experts, tokens), "{experts:?} of {tokens}");
                assert!(rows.of_tokens.iter().all(|rows| rows.len() == per_token));
                assert!(rows.of_experts.iter().all(|rows| rows.len() <= at_once(tokens)));
            }
        }
    }
}
