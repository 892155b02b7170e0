//! Masks and packed weights of several layers from few launches.

use half::bf16;
use twofour::{F8E4M3, select::Transposable};
use twofour_cuda::{
    DataType,
    layer::{self, DeviceBuffer, MaskRule, Precision, Refresh, SparseLinear, SparseLinearSettings},
};

use crate::{cuda::Cuda, dense::numbers, support::bench};

/// Every rule with shapes with and without padding. Of the first rule there are more layers than a launch has, whole
/// tiles and others, also where a third of them keeps its mask.
fn kinds() -> Vec<(MaskRule, (usize, usize))> {
    let shapes = [(128, 256), (256, 128), (64, 64), (100, 72), (384, 640), (1, 4)];
    let transposable =
        [Transposable::GreedyAbs, Transposable::GreedySigned, Transposable::Causal1122, Transposable::Optimal];
    let greedy = vec![MaskRule::Transposable(Transposable::GreedyAbs); 19];
    let others =
        transposable.map(MaskRule::Transposable).into_iter().chain([MaskRule::Magnitude, MaskRule::SoftThreshold]);
    greedy.into_iter().chain(others).flat_map(|rule| shapes.map(|shape| (rule, shape))).collect()
}

fn masters(engine: &Cuda<bf16>, seed: usize) -> Vec<DeviceBuffer> {
    let of = |(index, (_, (rows, cols))): (usize, (MaskRule, (usize, usize)))| {
        engine.up(&numbers::<f32>(rows * cols, seed + index))
    };
    kinds().into_iter().enumerate().map(of).collect()
}

fn layers(engine: &Cuda<bf16>, masters: &[DeviceBuffer]) -> Vec<SparseLinear> {
    let new = |((rule, shape), master): ((MaskRule, (usize, usize)), &DeviceBuffer)| {
        let settings = SparseLinearSettings { rule, ..Default::default() };
        SparseLinear::new(&engine.context, master.as_slice(), shape, DataType::BF16, settings).unwrap()
    };
    kinds().into_iter().zip(masters).map(new).collect()
}

/// Everything that a refresh changes.
fn assert_same(what: &str, found: &[SparseLinear], expected: &[SparseLinear]) {
    for ((found, expected), kind) in found.iter().zip(expected).zip(kinds()) {
        let what = format!("{what}, {kind:?}");
        assert_eq!(found.mask().unwrap(), expected.mask().unwrap(), "{what}");
        assert_eq!(found.flips().unwrap(), expected.flips().unwrap(), "{what}");
        assert!(found.packed::<bf16>().unwrap() == expected.packed::<bf16>().unwrap(), "{what}");
        let transposes = [found, expected].map(|layer| layer.packed_transpose::<bf16>().unwrap());
        assert!(transposes[0] == transposes[1], "{what}");
    }
}

#[test]
fn layers_that_are_refreshed_together_have_the_bits_of_each_alone() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let before = masters(&engine, 1);
    let (mut together, mut alone) = (layers(&engine, &before), layers(&engine, &before));
    let [go_on, skip] = [0, 1].map(|flag| DeviceBuffer::from_ids(&engine.context, &[flag]).unwrap());
    for (round, flag) in [(0, &go_on), (1, &skip), (2, &go_on)] {
        let after = masters(&engine, 1000 * (round + 1));
        // Every third layer keeps its mask.
        let selects = |index: usize| !(index + round).is_multiple_of(3);
        let refreshes = together.iter_mut().zip(&after).enumerate();
        let refreshes = refreshes.map(|(index, (layer, master))| Refresh {
            layer,
            master: master.as_slice(),
            selects_mask: selects(index),
        });
        layer::refresh_together(refreshes.collect(), flag.as_slice()).unwrap();
        for (index, (layer, master)) in alone.iter_mut().zip(&after).enumerate() {
            match selects(index) {
                true => layer.remask_unless(master.as_slice(), flag.as_slice()).unwrap(),
                false => layer.repack(master.as_slice()).unwrap(),
            }
        }
        assert_same(&format!("round {round}"), &together, &alone);
    }
    assert!(together.iter().any(|layer| layer.flips().unwrap() > 0));
}

/// 8-bit weights take passes of their own, among layers that do not.
#[test]
fn layers_in_8_bit_floats_are_refreshed_too() {
    let Some(bench) = bench() else { return };
    if bench.device.architecture().features().float8 == twofour_cuda::architecture::Float8::Missing {
        return;
    }
    let engine = Cuda::<bf16>::new(&bench.device);
    let rule = MaskRule::Transposable(Transposable::GreedyAbs);
    let settings = SparseLinearSettings { rule, ..Default::default() };
    let (before, after) = (engine.up(&numbers::<f32>(128 * 256, 1)), engine.up(&numbers::<f32>(128 * 256, 2)));
    let new = |precision| {
        let (context, master) = (&engine.context, before.as_slice());
        SparseLinear::with_precision(context, master, (128, 256), DataType::BF16, precision, settings).unwrap()
    };
    let go_on = DeviceBuffer::from_ids(&engine.context, &[0]).unwrap();
    let [mut wide, mut narrow] = [new(Precision::Activations), new(Precision::Float8)];
    let refresh = |layer| Refresh { layer, master: after.as_slice(), selects_mask: true };
    layer::refresh_together(vec![refresh(&mut wide), refresh(&mut narrow)], go_on.as_slice()).unwrap();
    let mut expected = new(Precision::Float8);
    expected.remask(after.as_slice()).unwrap();
    assert_eq!(wide.mask().unwrap(), expected.mask().unwrap());
    assert_eq!(narrow.mask().unwrap(), expected.mask().unwrap());
    assert!(
        narrow.packed::<F8E4M3>().unwrap() == expected.packed::<F8E4M3>().unwrap(),
        "the packed weight in 8-bit floats"
    );
    assert!(narrow.flips().unwrap() > 0);
}
