//! What became of each tensor.

use anyhow::Result;
use serde::Serialize;
use twofour::{
    Axis, Selector,
    file::{Converted, Kept, Outcome, Pruned, Report},
    role::Role,
};

use super::solution::Solutions;
use crate::{
    present::{
        Screen,
        layers::by_layer,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    selection::Selection,
};

#[derive(Debug, Serialize)]
pub(super) struct TensorAnswer<'a> {
    name: &'a str,
    dtype: &'static str,
    pub(super) shape: &'a [usize],
    pub(super) pruned: bool,
    /// The stored axis along which the layer sums, or groups run; null where they run along both, and where nothing was
    /// pruned.
    pub(super) axis: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    density_before: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_density: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_l1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_l2: Option<f64>,
    /// The squared change of the layer's outputs over their square, on some of the calibration's tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    relative_error: Option<f64>,
}

/// Prints a row for each kind of layer, or for each tensor.
pub(super) fn show(screen: &mut Screen, tensors: &[TensorAnswer<'_>]) -> Result<()> {
    let mut table = Table::new([
        (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Right),
        ("density", Align::Right),
        ("mask", Align::Right),
        ("kept L1", Align::Right),
        ("kept L2", Align::Right),
        ("error", Align::Right),
        ("along", Align::Left),
    ]);
    let was_sparse = screen.is_detailed() || tensors.iter().any(|t| t.density_before.is_some_and(|d| d < 0.9995));
    // The means of one kind of layer in one row.
    let alike = |t: &TensorAnswer<'_>| (t.dtype, t.shape.to_vec(), t.pruned, t.axis, t.reason.clone());
    let rows = by_layer(tensors, screen.is_detailed(), |t| (t.name, alike(t)));
    for (label, row) in rows {
        let first = row[0];
        let mean = |of: fn(&TensorAnswer<'_>) -> Option<f64>| {
            let values: Vec<f64> = row.iter().filter_map(|t| of(t)).collect();
            if values.is_empty() {
                String::new()
            } else {
                units::percent(values.iter().sum::<f64>() / values.len() as f64)
            }
        };
        let mut cells = vec![label, first.dtype.to_owned(), units::shape(first.shape)];
        if let Some(reason) = &first.reason {
            table.row_with_note(cells, &paint(style::FAINT, format!("kept: {reason}")));
            continue;
        }
        let detail = |of| if screen.is_detailed() { mean(of) } else { String::new() };
        cells.extend([
            if was_sparse { mean(|t| t.density_before) } else { String::new() },
            mean(|t| t.mask_density),
            mean(|t| t.kept_l1),
            detail(|t| t.kept_l2),
            mean(|t| t.relative_error),
            if first.axis == Some("column") { paint(style::FAINT, "columns") } else { String::new() },
        ]);
        table.row(cells);
    }
    screen.line(table)?;
    if tensors.iter().any(|t| t.pruned) {
        if was_sparse {
            screen.note("density: the share of nonzeros before")?;
        }
        screen.note("mask: the share of weights that are kept; kept L1: their share of the sum of |w|")?;
        if screen.is_detailed() {
            screen.note("kept L2: their share of the sum of w²")?;
        }
    }
    if tensors.iter().any(|t| t.relative_error.is_some()) {
        screen.note("error: the squared change of the layer's outputs on the calibration text, by their square")?;
    }
    Ok(())
}

/// The report's tensors with reasons and errors.
pub(super) fn answers<'a>(
    report: &'a Report<Pruned>,
    selection: &Selection,
    solutions: Option<&Solutions>,
) -> Vec<TensorAnswer<'a>> {
    let answer = |t: &'a Converted<Pruned>| {
        let mut answer = TensorAnswer {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            pruned: false,
            axis: None,
            reason: None,
            density_before: None,
            mask_density: None,
            kept_l1: None,
            kept_l2: None,
            relative_error: solutions.and_then(|solutions| solutions.relative_error(&t.name)),
        };
        match t.outcome {
            Outcome::Changed(pruned) => {
                let axis = match pruned.selector {
                    Some(Selector::Magnitude { axis, .. } | Selector::Pattern { axis, .. }) => Some(axis),
                    Some(_) => None,
                    None => solutions.and_then(|solutions| solutions.axis(&t.name)),
                };
                answer.axis = axis.map(|axis| if axis == Axis::Row { "row" } else { "column" });
                answer.pruned = true;
                answer.density_before = Some(pruned.density_before);
                answer.mask_density = Some(pruned.density);
                answer.kept_l1 = Some(pruned.kept_l1);
                answer.kept_l2 = Some(pruned.kept_l2);
            }
            Outcome::Copied(Kept::Compressed) => answer.reason = Some("compressed already".to_owned()),
            Outcome::Copied(_) => {
                let chosen = t.stored().map(|dtype| selection.of(&t.name, dtype, &t.shape));
                let reason = match chosen {
                    Some(Err(skipped)) => skipped.to_string(),
                    Some(Ok(_)) if solutions.is_some() => "no linear layer of a block".to_owned(),
                    _ => Role::NotAMatrix.to_string(),
                };
                answer.reason = Some(reason);
            }
        }
        answer
    };
    report.tensors.iter().map(answer).collect()
}
