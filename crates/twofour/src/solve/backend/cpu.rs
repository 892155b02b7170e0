//! Solvers on the CPU.

use std::ops::Range;

use rayon::prelude::*;

use super::{AlpsState, Backend, RefitRows, Values};
use crate::{
    Mask, MatrixRef, Pattern, Result, calibration::Hessian, linear_algebra::factor, mask::zero_pruned, select::nm,
    solve::normal::product,
};

/// The CPU, with all threads. Results are the same with any number of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cpu;

fn floats(values: &Values) -> Result<&Vec<f32>> {
    values.memory()
}

fn floats_mut(values: &mut Values) -> Result<&mut Vec<f32>> {
    values.memory_mut()
}

impl Backend for Cpu {
    fn upload(&self, values: Vec<f32>) -> Result<Values> {
        Ok(Values::new(values))
    }

    fn download(&self, values: Values) -> Result<Vec<f32>> {
        values.into_memory()
    }

    fn copy(&self, values: &Values) -> Result<Values> {
        Ok(Values::new(floats(values)?.clone()))
    }

    fn zeros(&self, len: usize) -> Result<Values> {
        Ok(Values::new(vec![0f32; len]))
    }

    fn row_sums(&self, rows: usize) -> Result<Values> {
        Ok(Values::new(vec![0f64; rows]))
    }

    fn upload_mask(&self, mask: &Mask, rows: Range<usize>) -> Result<Values> {
        Ok(Values::new(mask.of_rows(rows)))
    }

    fn download_mask(&self, mask: &Values, rows: usize, cols: usize) -> Result<Mask> {
        let mask: &Mask = mask.memory()?;
        mask.expect_shape("mask", rows, cols)?;
        Ok(mask.clone())
    }

    fn product(&self, x: &Values, square: &Values, order: usize, out: &mut Values) -> Result<()> {
        product(floats(x)?, floats(square)?, order, floats_mut(out)?);
        Ok(())
    }

    fn inverse(&self, square: &Values, order: usize, shift: f32) -> Result<std::result::Result<Values, usize>> {
        let mut shifted = floats(square)?.clone();
        shifted.iter_mut().step_by(order + 1).for_each(|value| *value += shift);
        Ok(factor::inverse(&shifted, order).map(Values::new))
    }

    fn largest(&self, pattern: Pattern, cols: usize, fit: &Values, added: Option<(f32, &Values)>) -> Result<Values> {
        let fit = floats(fit)?;
        let added = added.map(|(factor, values)| Ok::<_, crate::Error>((factor, floats(values)?))).transpose()?;
        let mut mask = Mask::empty(fit.len() / cols.max(1), cols);
        mask.par_rows_mut().enumerate().for_each_init(
            || vec![0f32; cols],
            |scores, (row, words)| {
                scores.copy_from_slice(&fit[row * cols..][..cols]);
                if let Some((factor, values)) = added {
                    let values = &values[row * cols..];
                    scores.iter_mut().zip(values).for_each(|(score, value)| *score += factor * value);
                }
                scores.iter_mut().for_each(|score| *score *= *score);
                nm::best_of_row(pattern, scores, words);
            },
        );
        Ok(Values::new(mask))
    }

    fn differences(&self, a: &Values, b: &Values) -> Result<u64> {
        a.memory::<Mask>()?.flips(b.memory()?)
    }

    fn apply(&self, mask: &Values, cols: usize, values: &mut Values) -> Result<()> {
        let mask: &Mask = mask.memory()?;
        let rows = floats_mut(values)?.par_chunks_mut(cols.max(1)).enumerate();
        rows.for_each(|(row, values)| zero_pruned(values, mask.row_words(row)));
        Ok(())
    }

    fn alps_right(&self, state: &mut AlpsState, cols: usize, penalty: f32, shift: f32) -> Result<()> {
        let AlpsState { outputs, fit, sparse, multiplier } = state;
        let (outputs, fit, multiplier) = (floats(outputs)?, floats(fit)?, floats(multiplier)?);
        let right = floats_mut(sparse)?.par_chunks_mut(cols).zip(outputs.par_chunks(cols));
        right.zip(multiplier.par_chunks(cols)).zip(fit.par_chunks(cols)).for_each(
            |(((sparse, outputs), multiplier), fit)| {
                for (((sparse, output), multiplier), fit) in sparse.iter_mut().zip(outputs).zip(multiplier).zip(fit) {
                    *sparse = output - multiplier + penalty * *sparse - shift * fit;
                }
            },
        );
        Ok(())
    }

    fn alps_project(&self, state: &mut AlpsState, cols: usize, mask: &Values, penalty: f32) -> Result<()> {
        let mask: &Mask = mask.memory()?;
        let AlpsState { fit, sparse, multiplier, .. } = state;
        let (sparse, multiplier) = (floats_mut(sparse)?, floats_mut(multiplier)?);
        let parts = sparse.par_chunks_mut(cols).zip(floats(fit)?.par_chunks(cols)).zip(multiplier.par_chunks_mut(cols));
        parts.enumerate().for_each(|(row, ((sparse, fit), multiplier))| {
            for ((sparse, fit), multiplier) in sparse.iter_mut().zip(fit).zip(&*multiplier) {
                *sparse = fit + multiplier / penalty;
            }
            zero_pruned(sparse, mask.row_words(row));
            for ((sparse, fit), multiplier) in sparse.iter().zip(fit).zip(multiplier) {
                *multiplier += penalty * (fit - sparse);
            }
        });
        Ok(())
    }

    fn refit_begin(&self, rows: &mut RefitRows) -> Result<()> {
        for_rows(rows, |row, words, inverse| {
            zero_pruned(row.residual, words);
            *row.norm = 0.0;
            for ((p, r), inverse) in row.direction.iter_mut().zip(&*row.residual).zip(inverse) {
                *p = r * inverse;
                *row.norm += f64::from(*r) * f64::from(*p);
            }
        })
    }

    fn refit_step(&self, rows: &mut RefitRows) -> Result<()> {
        for_rows(rows, step)
    }

    fn squared_outputs(&self, hessian: &Hessian, weight: MatrixRef<'_, f32>) -> Result<f64> {
        hessian.squared_outputs(weight)
    }
}

/// A row's part of a refit.
struct RowState<'a> {
    weight: &'a mut [f32],
    residual: &'a mut [f32],
    direction: &'a mut [f32],
    product: &'a mut [f32],
    norm: &'a mut f64,
}

/// Calls `f` with each row, its words of the mask, and the preconditioner.
fn for_rows(rows: &mut RefitRows, f: impl Fn(RowState<'_>, &[u64], &[f32]) + Sync) -> Result<()> {
    let RefitRows { cols, mask, inverse, weight, residual, direction, product, norms } = rows;
    let (mask, inverse): (&Mask, _) = (mask.memory()?, floats(inverse)?);
    let norms: &mut Vec<f64> = norms.memory_mut()?;
    let rows = floats_mut(weight)?.par_chunks_mut(*cols).zip(floats_mut(residual)?.par_chunks_mut(*cols));
    let rows = rows.zip(floats_mut(direction)?.par_chunks_mut(*cols));
    let rows = rows.zip(floats_mut(product)?.par_chunks_mut(*cols)).zip(norms);
    rows.enumerate().for_each(|(row, ((((weight, residual), direction), product), norm))| {
        f(RowState { weight, residual, direction, product, norm }, mask.row_words(row), inverse);
    });
    Ok(())
}

/// A step of a row along its direction, whose product with `H` is given, and the next direction.
fn step(row: RowState<'_>, words: &[u64], inverse: &[f32]) {
    zero_pruned(row.product, words);
    let curvature: f64 = row.direction.iter().zip(&*row.product).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum();
    // Where nothing is left to gain, or rounding has the better of it, the row stays.
    if curvature <= 0.0 || *row.norm <= 0.0 {
        row.direction.fill(0.0);
        return;
    }
    let length = (*row.norm / curvature) as f32;
    let mut norm = 0f64;
    let updates = row.weight.iter_mut().zip(&mut *row.residual).zip(&*row.direction).zip(&*row.product);
    for (((weight, residual), p), q) in updates {
        *weight += length * p;
        *residual -= length * q;
    }
    for (r, inverse) in row.residual.iter().zip(inverse) {
        norm += f64::from(*r) * f64::from(r * inverse);
    }
    let share = (norm / *row.norm) as f32;
    for ((p, r), inverse) in row.direction.iter_mut().zip(&*row.residual).zip(inverse) {
        *p = r * inverse + share * *p;
    }
    *row.norm = norm;
}
