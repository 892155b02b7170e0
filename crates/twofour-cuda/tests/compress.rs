//! On a device: what is compressed in one direction is what the CPU makes, bit for bit, by every rule and between all
//! types. Without a device the tests skip.

mod support;

use half::{bf16, f16};
use support::{
    Bench, bench,
    compressed::{self, Guarded, Input, Output, padded, same, tiles, transposed},
    numbers::{Random, adversarial},
};
use twofour::{
    Axis, Compressed, F8E4M3, F8E5M2, MatrixRef,
    estimate::{Estimator, estimate, soft_threshold_scale},
    layout::sm90,
    select::{self, Transposable},
};
use twofour_cuda::{
    Architecture, DataType, Error,
    raw::{
        DenseWeight, MetaOrder, Packed,
        compress::{CompressRule, CompressTarget, Compressor},
        prune::{NO_NAN, first_nan},
    },
};

struct Case<'a, I> {
    rows: usize,
    cols: usize,
    data: &'a [I],
    axis: Axis,
    order: MetaOrder,
    factor: Option<f32>,
    /// Elements before the tensor: 1 takes its alignment away.
    before: usize,
}

fn check<I: Input, O: Output>(bench: &Bench, case: &Case<'_, I>, rule: CompressRule, expected: &Compressed<O>) {
    let &Case { rows, cols, data, axis, order, factor, before } = case;
    let what = format!(
        "[{rows}, {cols}] {:?} to {:?}, {axis:?}, {rule:?}, {order:?}, {factor:?}, {before} before",
        I::ELEMENT,
        O::ELEMENT
    );
    let compressor = Compressor::new(&bench.device, I::ELEMENT, O::ELEMENT).unwrap();
    let expected = &padded(expected, order);
    let (values, meta) = (compressed::values(expected), compressed::meta(expected, order));
    let shifted: Vec<I> = vec![I::ZERO; before].into_iter().chain(data.iter().copied()).collect();
    let (there, wrong) = (bench.up(&shifted), bench.up(&[NO_NAN]));
    let factor_there = bench.up(&[factor.unwrap_or(f32::NAN)]);
    let (found_values, found_meta) = (Guarded::new(bench, values.len()), Guarded::new(bench, meta.len()));
    let to = CompressTarget {
        packed: Packed { values: found_values.at(bench), meta: found_meta.at(bench) },
        order,
        factor: factor.map(|_| bench.at(&factor_there)),
        seed: None,
        wrong: bench.at(&wrong),
    };
    let dense = DenseWeight { data: bench.at(&there) + (before * I::ELEMENT.bytes()) as u64, rows, cols };
    // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited
    // for.
    unsafe { compressor.run(bench.stream(), dense, axis, rule, to) }.unwrap();
    same(&format!("{what}: values"), &found_values.found(bench, &what), values);
    same(&format!("{what}: metadata"), &found_meta.found(bench, &what), &meta);
    assert_eq!(bench.down(&wrong), [NO_NAN], "{what}");
}

const ESTIMATORS: [Estimator; 4] = [
    Estimator::Magnitude,
    Estimator::SoftThreshold,
    Estimator::MvueApproximate { seed: 0x1234_5678_9ABC_DEF0 },
    Estimator::Mvue { seed: 3 },
];

/// Along both axes, against the CPU's of the tensor or of its transpose.
fn check_estimators<I: Input, O: Output>(bench: &Bench, rows: usize, cols: usize, data: &[I], order: MetaOrder) {
    for axis in [Axis::Row, Axis::Column] {
        check_one_axis::<I, O>(bench, rows, cols, data, axis, order);
    }
}

fn check_one_axis<I: Input, O: Output>(
    bench: &Bench,
    rows: usize,
    cols: usize,
    data: &[I],
    axis: Axis,
    order: MetaOrder,
) {
    let other = transposed(rows, cols, data);
    for estimator in ESTIMATORS {
        for factor in [None, Some(0.3)] {
            let matrix = match axis {
                Axis::Row => MatrixRef::new(rows, cols, data),
                Axis::Column => MatrixRef::new(cols, rows, &other),
            };
            let expected = estimate::<I, O>(matrix.unwrap(), estimator, factor.unwrap_or(1.0)).unwrap();
            let case = Case { rows, cols, data, axis, order, factor, before: 0 };
            check(bench, &case, CompressRule::Estimate(estimator), &expected);
        }
    }
}

/// By a transposable mask, both ways.
fn check_given<I: Input, O: Output>(bench: &Bench, rows: usize, cols: usize, data: &[I], order: MetaOrder) {
    let mask = select::transposable(MatrixRef::new(rows, cols, data).unwrap(), Transposable::GreedyAbs).unwrap();
    let there = bench.up(&tiles(&mask));
    let rounded: Vec<O> = data.iter().map(|v| O::from_f32(v.to_f32() * 0.3)).collect();
    let along = Compressed::from_masked(MatrixRef::new(rows, cols, &rounded).unwrap(), &mask).unwrap();
    let other = transposed(rows, cols, &rounded);
    let across = Compressed::from_masked(MatrixRef::new(cols, rows, &other).unwrap(), &mask.transposed()).unwrap();
    for (axis, expected) in [(Axis::Row, along), (Axis::Column, across)] {
        let case = Case { rows, cols, data, axis, order, factor: Some(0.3), before: (rows + cols) % 2 };
        check(bench, &case, CompressRule::Given(bench.at(&there)), &expected);
    }
}

fn agree<I: Input, O: Output>() {
    let Some(bench) = bench() else { return };
    if O::ELEMENT.bytes() == 1 && bench.device.architecture() < Architecture::SM_89 {
        eprintln!("skipped: a GPU without 8-bit floats");
        return;
    }
    let numbers = |len: usize, seed| -> Vec<I> { adversarial(len, seed).into_iter().map(I::from_f32).collect() };
    let shapes = [(1, 1), (1, 4), (1, 4097), (3, 7), (5, 30), (7, 32), (64, 64), (130, 101), (33, 1), (512, 1024)];
    for (i, (rows, cols)) in shapes.into_iter().enumerate() {
        check_estimators::<I, O>(&bench, rows, cols, &numbers(rows * cols, i as u64), MetaOrder::Canonical);
    }
    for (rows, cols) in [(4, 4), (36, 68), (128, 256), (1, 1), (7, 30), (65, 130)] {
        check_given::<I, O>(&bench, rows, cols, &numbers(rows * cols, 5), MetaOrder::Canonical);
    }
    for tile in sm90::TileK::ALL {
        check_estimators::<I, O>(&bench, 128, 256, &numbers(128 * 256, 9), MetaOrder::Sm90(tile));
        check_given::<I, O>(&bench, 256, 128, &numbers(128 * 256, 10), MetaOrder::Sm90(tile));
        // Several blocks in each direction.
        check_one_axis::<I, O>(&bench, 320, 192, &numbers(320 * 192, 14), Axis::Column, MetaOrder::Sm90(tile));
        // Lengths that have to be completed, along rows and along columns.
        check_estimators::<I, O>(&bench, 64, 192, &numbers(64 * 192, 11), MetaOrder::Sm90(tile));
        check_one_axis::<I, O>(&bench, 64, 101, &numbers(64 * 101, 12), Axis::Row, MetaOrder::Sm90(tile));
        check_one_axis::<I, O>(&bench, 77, 128, &numbers(77 * 128, 13), Axis::Column, MetaOrder::Sm90(tile));
        // Lines, too, and masks that end within a tile.
        for (rows, cols) in [(1, 1), (7, 30), (65, 130), (600, 12)] {
            check_estimators::<I, O>(&bench, rows, cols, &numbers(rows * cols, 15), MetaOrder::Sm90(tile));
            check_given::<I, O>(&bench, rows, cols, &numbers(rows * cols, 16), MetaOrder::Sm90(tile));
        }
    }
    not_aligned::<I, O>(&bench, &numbers(64 * 128, 17));
}

/// A tensor that starts between the addresses that whole groups could be read from.
fn not_aligned<I: Input, O: Output>(bench: &Bench, data: &[I]) {
    let (rows, cols) = (64, 128);
    let other = transposed(rows, cols, data);
    for (axis, matrix) in [
        (Axis::Row, MatrixRef::new(rows, cols, data).unwrap()),
        (Axis::Column, MatrixRef::new(cols, rows, &other).unwrap()),
    ] {
        for estimator in ESTIMATORS {
            let expected = estimate::<I, O>(matrix, estimator, 1.0).unwrap();
            for before in [1, 2, 3] {
                let case = Case { rows, cols, data, axis, order: MetaOrder::Canonical, factor: None, before };
                check(bench, &case, CompressRule::Estimate(estimator), &expected);
            }
        }
    }
}

macro_rules! agree {
    ($($name:ident: $input:ty, $output:ty;)*) => {$(
        #[test]
        fn $name() {
            agree::<$input, $output>();
        }
    )*};
}

agree! {
    f32_to_f16: f32, f16;
    f32_to_bf16: f32, bf16;
    f16_to_f16: f16, f16;
    bf16_to_bf16: bf16, bf16;
    f32_to_e4m3: f32, F8E4M3;
    f32_to_e5m2: f32, F8E5M2;
    f16_to_e4m3: f16, F8E4M3;
    f16_to_e5m2: f16, F8E5M2;
    bf16_to_e4m3: bf16, F8E4M3;
    bf16_to_e5m2: bf16, F8E5M2;
}

/// Groups of every size there is, each with elements of about its own: from those of which sums and products lose bits
/// to those of which they overflow.
fn groups_of_every_size<T: Input + Output>(numbers: impl Fn(u32) -> T, exponents: u32, mantissa: u32) {
    let Some(bench) = bench() else { return };
    let (rows, cols) = (512, 2048);
    let mut random = Random(41);
    let mut group = || {
        let exponent = random.bits() % exponents;
        std::array::from_fn::<T, 4, _>(|_| {
            let bits = random.bits();
            let own = exponent.saturating_sub(bits % 3);
            numbers((bits >> 30) << 15 | own << mantissa | ((bits >> 8) % (1 << mantissa)))
        })
    };
    let data: Vec<T> = (0..rows * cols / 4).flat_map(|_| group()).collect();
    for (axis, [rows, cols], data) in
        [(Axis::Row, [rows, cols], data.clone()), (Axis::Column, [cols, rows], transposed(rows, cols, &data))]
    {
        check_one_axis::<T, T>(&bench, rows, cols, &data, axis, MetaOrder::Canonical);
    }
}

#[test]
fn bf16_of_every_size() {
    groups_of_every_size(|bits| bf16::from_bits(bits as u16), 255, 7);
}

#[test]
fn f16_of_every_size() {
    groups_of_every_size(|bits| f16::from_bits(bits as u16), 31, 10);
}

/// S-STE's own scale as the factor, and calls captured in a graph.
#[test]
fn a_soft_threshold_in_a_graph() {
    let Some(bench) = bench() else { return };
    let (rows, cols) = (64, 512);
    let data = adversarial(rows * cols, 2);
    let matrix = MatrixRef::new(rows, cols, &data).unwrap();
    let scale = soft_threshold_scale(matrix).unwrap();
    let expected = estimate::<f32, bf16>(matrix, Estimator::SoftThreshold, scale).unwrap();
    let compressor = Compressor::new(&bench.device, DataType::F32, DataType::BF16).unwrap();
    let (there, wrong, factor) = (bench.up(&data), bench.up(&[NO_NAN]), bench.up(&[scale]));
    let (values, meta) = (bench.poisoned(rows * cols / 2, 0xA5A5u16), bench.poisoned(rows * cols / 32, 0u32));
    let to = CompressTarget {
        packed: Packed { values: bench.at(&values), meta: bench.at(&meta) },
        order: MetaOrder::Canonical,
        factor: Some(bench.at(&factor)),
        seed: None,
        wrong: bench.at(&wrong),
    };
    let dense = DenseWeight { data: bench.at(&there), rows, cols };
    let rule = CompressRule::Estimate(Estimator::SoftThreshold);
    bench.wait();
    // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been waited
    // for.
    let graph = bench.captured(|| unsafe { compressor.run(bench.stream(), dense, Axis::Row, rule, to) }.unwrap());
    graph.launch().unwrap();
    let found: Vec<bf16> = bench.down(&values).into_iter().map(bf16::from_bits).collect();
    assert!(found == expected.values());
    assert_eq!(bench.down(&meta), expected.meta());
}

#[test]
fn a_graph_draws_other_numbers_at_each_replay() {
    let Some(bench) = bench() else { return };
    let (rows, cols, first) = (96, 64, u64::from(u32::MAX) - 1);
    let data: Vec<bf16> = adversarial(rows * cols, 5).into_iter().map(bf16::from_f32).collect();
    let compressor = Compressor::new(&bench.device, DataType::BF16, DataType::BF16).unwrap();
    for mvue in [|seed| Estimator::Mvue { seed }, |seed| Estimator::MvueApproximate { seed }] {
        let (there, wrong, seed) = (bench.up(&data), bench.up(&[NO_NAN]), bench.up(&[first]));
        let (values, meta) = (bench.poisoned(rows * cols / 2, 0u16), bench.poisoned(rows * cols / 32, 0u32));
        let to = CompressTarget {
            packed: Packed { values: bench.at(&values), meta: bench.at(&meta) },
            order: MetaOrder::Canonical,
            factor: None,
            seed: Some(bench.at(&seed)),
            wrong: bench.at(&wrong),
        };
        let dense = DenseWeight { data: bench.at(&there), rows, cols };
        let (rule, seed_at) = (CompressRule::Estimate(mvue(7)), bench.at(&seed));
        bench.wait();
        // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been
        // waited for.
        let graph = bench.captured(|| unsafe {
            compressor.run(bench.stream(), dense, Axis::Row, rule, to).unwrap();
            compressor.advance(bench.stream(), seed_at).unwrap();
        });
        for replay in 0..3 {
            graph.launch().unwrap();
            let matrix = MatrixRef::new(rows, cols, &data).unwrap();
            let expected = estimate::<bf16, bf16>(matrix, mvue(7 + first + replay), 1.0).unwrap();
            assert_eq!(bench.down(&meta), expected.meta(), "replay {replay}");
            let found: Vec<bf16> = bench.down(&values).into_iter().map(bf16::from_bits).collect();
            assert!(found == expected.values(), "replay {replay}");
        }
        assert_eq!(bench.down(&seed), [first + 3]);
    }
}

fn the_first_that_is_wrong<I: Input>() {
    let Some(bench) = bench() else { return };
    let compressor = Compressor::new(&bench.device, I::ELEMENT, DataType::BF16).unwrap();
    let (rows, cols) = (64, 192);
    let mut data = adversarial(rows * cols, 3);
    data[30 * cols + 9] = f32::NEG_INFINITY;
    data[40 * cols + 7] = f32::NAN;
    data[40 * cols + 5] = f32::NAN;
    let data: Vec<I> = data.into_iter().map(I::from_f32).collect();
    let there = bench.up(&data);
    let (values, meta) = (bench.poisoned(rows * cols / 2, 0u16), bench.poisoned(rows * cols / 32, 0u32));
    for axis in [Axis::Row, Axis::Column] {
        for estimator in ESTIMATORS {
            let wrong = bench.up(&[NO_NAN]);
            let packed = Packed { values: bench.at(&values), meta: bench.at(&meta) };
            let to = CompressTarget {
                packed,
                order: MetaOrder::Canonical,
                factor: None,
                seed: None,
                wrong: bench.at(&wrong),
            };
            let dense = DenseWeight { data: bench.at(&there), rows, cols };
            // SAFETY: all memory is allocated above, as long as the shapes ask for, and lives until the stream has been
            // waited for.
            unsafe { compressor.run(bench.stream(), dense, axis, CompressRule::Estimate(estimator), to) }.unwrap();
            let error = first_nan(bench.down(&wrong)[0], cols).unwrap_err();
            let expected = if estimator == Estimator::Magnitude { (40, 5) } else { (30, 9) };
            assert!(
                matches!(error, Error::NotANumber { row, col } if (row, col) == expected),
                "{estimator:?}: {error}"
            );
        }
    }
}

#[test]
fn the_first_f32_that_is_wrong_is_told() {
    the_first_that_is_wrong::<f32>();
}

#[test]
fn the_first_bf16_that_is_wrong_is_told() {
    the_first_that_is_wrong::<bf16>();
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let compressor = Compressor::new(&bench.device, DataType::BF16, DataType::BF16).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let to = CompressTarget {
        packed: Packed { values: at, meta: at },
        order: MetaOrder::Canonical,
        factor: None,
        seed: None,
        wrong: at,
    };
    let magnitude = CompressRule::Estimate(Estimator::Magnitude);
    // SAFETY: each of these calls returns an error before it launches anything.
    let run = |data, rows, cols, rule, to| unsafe {
        compressor.run(bench.stream(), DenseWeight { data, rows, cols }, Axis::Row, rule, to)
    };
    assert!(matches!(run(0, 4, 4, magnitude, to), Err(Error::Pointer { what: "tensor", address: 0, .. })));
    assert!(matches!(run(at + 1, 4, 4, magnitude, to), Err(Error::Pointer { what: "tensor", alignment: 2, .. })));
    let meta = CompressTarget { packed: Packed { meta: at + 4, ..to.packed }, ..to };
    assert!(matches!(run(at, 4, 4, magnitude, meta), Err(Error::Pointer { what: "metadata", .. })));
    let factor = CompressTarget { factor: Some(at + 2), ..to };
    assert!(matches!(run(at, 4, 4, magnitude, factor), Err(Error::Pointer { what: "factor", .. })));
    assert!(matches!(
        run(at, 4, 4, CompressRule::Given(at + 1), to),
        Err(Error::Pointer { what: "mask of tiles", .. })
    ));
    assert!(matches!(run(at, usize::MAX, 4, magnitude, to), Err(Error::TooLarge { .. })));
    // Nothing to do is done.
    assert!(run(0, 0, 64, magnitude, CompressTarget { packed: Packed { values: 0, meta: 0 }, ..to }).is_ok());
    for (input, output) in
        [(DataType::F16, DataType::BF16), (DataType::F32, DataType::F32), (DataType::BF16, DataType::I8)]
    {
        assert!(matches!(Compressor::new(&bench.device, input, output), Err(Error::Types { .. })));
    }
}
