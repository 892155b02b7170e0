//! Tensor maps: TMA's descriptors of matrices and of heads.

use cudarc::driver::sys::{self, CUtensorMapDataType as Type};

use crate::{DataType, DevicePtr, Error, Result};

/// A tensor map: a matrix or a tensor of four dimensions, and the box of it that one copy transfers.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap(sys::CUtensorMap);

/// The swizzle of a box's rows in shared memory, whose width is a row's.
#[derive(Debug, Clone, Copy)]
pub enum Swizzle {
    /// None.
    None,
    /// Rows of 32 bytes.
    Bytes32,
    /// Rows of 64 bytes.
    Bytes64,
    /// Rows of 128 bytes.
    Bytes128,
}

impl TensorMap {
    /// A map of no matrix, for kernels that do not use it.
    pub const NONE: Self = Self(sys::CUtensorMap { opaque: [0; 16] });

    /// Returns the map of a row-major matrix of (rows, columns) with elements of `width` bytes, and a box of (rows,
    /// columns). Copies read zeros outside the matrix.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver rejects an address or a pitch that is not a multiple of 16 bytes.
    pub fn new(
        data: DevicePtr,
        width: usize,
        (rows, cols): (usize, usize),
        tile: (u32, u32),
        swizzle: Swizzle,
    ) -> Result<Self> {
        // Copies do not interpret elements: only their width matters.
        let kind = match width {
            1 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        };
        Self::encode(data, (kind, width), (rows, cols), tile, swizzle)
    }

    /// Returns the map of f16 or bf16 results, which TMA can also add to the output.
    ///
    /// # Errors
    /// Those of [`TensorMap::new`].
    pub fn of_results(
        data: DevicePtr,
        element: DataType,
        shape: (usize, usize),
        tile: (u32, u32),
        swizzle: Swizzle,
    ) -> Result<Self> {
        let kind = match element {
            DataType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        Self::encode(data, (kind, element.bytes()), shape, tile, swizzle)
    }

    /// Returns the map of a tensor of four dimensions with elements of 16 bits. Dimensions, steps and boxes are in the
    /// order of memory: the contiguous dimension first. `steps` are the bytes between neighbours in the other three.
    /// Copies read zeros outside the tensor.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver rejects an address or a step that is not a multiple of 16 bytes.
    pub fn of_heads(
        data: DevicePtr,
        sizes: [u64; 4],
        steps: [u64; 3],
        tile: [u32; 4],
        swizzle: Swizzle,
    ) -> Result<Self> {
        let kind = Type::CU_TENSOR_MAP_DATA_TYPE_UINT16;
        Self::encode_tensor(data, kind, sizes, &steps, tile, swizzle)
    }

    fn encode(
        data: DevicePtr,
        (kind, width): (Type, usize),
        (rows, cols): (usize, usize),
        tile: (u32, u32),
        swizzle: Swizzle,
    ) -> Result<Self> {
        let sizes = [cols as u64, rows as u64];
        Self::encode_tensor(data, kind, sizes, &[(cols * width) as u64], [tile.1, tile.0], swizzle)
    }

    /// `steps` has `N - 1` elements.
    fn encode_tensor<const N: usize>(
        data: DevicePtr,
        kind: Type,
        sizes: [u64; N],
        steps: &[u64],
        tile: [u32; N],
        swizzle: Swizzle,
    ) -> Result<Self> {
        use sys::CUtensorMapSwizzle as Swizzled;
        let swizzle = match swizzle {
            Swizzle::None => Swizzled::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => Swizzled::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => Swizzled::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => Swizzled::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = Self::NONE;
        // SAFETY: all pointers are valid and as long as so many dimensions require; the map is aligned to 64 bytes.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                kind,
                N as u32,
                data as *mut std::ffi::c_void,
                sizes.as_ptr(),
                steps.as_ptr(),
                tile.as_ptr(),
                [1; N].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                // L2 promotion to 256 bytes where 128 are requested made small-batch GEMMs slower by 1.3 to 2 us, and
                // large-batch ones no faster.
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(|error| Error::driver("encoding a tensor map", error))?;
        Ok(map)
    }
}
