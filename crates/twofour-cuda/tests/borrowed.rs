//! On a device: the layer's passes over borrowed memory, as a framework's tensors are, compute what the CPU computes.
//! Without a device the tests skip.

mod support;

use cudarc::driver::DevicePtrMut as _;
use half::{bf16, f16};
use support::device;
use twofour::{
    Arithmetic, Axis, Compressed, MatrixRef, Pattern,
    estimate::{self, Estimator},
    layer::{MaskRule, gradient_estimate},
    select::{self, Transposable},
};
use twofour_cuda::{
    Activation, DataType, Error,
    layer::{
        DeviceBuffer, DeviceSliceMut, LayerContext,
        borrowed::{
            self, MaskSlice, MasterSlice, PackTarget, PackedSlice, PackedSliceMut, Sampling, input_gradient, linear,
            mask_len, packed_len, remask, remask_checked, remask_together, unpack,
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
    }
}

/// A pass over a master weight that writes the packed weight, where asked its transpose, and the mask.
fn pass<'a>(
    [packed, transposed, mask]: &'a mut [DeviceBuffer; 3],
    (rows, cols): (usize, usize),
    master: &'a DeviceBuffer,
    both: bool,
) -> (MasterSlice<'a>, PackTarget<'a>) {
    let to = PackTarget {
        packed: Some(PackedSliceMut::new(packed.as_slice_mut(), rows, cols)),
        transposed: both.then(|| PackedSliceMut::new(transposed.as_slice_mut(), cols, rows)),
        mask: MaskSlice::new(mask.as_slice_mut()),
    };
    (MasterSlice { data: master.as_slice(), rows, cols }, to)
}

/// More weights than a launch takes, with and without padding, by every rule.
#[test]
fn weights_that_are_packed_together_have_the_bits_of_each_alone() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    let shapes = [(128, 256), (256, 128), (64, 64), (100, 72), (7, 30), (1, 1)].repeat(5);
    let transposable =
        [Transposable::GreedyAbs, Transposable::GreedySigned, Transposable::Causal1122, Transposable::Optimal];
    let rules = transposable.map(MaskRule::Transposable).into_iter().chain([MaskRule::Magnitude]);
    let of = |(index, (rows, cols)): (usize, &(usize, usize))| {
        DeviceBuffer::from_host(context, &numbers(rows * cols, index)).unwrap()
    };
    let masters: Vec<_> = shapes.iter().enumerate().map(of).collect();
    for rule in rules {
        let both = rule != MaskRule::Magnitude;
        let mut packed = [0, 1].map(|_| {
            let zeros = |len| DeviceBuffer::zeros(context, DTYPE, len).unwrap();
            let of = |&(rows, cols): &(usize, usize)| {
                [packed_len(DTYPE, rows, cols).unwrap(), packed_len(DTYPE, cols, rows).unwrap(), mask_len(rows, cols)]
                    .map(zeros)
            };
            shapes.iter().map(of).collect::<Vec<_>>()
        });
        let [alone, together] = packed.each_mut().map(|packed| {
            let each = packed.iter_mut().zip(&shapes).zip(&masters);
            each.map(|((buffers, shape), master)| pass(buffers, *shape, master, both)).collect::<Vec<_>>()
        });
        for (master, to) in alone {
            remask(context, master, rule, None, DTYPE, to).unwrap();
        }
        remask_together(context, together, rule, DTYPE).unwrap();
        let bits = |buffers: &[DeviceBuffer; 3]| {
            buffers.each_ref().map(|buffer| bytemuck::cast_vec::<bf16, u16>(buffer.to_host().unwrap()))
        };
        for ((alone, together), shape) in packed[0].iter().zip(&packed[1]).zip(&shapes) {
            assert_eq!(bits(alone), bits(together), "{rule:?}, {shape:?}");
        }
    }
    let mut one = [0; 3].map(|_| DeviceBuffer::zeros(context, DTYPE, 1).unwrap());
    let soft =
        remask_together(context, vec![pass(&mut one, (1, 1), &masters[5], false)], MaskRule::SoftThreshold, DTYPE);
    assert!(matches!(soft, Err(Error::NoMethod { .. })));
}

#[test]
fn products_of_integers_are_exact() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    for (rows, cols, tokens) in [(64, 128, 16), (100, 52, 5), (37, 30, 1), (256, 4096, 300)] {
        let integer = |i: usize| ((i * 7919) % 256) as u8 as i8;
        let dense: Vec<i8> = (0..rows * cols).map(|i| if i % 4 < 2 { integer(i) } else { 0 }).collect();
        let weight = Compressed::from_dense(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        let x: Vec<i8> = (0..tokens * cols).map(|i| integer(i + 3)).collect();
        let packed = DeviceBuffer::from_host(context, &borrowed::encode(&weight).unwrap()).unwrap();
        let there = DeviceBuffer::from_host(context, &x).unwrap();
        let mut y = context.stream().alloc_zeros::<i32>(tokens * rows).unwrap();
        let address = y.device_ptr_mut(context.stream()).0;
        // SAFETY: `y` has that many elements, outlives the call, and is used on this stream alone.
        let out = unsafe { DeviceSliceMut::from_raw(&device, address, tokens * rows, DataType::I32) };
        let packed = PackedSlice::new(packed.as_slice(), rows, cols);
        borrowed::exact_linear(context, packed, there.as_slice(), tokens, out).unwrap();
        let found = context.stream().clone_dtoh(&y).unwrap();
        for (place, found) in found.into_iter().enumerate() {
            let (token, row) = (place / rows, place % rows);
            let products = (0..cols).map(|i| i32::from(x[token * cols + i]) * i32::from(dense[row * cols + i]));
            assert_eq!(found, products.sum::<i32>(), "[{rows}, {cols}], token {token}, row {row}");
        }
    }
}

/// The estimates of a matrix of one type, with the seed in the call and in device memory, are the CPU's, bit for bit.
fn estimates_are_the_cpus<T: Arithmetic + PartialEq>(context: &LayerContext, (rows, cols): (usize, usize)) {
    let dense: Vec<T> = numbers(rows * cols, 1).iter().map(|v| T::from_f32(v.to_f32())).collect();
    let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
    let there = DeviceBuffer::from_host(context, &dense).unwrap();
    let master = MasterSlice { data: there.as_slice(), rows, cols };
    let (two, seven) = (DeviceBuffer::from_host(context, &[2f32]).unwrap(), device_seed(context, 7));
    let sampled = [Estimator::Mvue { seed: 7 }, Estimator::MvueApproximate { seed: 7 }];
    for expected in [Estimator::Magnitude, Estimator::SoftThreshold].into_iter().chain(sampled) {
        let (estimator, seed) = match expected {
            Estimator::Mvue { .. } => (Estimator::Mvue { seed: 0 }, Some(seven.as_slice())),
            other => (other, None),
        };
        for scale in [None, Some(2.0)] {
            let mut out = DeviceBuffer::zeros(context, T::DTYPE, rows * cols).unwrap();
            let sampling = Sampling { estimator, seed };
            let factor = scale.map(|_| two.as_slice());
            borrowed::estimate(context, master, sampling, factor, out.as_slice_mut()).unwrap();
            let expected = estimate::estimate::<_, T>(matrix, expected, scale.unwrap_or(1.0)).unwrap().to_dense();
            let found = out.to_host::<T>().unwrap();
            assert!(found == expected, "[{rows}, {cols}] of {}, {estimator:?}, {scale:?}", T::DTYPE);
        }
    }
}

/// A u64 in device memory.
fn device_seed(context: &LayerContext, seed: u64) -> DeviceBuffer {
    DeviceBuffer::from_host(context, &seed.to_ne_bytes().map(u8::cast_signed)).unwrap()
}

#[test]
fn estimates_of_every_type_are_the_cpus() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    for shape in [(64, 128), (100, 52), (7, 30), (1, 1), (3, 257)] {
        estimates_are_the_cpus::<f32>(context, shape);
        estimates_are_the_cpus::<f16>(context, shape);
        estimates_are_the_cpus::<bf16>(context, shape);
    }
}

#[test]
fn a_masked_weight_is_the_one_that_the_mask_keeps() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    for (rows, cols) in [(64, 128), (100, 52), (7, 30)] {
        let dense: Vec<f32> = numbers(rows * cols, 5).iter().map(|v| v.to_f32()).collect();
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        let there = DeviceBuffer::from_host(context, &dense).unwrap();
        let master = MasterSlice { data: there.as_slice(), rows, cols };
        let mut mask = DeviceBuffer::zeros(context, DTYPE, mask_len(rows, cols)).unwrap();
        let rule = MaskRule::Transposable(Transposable::Optimal);
        let to = PackTarget { packed: None, transposed: None, mask: MaskSlice::new(mask.as_slice_mut()) };
        remask(context, master, rule, None, DTYPE, to).unwrap();
        let mut out = DeviceBuffer::zeros(context, DataType::F32, rows * cols).unwrap();
        borrowed::keep(context, master, MaskSlice::new(mask.as_slice_mut()), out.as_slice_mut()).unwrap();
        let expected = select::transposable(matrix, Transposable::Optimal).unwrap().apply(matrix).unwrap();
        assert_eq!(out.to_host::<f32>().unwrap(), expected, "[{rows}, {cols}]");
    }
}

#[test]
fn a_sampled_weight_gradient_is_the_product_with_the_estimate() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    for (tokens, outputs, inputs) in [(64, 128, 64), (33, 70, 30), (300, 256, 128), (1, 4, 4)] {
        let (dy, x) = (numbers(tokens * outputs, 2), numbers(tokens * inputs, 3));
        let (dy_there, x_there) =
            (DeviceBuffer::from_host(context, &dy).unwrap(), DeviceBuffer::from_host(context, &x).unwrap());
        let operands = (
            MasterSlice { data: dy_there.as_slice(), rows: tokens, cols: outputs },
            MasterSlice { data: x_there.as_slice(), rows: tokens, cols: inputs },
        );
        let seed = device_seed(context, 11);
        let sampling = Sampling { estimator: Estimator::Mvue { seed: 0 }, seed: Some(seed.as_slice()) };
        let mut dw = DeviceBuffer::zeros(context, DTYPE, outputs * inputs).unwrap();
        borrowed::sampled_weight_gradient(context, operands, sampling, dw.as_slice_mut()).unwrap();
        let estimated = gradient_estimate(&dy, tokens, outputs, Estimator::Mvue { seed: 11 }).unwrap().to_dense();
        let x_t = MatrixRef::new(tokens, inputs, &x).unwrap().transposed();
        let expected = product(&estimated, &x_t, (outputs, inputs, tokens));
        close(&format!("{tokens} tokens, [{outputs}, {inputs}]"), &dw.to_host::<bf16>().unwrap(), &expected);
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

#[test]
fn a_nan_that_nobody_asks_for_is_kept() {
    let Some(device) = device() else { return };
    let context = &LayerContext::new(&device).unwrap();
    let zeros = |len: usize| DeviceBuffer::zeros(context, DTYPE, len).unwrap();
    let tiles = [Transposable::GreedyAbs, Transposable::GreedySigned, Transposable::Causal1122, Transposable::Optimal];
    for (rows, cols) in [(64, 64), (30, 70)] {
        for rule in tiles.map(MaskRule::Transposable).into_iter().chain([MaskRule::Magnitude]) {
            for nan in [bf16::NAN, -bf16::NAN] {
                for place in 0..16 {
                    let at = (8 + place / 4) * cols + 16 + place % 4;
                    let mut dense = numbers(rows * cols, 1);
                    dense[at] = nan;
                    let master = DeviceBuffer::from_host(context, &dense).unwrap();
                    let master = MasterSlice { data: master.as_slice(), rows, cols };
                    let (mut packed, mut mask) =
                        (zeros(packed_len(DTYPE, rows, cols).unwrap()), zeros(mask_len(rows, cols)));
                    let to = PackTarget {
                        packed: Some(PackedSliceMut::new(packed.as_slice_mut(), rows, cols)),
                        transposed: None,
                        mask: MaskSlice::new(mask.as_slice_mut()),
                    };
                    remask(context, master, rule, None, DTYPE, to).unwrap();
                    let mut out = zeros(rows * cols);
                    unpack(context, PackedSlice::new(packed.as_slice(), rows, cols), out.as_slice_mut()).unwrap();
                    let kept = out.to_host::<bf16>().unwrap();
                    assert!(kept[at].is_nan(), "[{rows}, {cols}], {rule:?}, element {place} of its tile");
                }
            }
        }
    }
}
