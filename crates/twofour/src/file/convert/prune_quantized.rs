//! From dense weights to 2:4 weights of integers, by a function that prunes and quantizes in one pass.

use std::{
    collections::{BTreeSet, HashMap},
    ops::ControlFlow,
    path::Path,
};

use super::{
    Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, PruneOutcome, PruneReport, PrunedTensor,
    Quantization, QuantizedWeight, Reader, TensorInfo, Writer, reject_not_finite, run,
};
use crate::{Arithmetic, Error, Mask, MatrixRef, Result};

/// As [`prune_with`](super::prune_with), with weights that the function returns as 2:4 weights of integers: what
/// [`sparsegpt`](mod@crate::solve::sparsegpt) with a [`Grid`](crate::solve::Grid) solves for.
///
/// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows. `solve` is called with each chosen tensor, one at a time. What it
/// returns is verified before it is written: its shape, its integers and granularity against `to`, and that it can be made again from the parts that a file holds. Everything
/// else is copied byte for byte. Places are along rows, as in every compressed weight.
///
/// # Errors
/// Those of [`prune_with`](super::prune_with) and of the function, with the tensor's name; [`Error::Shape`] for a result of another shape, [`Error::NotPlanned`] for one of other
/// integers. Nothing is left then.
pub fn prune_and_quantize_with(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    to: Quantization,
    choose: &mut dyn FnMut(&TensorInfo) -> bool,
    solve: &mut dyn FnMut(&TensorInfo) -> Result<QuantizedWeight>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<PruneReport> {
    let reader = Reader::open(input)?;
    let report = PruneReport::default();
    let mut conversion = PruneQuantized { to, choose, solve, report, chosen: BTreeSet::new(), kept: HashMap::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct PruneQuantized<'a> {
    to: Quantization,
    choose: &'a mut dyn FnMut(&TensorInfo) -> bool,
    solve: &'a mut dyn FnMut(&TensorInfo) -> Result<QuantizedWeight>,
    report: PruneReport,
    chosen: BTreeSet<String>,
    /// What became of the tensors that are copied.
    kept: HashMap<String, PruneOutcome>,
}

impl Conversion for PruneQuantized<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        let outcome = match item {
            Item::Compressed(_) => PruneOutcome::AlreadyCompressed,
            Item::Plain(tensor) => match Matrix::of(tensor) {
                None => PruneOutcome::NotAMatrix,
                Some(matrix) if (self.choose)(tensor) => {
                    matrix.run(reader, Finite)?;
                    plan.compressed(self.to.info(&tensor.name, matrix.rows, matrix.cols)?);
                    self.chosen.insert(tensor.name.clone());
                    return Ok(());
                }
                Some(_) => PruneOutcome::NotChosen,
            },
        };
        self.kept.insert(item.name().to_owned(), outcome);
        item.plan_copy(plan);
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let name = item.name().to_owned();
        let (dtype, shape) = match item {
            Item::Plain(tensor) => (tensor.dtype, tensor.shape.clone()),
            Item::Compressed(weight) => (weight.format.stored(), vec![weight.rows, weight.cols]),
        };
        let outcome = match item {
            Item::Plain(tensor) if self.chosen.contains(&name) => self.solved(reader, tensor, writer)?,
            _ => {
                item.write_copy(reader, writer)?;
                self.kept.get(&name).copied().unwrap_or(PruneOutcome::NotAMatrix)
            }
        };
        self.report.tensors.push(PrunedTensor { name, dtype, shape, outcome });
        Ok(())
    }
}

impl PruneQuantized<'_> {
    fn solved(&mut self, reader: &Reader, tensor: &TensorInfo, writer: &mut Writer) -> Result<PruneOutcome> {
        let changed = |reason| {
            let (path, name) = (reader.path().to_owned(), tensor.name.clone());
            Error::NotPlanned { path, name, reason }
        };
        let matrix = Matrix::of(tensor).ok_or_else(|| changed("is no matrix; it changed while it was read"))?;
        let weight = (self.solve)(tensor)?;
        if weight.quantization() != self.to {
            return Err(changed("was quantized to other integers than planned"));
        }
        let weight = weight.verified()?;
        let mask = weight.mask();
        mask.expect_shape("quantized weight and tensor", matrix.rows, matrix.cols)?;
        let outcome = matrix.run(reader, Retained(&mask))?;
        weight.write(&tensor.name, writer)?;
        Ok(outcome)
    }
}

/// Checks that every element is finite.
struct Finite;

impl OnMatrix for Finite {
    type Output = ();

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<()> {
        reject_not_finite(matrix)
    }
}

/// What a mask keeps of the dense weight.
struct Retained<'a>(&'a Mask);

impl OnMatrix for Retained<'_> {
    type Output = PruneOutcome;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<PruneOutcome> {
        let retained = self.0.retained(matrix)?;
        Ok(PruneOutcome::PrunedBy {
            density_before: retained.density_before(),
            density: retained.density(),
            kept_l1: retained.l1(),
            kept_l2: retained.l2(),
            adjusted: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        Pattern,
        calibration::Hessian,
        file::{PlannedTensor, StoredDType},
        int4::Granularity,
        select::Sparsity,
        solve::{Bits, Grid, GridScales, ScaleScope, SparseGpt, sparsegpt},
    };

    fn weight() -> Vec<f32> {
        (0..8 * 132u32).map(|i| ((i * 7919 + 31) % 1009) as f32 / 500.0 - 1.0).collect()
    }

    fn solved(bits: Bits, scope: ScaleScope) -> QuantizedWeight {
        let mut hessian = Hessian::new(132).unwrap();
        let x: Vec<f32> = (0..300 * 132u32).map(|i| ((i * 104_729 + 7) % 997) as f32 / 500.0 - 1.0).collect();
        hessian.add(&x).unwrap();
        let grid = Some(Grid { bits, scope, scales: GridScales::Static });
        let settings = SparseGpt { grid, ..SparseGpt::new(Sparsity::Groups(Pattern::TWO_FOUR)) };
        let found = sparsegpt(MatrixRef::new(8, 132, &weight()).unwrap(), &hessian, &settings).unwrap();
        QuantizedWeight::of_solved(&found, to(bits, scope)).unwrap()
    }

    fn to(bits: Bits, scope: ScaleScope) -> Quantization {
        let granularity = if scope == ScaleScope::Row { Granularity::Row } else { Granularity::Group };
        match bits {
            Bits::Int8 => Quantization::Int8(granularity),
            Bits::Int4 => Quantization::Int4(granularity),
        }
    }

    #[test]
    fn what_was_solved_is_what_a_reader_finds() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let plan = ["up.weight", "norm.weight"].map(|name| PlannedTensor::new(name, StoredDType::F32, [8, 132]));
        let mut writer = Writer::create(at("in.safetensors"), Overwrite::No, plan.to_vec(), BTreeMap::new()).unwrap();
        for name in ["up.weight", "norm.weight"] {
            writer.write_elements(name, &weight()).unwrap();
        }
        writer.finish().unwrap();
        for (bits, scope) in [
            (Bits::Int8, ScaleScope::Row),
            (Bits::Int8, ScaleScope::Group(128)),
            (Bits::Int4, ScaleScope::Row),
            (Bits::Int4, ScaleScope::Group(128)),
        ] {
            let expected = solved(bits, scope);
            let convert = |to, solve: &mut dyn FnMut(&TensorInfo) -> Result<QuantizedWeight>| {
                prune_and_quantize_with(
                    at("in.safetensors"),
                    at("out.safetensors"),
                    Overwrite::Yes,
                    to,
                    &mut |tensor| tensor.name == "up.weight",
                    solve,
                    &mut |_| ControlFlow::Continue(()),
                )
            };
            let report = convert(to(bits, scope), &mut |_| Ok(expected.clone())).unwrap();
            assert!(report.tensors.iter().any(|tensor| tensor.outcome == PruneOutcome::NotChosen));
            let reader = Reader::open(at("out.safetensors")).unwrap();
            let found = match bits {
                Bits::Int8 => reader.int8("up.weight").unwrap().dequantize(),
                Bits::Int4 => reader.int4("up.weight").unwrap().dequantize(),
            };
            assert_eq!(found.to_dense(), expected.dequantize().to_dense());
            assert_eq!(reader.tensor("norm.weight").unwrap().to_vec::<f32>().unwrap(), weight());
            // Other integers than planned leave the output as it was.
            let other = to(if bits == Bits::Int8 { Bits::Int4 } else { Bits::Int8 }, scope);
            assert!(matches!(convert(other, &mut |_| Ok(expected.clone())), Err(Error::NotPlanned { .. })));
            let missing = |tensor: &TensorInfo| Err(Error::NoParameter { name: tensor.name.clone() });
            assert!(matches!(convert(to(bits, scope), &mut { missing }), Err(Error::NoParameter { .. })));
            assert_eq!(Reader::open(at("out.safetensors")).unwrap().tensors().count(), reader.tensors().count());
        }
    }
}
