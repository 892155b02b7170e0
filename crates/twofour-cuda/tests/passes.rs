//! On a device: the passes around a layer's GEMMs against the CPU and f64, at odd shapes and unaligned addresses.
//! Without a device the tests skip.

mod support;

use cudarc::driver::DeviceRepr;
use half::{bf16, f16};
use support::{Bench, bench, numbers::Random};
use twofour::{
    Arithmetic, Element, F8E4M3, F8E5M2, MatrixRef,
    kernel::{Activation, quantize},
};
use twofour_cuda::{
    DataType, Error,
    raw::{
        column_sums::{ColumnSums, ColumnSumsTarget},
        elementwise::{ElementFunction, Elementwise, FunctionGradient},
        quantize::{Quantizer, TensorScale},
    },
};

/// Elements behind each result, which nothing may write.
const GUARD: usize = 16;

fn numbers<T: Arithmetic>(len: usize, seed: u64) -> Vec<T> {
    let mut random = Random(seed);
    (0..len).map(|_| T::from_f32(4.0 * random.number())).collect()
}

/// Sums are those of f64 within what f32 sums lose, and the same bits at every run.
fn check_sums<T: Arithmetic + DeviceRepr>(bench: &Bench, (rows, cols): (usize, usize), offset: usize) {
    let what = format!("[{rows}, {cols}] {:?}, from element {offset} on", T::DTYPE);
    let kernel = ColumnSums::new(&bench.device, T::DTYPE).unwrap();
    let matrix = numbers::<T>(offset + rows * cols, 3);
    let (there, sums) = (bench.up(&matrix), bench.poisoned(cols + GUARD, 7.0f32));
    let workspace = bench.poisoned(kernel.workspace_bytes(rows, cols) / 4, f32::NAN);
    let from = bench.at(&there) + (offset * size_of::<T>()) as u64;
    let run = |accumulate| {
        let to = ColumnSumsTarget {
            sums: bench.at(&sums),
            dtype: DataType::F32,
            accumulate,
            workspace: bench.at(&workspace),
        };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        unsafe { kernel.run(bench.stream(), from, rows, cols, to) }.unwrap();
        bench.down(&sums)
    };
    let first = run(false);
    let matrix = &matrix[offset..];
    for (col, found) in first[..cols].iter().enumerate() {
        let column = (0..rows).map(|row| f64::from(matrix[row * cols + col].to_f32()));
        let (sum, size) = column.fold((0.0, 0.0), |(sum, size), v| (sum + v, size + v.abs()));
        assert!(
            (f64::from(*found) - sum).abs() <= 1e-6 * size + 1e-12,
            "{what}: column {col}: {found}, expected {sum}"
        );
    }
    assert_eq!(run(false), first, "{what}: another run");
    let twice = run(true);
    assert!(twice[..cols].iter().zip(&first).all(|(twice, once)| *twice == once + once), "{what}: accumulated");
    assert!(twice[cols..].iter().all(|guard| *guard == 7.0), "{what}: beyond the end");
}

#[test]
fn column_sums_are_those_of_f64() {
    let Some(bench) = bench() else { return };
    for shape in [(0, 5), (1, 1), (7, 130), (64, 64), (1000, 33), (13_008, 72), (70_000, 1), (3, 5000)] {
        for offset in [0, 1] {
            check_sums::<f32>(&bench, shape, offset);
            check_sums::<f16>(&bench, shape, offset);
            check_sums::<bf16>(&bench, shape, offset);
        }
    }
}

/// One pass has the bits of the two that it stands for.
fn check_sums_through<T: Arithmetic + DeviceRepr + Default>(
    bench: &Bench,
    (rows, cols): (usize, usize),
    offset: usize,
) {
    let (sums, elementwise) =
        (ColumnSums::new(&bench.device, T::DTYPE).unwrap(), Elementwise::new(&bench.device, T::DTYPE).unwrap());
    let count = rows * cols;
    let (x, dy) = (numbers::<T>(offset + count, 5), numbers::<T>(offset + count, 6));
    let (x_there, dy_there) = (bench.up(&x), bench.up(&dy));
    let shift = (offset * size_of::<T>()) as u64;
    let (x_at, dy_at) = (bench.at(&x_there) + shift, bench.at(&dy_there) + shift);
    let workspace = bench.poisoned(sums.workspace_bytes(rows, cols).div_ceil(4), f32::NAN);
    for activation in [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu] {
        for accumulate in [false, true] {
            let [together, apart] = [(); 2].map(|()| bench.poisoned(cols + GUARD, 7.0f32));
            let [of_both, of_each] = [(); 2].map(|()| bench.up(&dy));
            let to = |sums: &cudarc::driver::CudaSlice<f32>| ColumnSumsTarget {
                sums: bench.at(sums),
                dtype: DataType::F32,
                accumulate,
                workspace: bench.at(&workspace),
            };
            let (first, second) = (bench.at(&of_both) + shift, bench.at(&of_each) + shift);
            let function = ElementFunction::Activation(activation);
            let tensors = FunctionGradient { input: x_at, gradient: dy_at, out: second, tiles: None };
            // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
            // waited for.
            unsafe {
                sums.run_through(bench.stream(), activation, (x_at, first), (rows, cols), to(&together)).unwrap();
                elementwise.gradient(bench.stream(), function, tensors, rows, cols).unwrap();
                sums.run(bench.stream(), second, rows, cols, to(&apart)).unwrap();
            }
            let what = format!("{activation:?} of [{rows}, {cols}] {:?}, from element {offset} on", T::DTYPE);
            let bits = |memory: &cudarc::driver::CudaSlice<T>| -> Vec<u32> {
                bench.down(memory).iter().map(|v| v.to_f32().to_bits()).collect()
            };
            assert!(bits(&of_both) == bits(&of_each), "{what}: the gradient");
            assert_eq!(bench.down(&together), bench.down(&apart), "{what}: sums, added: {accumulate}");
        }
    }
}

#[test]
fn column_sums_through_an_activation_have_the_bits_of_two_passes() {
    let Some(bench) = bench() else { return };
    for shape in [(1, 1), (7, 130), (1000, 33), (3000, 320)] {
        for offset in [0, 1] {
            check_sums_through::<f32>(&bench, shape, offset);
            check_sums_through::<f16>(&bench, shape, offset);
            check_sums_through::<bf16>(&bench, shape, offset);
        }
    }
}

const FUNCTIONS: [ElementFunction; 5] = [
    ElementFunction::Activation(Activation::Identity),
    ElementFunction::Activation(Activation::Relu),
    ElementFunction::Activation(Activation::Gelu),
    ElementFunction::Activation(Activation::Silu),
    ElementFunction::SquaredRelu,
];

fn value(function: ElementFunction, x: f32) -> f32 {
    match function {
        ElementFunction::Activation(activation) => activation.apply(x),
        ElementFunction::SquaredRelu => x.max(0.0) * x.max(0.0),
        ElementFunction::TanhGelu => tanh_gelu(x).0,
    }
}

/// The derivative, by the CPU's functions; of squared ReLU by hand.
fn slope(function: ElementFunction, x: f32) -> f32 {
    match function {
        ElementFunction::Activation(activation) => {
            let mut dy = [1.0f32];
            twofour::layer::activation_gradient(activation, &[x], &mut dy).unwrap();
            dy[0]
        }
        ElementFunction::SquaredRelu => 2.0 * x.max(0.0),
        ElementFunction::TanhGelu => tanh_gelu(x).1,
    }
}

/// GELU's approximation by tanh and its derivative, in f64; their limits where the argument is infinite.
fn tanh_gelu(x: f32) -> (f32, f32) {
    if x.is_infinite() {
        return if x > 0.0 { (x, 1.0) } else { (0.0, 0.0) };
    }
    let (x, factor) = (f64::from(x), (2.0 / std::f64::consts::PI).sqrt());
    let t = (factor * (x + 0.044715 * x.powi(3))).tanh();
    let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * factor * (1.0 + 3.0 * 0.044715 * x * x);
    ((0.5 * x * (1.0 + t)) as f32, slope as f32)
}

fn check_functions<T: Arithmetic + DeviceRepr>(bench: &Bench, (rows, cols): (usize, usize), offset: usize) {
    let kernels = Elementwise::new(&bench.device, T::DTYPE).unwrap();
    let count = rows * cols;
    let mut x = numbers::<T>(offset + count, 5);
    for (at, special) in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, -30.0, 30.0].into_iter().enumerate() {
        if let Some(x) = x.get_mut(offset + at) {
            *x = T::from_f32(special);
        }
    }
    let dy = numbers::<T>(count, 6);
    let mut random = Random(7);
    let tiles: Vec<u16> = (0..rows.div_ceil(4) * cols.div_ceil(4)).map(|_| random.bits() as u16).collect();
    let (x_there, dy_there, tiles_there) = (bench.up(&x), bench.up(&dy), bench.up(&tiles));
    let x = &x[offset..];
    let from = bench.at(&x_there) + (offset * size_of::<T>()) as u64;
    let half = match T::DTYPE {
        twofour::DataType::F32 => 2e-6,
        twofour::DataType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-11),
    };
    let close = |what: String, found: &[T], expected: &dyn Fn(usize) -> f32| {
        for (i, found) in found[..count].iter().enumerate() {
            let (found, expected) = (f64::from(found.to_f32()), f64::from(T::from_f32(expected(i)).to_f32()));
            let same = found == expected || found.is_nan() && expected.is_nan();
            assert!(
                same || (found - expected).abs() <= 2.0 * half * expected.abs() + 2e-6,
                "{what}: element {i}: {found}, expected {expected}"
            );
        }
        assert!(found[count..].iter().all(|guard| guard.to_f32() == 7.0), "{what}: beyond the end");
    };
    for function in FUNCTIONS {
        let what = format!("{function:?} of [{rows}, {cols}] {:?}, from element {offset} on", T::DTYPE);
        let out = bench.poisoned(count + GUARD, T::from_f32(7.0));
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        unsafe { kernels.apply(bench.stream(), function, from, bench.at(&out), count) }.unwrap();
        close(what.clone(), &bench.down(&out), &|i| value(function, x[i].to_f32()));
        for masked in [false, true] {
            let out = bench.poisoned(count + GUARD, T::from_f32(7.0));
            let tensors = FunctionGradient {
                input: from,
                gradient: bench.at(&dy_there),
                out: bench.at(&out),
                tiles: masked.then(|| bench.at(&tiles_there)),
            };
            // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
            // waited for.
            unsafe { kernels.gradient(bench.stream(), function, tensors, rows, cols) }.unwrap();
            let kept = |i: usize| {
                let (row, col) = (i / cols, i % cols);
                !masked || tiles[row / 4 * cols.div_ceil(4) + col / 4] >> (row % 4 * 4 + col % 4) & 1 == 1
            };
            close(format!("the gradient of {what}, masked {masked}"), &bench.down(&out), &|i| {
                if kept(i) { dy[i].to_f32() * slope(function, x[i].to_f32()) } else { 0.0 }
            });
        }
    }
}

#[test]
fn functions_and_their_gradients_are_those_of_the_cpu() {
    let Some(bench) = bench() else { return };
    for shape in [(1, 1), (7, 30), (64, 72), (129, 131)] {
        for offset in [0, 1] {
            check_functions::<f32>(&bench, shape, offset);
            check_functions::<f16>(&bench, shape, offset);
            check_functions::<bf16>(&bench, shape, offset);
        }
    }
}

fn check_rows_of_integers<T: Arithmetic + DeviceRepr>(bench: &Bench, (rows, cols): (usize, usize), offset: usize) {
    let quantizer = Quantizer::new(&bench.device, T::DTYPE).unwrap();
    let what = format!("[{rows}, {cols}] {:?}, element {offset}", T::DTYPE);
    let mut values = numbers::<T>(rows * cols, 9);
    // Ties, a row of zeros, subnormals.
    values.iter_mut().take(cols).enumerate().for_each(|(i, v)| *v = T::from_f32((i % 9) as f32 - 4.5));
    if rows > 2 {
        values[cols..2 * cols].fill(T::from_f32(-0.0));
        let subnormal = |i: usize| T::from_f32(f32::from_bits(i as u32 % 50));
        values[2 * cols..3 * cols].iter_mut().enumerate().for_each(|(i, v)| *v = subnormal(i));
    }
    let wide: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
    let (expected, scales) = quantize(MatrixRef::new(rows, cols, &wide).unwrap()).unwrap();
    if rows > 4 {
        values[4 * cols + 3] = T::from_f32(f32::NAN);
    }
    values.splice(0..0, vec![T::from_f32(0.0); offset]);
    let there = bench.up(&values);
    let (out, scales_there) = (bench.poisoned(rows * cols + GUARD, 7i8), bench.poisoned(rows + GUARD, 7.0f32));
    let from = bench.at(&there) + (offset * T::DTYPE.bytes()) as u64;
    // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been waited
    // for.
    unsafe { quantizer.rows_to_i8(bench.stream(), from, (rows, cols), bench.at(&out), bench.at(&scales_there)) }
        .unwrap();
    let (found, found_scales) = (bench.down(&out), bench.down(&scales_there));
    for row in 0..rows {
        if row == 4 {
            assert!(found_scales[row].is_nan(), "{what}");
            continue;
        }
        assert_eq!(found_scales[row].to_bits(), scales[row].to_bits(), "{what}, row {row}");
        let range = row * cols..(row + 1) * cols;
        assert_eq!(found[range.clone()], expected[range], "{what}, row {row}");
    }
    assert!(found[rows * cols..].iter().all(|guard| *guard == 7) && found_scales[rows..].iter().all(|g| *g == 7.0));
}

#[test]
fn rows_of_integers_are_those_of_the_cpu_bit_for_bit() {
    let Some(bench) = bench() else { return };
    // Of one CTA and of clusters of 2, 4 and 8; wider than the vectors that stay in registers; not a whole number of
    // vectors; not aligned.
    for shape in [
        (1, 1),
        (5, 30),
        (64, 1024),
        (3, 5001),
        (8, 4096),
        (60, 8192),
        (5, 14_336),
        (1, 32_768),
        (140, 20_000),
        (6, 40_000),
    ] {
        for offset in [0, 1] {
            check_rows_of_integers::<f32>(&bench, shape, offset);
            check_rows_of_integers::<f16>(&bench, shape, offset);
            check_rows_of_integers::<bf16>(&bench, shape, offset);
        }
    }
}

fn check_floats<T: Arithmetic + DeviceRepr, O: Element + Arithmetic>(bench: &Bench, count: usize, largest: f32) {
    let quantizer = Quantizer::new(&bench.device, T::DTYPE).unwrap();
    let output = O::DTYPE;
    for (special, at) in [(0.0f32, 0), (-100.0, count / 2), (f32::NAN, count - 1), (f32::INFINITY, 0)] {
        let mut values = if special == 0.0 { vec![T::from_f32(0.0); count] } else { numbers::<T>(count, 11) };
        values[at] = T::from_f32(special);
        let there = bench.up(&values);
        let (amax, inverse, scales) = (bench.up(&[0u32]), bench.up(&[0f32]), bench.poisoned(3 + GUARD, 7.0f32));
        let out = bench.poisoned(count + GUARD, 7u8);
        let scale =
            TensorScale { amax: bench.at(&amax), inverse: bench.at(&inverse), scales: bench.at(&scales), count: 3 };
        // SAFETY: all memory is allocated above, as long as the count asks for, and lives until the stream has been
        // waited for.
        unsafe {
            quantizer.scale_to_floats(bench.stream(), bench.at(&there), count, output, scale).unwrap();
            quantizer.to_floats(bench.stream(), bench.at(&there), count, output, scale, bench.at(&out)).unwrap();
        }
        let (found, scales) = (bench.down(&out), bench.down(&scales));
        assert!(found[count..].iter().all(|guard| *guard == 7) && scales[3..].iter().all(|guard| *guard == 7.0));
        let amax = values.iter().fold(0f32, |most, v| most.max(v.to_f32().abs()));
        let expected = if special == 0.0 { 1.0 } else { largest / amax };
        assert!(scales[..3].iter().all(|s| s.to_bits() == scales[0].to_bits()));
        if !special.is_finite() {
            assert!(scales[0].is_nan(), "{special}");
            continue;
        }
        assert_eq!(bench.down(&inverse), [expected]);
        assert_eq!(scales[0], 1.0 / expected);
        for (i, (found, value)) in found[..count].iter().zip(&values).enumerate() {
            let expected = O::from_f32(value.to_f32() * expected);
            assert_eq!(bytemuck::bytes_of(&expected), [*found], "element {i} of {special}");
        }
    }
}

#[test]
fn tensors_of_8_bit_floats_use_their_whole_range() {
    let Some(bench) = bench() else { return };
    if bench.device.architecture().features().float8 == twofour_cuda::architecture::Float8::Missing {
        eprintln!("skipped: no 8-bit floats");
        return;
    }
    for count in [1, 63, 4096, 100_003] {
        check_floats::<bf16, F8E4M3>(&bench, count, 448.0);
        check_floats::<f32, F8E5M2>(&bench, count, 57344.0);
        check_floats::<f16, F8E4M3>(&bench, count, 448.0);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let memory = bench.poisoned(64, 0u32);
    let at = bench.at(&memory);
    for wrong in [DataType::E4M3, DataType::I8] {
        assert!(matches!(Elementwise::new(&bench.device, wrong), Err(Error::DataType { .. })));
        assert!(matches!(ColumnSums::new(&bench.device, wrong), Err(Error::DataType { .. })));
        assert!(matches!(Quantizer::new(&bench.device, wrong), Err(Error::DataType { .. })));
    }
    let kernels = Elementwise::new(&bench.device, DataType::BF16).unwrap();
    let relu = ElementFunction::Activation(Activation::Relu);
    // SAFETY: each of these calls returns an error before it launches anything.
    unsafe {
        let apply = |input, out, count| kernels.apply(bench.stream(), relu, input, out, count);
        assert!(matches!(apply(0, at, 4), Err(Error::Pointer { what: "input", .. })));
        assert!(matches!(apply(at, at + 1, 4), Err(Error::Pointer { what: "output", .. })));
        assert!(matches!(apply(at, at, usize::MAX), Err(Error::TooLarge { .. })));
        assert!(apply(0, 0, 0).is_ok());
        let quantizer = Quantizer::new(&bench.device, DataType::BF16).unwrap();
        let scale = TensorScale { amax: at, inverse: at, scales: at, count: 1 };
        assert!(matches!(
            quantizer.scale_to_floats(bench.stream(), at, 4, DataType::I8, scale),
            Err(Error::DataType { .. })
        ));
        let sums = ColumnSums::new(&bench.device, DataType::BF16).unwrap();
        let to = ColumnSumsTarget { sums: at, dtype: DataType::I8, accumulate: false, workspace: at };
        assert!(matches!(sums.run(bench.stream(), at, 4, 4, to), Err(Error::DataType { .. })));
    }
}
