//! Tables of `twofour bench cuda`.

use std::time::Duration;

use crate::{
    measure::cuda::{AttentionRow, GemmRow, GenerationRow, OverheadRow, PruneRow, StepRow, TrainRow},
    present::{
        table::{Align, Table},
        units,
    },
};

/// A GEMM's shape, as in 4096 tokens, [14336, 4096].
pub(super) fn product([tokens, reduction, features]: [usize; 3]) -> String {
    format!("{tokens} tokens, [{features}, {reduction}]")
}

fn time(us: f64) -> String {
    units::time(Duration::from_secs_f64(us * 1e-6))
}

/// Returns the table of pruning.
pub(super) fn prune(rows: &[PruneRow]) -> Table {
    let mut table = Table::new([
        ("weight", Align::Left),
        ("dtype", Align::Left),
        ("contender", Align::Left),
        ("kernel", Align::Left),
        ("time", Align::Right),
        ("TB/s", Align::Right),
    ]);
    for row in rows {
        table.row([
            format!("[{}, {}]", row.shape[0], row.shape[1]),
            if row.dtype == row.output { row.dtype.into() } else { format!("{} to {}", row.dtype, row.output) },
            row.contender.into(),
            row.kernel.clone(),
            time(row.us),
            format!("{:.2}", row.gb_per_s / 1e3),
        ]);
    }
    table
}

/// Returns the table of whole-model decoding.
pub(super) fn generation(rows: &[GenerationRow]) -> Table {
    let mut table = Table::new([
        ("model", Align::Left),
        ("weights", Align::Left),
        ("batch", Align::Right),
        ("step", Align::Right),
        ("tokens/s", Align::Right),
        ("weight GB", Align::Right),
        ("GB/s", Align::Right),
        ("memory GB", Align::Right),
    ]);
    for row in rows {
        table.row([
            row.model.clone(),
            row.weights.clone(),
            row.batch.to_string(),
            format!("{:.3} ms", row.step_ms),
            format!("{:.1}", row.tokens_per_s),
            format!("{:.2}", row.weight_bytes as f64 * 1e-9),
            format!("{:.0}", row.gb_per_s),
            format!("{:.1}", row.allocated_bytes as f64 * 1e-9),
        ]);
    }
    table
}

/// Returns the table of GEMMs.
pub(super) fn gemm(rows: &[GemmRow]) -> Table {
    let mut table = Table::new([
        ("product", Align::Left),
        ("dtype", Align::Left),
        ("contender", Align::Left),
        ("kernel", Align::Left),
        ("time", Align::Right),
        ("TFLOP/s", Align::Right),
        ("GB/s", Align::Right),
        ("sustained", Align::Right),
    ]);
    for row in rows {
        table.row([
            product(row.shape),
            row.dtype.into(),
            row.contender.into(),
            row.kernel.clone(),
            time(row.us),
            format!("{:.0}", row.tflops),
            format!("{:.0}", row.gb_per_s),
            row.sustained_us.map_or_else(String::new, time),
        ]);
    }
    table
}

/// Returns the table of training steps of layers.
pub(super) fn train(rows: &[TrainRow]) -> Table {
    let mut table = Table::new([
        ("layer", Align::Left),
        ("dtype", Align::Left),
        ("part", Align::Left),
        ("contender", Align::Left),
        ("kernel", Align::Left),
        ("time", Align::Right),
    ]);
    for row in rows {
        table.row([
            product(row.shape),
            row.dtype.into(),
            row.part.into(),
            row.contender.into(),
            row.kernel.clone(),
            time(row.us),
        ]);
    }
    table
}

/// Returns the table of training steps of models.
pub(super) fn step(rows: &[StepRow]) -> Table {
    let phases = ["forward", "backward", "update", "masks"];
    let mut table = Table::new([
        ("model", Align::Left),
        ("contender", Align::Left),
        ("step", Align::Right),
        ("p90", Align::Right),
        ("without graph", Align::Right),
        ("tokens/s", Align::Right),
        ("over dense", Align::Right),
        (phases[0], Align::Right),
        (phases[1], Align::Right),
        (phases[2], Align::Right),
        (phases[3], Align::Right),
        ("memory", Align::Right),
    ]);
    for row in rows {
        let dense = rows
            .iter()
            .find(|other| (other.kind, other.model) == (row.kind, row.model))
            .map_or(row.ms, |dense| dense.ms);
        let of = |name| row.phases.iter().find(|phase| phase.phase == name);
        let [forward, backward, update, masks] =
            phases.map(|name| of(name).map_or_else(String::new, |phase| format!("{:.2} ms", phase.ms)));
        table.row([
            step_model(row),
            row.contender.into(),
            format!("{:.2} ms", row.ms),
            format!("{:.2} ms", row.p90_ms),
            format!("{:.2} ms", row.launched_ms),
            format!("{:.0}", row.tokens_per_s),
            format!("{:.3}", dense / row.ms),
            forward,
            backward,
            update,
            masks,
            format!("{:.2} GB", row.bytes as f64 / 1e9),
        ]);
    }
    table
}

/// A model of training steps and its batch.
fn step_model(row: &StepRow) -> String {
    let [layers, _, _, tokens, _] = row.model;
    let plural = if layers == 1 { "" } else { "s" };
    format!("{}, {layers} layer{plural}, {} x {tokens}", row.kind, row.batch)
}

/// Returns the table of attention.
pub(super) fn attention(rows: &[AttentionRow]) -> Table {
    let mut table = Table::new([
        ("attention", Align::Left),
        ("dtype", Align::Left),
        ("contender", Align::Left),
        ("pass", Align::Left),
        ("time", Align::Right),
        ("TFLOP/s", Align::Right),
    ]);
    for row in rows {
        let [batch, positions, heads, head_dim] = row.shape;
        let mask = if row.causal { "causal" } else { "full" };
        table.row([
            format!("{batch} x {positions} tokens, {heads} heads of {head_dim}, {mask}"),
            row.dtype.into(),
            row.contender.into(),
            row.part.into(),
            time(row.us),
            format!("{:.0}", row.tflops),
        ]);
    }
    table
}

/// Returns the table of host times.
pub(super) fn overhead(rows: &[OverheadRow]) -> Table {
    let mut table = Table::new([
        ("call", Align::Left),
        ("dtype", Align::Left),
        ("contender", Align::Left),
        ("kernel", Align::Left),
        ("host", Align::Right),
    ]);
    for row in rows {
        table.row([product(row.shape), row.dtype.into(), row.contender.into(), row.kernel.clone(), time(row.host_us)]);
    }
    table
}
