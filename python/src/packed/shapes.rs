//! The shapes that kernels give packed weights, of numbers that torch.compile may know as symbols only.

use pyo3::{exceptions::PyNotImplementedError, prelude::*};
use twofour::{
    int4::{Granularity, Int4},
    kernel::{Format, PACKED_ALIGNMENT},
};

use crate::torch::{
    ScalarType,
    shapes::{Operand, Shape, Size},
};

/// Rows of a strip.
pub(super) const STRIP_ROWS: usize = 16;

/// The shape of a packed weight `[rows, cols]`.
///
/// # Errors
/// A `NotImplementedError` for a type that no weight is packed as.
pub(crate) fn shape<'py>(
    dtype: Option<ScalarType>,
    on_gpu: bool,
    rows: &Size<'py>,
    cols: &Size<'py>,
) -> PyResult<Shape<'py>> {
    let unknown =
        || PyNotImplementedError::new_err("weights cannot be packed as this type: use float32, bfloat16 or float16");
    let dtype = dtype.ok_or_else(unknown)?;
    let sizes = if on_gpu { vec![len_on_gpu(dtype, rows, cols)?] } else { sizes_on_cpu(dtype, rows, cols)? };
    Ok(Shape::new(sizes).of(dtype))
}

/// One of float32 is dense, others are padded to tiles: values, then a bit of metadata for each element.
fn len_on_gpu<'py>(dtype: ScalarType, rows: &Size<'py>, cols: &Size<'py>) -> PyResult<Size<'py>> {
    let tile = match dtype.bytes() {
        1 => 128,
        2 => 64,
        _ => return rows.times(cols.clone()),
    };
    let elements = rows.next_multiple_of(64)?.times(cols.next_multiple_of(tile)?)?;
    elements.div_floor(2)?.plus(elements.div_floor(8 * dtype.bytes())?)
}

fn sizes_on_cpu<'py>(dtype: ScalarType, rows: &Size<'py>, cols: &Size<'py>) -> PyResult<Vec<Size<'py>>> {
    let strips = rows.div_ceil(STRIP_ROWS)?;
    Ok(match dtype {
        ScalarType::F32 => vec![strips, strip_bytes::<f32>(cols)?.div_floor(4)?],
        ScalarType::Bf16 | ScalarType::F16 => vec![strips, strip_bytes::<half::f16>(cols)?.div_floor(2)?],
        // The sum of each row follows.
        ScalarType::I8 => vec![strips.times(strip_bytes::<i8>(cols)?)?.plus(rows.times(4)?)?],
        // The bytes of values that were widened.
        _ => vec![strips.times(strip_bytes::<f32>(cols)?)?],
    })
}

/// Bytes of a strip without headers.
fn strip_bytes<'py, F: Format>(cols: &Size<'py>) -> PyResult<Size<'py>> {
    let lines = cols.div_ceil(4 * F::GROUPS)?;
    lines.div_ceil(F::BLOCK_LINES)?.times(PACKED_ALIGNMENT)?.plus(lines.times(F::LINE_BYTES)?)
}

/// The shape of a packed weight of 4-bit integers.
pub(crate) fn int4_shape<'py>(
    granularity: Granularity,
    on_gpu: bool,
    rows: &Size<'py>,
    cols: &Size<'py>,
) -> PyResult<Shape<'py>> {
    let bytes = if on_gpu {
        let (tall, elements) = (rows.next_multiple_of(16)?, cols.next_multiple_of(128)?);
        let elements = elements.times(tall.clone())?;
        // Values and metadata of elements, and scales of two bytes.
        let scales = tall.times(2)?.times(scales_per_row(granularity, cols, rows)?)?;
        elements.div_floor(4)?.plus(elements.div_floor(8)?)?.plus(scales)?
    } else {
        // A header for the columns that share a scale, and for a row's one scale for each 256 of them.
        let mut headers = cols.div_ceil(granularity.columns().unwrap_or(256))?;
        if granularity == Granularity::Row && cols.is_below(1)? {
            headers = headers.plus(1)?;
        }
        rows.div_ceil(STRIP_ROWS)?.times(strip_bytes::<Int4>(cols)?.plus(headers.times(PACKED_ALIGNMENT)?)?)?
    };
    Ok(Shape::new([bytes]).of(ScalarType::I8))
}

fn scales_per_row<'py>(granularity: Granularity, cols: &Size<'py>, any: &Size<'py>) -> PyResult<Size<'py>> {
    match granularity.columns() {
        Some(columns) => cols.div_ceil(columns),
        // One.
        None => any.times(0)?.plus(1),
    }
}

/// The shapes of the canonical form of a weight: values and metadata.
pub(crate) fn parts_shapes<'py>(rows: &Size<'py>, cols: &Size<'py>) -> PyResult<Vec<Shape<'py>>> {
    let values = Shape::new([rows.clone(), cols.div_ceil(4)?.times(2)?]);
    Ok(vec![values, Shape::new([rows.clone(), cols.div_ceil(32)?]).of(ScalarType::I32)])
}

/// The shapes of the canonical form of a weight of 4-bit integers: values, metadata and scales.
pub(crate) fn int4_parts_shapes<'py>(
    granularity: Granularity,
    rows: &Size<'py>,
    cols: &Size<'py>,
) -> PyResult<Vec<Shape<'py>>> {
    let scales = scales_per_row(granularity, cols, rows)?;
    Ok(vec![
        Shape::new([rows.clone(), cols.div_ceil(4)?]).of(ScalarType::U8),
        Shape::new([rows.clone(), cols.div_ceil(32)?]).of(ScalarType::I32),
        Shape::new([rows.clone(), scales]).of(ScalarType::F16),
    ])
}

/// The shape of a matrix's mask in tiles.
pub(crate) fn tiles_shape<'py>(matrix: &Operand<'py>) -> PyResult<Shape<'py>> {
    let [rows, cols] = matrix.matrix()?;
    Ok(Shape::new([rows.div_ceil(4)?, cols.div_ceil(4)?]).of(ScalarType::I16))
}
