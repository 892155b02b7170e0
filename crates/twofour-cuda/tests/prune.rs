//! On a device: masks and compressed bytes are those of the CPU, for random and for adversarial weights. Without a device the tests skip.

mod support;

use cudarc::driver::DeviceRepr;
use half::{bf16, f16};
use support::{Bench, device};
use twofour::{
    Compressed, Mask, MatrixRef,
    layout::sm90,
    select::{self, Transposable},
};
use twofour_cuda::{
    Element, Error,
    prune::{BothWays, Choice, DenseWeight, MetaOrder, NO_NAN, Packed, Pruner, Watch, first_nan},
};

/// An element type that the kernels know.
trait Float: twofour::Element + twofour::Arithmetic + DeviceRepr + PartialEq {
    const ELEMENT: Element;
    fn bits(self) -> u32;
}

macro_rules! float {
    ($type:ty, $element:expr) => {
        impl Float for $type {
            const ELEMENT: Element = $element;
            fn bits(self) -> u32 {
                u32::from(self.to_bits())
            }
        }
    };
}

float!(f32, Element::F32);
float!(f16, Element::F16);
float!(bf16, Element::BF16);

const POISON: u32 = 0xDEAD_BEEF;

/// A value that no compressed weight stores.
fn poison<T: Float>() -> T {
    T::from_f32(-0.0)
}

fn same<T: Float>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if let Some(i) = (0..found.len()).find(|i| found[*i].bits() != expected[*i].bits()) {
        panic!("{what}: element {i} is {:?}, expected {:?}", found[i], expected[i]);
    }
}

/// A mask's tiles, as the kernels have them.
fn tiles(mask: &Mask) -> Vec<u16> {
    let tile =
        |r: usize, c: usize| (0..16).fold(0, |t, i| t | u16::from(mask.is_kept(4 * r + i / 4, 4 * c + i % 4)) << i);
    (0..mask.rows() / 4).flat_map(|r| (0..mask.cols() / 4).map(move |c| (r, c))).map(|(r, c)| tile(r, c)).collect()
}

/// What the CPU makes of a weight and a mask, in the output type: a weight is rounded after its mask was chosen.
fn expected<I: Float, O: Float>(weight: &[I], mask: &Mask) -> Compressed<O> {
    let rounded: Vec<O> = weight.iter().map(|v| O::from_f32(v.to_f32())).collect();
    Compressed::from_masked(MatrixRef::new(mask.rows(), mask.cols(), &rounded).unwrap(), mask).unwrap()
}

/// The metadata in an order, as u32s.
fn meta_words<O: Float>(weight: &Compressed<O>, order: MetaOrder) -> Vec<u32> {
    match order {
        MetaOrder::Canonical => weight.meta().to_vec(),
        MetaOrder::Sm90(tile) => {
            let halves = sm90::encode_16(weight, tile).unwrap();
            halves.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect()
        }
    }
}

fn transposed<T: Copy>(rows: usize, cols: usize, data: &[T]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect()
}

fn check_both_ways<I: Float, O: Float>(
    bench: &Bench,
    rows: usize,
    cols: usize,
    weight: &[I],
    rule: Transposable,
    order: MetaOrder,
) {
    let what = format!("[{rows}, {cols}] {:?} to {:?}, {rule}, {order:?}", I::ELEMENT, O::ELEMENT);
    let pruner = Pruner::new(&bench.device, I::ELEMENT, O::ELEMENT).unwrap();
    let mask = select::transposable(MatrixRef::new(rows, cols, weight).unwrap(), rule).unwrap();
    let row_packed = expected::<I, O>(weight, &mask);
    let column_packed = expected::<I, O>(&transposed(rows, cols, weight), &mask.transposed());
    let before: Vec<u16> = (0..rows * cols / 16).map(|i| (i as u16).wrapping_mul(40503)).collect();
    let flips: u64 = tiles(&mask).iter().zip(&before).map(|(a, b)| u64::from((a ^ b).count_ones())).sum();

    let (meta, meta_t) = (meta_words(&row_packed, order), meta_words(&column_packed, order));
    let w = bench.up(weight);
    let before = bench.up(&before);
    let values = bench.poisoned(row_packed.values().len(), poison::<O>());
    let values_t = bench.poisoned(column_packed.values().len(), poison::<O>());
    let (words, words_t) = (bench.poisoned(meta.len(), POISON), bench.poisoned(meta_t.len(), POISON));
    let found_tiles = bench.poisoned(rows * cols / 16, 0xBEEFu16);
    let (nan, flipped) = (bench.up(&[NO_NAN]), bench.up(&[7u64]));
    let to = BothWays {
        packed: Some(Packed { values: bench.at(&values), meta: bench.at(&words) }),
        transposed: Some(Packed { values: bench.at(&values_t), meta: bench.at(&words_t) }),
        tiles: Some(bench.at(&found_tiles)),
    };
    let dense = DenseWeight { data: bench.at(&w), rows, cols };
    let watch = Watch { nan: bench.at(&nan), flips: Some((bench.at(&before), bench.at(&flipped))) };
    let check = |pass: &str| {
        same(
            &format!("{what}, {pass}: values"),
            &bench.down(&values)[..row_packed.values().len()],
            row_packed.values(),
        );
        same(&format!("{what}, {pass}: values of the transpose"), &bench.down(&values_t), column_packed.values());
        assert_eq!(bench.down(&words), meta, "{what}, {pass}: metadata");
        assert_eq!(bench.down(&words_t), meta_t, "{what}, {pass}: metadata of the transpose");
        assert_eq!(bench.down(&nan), [NO_NAN], "{what}, {pass}");
    };
    // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited for.
    unsafe { pruner.both_ways(bench.stream(), dense, Choice::Rule(rule), to, order, watch) }.unwrap();
    check("chosen");
    assert_eq!(bench.down(&found_tiles), tiles(&mask), "{what}: tiles");
    assert_eq!(bench.down(&flipped), [7 + flips], "{what}: flips");

    // The same mask, given.
    let (values, values_t) =
        (bench.poisoned(values.len(), poison::<O>()), bench.poisoned(values_t.len(), poison::<O>()));
    let to = BothWays {
        packed: Some(Packed { values: bench.at(&values), meta: bench.at(&words) }),
        transposed: Some(Packed { values: bench.at(&values_t), meta: bench.at(&words_t) }),
        ..to
    };
    // SAFETY: as above.
    unsafe { pruner.both_ways(bench.stream(), dense, Choice::Given, to, order, Watch { flips: None, ..watch }) }
        .unwrap();
    same(&format!("{what}, given: values"), &bench.down(&values), row_packed.values());
    same(&format!("{what}, given: values of the transpose"), &bench.down(&values_t), column_packed.values());

    // Applied to the dense weight.
    let out = bench.poisoned(rows * cols, poison::<I>());
    // SAFETY: as above.
    unsafe { pruner.apply_mask(bench.stream(), dense, bench.at(&found_tiles), bench.at(&out)) }.unwrap();
    let kept: Vec<I> = weight
        .iter()
        .enumerate()
        .map(|(i, v)| if mask.is_kept(i / cols, i % cols) { *v } else { I::from_f32(0.0) })
        .collect();
    same(&format!("{what}: masked"), &bench.down(&out), &kept);
}

/// Numbers to be pruned: Gaussian-like ones, or such as have ties, zeros of both signs, huge ones, infinities and subnormal ones.
fn numbers<T: Float>(len: usize, adversarial: bool, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32
    };
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.0,
        -1.0,
        0.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        3e38,
        -3e38,
        2.5e38,
        1e-40,
        6e-8,
        65504.0,
        2.0,
    ];
    let number = |_| {
        let (kind, bits) = (next(), next());
        let smooth = (0..4).map(|_| next() as f32 / 2f32.powi(31) - 0.5).sum::<f32>();
        T::from_f32(match kind % 4 {
            _ if !adversarial => smooth,
            0 => special[bits as usize % special.len()],
            1 => (bits % 3) as f32 - 1.0,
            _ => smooth,
        })
    };
    (0..len).map(number).collect()
}

fn both_ways_agree<I: Float, O: Float>() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    for rule in Transposable::ALL {
        for (i, (rows, cols)) in
            [(4, 4), (4, 260), (132, 8), (68, 36), (128, 128), (256, 384), (1024, 12)].into_iter().enumerate()
        {
            for adversarial in [false, true] {
                check_both_ways::<I, O>(
                    &bench,
                    rows,
                    cols,
                    &numbers(rows * cols, adversarial, i as u64),
                    rule,
                    MetaOrder::Canonical,
                );
            }
        }
        for tile in sm90::TileK::ALL {
            check_both_ways::<I, O>(&bench, 256, 384, &numbers(256 * 384, true, 5), rule, MetaOrder::Sm90(tile));
        }
    }
    check_both_ways::<I, O>(
        &bench,
        128,
        128,
        &[I::from_f32(0.0); 128 * 128],
        Transposable::Optimal,
        MetaOrder::Canonical,
    );
    check_both_ways::<I, O>(
        &bench,
        128,
        128,
        &[I::from_f32(-1.0); 128 * 128],
        Transposable::GreedyAbs,
        MetaOrder::Canonical,
    );
}

macro_rules! agree {
    ($($both:ident: $input:ty, $output:ty;)*) => {$(
        #[test]
        fn $both() {
            both_ways_agree::<$input, $output>();
        }
    )*};
}

agree! {
    both_ways_f32_to_f16: f32, f16;
    both_ways_f32_to_bf16: f32, bf16;
    both_ways_f16: f16, f16;
    both_ways_bf16: bf16, bf16;
}

#[test]
fn the_first_nan_is_told() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    let pruner = Pruner::new(&bench.device, Element::F32, Element::BF16).unwrap();
    let (rows, cols) = (64, 192);
    let mut weight = numbers::<f32>(rows * cols, false, 3);
    for at in [(40, 7), (40, 5), (63, 191)] {
        weight[at.0 * cols + at.1] = f32::NAN;
    }
    let w = bench.up(&weight);
    let (values, meta) = (bench.poisoned(rows * cols / 2, 0u16), bench.poisoned(rows * cols / 32, POISON));
    let to = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let dense = DenseWeight { data: bench.at(&w), rows, cols };
    for rule in Transposable::ALL {
        let nan = bench.up(&[NO_NAN]);
        let watch = Watch { nan: bench.at(&nan), flips: None };
        let to = BothWays { packed: Some(to), ..BothWays::default() };
        // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited for.
        unsafe { pruner.both_ways(bench.stream(), dense, Choice::Rule(rule), to, MetaOrder::Canonical, watch) }
            .unwrap();
        let error = first_nan(bench.down(&nan)[0], cols).unwrap_err();
        assert!(matches!(error, Error::NotANumber { row: 40, col: 5 }), "{rule:?}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    let pruner = Pruner::new(&bench.device, Element::BF16, Element::BF16).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let to = Packed { values: at, meta: at };
    let weight = |data, rows, cols| DenseWeight { data, rows, cols };
    let watch = Watch { nan: at, flips: None };
    // SAFETY: none of these calls launches anything.
    let ordered = |weight, to, order| unsafe {
        pruner.both_ways(bench.stream(), weight, Choice::Rule(Transposable::Optimal), to, order, watch)
    };
    let both = |weight, to| ordered(weight, to, MetaOrder::Canonical);
    let rows = |to| BothWays { packed: Some(to), ..BothWays::default() };
    assert!(matches!(both(weight(0, 4, 4), rows(to)), Err(Error::Pointer { what: "weight", address: 0, .. })));
    assert!(matches!(both(weight(at + 8, 4, 4), rows(to)), Err(Error::Pointer { what: "weight", .. })));
    let meta = Packed { meta: at + 4, ..to };
    assert!(matches!(both(weight(at, 4, 4), rows(meta)), Err(Error::Pointer { what: "metadata", .. })));
    let sm90 = MetaOrder::Sm90(sm90::TileK::K64);
    let refused = ordered(weight(at, 96, 64), rows(to), sm90);
    assert!(matches!(refused, Err(Error::Multiple { multiple: 64, found: 96, .. })));
    let refused = ordered(weight(at, 64, 96), rows(to), sm90);
    assert!(matches!(refused, Err(Error::Multiple { multiple: 64, found: 96, .. })));
    assert!(matches!(both(weight(at, usize::MAX, 4), rows(to)), Err(Error::TooLarge { .. })));
    assert!(matches!(both(weight(at, 6, 4), BothWays::default()), Err(Error::Multiple { multiple: 4, found: 6, .. })));
    assert!(matches!(both(weight(at, 4, 4 << 31), BothWays::default()), Err(Error::TooLarge { .. })));
    // Nothing to do is done.
    assert!(both(weight(0, 64, 0), BothWays::default()).is_ok());
    for (input, output) in [(Element::F16, Element::BF16), (Element::F32, Element::F32)] {
        assert!(matches!(Pruner::new(&bench.device, input, output), Err(Error::Types { .. })));
    }
}

#[test]
fn threads_and_streams_do_not_meet() {
    let Some(device) = device() else { return };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let device = device.clone();
            scope.spawn(move || {
                let bench = Bench::new(device);
                let weight = numbers::<bf16>(512 * 512, true, seed);
                check_both_ways::<bf16, bf16>(&bench, 512, 512, &weight, Transposable::Optimal, MetaOrder::Canonical);
            });
        }
    });
}
