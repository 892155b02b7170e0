//! What pruning each layer alone costs.

use anyhow::Result;
use twofour::{
    MatrixRef,
    calibration::{ActivationSample, Statistic, StatisticKind},
    file::Reader,
    solve::{Cpu, Pruned, Pruning},
};
use twofour_nn::model::{BlockInput, BlockwiseCheckpoint, Calibration, Observation};

use super::{layer::Layer, perplexity::Judge};
use crate::{
    commands::{prune::own_text::Pieces, tensor::floats},
    interrupt,
    present::Screen,
    selection::Selection,
};

/// Tokens on which outputs are compared.
const COMPARED: usize = 512;

/// What is known of an input.
struct Seen {
    statistic: Option<Statistic>,
    sample: ActivationSample,
}

/// Every chosen linear layer of the model's blocks, in the order of computation, pruned by each method on the inputs
/// that it has in the dense model.
pub(super) fn layers(
    screen: &Screen,
    checkpoint: &dyn BlockwiseCheckpoint,
    pieces: Pieces,
    selection: &Selection,
    prunings: &[Pruning],
    mut judge: Option<&mut Judge>,
) -> Result<Vec<Layer>> {
    let requires = prunings.iter().map(Pruning::requires).max().unwrap_or(StatisticKind::Nothing);
    let compared = COMPARED.div_ceil(pieces.tokens.len().max(1));
    let mut calibration =
        Calibration::new(checkpoint, &pieces.tokens)?.behind_prompt(pieces.prompt).stopped_by(&interrupt::requested);
    drop(pieces);
    let (mut found, mut progress, blocks) = (vec![], screen.progress(), checkpoint.blocks() as u64);
    while !calibration.is_finished() {
        let block = calibration.block();
        let inputs = calibration.inputs()?;
        let mut seen: Vec<Option<Seen>> = inputs.iter().map(|_| None).collect();
        let mut failed = None;
        calibration.preview(usize::MAX, &mut |observation, _| {
            let index = inputs.iter().position(|input| input == observation.input);
            if let Some(seen) = index.and_then(|index| seen.get_mut(index)) {
                failed = failed.take().or(observe(seen, observation, requires, compared).err());
            }
        })?;
        if let Some(error) = failed {
            return Err(error.context(format!("inputs of block {block}")));
        }
        let steps = inputs.len() as u64;
        for (index, (input, seen)) in inputs.iter().zip(seen).enumerate() {
            progress.steps(&format!("block {}", block + 1), block as u64 * steps + index as u64, blocks * steps);
            let Some(seen) = seen else { continue };
            for name in &input.weights {
                interrupt::check()?;
                let tensor = checkpoint.reader().plain_tensors().find(|tensor| tensor.name == *name);
                if tensor.is_none_or(|t| selection.of(&t.name, t.dtype, &t.shape).is_err()) {
                    continue;
                }
                found.push(layer(checkpoint.reader(), name, input, &seen, prunings, judge.as_deref_mut())?);
            }
        }
        calibration.advance(&|_| None)?;
    }
    Ok(found)
}

fn observe(seen: &mut Option<Seen>, observed: Observation<'_>, requires: StatisticKind, compared: usize) -> Result<()> {
    let Observation { input, x, tokens } = observed;
    if tokens == 0 {
        return Ok(());
    }
    let features = x.len() / tokens;
    if seen.is_none() {
        let statistic = Statistic::new(requires, features)?;
        *seen = Some(Seen { statistic, sample: ActivationSample::new(features) });
    }
    let Some(Seen { statistic, sample }) = seen else { return Ok(()) };
    let named = |error: twofour::Error| error.in_tensor(input.weights.first().map_or("", String::as_str));
    if let Some(statistic) = statistic {
        statistic.add(x).map_err(named)?;
    }
    sample.add(&x[tokens.saturating_sub(compared) * features..]).map_err(named)?;
    Ok(())
}

fn layer(
    reader: &Reader,
    name: &str,
    input: &BlockInput,
    seen: &Seen,
    prunings: &[Pruning],
    judge: Option<&mut Judge>,
) -> Result<Layer> {
    let named = |error: twofour::Error| error.in_tensor(name);
    let (shape, stored) = elements(reader, name)?;
    let dtype = reader.tensor(name)?.info.dtype;
    let [rows, cols] = if input.is_transposed { [shape[1], shape[0]] } else { shape };
    let transposed = |values: Vec<f32>, [rows, cols]: [usize; 2]| -> Result<Vec<f32>> {
        Ok(if input.is_transposed { MatrixRef::new(rows, cols, &values)?.transposed() } else { values })
    };
    let dense = transposed(stored, shape)?;
    let matrix = MatrixRef::new(rows, cols, &dense)?;
    let (mut errors, mut last) = (vec![], vec![]);
    for pruning in prunings {
        interrupt::check()?;
        let values = match pruning.prune(&Cpu, matrix, seen.statistic.as_ref(), None).map_err(named)? {
            Pruned::Mask(mask) => mask.apply(matrix)?,
            Pruned::Solved(solved) => solved.weight,
        };
        errors.push(seen.sample.relative_error(matrix, MatrixRef::new(rows, cols, &values)?).map_err(named)?);
        last = values;
    }
    let perplexity = match judge {
        Some(judge) => Some(judge.with(name, &transposed(last, [rows, cols])?)?),
        None => None,
    };
    Ok(Layer { name: name.to_owned(), shape, dtype, errors, perplexity })
}

/// A stored matrix.
fn elements(reader: &Reader, name: &str) -> Result<([usize; 2], Vec<f32>)> {
    let &[rows, cols] = reader.tensor(name)?.info.shape.as_slice() else {
        anyhow::bail!("tensor `{name}` is no matrix");
    };
    Ok(([rows, cols], floats(reader, name)?))
}
