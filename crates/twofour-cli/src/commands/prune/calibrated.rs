//! Pruning by what a model computes on text, block after block.

use std::{cell::RefCell, collections::HashMap, path::Path};

use anyhow::Result;
use twofour::{
    Arithmetic, Axis, Element, MatrixRef,
    calibration::{ActivationSample, CrossProducts, Statistic},
    file::{Quantization, QuantizedWeight, Reader, StoredElement},
    match_element,
    solve::{Pruned, Pruning},
};
use twofour_nn::model::{Calibration, Observation, Replace, open_blockwise};

use super::{
    sampling::Sampling,
    solution::{Adjusted, Solution, Solutions},
    store::Store,
};
use crate::{
    interrupt, memory,
    present::{Screen, units},
    selection::Selection,
};

/// Tokens on which pruned layers are compared with dense ones.
const COMPARED: usize = 256;

/// How weights are pruned.
#[derive(Debug, Clone, Copy)]
pub(super) struct How {
    pub(super) pruning: Pruning,
    /// The integers that kept weights are rounded to.
    pub(super) quantization: Option<Quantization>,
}

/// Prunes every selected weight that the checkpoint's blocks multiply with.
pub(super) fn solve(
    screen: &Screen,
    (input, output): (&Path, &Path),
    selection: &Selection,
    how: How,
    sampling: &Sampling,
) -> Result<Solutions> {
    let checkpoint = open_blockwise(input)?;
    let tokenizer = checkpoint.tokenizer()?;
    let framing = checkpoint.framing(&tokenizer)?;
    let pieces = sampling.pieces(&tokenizer, &framing, checkpoint.context(), screen)?;
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let store = Store::create_in(parent)?;
    let solver = Solver { reader: checkpoint.reader(), selection, how, store: &store };
    let tokens: usize = pieces.iter().map(Vec::len).sum();
    let models = if how.pruning.compensation > 0.0 { 2 } else { 1 };
    let states = (tokens as u64).saturating_mul((models * checkpoint.width() * size_of::<f32>()) as u64);
    let what = format!("the hidden states of {} take", units::plural(tokens, "token"));
    memory::expect_room(states, &what, "lower --samples or --length")?;
    let compared = COMPARED.div_ceil(pieces.len());
    let mut calibration = Calibration::new(checkpoint.as_ref(), &pieces)?.stopped_by(&interrupt::requested);
    drop(pieces);
    if how.pruning.compensation > 0.0 {
        calibration = calibration.beside_dense();
    }

    let mut progress = screen.progress();
    let blocks = checkpoint.blocks();
    let mut weights: HashMap<String, Solution> = HashMap::new();
    while !calibration.is_finished() {
        let block = calibration.block();
        progress.steps(&format!("pruning block {}", block + 1), block as u64, blocks as u64);
        // Inputs in the order of computation: those of a layer come from the pruned ones before it.
        for names in calibration.inputs()? {
            interrupt::check()?;
            let Some(first) = names.iter().find(|name| solver.is_selected(name)) else { continue };
            let mut input = None;
            let mut failed = None;
            with_solutions(&solver, &weights, |replace| {
                calibration.observe_input(first, replace, &mut |observation, beside| {
                    if failed.is_none() {
                        failed = solver.observe(&mut input, observation, beside, compared).err();
                    }
                })
            })?;
            if let Some(error) = failed {
                solver.expect_finite_weights()?;
                return Err(error.context(format!("inputs of block {block}")));
            }
            let Some(input) = input else { continue };
            for name in &input.weights {
                interrupt::check()?;
                if let Some(solution) = solver.solve(name, &input)? {
                    weights.insert(name.clone(), solution);
                }
            }
        }
        with_solutions(&solver, &weights, |replace| calibration.advance(replace))?;
    }
    Ok(Solutions::new(weights, store, tokens))
}

/// Does what computes with the weights that were found; an error of reading one of them comes first.
fn with_solutions(
    solver: &Solver<'_>,
    weights: &HashMap<String, Solution>,
    work: impl FnOnce(Replace<'_>) -> twofour_nn::Result<()>,
) -> Result<()> {
    let failed = RefCell::new(None);
    let outcome = work(&|name| {
        let solution = weights.get(name)?;
        solver.values(name, solution).map_err(|error| failed.replace(Some(error))).ok()
    });
    match failed.into_inner() {
        Some(error) => Err(error),
        None => Ok(outcome?),
    }
}

/// What is known of the input of some linear layers.
#[derive(Debug)]
struct LayerInput {
    weights: Vec<String>,
    is_transposed: bool,
    statistic: Statistic,
    /// Products with the same inputs in the dense model.
    beside: Option<CrossProducts>,
    sample: ActivationSample,
}

/// The values of a solved weight, `[out, in]`.
enum Values {
    /// As the weight's dtype stores them.
    Floats(Vec<f32>),
    Integers(QuantizedWeight),
}

struct Solver<'a> {
    reader: &'a Reader,
    selection: &'a Selection,
    how: How,
    store: &'a Store,
}

impl Solver<'_> {
    /// Adds a text's inputs to the statistics of the layers that read them.
    fn observe(
        &self,
        input: &mut Option<LayerInput>,
        observation: Observation<'_>,
        beside: Option<&[f32]>,
        compared: usize,
    ) -> Result<()> {
        let Some(first) = observation.weights.first() else { return Ok(()) };
        if observation.tokens == 0 {
            return Ok(());
        }
        let features = observation.x.len() / observation.tokens;
        if input.is_none() {
            let Some(statistic) = Statistic::new(self.how.pruning.requires(), features)? else { return Ok(()) };
            *input = Some(LayerInput {
                weights: observation.weights.to_vec(),
                is_transposed: observation.is_transposed,
                statistic,
                beside: beside.map(|_| CrossProducts::new(features)).transpose()?,
                sample: ActivationSample::new(features),
            });
        }
        let Some(input) = input else { return Ok(()) };
        let named = |error: twofour::Error| error.in_tensor(first);
        input.statistic.add(observation.x).map_err(named)?;
        if let (Some(products), Some(beside)) = (&mut input.beside, beside) {
            products.add(beside, observation.x).map_err(named)?;
        }
        // The end of a text has the longest context.
        let skipped = observation.tokens.saturating_sub(compared);
        input.sample.add(&observation.x[skipped * features..]).map_err(named)?;
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

    fn is_selected(&self, name: &str) -> bool {
        let tensor = self.reader.plain_tensors().find(|tensor| tensor.name == *name);
        tensor.is_some_and(|t| self.selection.of(&t.name, t.dtype, &t.shape).is_ok())
    }

    /// Prunes a weight, if it is selected.
    fn solve(&self, name: &str, input: &LayerInput) -> Result<Option<Solution>> {
        if !self.is_selected(name) {
            return Ok(None);
        }
        tracing::info!(tensor = name, "pruning");
        let (rows, cols, dense) = self.dense(name, input.is_transposed)?;
        let matrix = MatrixRef::new(rows, cols, &dense)?;
        let named = |error: twofour::Error| error.in_tensor(name);
        let found = self.how.pruning.prune(matrix, Some(&input.statistic), input.beside.as_ref()).map_err(named)?;
        let (mask, values) = match found {
            Pruned::Mask(mask) => (mask, None),
            Pruned::Solved(solved) => {
                let values = match self.how.quantization {
                    None => Values::Floats(self.rounded(name, solved.weight)?),
                    Some(_) if input.is_transposed => anyhow::bail!(
                        "`{name}` is stored as [in_features, out_features], and integers are 2:4 along stored rows; \
                         leave out --quantize"
                    ),
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
        let relative_error =
            input.sample.relative_error(matrix, MatrixRef::new(rows, cols, &pruned)?).map_err(named)?;
        let adjusted = match values {
            None => None,
            Some(Values::Integers(weight)) => Some(Adjusted::integers(self.store, &weight)?),
            Some(Values::Floats(_)) => {
                let stored =
                    if input.is_transposed { MatrixRef::new(rows, cols, &pruned)?.transposed() } else { pruned };
                Some(Adjusted::floats(self.store, &stored)?)
            }
        };
        let (mask, axis) = if input.is_transposed { (mask.transposed(), Axis::Column) } else { (mask, Axis::Row) };
        Ok(Some(Solution { mask, axis, adjusted, relative_error }))
    }

    /// A stored weight as `[out, in]`: rows, columns and elements.
    fn dense(&self, name: &str, is_transposed: bool) -> Result<(usize, usize, Vec<f32>)> {
        let (rows, cols, stored) = self.stored(name)?;
        if is_transposed {
            return Ok((cols, rows, MatrixRef::new(rows, cols, &stored)?.transposed()));
        }
        Ok((rows, cols, stored))
    }

    fn stored(&self, name: &str) -> Result<(usize, usize, Vec<f32>)> {
        fn typed<T: Element + StoredElement>(reader: &Reader, name: &str) -> twofour::Result<Vec<f32>> {
            Ok(reader.tensor(name)?.elements::<T>()?.iter().map(|value| value.to_f32()).collect())
        }
        let info = self.reader.tensor(name)?.info;
        let (Some(dtype), &[rows, cols]) = (info.dtype.element(), info.shape.as_slice()) else {
            anyhow::bail!("tensor `{name}` is no matrix of a dtype that can be pruned");
        };
        Ok((rows, cols, match_element!(dtype, |T| typed::<T>(self.reader, name))?))
    }

    /// Values as the weight's dtype stores them.
    fn rounded(&self, name: &str, weight: Vec<f32>) -> Result<Vec<f32>> {
        let dtype = self.reader.tensor(name)?.info.dtype.element();
        let Some(dtype) = dtype else { return Ok(weight) };
        Ok(match_element!(dtype, |T| Ok::<Vec<f32>, twofour::Error>(
            weight.into_iter().map(|value| T::from_f32(value).to_f32()).collect()
        ))?)
    }

    /// The pruned weight in its stored orientation.
    fn values(&self, name: &str, solution: &Solution) -> Result<Vec<f32>> {
        match &solution.adjusted {
            Some(adjusted) => Ok(adjusted.values(self.store)?),
            None => {
                let (rows, cols, stored) = self.stored(name)?;
                Ok(solution.mask.apply(MatrixRef::new(rows, cols, &stored)?)?)
            }
        }
    }
}
