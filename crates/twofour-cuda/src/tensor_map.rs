//! Descriptions of matrices for TMA.

use cudarc::driver::sys::{self, CUtensorMapDataType as Type};

use crate::{DataType, DevicePtr, Error, Result};

/// A matrix and the tile of it that one copy takes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(sys::CUtensorMap);

/// How rows of a tile are permuted in shared memory; as wide as its rows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl TensorMap {
    /// Of no matrix, for kernels that do not use it.
    pub(crate) const NONE: Self = Self(sys::CUtensorMap { opaque: [0; 16] });

    /// A row-major matrix of (rows, columns), its elements `width` bytes wide, and a tile of (rows, columns). Outside of the matrix a copy reads zeros.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver refuses: an address or a pitch that is no multiple of 16 bytes.
    pub(crate) fn new(
        data: DevicePtr,
        width: usize,
        (rows, cols): (usize, usize),
        tile: (u32, u32),
        swizzle: Swizzle,
    ) -> Result<Self> {
        // Bits are copied as they are: only the width of elements counts.
        let kind = match width {
            1 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        };
        Self::encode(data, (kind, width), (rows, cols), tile, swizzle)
    }

    /// Of f16 or bf16 results, which may be added to what is there.
    ///
    /// # Errors
    /// Those of [`TensorMap::new`].
    pub(crate) fn of_results(
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

    fn encode(
        data: DevicePtr,
        (kind, width): (Type, usize),
        (rows, cols): (usize, usize),
        tile: (u32, u32),
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
        // SAFETY: all pointers are valid and as long as two dimensions ask for; the map is aligned to 64 bytes.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                kind,
                2,
                data as *mut std::ffi::c_void,
                [cols as u64, rows as u64].as_ptr(),
                [(cols * width) as u64].as_ptr(),
                [tile.1, tile.0].as_ptr(),
                [1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                // Reading 256 bytes where 128 are asked for made products of few tokens slower by 1.3 to 2 us, and those of many no faster.
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(|error| Error::driver("encoding a tensor map", error))?;
        Ok(map)
    }
}
