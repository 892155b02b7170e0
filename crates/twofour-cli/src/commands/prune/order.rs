//! Orders of features in which pruning costs less.

use std::collections::HashMap;

use anyhow::Result;
use twofour::{
    MatrixRef, Pattern,
    calibration::{Hessian, Statistic, StatisticKind},
    file::Reorder,
    solve::{Cpu, Permutation, Pruned, method, permutation_on},
};
use twofour_nn::model::{BlockInput, Calibration, FreeFeatures, Gathered as _, Runner};

use super::calibrated::Solver;

/// Tokens on which orders are chosen and compared.
const TOKENS: usize = 8192;

/// Rows by whose errors two orders are compared.
const ROWS: usize = 256;

/// An input whose features may be ordered.
struct Free<'a> {
    input: &'a BlockInput,
    /// The one weight that reads it.
    weight: &'a str,
    features: FreeFeatures,
    hessian: Hessian,
}

/// Returns the orders, by name, of the tensors of the next block that have less error in them: of weights' input
/// features, and of the outputs of the layers before, with their biases.
pub(super) fn choose<R: Runner>(
    solver: &Solver<'_, R>,
    calibration: &Calibration<'_, R>,
    inputs: &[BlockInput],
) -> Result<HashMap<String, Reorder>> {
    let mut orders = HashMap::new();
    let Some(pattern) = solver.groups() else { return Ok(orders) };
    for free in free_inputs(solver, pattern, calibration, inputs)? {
        let named = |error: twofour::Error| error.in_tensor(free.weight);
        let (rows, cols, dense) = solver.dense(free.weight, free.input.is_transposed)?;
        let matrix = MatrixRef::new(rows, cols, &dense)?;
        let FreeFeatures { sets, len, .. } = &free.features;
        let settings = Permutation::new(pattern);
        let order = permutation_on(solver.backend, matrix, &free.hessian, sets, *len, &settings).map_err(named)?;
        let Some(producers) = free.features.outputs(&order) else { continue };
        let names = producers.iter().flat_map(|producer| [Some(&producer.weight), producer.bias.as_ref()]);
        if !names.flatten().all(|name| solver.is_plain(name)) || !lowers_error(pattern, matrix, &order, &free.hessian)?
        {
            continue;
        }
        let of_axis = |is_rows: bool, order| if is_rows { Reorder::rows(order) } else { Reorder::columns(order) };
        orders.insert(free.weight.to_owned(), of_axis(free.input.is_transposed, order)?);
        for producer in producers {
            if let Some(bias) = producer.bias {
                orders.insert(bias, Reorder::rows(producer.order.clone())?);
            }
            orders.insert(producer.weight, of_axis(!producer.is_transposed, producer.order)?);
        }
    }
    Ok(orders)
}

/// The inputs of the next block whose features may be ordered, with what is known of them on some tokens.
fn free_inputs<'a, R: Runner>(
    solver: &Solver<'_, R>,
    pattern: Pattern,
    calibration: &Calibration<'_, R>,
    inputs: &'a [BlockInput],
) -> Result<Vec<Free<'a>>> {
    let (mut free, mut gatherers) = (vec![], vec![]);
    for (index, input) in inputs.iter().enumerate() {
        let [weight] = input.weights.as_slice() else { continue };
        let Some(features) = calibration.free_features(index)?.filter(|_| solver.is_selected(weight)) else { continue };
        // Otherwise a group would lie in two runs.
        if features.len.is_multiple_of(pattern.m()) {
            let columns = features.sets.iter().map(Vec::len).sum::<usize>() * features.len;
            let gathered = solver.runner.gather(StatisticKind::Hessian, columns, None)?;
            gatherers.extend(gathered.map(|gathered| (index, gathered)));
            free.push((input, weight.as_str(), features));
        }
    }
    if free.is_empty() {
        return Ok(vec![]);
    }
    let mut failed = false;
    calibration.preview(TOKENS, &mut |seen, _| {
        if let Some((_, gathered)) = gatherers.iter_mut().find(|(index, _)| inputs[*index] == *seen.input) {
            failed |= gathered.add(seen.x, None).is_err();
        }
    })?;
    // What is wrong with these inputs is told where they are observed.
    let mut found = vec![];
    for ((_, gathered), (input, weight, features)) in gatherers.into_iter().zip(free) {
        match gathered.finish() {
            Ok((Statistic::Hessian(hessian), _)) if !failed => found.push(Free { input, weight, features, hessian }),
            Ok(_) | Err(twofour::Error::Statistic { .. }) => return Ok(vec![]),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

/// Whether the error of pruning is lower in this order of columns, by SparseGPT on some rows.
fn lowers_error(pattern: Pattern, weight: MatrixRef<'_, f32>, order: &[usize], hessian: &Hessian) -> Result<bool> {
    let cols = weight.cols();
    let rows: Vec<&[f32]> = (0..weight.rows()).step_by(weight.rows().div_ceil(ROWS)).map(|r| weight.row(r)).collect();
    let Some(sparsegpt) = method("sparsegpt") else { return Ok(false) };
    let error = |values: &[f32], hessian: Hessian| -> Result<f64> {
        let matrix = MatrixRef::new(rows.len(), cols, values)?;
        Ok(match sparsegpt.prune(&Cpu, matrix, pattern.into(), Some(&Statistic::Hessian(hessian)))? {
            Pruned::Solved(solved) => solved.squared_error,
            Pruned::Mask(_) => f64::INFINITY,
        })
    };
    let ordered: Vec<f32> = rows.iter().flat_map(|row| order.iter().map(|column| row[*column])).collect();
    Ok(error(&ordered, hessian.reordered(order)?)? < error(&rows.concat(), hessian.clone())?)
}
