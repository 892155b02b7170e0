//! On a device: int4 weights in borrowed memory multiply as their dequantized numbers do. Without a device the tests
//! skip.

mod support;

use cudarc::driver::DevicePtr as _;
use half::{bf16, f16};
use support::device;
use twofour::{
    Arithmetic, Compressed, MatrixRef,
    int4::{Granularity, Int4},
};
use twofour_cuda::{
    Activation, DataType, Error,
    layer::{
        DeviceBuffer, DeviceSlice, LayerContext,
        borrowed::int4::{self, Int4Slice},
    },
};

fn numbers(len: usize, seed: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0)).collect()
}

fn close(what: &str, found: &[bf16], expected: &[f64]) {
    let largest = expected.iter().fold(1e-6f64, |most, v| most.max(v.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found.to_f32()) - expected).abs();
        assert!(error <= 1e-2 * largest, "{what}, element {i}: {found} for {expected}");
    }
}

/// f16 and bf16 alike.
fn int4_products_of<T: Arithmetic>(context: &LayerContext) {
    let dtype: DataType = T::DTYPE;
    let narrow = |values: &[bf16]| -> Vec<T> { values.iter().map(|v| T::from_f32(v.to_f32())).collect() };
    let wide = |values: &[T]| -> Vec<bf16> { values.iter().map(|v| bf16::from_f32(v.to_f32())).collect() };
    // More than 256 tokens are multiplied with floats.
    let few = [(64, 256, 1), (100, 52, 33), (7, 30, 2), (48, 128, 130), (4096, 384, 8), (33, 258, 65)];
    for (rows, cols, tokens) in few.into_iter().chain([(64, 256, 300), (70, 132, 257), (33, 300, 400)]) {
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
