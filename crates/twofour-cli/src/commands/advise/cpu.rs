//! `twofour advise` on this machine's processor.

use std::collections::BTreeMap;

use anyhow::Result;

use super::{
    Advise,
    answer::ShapeAnswer,
    passes::{MIN_PASSES, medians, settled},
    timing::{Side, Timing},
};
use crate::{
    measure::{self, Arithmetic, Bandwidth, Message, Pass, Request, Row, Shape, Who, Work},
    present::{Screen, units},
    weight_format::WeightFormat,
};

/// Rounds of a pass that are made even when its budget is used up.
const MIN_ROUNDS: usize = 3;

/// One piece of work and what was measured of it so far.
struct Measured {
    work: Work,
    passes: Vec<Pass>,
    /// The contenders of the last pass.
    rows: Vec<Row>,
}

/// What this machine can do at best, as far as passes have shown.
#[derive(Default)]
struct Limits {
    read_gb_per_s: f64,
    gflop_per_s: f64,
}

impl Limits {
    /// The least time of a GEMM with a weight of so many bytes, in microseconds; nothing where the limits are not
    /// known.
    fn least_us(&self, work: Work, bytes: usize) -> Option<f64> {
        let operations = 2.0 * work.shape.out as f64 * work.shape.inputs as f64 * work.tokens as f64;
        let known = self.read_gb_per_s > 0.0 && self.gflop_per_s > 0.0;
        known.then(|| (bytes as f64 / self.read_gb_per_s).max(operations / self.gflop_per_s) * 1e-3)
    }
}

/// Measures every shape at every number of tokens, in passes of a process each, until the spread is known.
///
/// A process of its own for each pass has other pages and threads on other cores than the one before: what differs from
/// run to run differs from pass to pass, and shows in the interval.
pub(super) fn measure(
    advise: &Advise,
    format: WeightFormat,
    screen: &Screen,
    threads: usize,
    shapes: &BTreeMap<Shape, usize>,
) -> Result<Vec<ShapeAnswer>> {
    let budget = measure::time("--budget", advise.budget)? / MIN_PASSES as u32;
    let dtype = format.on_cpu()?;
    let of_shape =
        |&shape: &Shape| advise.tokens.iter().map(move |&tokens| Work { shape, dtype, tokens: tokens as usize });
    let mut all: Vec<Measured> =
        shapes.keys().flat_map(of_shape).map(|work| Measured { work, passes: Vec::new(), rows: Vec::new() }).collect();
    let mut limits = Limits::default();
    let mut progress = screen.progress();
    let mut done = 0;
    for pass in 1.. {
        let works: Vec<Work> = all.iter().filter(|m| settled(&m.passes).is_none()).map(|m| m.work).collect();
        if works.is_empty() {
            break;
        }
        let expected = done + works.len() * (MIN_PASSES + 1).saturating_sub(pass).max(1);
        let mut request = Request { least_rounds: MIN_ROUNDS, ..Request::new(works, budget) };
        if pass <= MIN_PASSES && advise.tokens.iter().any(|tokens| *tokens > 1) {
            (request.bandwidth, request.arithmetic) = (Bandwidth::Before, Arithmetic::Before(dtype));
        }
        measure::measure(threads, &request, &mut |message| {
            match message {
                Message::Bandwidth(read) => limits.read_gb_per_s = limits.read_gb_per_s.max(read.gb_per_s),
                Message::Arithmetic(gflop_per_s) => limits.gflop_per_s = limits.gflop_per_s.max(gflop_per_s),
                Message::Begun(work) => {
                    let what = format!("{}, {}, pass {pass}", work.shape, units::plural(work.tokens, "token"));
                    progress.steps(&what, done as u64, expected as u64);
                }
                Message::Done { rows, rounds_us } => {
                    tracing::info!(pass, ?rows, "measured");
                    done += 1;
                    let work = rows.first().map(Row::what);
                    if let Some(measured) = all.iter_mut().find(|m| Some(m.work) == work) {
                        measured.passes.push(pass_of(&rows, rounds_us));
                        measured.rows = rows;
                    }
                }
                Message::Failed(_) => {}
            }
            Ok(())
        })?;
    }
    drop(progress);
    let timings: Vec<Timing> = all.iter().filter_map(|measured| timing(measured, &limits)).collect();
    let answers = shapes.iter().zip(timings.chunks(advise.tokens.len())).map(|((shape, &layers), timings)| {
        ShapeAnswer { out: shape.out, inputs: shape.inputs, layers, timings: timings.to_vec() }
    });
    Ok(answers.collect())
}

/// A contender's rounds, those of 2:4 and of dense ones told apart.
fn pass_of(rows: &[Row], rounds_us: Vec<Vec<f64>>) -> Pass {
    let mut pass = Pass::default();
    for (row, rounds) in rows.iter().zip(rounds_us) {
        match row.contender {
            Who::Sparse => pass.sparse = rounds,
            who if who.is_dense() => pass.dense.push(rounds),
            _ => {}
        }
    }
    pass
}

/// Nothing where a side is missing.
fn timing(measured: &Measured, limits: &Limits) -> Option<Timing> {
    let Measured { work, passes, rows } = measured;
    let found = settled(passes)?;
    let [dense_us, sparse_us] = medians(passes, found.dense);
    let dense = rows.iter().filter(|row| row.contender.is_dense()).nth(found.dense)?;
    let sparse = rows.iter().find(|row| row.contender == Who::Sparse)?;
    let side = |row: &Row, us| Side { us, contender: row.contender.to_string(), bytes: row.weight_bytes };
    let sides = [side(dense, dense_us), side(sparse, sparse_us)];
    Some(Timing::new(work.tokens, sides, found.interval, passes, limits.least_us(*work, dense.weight_bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use twofour::DataType;

    #[test]
    fn the_limit_is_bandwidth_for_few_tokens_and_arithmetic_for_many() {
        let work = |tokens| Work { shape: Shape { out: 1000, inputs: 1000 }, dtype: DataType::F32.into(), tokens };
        let limits = Limits { read_gb_per_s: 20.0, gflop_per_s: 100.0 };
        assert_eq!(limits.least_us(work(1), 4_000_000), Some(200.0));
        assert_eq!(limits.least_us(work(50), 4_000_000), Some(1000.0));
        assert_eq!(Limits::default().least_us(work(1), 4_000_000), None);
    }
}
