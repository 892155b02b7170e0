//! On a device: products with a weight in square blocks are those of the dense weight, whatever its blocks are. Without
//! a device the test skips.

mod support;

use cudarc::driver::DevicePtr as _;
use half::{bf16, f16};
use support::device;
use twofour::Arithmetic;
use twofour_cuda::{
    DataType, Error,
    layer::{
        DeviceBuffer, DeviceSlice, LayerContext,
        borrowed::block_sparse::{self, BlockSparseSlice},
    },
};

fn number(index: usize, seed: usize) -> f32 {
    ((index * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0
}

/// A weight's blocks: of each row of blocks those that `keeps` says.
struct Blocks<T> {
    crow: Vec<i64>,
    col: Vec<i64>,
    values: Vec<T>,
    dense: Vec<f32>,
}

fn blocks_of<T: Arithmetic>(
    (rows, cols, block): (usize, usize, usize),
    keeps: impl Fn(usize, usize) -> bool,
) -> Blocks<T> {
    let mut made = Blocks { crow: vec![0], col: vec![], values: vec![], dense: vec![0.0; rows * cols] };
    for i in 0..rows.div_ceil(block) {
        for j in (0..cols.div_ceil(block)).filter(|j| keeps(i, *j)) {
            made.col.push(j as i64);
            for (r, c) in (0..block * block).map(|at| (i * block + at / block, j * block + at % block)) {
                let is_there = r < rows && c < cols;
                let value = if is_there { T::from_f32(number(r * cols + c, 1)) } else { T::ZERO };
                made.values.push(value);
                if is_there {
                    made.dense[r * cols + c] = value.to_f32();
                }
            }
        }
        made.crow.push(made.col.len() as i64);
    }
    made
}

/// The product on the device, `[tokens, rows]`.
fn product<T: Arithmetic>(
    context: &LayerContext,
    blocks: &Blocks<T>,
    (rows, cols, block): (usize, usize, usize),
    x: &[T],
) -> Result<Vec<T>, Error> {
    let stream = context.stream();
    let [crow, col] = [&blocks.crow, &blocks.col].map(|indices| {
        // An allocation has at least one element.
        let mut indices = indices.clone();
        indices.push(0);
        stream.clone_htod(&indices).unwrap()
    });
    let up = |values: &[T]| DeviceBuffer::from_host(context, values).unwrap();
    let (x_there, values) = (up(x), up(&blocks.values));
    let tokens = x.len() / cols;
    let mut y = DeviceBuffer::zeros(context, T::DTYPE, tokens * rows)?;
    let indices = |memory: &cudarc::driver::CudaSlice<i64>, count: usize| {
        let (address, _guard) = memory.device_ptr(stream);
        // SAFETY: the memory holds so many numbers, is not written, and outlives the call, which is waited for.
        unsafe { DeviceSlice::from_raw(context.device(), address, 2 * count, DataType::I32) }
    };
    let weight = BlockSparseSlice {
        crow: indices(&crow, blocks.crow.len()),
        col: indices(&col, blocks.col.len()),
        values: values.as_slice(),
        block,
        rows,
        cols,
    };
    block_sparse::linear(context, weight, x_there.as_slice(), tokens, y.as_slice_mut())?;
    y.to_host::<T>()
}

fn products_of<T: Arithmetic>(context: &LayerContext) {
    let shapes = [(128, 256, 64), (70, 56, 16), (5, 136, 64), (96, 96, 32), (130, 264, 128), (256, 512, 64)];
    for shape @ (rows, cols, _) in shapes {
        for tokens in [1, 16, 17, 33, 130, 700] {
            for share in [0, 3, 10] {
                // The second row of blocks is empty; a column of blocks may be.
                let keeps = |i: usize, j: usize| i != 1 && (i * 7 + j * 5) % 10 < share;
                let blocks = blocks_of::<T>(shape, keeps);
                let x: Vec<T> = (0..tokens * cols).map(|i| T::from_f32(number(i, 2))).collect();
                let found = product(context, &blocks, shape, &x).unwrap();
                let mut sums = vec![0f64; tokens * rows];
                for (i, sum) in sums.iter_mut().enumerate() {
                    let (x, w) = (&x[i / rows * cols..][..cols], &blocks.dense[i % rows * cols..][..cols]);
                    *sum = x.iter().zip(w).map(|(x, w)| f64::from(x.to_f32()) * f64::from(*w)).sum();
                }
                let largest = sums.iter().fold(1e-6f64, |most, v| most.max(v.abs()));
                for (i, (found, expected)) in found.iter().zip(&sums).enumerate() {
                    let error = (f64::from(found.to_f32()) - expected).abs();
                    let what = format!("{} {shape:?}, {tokens} tokens, {share} of 10, element {i}", T::DTYPE);
                    assert!(error <= 5e-3 * largest, "{what}: {} for {expected}", found.to_f32());
                }
            }
        }
    }
}

#[test]
fn products_with_blocks_are_those_of_the_dense_weight() {
    let Some(device) = device() else { return };
    let context = LayerContext::new(&device).unwrap();
    products_of::<bf16>(&context);
    products_of::<f16>(&context);
}

#[test]
fn what_is_no_weight_is_an_error_or_zeros() {
    let Some(device) = device() else { return };
    let context = LayerContext::new(&device).unwrap();
    let shape = (64, 128, 64);
    let mut blocks = blocks_of::<bf16>(shape, |_, _| true);
    let x = vec![bf16::from_f32(1.0); 3 * 128];
    // Indices are on the device: those outside of the weight read zeros, and no memory that is not its own.
    for (crow, col) in [(vec![0, 2], vec![-1, 2]), (vec![2, 900], vec![0, 1]), (vec![-5, 0], vec![0, 1])] {
        (blocks.crow, blocks.col) = (crow, col);
        let y = product(&context, &blocks, shape, &x).unwrap();
        assert!(y.iter().all(|value| value.to_f32() == 0.0), "{:?} {:?}", blocks.crow, blocks.col);
    }
    (blocks.crow, blocks.col) = (vec![0, 2], vec![0, 1]);
    let refused = |shape, x: &[bf16]| product(&context, &blocks, shape, x).unwrap_err();
    assert!(matches!(refused((64, 128, 48), &x), Error::Setting { .. }));
    assert!(matches!(refused((64, 128, 0), &x), Error::Setting { .. }));
    assert!(matches!(refused((64, 129, 64), &[bf16::ONE; 129]), Error::Multiple { found: 129, .. }));
    assert!(matches!(refused((128, 128, 64), &x), Error::Length { .. }));
    assert!(!block_sparse::is_supported(0, 128) && !block_sparse::is_supported(48, 128));
    assert!(!block_sparse::is_supported(64, 129));
    assert!(block_sparse::is_supported(192, 136));
}
