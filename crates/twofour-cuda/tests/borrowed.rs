//! On a device: the layer's passes over borrowed memory, as a framework's tensors are, compute what the CPU computes. Without a device the tests skip.

mod support;

use cudarc::driver::DevicePtr as _;
use half::{bf16, f16};
use support::device;
use twofour::{
    Arithmetic, Axis, Compressed, MatrixRef, Pattern,
    estimate::{self, Estimator},
    int4::{Granularity, Int4},
    layer::MaskRule,
    select::{self, Transposable},
};
use twofour_cuda::{
    DataType, Error,
    layer::{
        Activation, DeviceBuffer, DeviceSlice, LayerContext,
        borrowed::{
            self, MaskSlice, MasterSlice, PackTarget, PackedSlice, PackedSliceMut, input_gradient,
            int4::{self, Int4Slice},
            linear, mask_len, packed_len, remask, remask_checked, unpack,
        },
    },
};

const DTYPE: DataType = DataType::BF16;

fn numbers(len: usize, seed: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0)).collect()
}

/// `a` `[n, k]` times the transpose of `b` `[m, k]`.
fn product(a: &[bf16], b: &[bf16], (n, m, k): (usize, usize, usize)) -> Vec<f64> {
    let at = |v: &[bf16], i: usize| f64::from(v[i].to_f32());
    (0..n * m).map(|i| (0..k).map(|j| at(a, i / m * k + j) * at(b, i % m * k + j)).sum()).collect()
}

fn close(what: &str, found: &[bf16], expected: &[f64]) {
    let largest = expected.iter().fold(1e-6f64, |most, v| most.max(v.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found.to_f32()) - expected).abs();
        assert!(error <= 1e-2 * largest, "{what}, element {i}: {found} for {expected}");
    }
}

#[test]
fn packed_tensors_multiply_both_ways_as_the_pruned_matrix_does() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    let zeros = |len: usize| DeviceBuffer::zeros(context, DTYPE, len).unwrap();
    for (rows, cols, tokens) in [(64, 128, 5), (100, 52, 33), (7, 30, 1), (256, 256, 300)] {
        let dense = numbers(rows * cols, 1);
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        let master = DeviceBuffer::from_host(context, &dense).unwrap();
        let master = MasterSlice { data: master.as_slice(), rows, cols };
        let magnitude = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let tiles = select::transposable(matrix, Transposable::GreedySigned).unwrap();
        let rules = [(MaskRule::Magnitude, magnitude), (MaskRule::Transposable(Transposable::GreedySigned), tiles)];
        for (rule, expected) in rules {
            let what = format!("[{rows}, {cols}], {rule:?}");
            let both = rule != MaskRule::Magnitude;
            let (mut packed, mut mask) = (zeros(packed_len(DTYPE, rows, cols).unwrap()), zeros(mask_len(rows, cols)));
            let mut transposed = zeros(packed_len(DTYPE, cols, rows).unwrap());
            let to = PackTarget {
                packed: Some(PackedSliceMut::new(packed.as_slice_mut(), rows, cols)),
                transposed: both.then(|| PackedSliceMut::new(transposed.as_slice_mut(), cols, rows)),
                mask: MaskSlice::new(mask.as_slice_mut()),
            };
            remask_checked(context, master, rule, None, DTYPE, to).unwrap();
            let kept = expected.apply(matrix).unwrap();
            let weight = PackedSlice::new(packed.as_slice(), rows, cols);
            let mut out = zeros(rows * cols);
            unpack(context, weight, out.as_slice_mut()).unwrap();
            assert_eq!(out.to_host::<bf16>().unwrap(), kept, "{what}");
            let tiles: Vec<u16> = bytemuck::cast_vec(mask.to_host::<bf16>().unwrap());
            for row in 0..rows {
                for col in 0..cols {
                    let tile = tiles[row / 4 * cols.div_ceil(4) + col / 4];
                    assert_eq!(tile >> (row % 4 * 4 + col % 4) & 1 == 1, expected.is_kept(row, col), "{what}");
                }
            }
            let (x, dy, bias) = (numbers(tokens * cols, 2), numbers(tokens * rows, 3), numbers(rows, 4));
            let up = |values: &[bf16]| DeviceBuffer::from_host(context, values).unwrap();
            let mut y = zeros(tokens * rows);
            let (x_there, bias_there) = (up(&x), up(&bias));
            linear(
                context,
                weight,
                x_there.as_slice(),
                tokens,
                Some(bias_there.as_slice()),
                Activation::Relu,
                y.as_slice_mut(),
            )
            .unwrap();
            let mut sums = product(&x, &kept, (tokens, rows, cols));
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = (*sum + f64::from(bias[i % rows].to_f32())).max(0.0);
            }
            close(&format!("{what}, forward"), &y.to_host::<bf16>().unwrap(), &sums);
            let kept_t = MatrixRef::new(rows, cols, &kept).unwrap().transposed();
            let expected = product(&dy, &kept_t, (tokens, cols, rows));
            let (dy, mut dx) = (up(&dy), zeros(tokens * cols));
            input_gradient(context, weight, dy.as_slice(), tokens, dx.as_slice_mut()).unwrap();
            close(&format!("{what}, unpacked"), &dx.to_host::<bf16>().unwrap(), &expected);
            if both {
                let (weight, mut dx) = (PackedSlice::new(transposed.as_slice(), cols, rows), zeros(tokens * cols));
                let identity = Activation::Identity;
                linear(context, weight, dy.as_slice(), tokens, None, identity, dx.as_slice_mut()).unwrap();
                close(&format!("{what}, transposed"), &dx.to_host::<bf16>().unwrap(), &expected);
            }
        }
        for estimator in [Estimator::Mvue { seed: 7 }, Estimator::MvueApproximate { seed: 7 }] {
            let mut out = zeros(rows * cols);
            let one = DeviceBuffer::from_host(context, &[1f32]).unwrap();
            borrowed::estimate(context, master, estimator, one.as_slice(), out.as_slice_mut()).unwrap();
            let expected = estimate::estimate::<_, bf16>(matrix, estimator, 1.0).unwrap().to_dense();
            assert_eq!(out.to_host::<bf16>().unwrap(), expected, "[{rows}, {cols}], {estimator:?}");
        }
    }
}

#[test]
fn memory_that_does_not_fit_and_a_nan_are_errors() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    let zeros = |len: usize| DeviceBuffer::zeros(context, DTYPE, len).unwrap();
    let mut dense = numbers(64 * 64, 1);
    dense[64 + 5] = bf16::NAN;
    let master = DeviceBuffer::from_host(context, &dense).unwrap();
    let master = MasterSlice { data: master.as_slice(), rows: 64, cols: 64 };
    let (mut packed, mut mask) = (zeros(packed_len(DTYPE, 64, 64).unwrap()), zeros(mask_len(64, 64)));
    let mut short = zeros(8);
    let rule = MaskRule::Transposable(Transposable::GreedyAbs);
    let to = PackTarget {
        packed: Some(PackedSliceMut::new(packed.as_slice_mut(), 64, 64)),
        transposed: None,
        mask: MaskSlice::new(mask.as_slice_mut()),
    };
    let error = remask_checked(context, master, rule, None, DTYPE, to).unwrap_err();
    assert!(error.to_string().contains("row 1, column 5"), "{error}");
    let to = PackTarget {
        packed: Some(PackedSliceMut::new(short.as_slice_mut(), 64, 64)),
        transposed: None,
        mask: MaskSlice::new(mask.as_slice_mut()),
    };
    assert!(matches!(remask(context, master, rule, None, DTYPE, to), Err(Error::Length { .. })));
    let (x, mut y) = (zeros(64), zeros(64));
    let weight = PackedSlice::new(short.as_slice(), 64, 64);
    let multiplied = linear(context, weight, x.as_slice(), 1, None, Activation::Identity, y.as_slice_mut());
    assert!(matches!(multiplied, Err(Error::Length { .. })));
}

/// f16 and bf16 alike.
fn int4_products_of<T: Arithmetic>(context: &LayerContext) {
    let dtype: DataType = T::DTYPE.into();
    let narrow = |values: &[bf16]| -> Vec<T> { values.iter().map(|v| T::from_f32(v.to_f32())).collect() };
    let wide = |values: &[T]| -> Vec<bf16> { values.iter().map(|v| bf16::from_f32(v.to_f32())).collect() };
    for (rows, cols, tokens) in [(64, 256, 1), (100, 52, 33), (7, 30, 2), (48, 128, 130), (4096, 384, 8), (33, 258, 65)]
    {
        for granularity in [Granularity::Row, Granularity::Group] {
            let what = format!("{dtype} [{rows}, {cols}], {tokens} tokens, {granularity:?}");
            let dense: Vec<f32> = numbers(rows * cols, 1).iter().map(|v| v.to_f32()).collect();
            let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
            let weight = Int4::quantize(&weight, granularity).unwrap();
            let packed: Vec<i8> = bytemuck::cast_vec(int4::encode(&weight).unwrap());
            let there = DeviceBuffer::from_host(context, &packed).unwrap();
            let (x, bias) = (narrow(&numbers(tokens * cols, 2)), narrow(&numbers(rows, 4)));
            let up = |values: &[T]| DeviceBuffer::from_host(context, values).unwrap();
            // One element too far, so that nothing is aligned.
            let shifted: Vec<T> = std::iter::once(T::ZERO).chain(x.iter().copied()).collect();
            let (x_there, bias_there) = (up(&x), up(&bias));
            let shifted = context.stream().clone_htod(bytemuck::cast_slice::<T, u8>(&shifted)).unwrap();
            let mut y = DeviceBuffer::zeros(context, dtype, tokens * rows).unwrap();
            let exact = weight.dequantize().to_dense();
            let mut sums = vec![0f64; tokens * rows];
            for (i, sum) in sums.iter_mut().enumerate() {
                let (x, w) = (&x[i / rows * cols..][..cols], &exact[i % rows * cols..][..cols]);
                *sum = x.iter().zip(w).map(|(x, w)| f64::from(x.to_f32()) * f64::from(*w)).sum::<f64>();
                *sum = (*sum + f64::from(bias[i % rows].to_f32())).max(0.0);
            }
            // SAFETY: the buffer has an element more, and lives until the device has been waited for.
            let unaligned = unsafe {
                let address = shifted.device_ptr(context.stream()).0 + dtype.bytes() as u64;
                DeviceSlice::from_raw(context.device(), address, tokens * cols, dtype)
            };
            for x in [x_there.as_slice(), unaligned] {
                let slice = Int4Slice { memory: there.as_slice(), rows, cols, granularity };
                let bias = Some(bias_there.as_slice());
                int4::linear(context, slice, x, tokens, bias, Activation::Relu, y.as_slice_mut()).unwrap();
                close(&what, &wide(&y.to_host::<T>().unwrap()), &sums);
            }
            let short = Int4Slice { memory: there.as_slice(), rows, cols: cols + 128, granularity };
            let identity = Activation::Identity;
            let multiplied = int4::linear(context, short, x_there.as_slice(), tokens, None, identity, y.as_slice_mut());
            assert!(matches!(multiplied, Err(Error::Length { what: "the packed weight", .. })), "{what}");
        }
    }
}

#[test]
fn int4_weights_of_any_shape_multiply_as_their_dequantized_numbers_do() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    int4_products_of::<bf16>(context);
    int4_products_of::<f16>(context);
}
