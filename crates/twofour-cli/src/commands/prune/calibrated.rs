//! Pruning by what a model computes on text, block after block.

use std::{cell::RefCell, collections::HashMap, path::Path};

use anyhow::Result;
use twofour::{
    Arithmetic, Axis, Element, MatrixRef, Pattern,
    calibration::{ActivationSample, CrossProducts, DenseSide, Statistic, StatisticKind},
    file::{Quantization, QuantizedWeight, Reader, Reorder},
    match_element,
    select::Sparsity,
    solve::{Backend, Cpu, LowRank, LowRankPart, Pruned, Pruning},
};
use twofour_nn::{
    Error,
    model::{
        Beside, Calibration, CheckpointError, Gathered, GpuRunner, Host, Observation, Replace, Runner, States,
        open_blockwise,
    },
};

use super::{
    order,
    own_text::Pieces,
    place::Place,
    sampling::Sampling,
    solution::{Adjusted, Solution, Solutions, StoredFactors},
    store::Store,
    tune::{BlockTuner, SeenInput},
};
use crate::{
    commands::tensor::floats,
    interrupt, memory,
    present::{Screen, units},
    selection::Selection,
};

/// Tokens on which pruned layers are compared with dense ones.
const COMPARED: usize = 256;

/// Values in a runner's memory.
type ViewOf<'a, R> = <<R as Runner>::States as States>::View<'a>;

/// An input of layers in a runner's memory.
type Observed<'a, R> = Observation<'a, ViewOf<'a, R>>;

/// How weights are pruned.
#[derive(Debug, Clone, Copy)]
pub(super) struct How {
    pub(super) pruning: Pruning,
    /// The integers that kept weights are rounded to.
    pub(super) quantization: Option<Quantization>,
    /// Whether features are put in another order where that makes the error smaller.
    pub(super) permutes: bool,
    /// What is found beside pruned weights.
    pub(super) low_rank: Option<LowRankPart>,
    /// Whether blocks are tuned, and weights rounded after that.
    pub(super) tunes: bool,
}

impl How {
    fn requires(&self) -> StatisticKind {
        self.pruning.requires().max(self.low_rank.map_or(StatisticKind::Nothing, |part| part.requires()))
    }

    /// The integers that a solved weight is stored as.
    fn integers(&self) -> Option<Quantization> {
        self.quantization.filter(|_| !self.tunes)
    }

    /// How weights are solved.
    fn solving(&self) -> Pruning {
        Pruning { grid: self.pruning.grid.filter(|_| !self.tunes), ..self.pruning }
    }
}

/// Prunes every selected weight that the checkpoint's blocks multiply with.
pub(super) fn solve(
    screen: &Screen,
    (input, output): (&Path, &Path),
    (selection, place): (&Selection, &Place),
    how: How,
    sampling: &Sampling,
    tuner: Option<&BlockTuner>,
) -> Result<Solutions> {
    let places = (input, output);
    let room = place.room()?;
    match place {
        Place::Cpu => solve_on((&Host, &Cpu), screen, places, (selection, room), how, sampling, tuner),
        Place::Gpu(_, backend) => {
            let runner = GpuRunner::new(backend);
            solve_on((&runner, backend.as_ref()), screen, places, (selection, room), how, sampling, tuner)
        }
    }
}

/// The same, with a runner and a backend of one device.
fn solve_on<R: Runner>(
    (runner, backend): (&R, &dyn Backend),
    screen: &Screen,
    (input, output): (&Path, &Path),
    (selection, room): (&Selection, u64),
    how: How,
    sampling: &Sampling,
    tuner: Option<&BlockTuner>,
) -> Result<Solutions> {
    let checkpoint = open_blockwise(input).map_err(without_calibration)?;
    let Pieces { tokens: pieces, prompt } = Pieces::of(screen, (checkpoint.as_ref(), input), sampling)?;
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let store = Store::create_in(parent)?;
    let (reader, orders) = (checkpoint.reader(), HashMap::new());
    let mut solver = Solver { runner, backend, reader, selection, how, store: &store, orders };
    let (texts, tokens) = (pieces.len(), pieces.iter().map(Vec::len).sum::<usize>());
    let tuned_texts = tuner.map_or(0, BlockTuner::samples);
    let dense_texts = if how.pruning.compensation > 0.0 { usize::MAX } else { tuned_texts };
    let first = |count: usize| pieces.iter().take(count).map(Vec::len).sum::<usize>();
    // Beside the pruned model's states the dense model's; for tuning all those in front of the block, once more while
    // they are copied, and some of both as it reads them.
    let kept = tokens + first(dense_texts) + tuner.map_or(0, |_| 2 * tokens) + 2 * first(tuned_texts);
    let states = (kept as u64).saturating_mul((checkpoint.width() * size_of::<f32>()) as u64);
    let tokens_of = units::plural(tokens, "token");
    let (what, remedy) = match tuner {
        Some(_) => (
            format!("the hidden states of {tokens_of} and a block in training take"),
            "lower --samples or --length, or leave tuning out by --tune 0",
        ),
        None => (format!("the hidden states of {tokens_of} take"), "lower --samples or --length"),
    };
    let needed = states.saturating_add(tuner.map_or(0, BlockTuner::training_bytes));
    memory::expect_room(needed, &what, remedy)?;
    let compared = COMPARED.div_ceil(pieces.len());
    let mut calibration =
        Calibration::on(runner, checkpoint.as_ref(), &pieces)?.with_room(room).stopped_by(&interrupt::requested);
    calibration = calibration.behind_prompt(prompt);
    drop(pieces);
    if dense_texts > 0 {
        calibration = calibration.beside_dense_of(dense_texts)?;
    }
    if tuner.is_some() {
        calibration = calibration.keeping_entry()?;
    }

    let mut progress = screen.progress();
    let blocks = checkpoint.blocks() as u64;
    let mut weights: HashMap<String, Solution> = HashMap::new();
    let mut tuned = vec![];
    while !calibration.is_finished() {
        let block = calibration.block();
        let inputs = calibration.inputs()?;
        if how.permutes {
            let orders = order::choose(&solver, &calibration, &inputs)?;
            solver.orders.extend(orders);
        }
        let mut seen_inputs = vec![];
        // In the order of computation: those of a layer come from the pruned ones before it.
        for (index, input) in inputs.iter().enumerate() {
            interrupt::check()?;
            let (done, all) = (block as u64 * inputs.len() as u64 + index as u64, blocks * inputs.len() as u64);
            progress.steps(&format!("pruning block {}", block + 1), done, all);
            let selected: Vec<&str> =
                input.weights.iter().map(String::as_str).filter(|name| solver.is_selected(name)).collect();
            if selected.is_empty() {
                continue;
            }
            let mut seen = None;
            let mut failed = None;
            with_solutions(&solver, &weights, |replace| {
                calibration.observe(index, replace, &mut |observation, beside| {
                    if failed.is_none() {
                        failed = solver.observe(&mut seen, observation, beside, compared).err();
                    }
                })
            })?;
            if let Some(error) = failed {
                solver.expect_finite_weights()?;
                return Err(error.context(format!("inputs of block {block}")));
            }
            let Some(seen) = seen else { continue };
            let seen = match seen.finish() {
                Ok(seen) => seen,
                Err(error) => {
                    solver.expect_finite_weights()?;
                    return Err(anyhow::Error::from(error).context(format!("inputs of block {block}")));
                }
            };
            weights.extend(solver.solve(&selected, input.is_transposed, &seen)?);
            let names = selected.iter().map(|name| (*name).to_owned()).collect();
            let Seen { statistic, sample, .. } = seen;
            let statistic = how.quantization.filter(|_| how.tunes).map(|_| statistic);
            seen_inputs.push(SeenInput { weights: names, is_transposed: input.is_transposed, sample, statistic });
        }
        if let Some(tuner) = tuner.filter(|_| !seen_inputs.is_empty()) {
            tuned.extend(tuner.tune(&solver, &mut weights, &mut calibration, &seen_inputs)?);
        }
        with_solutions(&solver, &weights, |replace| calibration.advance(replace))?;
    }
    let Solver { orders, .. } = solver;
    let mut solutions = Solutions::new(weights, orders, store, (texts, tokens));
    solutions.tuned = tuned;
    Ok(solutions)
}

/// Says what works with a model that is not run.
fn without_calibration(error: Error) -> anyhow::Error {
    match error {
        Error::Checkpoint(CheckpointError::UnsupportedModel { .. }) => {
            anyhow::anyhow!("{error}; to prune by magnitude, which takes any model, leave out --calibration")
        }
        other => other.into(),
    }
}

/// Does what computes with the weights that were found; an error of reading one of them comes first.
pub(super) fn with_solutions<R: Runner>(
    solver: &Solver<'_, R>,
    weights: &HashMap<String, Solution>,
    work: impl FnOnce(Replace<'_>) -> twofour_nn::Result<()>,
) -> Result<()> {
    let failed = RefCell::new(None);
    let outcome = work(&|name| {
        let values = match weights.get(name) {
            Some(solution) => solver.values(name, solution),
            None if solver.orders.contains_key(name) => solver.elements(name),
            None => return None,
        };
        values.map_err(|error| failed.replace(Some(error))).ok()
    });
    match failed.into_inner() {
        Some(error) => Err(error),
        None => Ok(outcome?),
    }
}

/// What is being gathered of the input of some linear layers.
struct Gathering<G> {
    /// A weight that reads it.
    weight: String,
    gathered: G,
    sample: ActivationSample,
}

impl<G> Gathering<G> {
    fn finish<S: States>(self) -> twofour::Result<Seen>
    where
        G: Gathered<S>,
    {
        let (statistic, beside) = self.gathered.finish().map_err(|error| error.in_tensor(&self.weight))?;
        Ok(Seen { statistic, beside, sample: self.sample })
    }
}

/// What is known of the input of some linear layers.
#[derive(Debug)]
struct Seen {
    statistic: Statistic,
    /// Products with what the same tokens have in the dense model.
    beside: Option<CrossProducts>,
    sample: ActivationSample,
}

/// The values of a solved weight, `[out, in]`.
enum Values {
    /// As the weight's dtype stores them.
    Floats(Vec<f32>),
    Integers(QuantizedWeight),
}

/// What prunes the weights of a checkpoint.
pub(super) struct Solver<'a, R> {
    pub(super) runner: &'a R,
    pub(super) backend: &'a dyn Backend,
    reader: &'a Reader,
    selection: &'a Selection,
    how: How,
    pub(super) store: &'a Store,
    /// The orders that stored tensors are read in, by name.
    orders: HashMap<String, Reorder>,
}

impl<R: Runner> Solver<'_, R> {
    /// Adds a text's inputs to the statistics of the layers that read them.
    fn observe(
        &self,
        seen: &mut Option<Gathering<R::Gathered>>,
        observation: Observed<'_, R>,
        beside: Beside<ViewOf<'_, R>>,
        compared: usize,
    ) -> Result<()> {
        let Observation { input, x, tokens } = observation;
        let Some(first) = input.weights.first() else { return Ok(()) };
        if tokens == 0 {
            return Ok(());
        }
        let features = R::States::count(x) / tokens;
        let dense = match beside {
            _ if self.how.pruning.compensation == 0.0 => None,
            Beside::Nothing => None,
            Beside::Inputs(dense) => Some((DenseSide::Inputs, dense)),
            Beside::Outputs(dense) => Some((DenseSide::Outputs(R::States::count(dense) / tokens), dense)),
        };
        if seen.is_none() {
            let side = dense.map(|(side, _)| side);
            let Some(gathered) = self.runner.gather(self.how.requires(), features, side)? else {
                return Ok(());
            };
            *seen = Some(Gathering { weight: first.clone(), gathered, sample: ActivationSample::new(features) });
        }
        let Some(seen) = seen else { return Ok(()) };
        let named = |error: twofour::Error| error.in_tensor(first);
        seen.gathered.add(x, dense.map(|(_, dense)| dense)).map_err(named)?;
        // The end of a text has the longest context.
        let last = R::States::last(x, compared.min(tokens) * features)?;
        seen.sample.add(&self.runner.to_host(last)?).map_err(named)?;
        Ok(())
    }

    /// An error for the first weight that is not finite: what is computed with it tells less.
    fn expect_finite_weights(&self) -> Result<()> {
        for tensor in self.reader.plain_tensors().filter(|tensor| tensor.dtype.element().is_some()) {
            interrupt::check()?;
            let &[rows, cols] = tensor.shape.as_slice() else { continue };
            let (_, _, values) = self.stored(&tensor.name)?;
            MatrixRef::new(rows, cols, &values)?.expect_finite().map_err(|error| error.in_tensor(&tensor.name))?;
        }
        Ok(())
    }

    /// The groups that weights are pruned in, where the pattern is N:M.
    pub(super) fn groups(&self) -> Option<Pattern> {
        match self.how.pruning.sparsity {
            Sparsity::Groups(pattern) => Some(pattern),
            _ => None,
        }
    }

    /// Whether a tensor is stored as floats.
    pub(super) fn is_plain(&self, name: &str) -> bool {
        let tensor = self.reader.plain_tensors().find(|tensor| tensor.name == *name);
        tensor.is_some_and(|tensor| tensor.dtype.element().is_some())
    }

    /// Whether a weight is to be pruned.
    pub(super) fn is_selected(&self, name: &str) -> bool {
        let tensor = self.reader.plain_tensors().find(|tensor| tensor.name == *name);
        tensor.is_some_and(|t| self.selection.of(&t.name, t.dtype, &t.shape).is_ok())
    }

    /// Prunes weights that read one input.
    fn solve(&self, names: &[&str], is_transposed: bool, seen: &Seen) -> Result<Vec<(String, Solution)>> {
        let mut dense = vec![];
        for name in names {
            tracing::info!(tensor = name, "pruning");
            dense.push(self.dense(name, is_transposed)?);
        }
        let mut matrices = vec![];
        for (name, (rows, cols, values)) in names.iter().zip(&dense) {
            let matrix = MatrixRef::new(*rows, *cols, values)?;
            matrix.expect_finite().map_err(|error| error.in_tensor(*name))?;
            matrices.push(matrix);
        }
        let found = self.how.solving().prune_all(self.backend, &matrices, Some(&seen.statistic), seen.beside.as_ref());
        let found = found.map_err(|error| error.in_tensor(names.join(", ")))?;
        let mut solutions = vec![];
        for ((name, matrix), found) in names.iter().zip(matrices).zip(found) {
            interrupt::check()?;
            let (found, low_rank) = self.with_low_rank(name, matrix, found, seen)?;
            let mut solution = self.solution(name, is_transposed, (matrix, found), low_rank.as_ref(), &seen.sample)?;
            if let Some(factors) = low_rank {
                let shape = [matrix.rows(), matrix.cols()];
                solution.low_rank = Some(StoredFactors::new(self.store, shape, &factors)?);
            }
            solutions.push(((*name).to_owned(), solution));
        }
        Ok(solutions)
    }

    /// What a weight was pruned to, with the low-rank part beside it as the weight's dtype stores it.
    fn with_low_rank(
        &self,
        name: &str,
        matrix: MatrixRef<'_, f32>,
        found: Pruned,
        seen: &Seen,
    ) -> Result<(Pruned, Option<LowRank>)> {
        let Some(part) = self.how.low_rank else { return Ok((found, None)) };
        let named = |error: twofour::Error| error.in_tensor(name);
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let target = self
            .how
            .pruning
            .target(self.backend, matrix, Some(&seen.statistic), seen.beside.as_ref())
            .map_err(named)?;
        let target = MatrixRef::new(rows, cols, target.as_deref().unwrap_or(matrix.data()))?;
        let (found, factors) = part.beside(target, found, &seen.statistic).map_err(named)?;
        let [left, right] = [factors.left(), factors.right()].map(|factor| self.rounded(name, factor.to_vec()));
        Ok((found, Some(LowRank::new(rows, cols, factors.rank(), left?, right?)?)))
    }

    /// What is stored of a pruned weight.
    fn solution(
        &self,
        name: &str,
        is_transposed: bool,
        (matrix, found): (MatrixRef<'_, f32>, Pruned),
        low_rank: Option<&LowRank>,
        sample: &ActivationSample,
    ) -> Result<Solution> {
        if self.how.quantization.is_some() && is_transposed {
            anyhow::bail!(
                "`{name}` is stored as [in_features, out_features], and integers are 2:4 along stored rows; leave out \
                 --quantize"
            );
        }
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let named = |error: twofour::Error| error.in_tensor(name);
        let (mask, values) = match found {
            Pruned::Mask(mask) => (mask, None),
            Pruned::Solved(solved) => {
                let values = match self.how.integers() {
                    None => Values::Floats(self.rounded(name, solved.weight)?),
                    Some(to) => Values::Integers(QuantizedWeight::of_solved(&solved, to).map_err(named)?),
                };
                (solved.mask, Some(values))
            }
        };
        let dense_of = |values: &Values| match values {
            Values::Floats(weight) => weight.clone(),
            Values::Integers(weight) => weight.dequantize().to_dense(),
        };
        let pruned = values.as_ref().map_or_else(|| mask.apply(matrix), |values| Ok(dense_of(values)))?;
        let mut computed = pruned.clone();
        if let Some(factors) = low_rank {
            computed.iter_mut().zip(factors.product()).for_each(|(weight, product)| *weight += product);
        }
        let relative_error = sample.relative_error(matrix, MatrixRef::new(rows, cols, &computed)?).map_err(named)?;
        drop(computed);
        let adjusted = match values {
            None => None,
            Some(Values::Integers(weight)) => Some(Adjusted::integers(self.store, &weight)?),
            Some(Values::Floats(_)) => {
                let stored = if is_transposed { MatrixRef::new(rows, cols, &pruned)?.transposed() } else { pruned };
                Some(Adjusted::floats(self.store, &stored)?)
            }
        };
        let (mask, axis) = if is_transposed { (mask.transposed(), Axis::Column) } else { (mask, Axis::Row) };
        Ok(Solution { mask, axis, adjusted, low_rank: None, relative_error })
    }

    /// A weight as `[out, in]`, in its order: rows, columns and elements.
    pub(super) fn dense(&self, name: &str, is_transposed: bool) -> Result<(usize, usize, Vec<f32>)> {
        let (rows, cols, stored) = self.stored(name)?;
        if is_transposed {
            return Ok((cols, rows, MatrixRef::new(rows, cols, &stored)?.transposed()));
        }
        Ok((rows, cols, stored))
    }

    fn stored(&self, name: &str) -> Result<(usize, usize, Vec<f32>)> {
        let &[rows, cols] = self.reader.tensor(name)?.info.shape.as_slice() else {
            anyhow::bail!("tensor `{name}` is no matrix");
        };
        Ok((rows, cols, self.elements(name)?))
    }

    /// A tensor's elements, in its order.
    fn elements(&self, name: &str) -> Result<Vec<f32>> {
        let elements = floats(self.reader, name)?;
        match self.orders.get(name) {
            Some(order) => Ok(order
                .apply(&self.reader.tensor(name)?.info.shape, &elements)
                .map_err(|error| error.in_tensor(name))?),
            None => Ok(elements),
        }
    }

    /// Values as the weight's dtype stores them.
    pub(super) fn rounded(&self, name: &str, weight: Vec<f32>) -> Result<Vec<f32>> {
        let dtype = self.reader.tensor(name)?.info.dtype.element();
        let Some(dtype) = dtype else { return Ok(weight) };
        Ok(match_element!(dtype, |T| Ok::<Vec<f32>, twofour::Error>(
            weight.into_iter().map(|value| T::from_f32(value).to_f32()).collect()
        ))?)
    }

    /// The pruned weight in its stored orientation, with the low-rank part beside it.
    pub(super) fn values(&self, name: &str, solution: &Solution) -> Result<Vec<f32>> {
        let mut values = match &solution.adjusted {
            Some(adjusted) => adjusted.values(self.store)?,
            None => {
                let (rows, cols, stored) = self.stored(name)?;
                solution.mask.apply(MatrixRef::new(rows, cols, &stored)?)?
            }
        };
        if let Some(factors) = &solution.low_rank {
            factors.add_to(self.store, solution.axis, &mut values)?;
        }
        Ok(values)
    }
}
