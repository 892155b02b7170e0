//! Pruning, and rounding after it, from the solver to the file.

use std::collections::BTreeMap;

use twofour::{
    Compressed, Error, MatrixRef, Pattern, Result,
    calibration::{Hessian, Statistic},
    file::{
        Convert, Kept, Outcome, Overwrite, PlannedTensor, PruneAndQuantize, Quantization, QuantizedWeight, Reader,
        StoredDType, TensorInfo, Writer,
    },
    int4::{Granularity, Int4},
    solve::{Bits, Cpu, Grid, Pruned, Pruning, ScaleScope, method},
};

fn weight() -> Vec<f32> {
    (0..8 * 132u32).map(|i| ((i * 7919 + 31) % 1009) as f32 / 500.0 - 1.0).collect()
}

fn hessian() -> Hessian {
    let mut hessian = Hessian::new(132).unwrap();
    let x: Vec<f32> = (0..300 * 132u32).map(|i| ((i * 104_729 + 7) % 997) as f32 / 500.0 - 1.0).collect();
    hessian.add(&x).unwrap();
    hessian
}

/// What a method found with what follows it.
fn pruned(name: &str, grid: Option<Grid>) -> twofour::solve::Solved {
    let pruning = Pruning { grid, ..Pruning::new(method(name).unwrap(), Pattern::TWO_FOUR) };
    let inputs = Statistic::Hessian(hessian());
    let Pruned::Solved(found) =
        pruning.prune(&Cpu, MatrixRef::new(8, 132, &weight()).unwrap(), Some(&inputs), None).unwrap()
    else {
        panic!("{name} is refitted")
    };
    found
}

fn solved(bits: Bits, scope: ScaleScope) -> QuantizedWeight {
    let grid = to(bits, scope).grid();
    assert_eq!(grid, Grid { bits, scope });
    QuantizedWeight::of_solved(&pruned("alps", Some(grid)), to(bits, scope)).unwrap()
}

fn to(bits: Bits, scope: ScaleScope) -> Quantization {
    let granularity = if scope == ScaleScope::Row { Granularity::Row } else { Granularity::Group };
    match bits {
        Bits::Int8 => Quantization::Int8(granularity),
        Bits::Int4 => Quantization::Int4(granularity),
    }
}

/// `‖(W - Ŵ)·X‖²`.
fn error(of: &[f32], hessian: &Hessian) -> f64 {
    let change: Vec<f32> = weight().iter().zip(of).map(|(w, q)| w - q).collect();
    hessian.squared_outputs(MatrixRef::new(8, 132, &change).unwrap()).unwrap()
}

#[test]
fn rounding_for_the_outputs_is_better_than_to_the_nearest_integers_after_every_method() {
    let hessian = hessian();
    for name in ["magnitude", "wanda", "sparsegpt", "alps"] {
        let floats = pruned(name, None);
        let sparse = Compressed::from_masked(MatrixRef::new(8, 132, &floats.weight).unwrap(), &floats.mask);
        let nearest = Int4::quantize(&sparse.unwrap(), Granularity::Group).unwrap().dequantize().to_dense();
        let own = pruned(name, Some(to(Bits::Int4, ScaleScope::Group(128)).grid()));
        assert_eq!(own.mask, floats.mask);
        let [floats, nearest, own] = [&floats.weight, &nearest, &own.weight].map(|of| error(of, &hessian));
        assert!(floats < own && own - floats < 0.6 * (nearest - floats), "{name}: {floats} {own} {nearest}");
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
            let operation = PruneAndQuantize::new(to, |tensor| tensor.name == "up.weight", solve);
            Convert::open(at("in.safetensors"))?.overwrite(Overwrite::Yes).run(at("out.safetensors"), operation)
        };
        let report = convert(to(bits, scope), &mut |_| Ok(expected.clone())).unwrap();
        assert!(report.tensors.iter().any(|tensor| tensor.outcome == Outcome::Copied(Kept::NotChosen)));
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
