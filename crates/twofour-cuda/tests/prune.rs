//! On a device: masks and compressed bytes are those of the CPU, for random and for adversarial weights. Without a
//! device the tests skip.

mod support;

use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use support::{
    Bench,
    compressed::{self, Guarded, Input, Output, padded, same, tiles, transposed},
    device,
};
use twofour::{
    Axis, Compressed, F8E4M3, F8E5M2, Mask, MatrixRef, Pattern,
    layout::sm90,
    select::{self, Transposable},
};
use twofour_cuda::{
    Architecture, DataType, Error,
    raw::{
        DenseWeight, MetaOrder, Packed,
        prune::{BothWays, MaskChoice, NO_NAN, Pruner, Watch, first_nan},
    },
};

/// What the CPU makes of a weight and a mask, in the output type: a weight is multiplied and rounded after its mask was
/// chosen.
fn expected<I: Input, O: Output>(weight: &[I], mask: &Mask, factor: Option<f32>) -> Compressed<O> {
    let rounded: Vec<O> = weight.iter().map(|v| O::from_f32(factor.map_or(v.to_f32(), |f| v.to_f32() * f))).collect();
    Compressed::from_masked(MatrixRef::new(mask.rows(), mask.cols(), &rounded).unwrap(), mask).unwrap()
}

/// How a weight is pruned.
#[derive(Debug, Clone, Copy)]
struct How {
    rule: Transposable,
    order: MetaOrder,
    factor: Option<f32>,
    /// Elements before the weight: 1 takes its alignment away.
    before: usize,
}

/// Where a compressed weight is to come, and what is to come there.
struct Side {
    values: Guarded,
    meta: Guarded,
    expected: (Vec<u8>, Vec<u8>),
}

impl Side {
    fn new<O: Output>(bench: &Bench, expected: &Compressed<O>, order: MetaOrder) -> Self {
        let expected = &padded(expected, order);
        let expected = (compressed::values(expected).to_vec(), compressed::meta(expected, order));
        Self { values: Guarded::new(bench, expected.0.len()), meta: Guarded::new(bench, expected.1.len()), expected }
    }

    fn at(&self, bench: &Bench) -> Packed {
        Packed { values: self.values.at(bench), meta: self.meta.at(bench) }
    }

    fn check(&self, bench: &Bench, what: &str) {
        for (name, found, expected) in
            [("values", &self.values, &self.expected.0), ("metadata", &self.meta, &self.expected.1)]
        {
            let what = format!("{what}: {name}");
            same(&what, &found.found(bench, &what), expected);
        }
    }
}

/// A weight on the device, so many elements behind the start of its memory.
fn there<I: Input>(bench: &Bench, weight: &[I], before: usize) -> (CudaSlice<I>, u64) {
    let shifted: Vec<I> = vec![I::ZERO; before].into_iter().chain(weight.iter().copied()).collect();
    let memory = bench.up(&shifted);
    let at = bench.at(&memory) + (before * I::ELEMENT.bytes()) as u64;
    (memory, at)
}

fn check_both_ways<I: Input, O: Output>(bench: &Bench, rows: usize, cols: usize, weight: &[I], how: How) {
    let How { rule, order, factor, before: first } = how;
    let what = format!("[{rows}, {cols}] {:?} to {:?}, {how:?}", I::ELEMENT, O::ELEMENT);
    let pruner = Pruner::new(&bench.device, I::ELEMENT, O::ELEMENT).unwrap();
    let mask = select::transposable(MatrixRef::new(rows, cols, weight).unwrap(), rule).unwrap();
    let along = expected::<I, O>(weight, &mask, factor);
    let across = expected::<I, O>(&transposed(rows, cols, weight), &mask.transposed(), factor);
    let sides = || (Side::new(bench, &along, order), Side::new(bench, &across, order));
    let count = tiles(&mask).len();
    let before: Vec<u16> = (0..count).map(|i| (i as u16).wrapping_mul(40503)).collect();
    let flips: u64 = tiles(&mask).iter().zip(&before).map(|(a, b)| u64::from((a ^ b).count_ones())).sum();

    let (_memory, w) = there(bench, weight, first);
    let before = bench.up(&before);
    let found_tiles = bench.poisoned(count + 8, 0xBEEFu16);
    let (nan, flipped) = (bench.up(&[NO_NAN]), bench.up(&[7u64]));
    let factor_there = bench.up(&[factor.unwrap_or(f32::NAN)]);
    let (packed, other) = sides();
    let to = BothWays {
        packed: Some(packed.at(bench)),
        transposed: Some(other.at(bench)),
        tiles: Some(bench.at(&found_tiles)),
        factor: factor.map(|_| bench.at(&factor_there)),
        skip: None,
    };
    let dense = DenseWeight { data: w, rows, cols };
    let watch = Watch { nan: bench.at(&nan), flips: Some((bench.at(&before), bench.at(&flipped))) };
    // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited
    // for.
    unsafe { pruner.both_ways(bench.stream(), dense, MaskChoice::Rule(rule), to, order, watch) }.unwrap();
    packed.check(bench, &format!("{what}, chosen"));
    other.check(bench, &format!("{what}, chosen, the transpose"));
    assert_eq!(bench.down(&nan), [NO_NAN], "{what}");
    let down = bench.down(&found_tiles);
    assert_eq!(down[..count], tiles(&mask), "{what}: tiles");
    assert_eq!(down[count..], [0xBEEF; 8], "{what}: tiles beyond the end");
    assert_eq!(bench.down(&flipped), [7 + flips], "{what}: flips");

    // The same mask, given, and applied to the dense weight, as a graph.
    let (packed, other) = sides();
    let to = BothWays { packed: Some(packed.at(bench)), transposed: Some(other.at(bench)), ..to };
    let out = Guarded::new(bench, rows * cols * I::ELEMENT.bytes());
    let (tiles_at, out_at) = (bench.at(&found_tiles), out.at(bench));
    pruner.load(&[MaskChoice::Given], (rows, cols), order).unwrap();
    pruner.load_masks().unwrap();
    bench.wait();
    let graph = bench.captured(|| {
        let watch = Watch { flips: None, ..watch };
        // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the graph has run.
        unsafe { pruner.both_ways(bench.stream(), dense, MaskChoice::Given, to, order, watch) }.unwrap();
        // SAFETY: weight, tiles and result are allocated above, as long as the shape asks for, and live until the graph
        // has run.
        unsafe { pruner.apply_mask(bench.stream(), dense, tiles_at, out_at) }.unwrap();
    });
    graph.launch().unwrap();
    packed.check(bench, &format!("{what}, given"));
    other.check(bench, &format!("{what}, given, the transpose"));
    let kept: Vec<I> = weight
        .iter()
        .enumerate()
        .map(|(i, v)| if mask.is_kept(i / cols, i % cols) { *v } else { I::from_f32(0.0) })
        .collect();
    let what = format!("{what}: masked");
    same(&what, &out.found(bench, &what), bytemuck::cast_slice(&kept));
}

/// Numbers to be pruned: Gaussian-like ones, or such as have ties, zeros of both signs, huge ones, infinities and
/// subnormal ones.
fn numbers<T: Input>(len: usize, adversarial: bool, seed: u64) -> Vec<T> {
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

const ANY_SHAPES: [(usize, usize); 8] =
    [(1, 1), (7, 30), (36, 52), (65, 130), (600, 12), (3, 257), (128, 128), (128, 64)];

/// The two largest of each group of a row, and no transpose.
fn check_rows<I: Input, O: Output>(
    bench: &Bench,
    rows: usize,
    cols: usize,
    weight: &[I],
    order: MetaOrder,
    first: usize,
) {
    let what = format!("[{rows}, {cols}] {:?} to {:?} along rows, {order:?}, {first} before", I::ELEMENT, O::ELEMENT);
    let pruner = Pruner::new(&bench.device, I::ELEMENT, O::ELEMENT).unwrap();
    let mask = select::magnitude(MatrixRef::new(rows, cols, weight).unwrap(), Pattern::TWO_FOUR, Axis::Row).unwrap();
    let expected = expected::<I, O>(weight, &mask, None);
    let count = tiles(&mask).len();
    let (_memory, w) = there(bench, weight, first);
    let dense = DenseWeight { data: w, rows, cols };
    let (found_tiles, before) = (bench.poisoned(count, 0xBEEFu16), bench.up(&vec![0xFFFFu16; count]));
    let (nan, flipped) = (bench.up(&[NO_NAN]), bench.up(&[0u64]));
    let watch = Watch { nan: bench.at(&nan), flips: Some((bench.at(&before), bench.at(&flipped))) };
    // Chosen, and then as it was chosen.
    for choice in [MaskChoice::Rows, MaskChoice::Given] {
        let packed = Side::new(bench, &expected, order);
        let to =
            BothWays { packed: Some(packed.at(bench)), tiles: Some(bench.at(&found_tiles)), ..BothWays::default() };
        // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been
        // waited for.
        unsafe { pruner.both_ways(bench.stream(), dense, choice, to, order, watch) }.unwrap();
        packed.check(bench, &format!("{what}, {choice:?}"));
    }
    assert_eq!(bench.down(&found_tiles), tiles(&mask), "{what}: tiles");
    let flips: u32 = tiles(&mask).iter().map(|tile| 2 * (!tile).count_ones()).sum();
    assert_eq!((bench.down(&nan)[0], bench.down(&flipped)[0]), (NO_NAN, u64::from(flips)), "{what}");
}

fn rows_agree<I: Input, O: Output>() {
    let Some(device) = device() else { return };
    if O::ELEMENT.bytes() == 1 && device.architecture() < Architecture::SM_89 {
        eprintln!("skipped: a GPU without 8-bit floats");
        return;
    }
    let bench = Bench::new(device);
    let aligned = [(4, 260), (256, 384)].into_iter().map(|shape| (shape, 0));
    for (i, ((rows, cols), first)) in aligned.chain(ANY_SHAPES.map(|shape| (shape, 1))).enumerate() {
        let weight = numbers(rows * cols, true, 40 + i as u64);
        for order in [MetaOrder::Canonical, MetaOrder::Sm90(sm90::TileK::K64), MetaOrder::Sm90(sm90::TileK::K128)] {
            check_rows::<I, O>(&bench, rows, cols, &weight, order, first);
        }
    }
}

#[test]
fn rows_f32_to_bf16() {
    rows_agree::<f32, bf16>();
}

#[test]
fn rows_f16() {
    rows_agree::<f16, f16>();
}

#[test]
fn rows_bf16_to_e4m3() {
    rows_agree::<bf16, F8E4M3>();
}

/// As many rows as a vocabulary has words.
#[test]
fn a_vocabulary() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    let (rows, cols) = (50257, 64);
    let weight = numbers::<bf16>(rows * cols, false, 60);
    let order = MetaOrder::Sm90(sm90::TileK::K64);
    let how = How { rule: Transposable::GreedyAbs, order, factor: None, before: 0 };
    check_both_ways::<bf16, bf16>(&bench, rows, cols, &weight, how);
    check_rows::<bf16, bf16>(&bench, rows, cols, &weight, order, 0);
}

fn both_ways_agree<I: Input, O: Output>() {
    let Some(device) = device() else { return };
    let eight_bits = O::ELEMENT.bytes() == 1;
    if eight_bits && device.architecture() < Architecture::SM_89 {
        eprintln!("skipped: a GPU without 8-bit floats");
        return;
    }
    let bench = Bench::new(device);
    let factors: &[Option<f32>] = if eight_bits { &[None, Some(0.3)] } else { &[None] };
    for &factor in factors {
        for rule in Transposable::ALL {
            let how = |order| How { rule, order, factor, before: 0 };
            let shapes = [(4, 4), (4, 260), (132, 8), (68, 36), (128, 128), (256, 384), (1024, 12)];
            for (i, (rows, cols)) in shapes.into_iter().enumerate() {
                for adversarial in [false, true] {
                    let weight = numbers(rows * cols, adversarial, i as u64);
                    check_both_ways::<I, O>(&bench, rows, cols, &weight, how(MetaOrder::Canonical));
                }
            }
            for tile in sm90::TileK::ALL {
                let weight = numbers(256 * 384, true, 5);
                check_both_ways::<I, O>(&bench, 256, 384, &weight, how(MetaOrder::Sm90(tile)));
            }
            // Tiles that the edge cuts off, padding, and addresses that tiles cannot be read from at once.
            let orders = [MetaOrder::Canonical, MetaOrder::Sm90(sm90::TileK::K64), MetaOrder::Sm90(sm90::TileK::K128)];
            for (i, (rows, cols)) in ANY_SHAPES.into_iter().enumerate() {
                for order in orders {
                    let weight = numbers(rows * cols, true, 20 + i as u64);
                    check_both_ways::<I, O>(&bench, rows, cols, &weight, How { before: i % 2, ..how(order) });
                }
            }
        }
        for (all, rule) in [(0.0, Transposable::Optimal), (-1.0, Transposable::GreedyAbs)] {
            let how = How { rule, order: MetaOrder::Canonical, factor, before: 0 };
            check_both_ways::<I, O>(&bench, 128, 128, &[I::from_f32(all); 128 * 128], how);
        }
    }
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
    both_ways_f32_to_e4m3: f32, F8E4M3;
    both_ways_f32_to_e5m2: f32, F8E5M2;
    both_ways_f16_to_e4m3: f16, F8E4M3;
    both_ways_f16_to_e5m2: f16, F8E5M2;
    both_ways_bf16_to_e4m3: bf16, F8E4M3;
    both_ways_bf16_to_e5m2: bf16, F8E5M2;
}

#[test]
fn the_first_nan_is_told() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    let pruner = Pruner::new(&bench.device, DataType::F32, DataType::BF16).unwrap();
    let (rows, cols) = (64, 192);
    let mut weight = numbers::<f32>(rows * cols, false, 3);
    for at in [(40, 7), (40, 5), (63, 191)] {
        weight[at.0 * cols + at.1] = f32::NAN;
    }
    let w = bench.up(&weight);
    let (values, meta) = (bench.poisoned(rows * cols / 2, 0u16), bench.poisoned(rows * cols / 32, 0u32));
    let to = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let dense = DenseWeight { data: bench.at(&w), rows, cols };
    for rule in Transposable::ALL {
        let nan = bench.up(&[NO_NAN]);
        let watch = Watch { nan: bench.at(&nan), flips: None };
        let to = BothWays { packed: Some(to), ..BothWays::default() };
        // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been
        // waited for.
        unsafe { pruner.both_ways(bench.stream(), dense, MaskChoice::Rule(rule), to, MetaOrder::Canonical, watch) }
            .unwrap();
        let error = first_nan(bench.down(&nan)[0], cols).unwrap_err();
        assert!(matches!(error, Error::NotANumber { row: 40, col: 5 }), "{rule:?}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(device) = device() else { return };
    let bench = Bench::new(device);
    let pruner = Pruner::new(&bench.device, DataType::BF16, DataType::BF16).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let to = Packed { values: at, meta: at };
    let weight = |data, rows, cols| DenseWeight { data, rows, cols };
    let watch = Watch { nan: at, flips: None };
    // SAFETY: each of these calls returns an error before it launches anything.
    let both = |weight, to| unsafe {
        let choice = MaskChoice::Rule(Transposable::Optimal);
        pruner.both_ways(bench.stream(), weight, choice, to, MetaOrder::Canonical, watch)
    };
    let rows = |to| BothWays { packed: Some(to), ..BothWays::default() };
    assert!(matches!(both(weight(0, 4, 4), rows(to)), Err(Error::Pointer { what: "weight", address: 0, .. })));
    assert!(matches!(both(weight(at + 1, 4, 4), rows(to)), Err(Error::Pointer { what: "weight", alignment: 2, .. })));
    let meta = Packed { meta: at + 4, ..to };
    assert!(matches!(both(weight(at, 4, 4), rows(meta)), Err(Error::Pointer { what: "metadata", .. })));
    let transposed = BothWays { transposed: Some(to), ..rows(to) };
    // SAFETY: the call returns an error before it launches anything.
    let refused = unsafe {
        pruner.both_ways(bench.stream(), weight(at, 4, 4), MaskChoice::Rows, transposed, MetaOrder::Canonical, watch)
    };
    assert!(matches!(refused, Err(Error::NoTranspose)));
    assert!(matches!(both(weight(at, usize::MAX, 4), rows(to)), Err(Error::TooLarge { .. })));
    assert!(matches!(both(weight(at, 4, 4 << 31), BothWays::default()), Err(Error::TooLarge { .. })));
    let scaled = BothWays { factor: Some(at), ..rows(to) };
    assert!(matches!(both(weight(at, 4, 4), scaled), Err(Error::Factor { output: DataType::BF16 })));
    // Nothing to do is done.
    assert!(both(weight(0, 64, 0), BothWays::default()).is_ok());
    for (input, output) in [(DataType::F16, DataType::BF16), (DataType::F32, DataType::F32)] {
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
                let how = How { rule: Transposable::Optimal, order: MetaOrder::Canonical, factor: None, before: 0 };
                check_both_ways::<bf16, bf16>(&bench, 512, 512, &weight, how);
            });
        }
    });
}
