//! Validation of shapes and slices.

use crate::{
    DataType, DevicePtr, Error, Result,
    arguments::{expect_dimension, expect_pointers},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

/// Most elements along a dimension: kernels count them in 32 bits.
pub(crate) const MOST: usize = i32::MAX as usize;

/// Returns a dimension as kernels take it.
pub(crate) fn side(what: &'static str, size: usize) -> Result<u32> {
    if size <= MOST { Ok(size as u32) } else { Err(Error::Dimension { what, size, most: MOST }) }
}

/// Returns a dimension of at least 1.
pub(crate) fn positive(what: &'static str, size: usize) -> Result<u32> {
    expect_dimension(what, size, MOST)?;
    Ok(size as u32)
}

/// Returns `rows * cols`, checked.
pub(crate) fn product(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })
}

/// Memory that a call reads or writes.
pub(crate) trait Memory {
    /// Returns the address, after checking the device, data type and number of elements, and its alignment to an element.
    fn at(&self, what: &'static str, context: &LayerContext, dtype: DataType, len: usize) -> Result<DevicePtr>;
}

macro_rules! memory {
    ($($type:ty),*) => {$(
        impl Memory for $type {
            fn at(&self, what: &'static str, context: &LayerContext, dtype: DataType, len: usize) -> Result<DevicePtr> {
                let address = self.expect(what, context, dtype, len)?;
                if len > 0 {
                    expect_pointers(&[(what, address, dtype.bytes() as u64)])?;
                }
                Ok(address)
            }
        }
    )*};
}

memory!(DeviceSlice<'_>, DeviceSliceMut<'_>);

/// Returns the address of optional memory, or null.
pub(crate) fn at_if(
    memory: Option<&impl Memory>,
    what: &'static str,
    context: &LayerContext,
    dtype: DataType,
    len: usize,
) -> Result<DevicePtr> {
    memory.map_or(Ok(0), |memory| memory.at(what, context, dtype, len))
}
