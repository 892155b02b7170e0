//! GEMMs with an int4 weight of any shape, and its packed form in host memory.
//!
//! A packed weight is one run of bytes: values, metadata and scales in the order of [`twofour::layout::lanes`], of a
//! weight that zeros complete to a multiple of 16 rows and 128 columns.

use half::f16;
use twofour::{
    int4::{GROUP, Granularity, Int4},
    layout::lanes::{self, Lanes},
};

use super::{LayerContext, elements, host_form};
use crate::{
    DataType, DevicePtr, Error, Result,
    problem::{GemmProblem, Int4Problem, Order},
    raw::{
        Packed,
        gemm::{
            Epilogue, GemmOperands,
            copies::Rows,
            int4::{Int4Weight, MAX_TOKENS},
            packed_bytes,
        },
    },
};

/// Rows that a packed weight has a multiple of.
const ROWS: usize = 16;

/// The alignment of addresses that kernels require, in bytes.
const ALIGNMENT: u64 = 16;

/// Returns the shape with its padding.
///
/// # Errors
/// [`Error::TooLarge`].
fn padded((rows, cols): (usize, usize)) -> Result<(usize, usize)> {
    let (tall, wide) = (rows.checked_next_multiple_of(ROWS), cols.checked_next_multiple_of(GROUP));
    let (Some(tall), Some(wide)) = (tall, wide) else { return Err(Error::TooLarge { rows, cols }) };
    elements(tall, wide)?;
    Ok((tall, wide))
}

/// Returns the bytes of values, metadata and scales.
///
/// # Errors
/// [`Error::TooLarge`]; [`Error::Core`] for groups of 64 columns, which kernels do not have.
pub(super) fn parts(shape: (usize, usize), granularity: Granularity) -> Result<[usize; 3]> {
    if granularity == Granularity::Group64 {
        return Err(twofour::Error::GroupOnCpuOnly { columns: 64 }.into());
    }
    let (rows, cols) = padded(shape)?;
    let scales = elements(rows, granularity.scales_per_row(cols))?.checked_mul(size_of::<f16>());
    Ok([rows * cols / 4, rows * cols / 8, scales.ok_or(Error::TooLarge { rows, cols })?])
}

/// Returns the bytes of a packed weight.
///
/// # Errors
/// [`Error::TooLarge`].
pub(super) fn bytes(shape: (usize, usize), granularity: Granularity) -> Result<usize> {
    let [values, meta, scales] = parts(shape, granularity)?;
    values.checked_add(meta + scales).ok_or(Error::TooLarge { rows: shape.0, cols: shape.1 })
}

/// Returns the packed form of a weight.
///
/// # Errors
/// [`Error::TooLarge`]; [`Error::Core`] with [`twofour::Error::TooLarge`].
pub(super) fn encode(weight: &Int4) -> Result<Vec<u8>> {
    let (q, granularity) = (weight.weight(), weight.granularity());
    let (rows, cols) = padded((q.rows(), q.cols()))?;
    let mut scales = weight.scales().to_vec();
    scales.resize(rows * granularity.scales_per_row(cols), f16::ZERO);
    let wide = Int4::from_parts(host_form::padded(q, rows, cols)?, scales, granularity)?;
    let Lanes { values, meta, scales } = lanes::encode(&wide)?;
    let words = [values, meta, scales].concat();
    Ok(bytemuck::cast_slice(&words).to_vec())
}

/// Returns the weight `[rows, cols]` of a packed form.
///
/// # Errors
/// [`Error::Length`] for another length than [`bytes`], [`Error::Core`] for contents that are no weight.
pub(super) fn decode(packed: &[u8], (rows, cols): (usize, usize), granularity: Granularity) -> Result<Int4> {
    let (expected, found) = (bytes((rows, cols), granularity)?, packed.len());
    if expected != found {
        return Err(Error::Length { what: "the packed weight", expected, found });
    }
    let ([values, meta, _], (tall, wide)) = (parts((rows, cols), granularity)?, padded((rows, cols))?);
    let (values, rest) = packed.split_at(values);
    let (meta, scales) = rest.split_at(meta);
    let [values, meta, scales] = [values, meta, scales].map(bytemuck::pod_collect_to_vec::<u8, u32>);
    let whole = lanes::decode(tall, wide, granularity, &Lanes { values, meta, scales })?;
    let (q, per_row) = (whole.weight(), granularity.scales_per_row(cols));
    let cropped = if rows == 0 || cols == 0 {
        let (values, meta) = twofour::compressed::lengths(rows, cols)?;
        twofour::Compressed::from_parts(rows, cols, vec![0; values], vec![0; meta])?
    } else {
        host_form::cropped(q.values(), q.meta(), wide, rows, cols)?
    };
    Ok(Int4::from_parts(cropped, whole.scales()[..rows * per_row].to_vec(), granularity)?)
}

/// A packed weight in device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Int4Place {
    weight: Int4Weight,
    shape: (usize, usize),
    granularity: Granularity,
}

impl Int4Place {
    /// Returns the weight whose [`bytes`] start at an address.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub(super) fn at(values: DevicePtr, shape: (usize, usize), granularity: Granularity) -> Result<Self> {
        let parts = parts(shape, granularity)?;
        let meta = values + parts[0] as u64;
        let weight = Int4Weight { values, meta, scales: meta + parts[1] as u64 };
        Ok(Self { weight, shape, granularity })
    }
}

/// Most tokens that are multiplied with integers, 64 at a time. More of them are multiplied with floats, which are then
/// computed once.
const MAX_INTEGER_TOKENS: usize = 256;

/// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, cols]` and `y` `[tokens, rows]` of f16 or bf16, with the
/// weight's floats, rounded to that type, in the workspace.
fn dequantized_linear(
    context: &LayerContext,
    weight: Int4Place,
    (x, dtype, tokens): (DevicePtr, DataType, usize),
    epilogue: Epilogue,
    out: DevicePtr,
) -> Result<()> {
    let Int4Place { weight, shape: (rows, cols), granularity } = weight;
    let problem = GemmProblem::plain(dtype, dtype, rows, tokens, cols);
    let gemm = context.packed_gemm(GemmProblem { epilogue: epilogue.kind(), ..problem })?;
    let (dequantizer, bytes) = (context.dequantizer(dtype)?, packed_bytes(dtype, rows, cols));
    let (tall, wide) = padded((rows, cols))?;
    let mut work = context.work();
    let mut parts = |gemm| work.parts([bytes.values, bytes.meta, gemm]);
    let (way, [values, meta, workspace]) = gemm.place(context, (x, out), &mut parts)?;
    let (stream, floats) = (context.raw(), Packed { values, meta });
    // SAFETY: the weight has the [`bytes`] that its shape requires; input and output come from slices whose lengths
    // were checked; the workspace has been allocated for the floats and the GEMM; the stream is of their device.
    unsafe {
        dequantizer.run(stream, weight, (rows, cols), (tall, granularity.scales_per_row(wide)), floats)?;
        gemm.run(context, way, GemmOperands { weight: floats, x, out, workspace }, epilogue, &mut parts)
    }
}

/// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, cols]` and `y` `[tokens, rows]` of f16 or bf16: up to
/// [`MAX_INTEGER_TOKENS`] tokens with integers, 64 at a time, more with floats. Operands that are not aligned or not a
/// multiple of the weight's padding are copied on the device.
pub(super) fn int4_linear(
    context: &LayerContext,
    weight: Int4Place,
    (x, dtype, tokens): (DevicePtr, DataType, usize),
    epilogue: Epilogue,
    out: DevicePtr,
) -> Result<()> {
    let (rows, cols) = weight.shape;
    if tokens == 0 || rows == 0 || cols == 0 {
        return Ok(());
    }
    if tokens > MAX_INTEGER_TOKENS {
        return dequantized_linear(context, weight, (x, dtype, tokens), epilogue, out);
    }
    let Int4Place { weight, granularity, .. } = weight;
    let (features, reduction) = padded((rows, cols))?;
    let (stream, size, most) = (context.raw(), dtype.bytes(), tokens.min(MAX_TOKENS));
    let is_aligned = |address: DevicePtr| address.is_multiple_of(ALIGNMENT);
    let copy_x = reduction != cols || !is_aligned(x);
    let copy_out = features != rows || !is_aligned(out);
    let bias = epilogue.bias.filter(|_| features != rows);
    let copies = if copy_x || copy_out { Some(context.copies()?) } else { None };
    let plan = |tokens| {
        let (element, order, epilogue) = (dtype, Order::TokensFirst, epilogue.kind());
        context.int4(Int4Problem {
            element,
            output: element,
            granularity,
            features,
            tokens,
            reduction,
            order,
            epilogue,
        })
    };
    // Before the workspace is taken, since planning may allocate.
    let (whole, last) = (plan(most)?, tokens % most);
    let last = if last == 0 { None } else { Some(plan(last)?) };
    let part = |wanted: bool, elements: usize| if wanted { elements * size } else { 0 };
    let mut work = context.work();
    let [wide_x, wide_out, wide_bias] =
        work.parts([part(copy_x, most * reduction), part(copy_out, most * features), part(bias.is_some(), features)])?;
    let pitched = |data: DevicePtr, elements: usize| Rows { data, pitch: elements * size };
    let mut epilogue = epilogue;
    if let (Some(copies), Some(bias)) = (&copies, bias) {
        let rows_of = (pitched(bias, rows), pitched(wide_bias, features));
        // SAFETY: the bias comes from a slice whose length was checked to be `rows`; its copy was allocated for
        // `features`; the stream is of their device.
        unsafe { copies.rows(stream, rows_of, 1, rows * size, features * size) }?;
        epilogue.bias = Some(wide_bias);
    }
    for first in (0..tokens).step_by(most) {
        let count = most.min(tokens - first);
        let (mut from, to) = (x + (first * cols * size) as u64, out + (first * rows * size) as u64);
        if let (Some(copies), true) = (&copies, copy_x) {
            let rows_of = (pitched(from, cols), pitched(wide_x, reduction));
            // SAFETY: the input comes from a slice whose length was checked to be `tokens * cols`, and `count` rows are
            // left of it; the workspace was allocated for their copies; the stream is of their device.
            unsafe { copies.rows(stream, rows_of, count, cols * size, reduction * size) }?;
            from = wide_x;
        }
        let into = if copy_out { wide_out } else { to };
        let gemm = if count == most { &whole } else { last.as_ref().unwrap_or(&whole) };
        // SAFETY: the weight has the [`bytes`] that its shape requires; input and output come from slices whose lengths
        // were checked, or were allocated above for `most` tokens; the stream is of their device.
        unsafe { gemm.run(stream, weight, from, into, epilogue) }?;
        if let (Some(copies), true) = (&copies, copy_out) {
            let rows_of = (pitched(wide_out, features), pitched(to, rows));
            // SAFETY: the output comes from a slice whose length was checked to be `tokens * rows`, and `count` rows
            // are left of it; the stream is of their device.
            unsafe { copies.rows(stream, rows_of, count, rows * size, rows * size) }?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use twofour::{Compressed, MatrixRef};

    #[test]
    fn the_packed_form_is_a_bijection_of_the_canonical_one() {
        for (rows, cols) in [(16, 128), (1, 1), (70, 132), (7, 30), (33, 257), (0, 8), (8, 0)] {
            let dense: Vec<f32> = (0..rows * cols).map(|i| (i * 37 % 19) as f32 - 9.0).collect();
            let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
            for granularity in [Granularity::Row, Granularity::Group] {
                let weight = Int4::quantize(&weight, granularity).unwrap();
                let packed = encode(&weight).unwrap();
                assert_eq!(packed.len(), bytes((rows, cols), granularity).unwrap());
                assert_eq!(
                    decode(&packed, (rows, cols), granularity).unwrap(),
                    weight,
                    "[{rows}, {cols}], {granularity:?}"
                );
            }
        }
        assert!(matches!(decode(&[0; 3], (16, 128), Granularity::Row), Err(Error::Length { found: 3, .. })));
        let narrow = Int4::quantize(
            &Compressed::from_pruned(MatrixRef::new(16, 128, &[1.0f32; 2048]).unwrap()).unwrap(),
            Granularity::Group64,
        );
        let (of_64, packed) = (bytes((16, 128), Granularity::Group64), encode(&narrow.unwrap()));
        assert!(of_64.is_err() && packed.unwrap_err().to_string().contains("not for 64"));
        assert!(matches!(bytes((usize::MAX, 128), Granularity::Row), Err(Error::TooLarge { .. })));
    }
}
