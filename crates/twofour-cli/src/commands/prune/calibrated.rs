//! Pruning by what a model computes on text, block after block.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::Result;
use twofour::{
    Arithmetic, Axis, Element, Mask, MatrixRef, Pattern,
    calibration::{ActivationSample, Hessian, InputNorms},
    criterion::{self, Criterion, Ria, Wanda, WandaVariant},
    file::{Quantization, QuantizedWeight, Reader, StoredElement},
    match_element,
    select::Sparsity,
    solve::{Precision, Solved, SparseGpt, sparsegpt},
};
use twofour_nn::model::{Calibration, Observation, open_blockwise};

use super::{
    method::Method,
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
    pub(super) method: Method,
    pub(super) pattern: Pattern,
    /// The integers that SparseGPT rounds to.
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
    let states = (tokens as u64).saturating_mul((checkpoint.width() * size_of::<f32>()) as u64);
    let what = format!("the hidden states of {} take", units::plural(tokens, "token"));
    memory::expect_room(states, &what, "lower --samples or --length")?;
    let compared = COMPARED.div_ceil(pieces.len());
    let mut calibration = Calibration::new(checkpoint.as_ref(), &pieces)?.stopped_by(&interrupt::requested);
    drop(pieces);

    let mut progress = screen.progress();
    let blocks = checkpoint.blocks();
    let mut weights: HashMap<String, Solution> = HashMap::new();
    while !calibration.is_finished() {
        let block = calibration.block();
        progress.steps(&format!("pruning block {}", block + 1), block as u64, blocks as u64);
        let mut inputs: BTreeMap<String, LayerInput> = BTreeMap::new();
        let mut failed = None;
        calibration.observe(&mut |observation| {
            if failed.is_none() {
                failed = solver.observe(&mut inputs, observation, compared).err();
            }
        })?;
        if let Some(error) = failed {
            solver.expect_finite_weights()?;
            return Err(error.context(format!("inputs of block {block}")));
        }
        for input in inputs.into_values() {
            interrupt::check()?;
            for name in &input.weights {
                if let Some(solution) = solver.solve(name, &input)? {
                    weights.insert(name.clone(), solution);
                }
            }
        }
        let failed = RefCell::new(None);
        calibration.advance(&|name| {
            let solution = weights.get(name)?;
            solver.values(name, solution).map_err(|error| failed.replace(Some(error))).ok()
        })?;
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
    }
    Ok(Solutions::new(weights, store, tokens))
}

/// What is known of the input of some linear layers.
#[derive(Debug)]
struct LayerInput {
    weights: Vec<String>,
    is_transposed: bool,
    statistic: Statistic,
    sample: ActivationSample,
}

#[derive(Debug)]
enum Statistic {
    Norms(InputNorms),
    Hessian(Hessian),
}

/// What a criterion or a solver found.
enum Found {
    Mask(Mask),
    Solved(Solved),
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
    /// Adds a text's inputs to the statistics of its layers.
    fn observe(
        &self,
        inputs: &mut BTreeMap<String, LayerInput>,
        observation: Observation<'_>,
        compared: usize,
    ) -> Result<()> {
        let Some(first) = observation.weights.first() else { return Ok(()) };
        if observation.tokens == 0 || !observation.weights.iter().any(|name| self.is_selected(name)) {
            return Ok(());
        }
        let features = observation.x.len() / observation.tokens;
        if !inputs.contains_key(first) {
            let statistic = match self.how.method {
                Method::Sparsegpt => Statistic::Hessian(Hessian::new(features)?),
                _ => Statistic::Norms(InputNorms::new(features)),
            };
            let input = LayerInput {
                weights: observation.weights.to_vec(),
                is_transposed: observation.is_transposed,
                statistic,
                sample: ActivationSample::new(features),
            };
            inputs.insert(first.clone(), input);
        }
        let Some(input) = inputs.get_mut(first) else { return Ok(()) };
        let named = |error: twofour::Error| error.in_tensor(first);
        match &mut input.statistic {
            Statistic::Norms(norms) => norms.add(observation.x),
            Statistic::Hessian(hessian) => hessian.add(observation.x),
        }
        .map_err(named)?;
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
        let found = self.pruned(matrix, &input.statistic).map_err(named)?;
        let (mask, values) = match found {
            Found::Mask(mask) => (mask, None),
            Found::Solved(solved) => {
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

    fn pruned(&self, matrix: MatrixRef<'_, f32>, statistic: &Statistic) -> twofour::Result<Found> {
        let sparsity = Sparsity::Groups(self.how.pattern);
        let by = |criterion: &dyn Criterion| Ok(Found::Mask(criterion::mask(matrix, criterion, sparsity)?));
        match statistic {
            Statistic::Norms(norms) if self.how.method == Method::Ria => by(&Ria { norms, exponent: Ria::EXPONENT }),
            Statistic::Norms(norms) => by(&Wanda { norms, variant: WandaVariant::Paper }),
            Statistic::Hessian(hessian) => {
                let grid = self.how.quantization.map(Quantization::grid);
                let settings = SparseGpt { grid, ..SparseGpt::new(sparsity) };
                let solved = match sparsegpt(matrix, hessian, &settings) {
                    Err(twofour::Error::NotPositiveDefinite { .. }) => {
                        sparsegpt(matrix, hessian, &SparseGpt { precision: Precision::F64, ..settings })?
                    }
                    solved => solved?,
                };
                Ok(Found::Solved(solved))
            }
        }
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
