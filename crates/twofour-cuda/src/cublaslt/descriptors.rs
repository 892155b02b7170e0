//! The library's objects that describe a GEMM, destroyed with their owner.

use std::{ffi::c_int, ptr};

use super::{
    DenseProblem,
    functions::{
        BATCH_STRIDE, BATCHES, COMPUTE_32F, COMPUTE_32I, Functions, Object, TRANSPOSE_A, TRANSPOSE_B, succeed,
    },
};
use crate::{DataType, Result, cublaslt::data_type};

/// An object of the library that is destroyed with its owner.
pub(super) struct Owned {
    pub(super) object: Object,
    destroy: unsafe extern "C" fn(Object) -> c_int,
}

// SAFETY: the library binds no object to the thread that created it.
unsafe impl Send for Owned {}
// SAFETY: the library only reads objects after planning. Only `BiasedPlan` changes one, which is shared with none but
// plans that hold the same lock.
unsafe impl Sync for Owned {}

impl Owned {
    /// Returns an object that `create` creates and `destroy` destroys.
    pub(super) fn new(
        action: &'static str,
        destroy: unsafe extern "C" fn(Object) -> c_int,
        create: impl FnOnce(*mut Object) -> c_int,
    ) -> Result<Self> {
        let mut object = ptr::null_mut();
        succeed(action, create(&mut object))?;
        Ok(Self { object, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the library created the object, and its only owner is gone. A failure cannot be reported.
        let _ = unsafe { (self.destroy)(self.object) };
    }
}

/// Descriptors of a GEMM and of its matrices.
pub(super) struct Parts {
    pub(super) product: Owned,
    pub(super) a: Owned,
    pub(super) b: Owned,
    pub(super) d: Owned,
    pub(super) batches: usize,
}

impl Parts {
    /// Describes `batches` GEMMs of one shape, whose operands each follow one another in memory.
    pub(super) fn new(functions: &Functions, dense: DenseProblem, batches: usize) -> Result<Self> {
        let DenseProblem { element, output, rows, cols, reduction, a_transposed, b_transposed, accumulate: _ } = dense;
        let describing = "describing the product";
        let (compute, scale) =
            if element == DataType::I8 { (COMPUTE_32I, output) } else { (COMPUTE_32F, DataType::F32) };
        let product = Owned::new(describing, functions.destroy_product, |to| {
            // SAFETY: `to` is the pointer of a local variable of `Owned::new`.
            unsafe { (functions.create_product)(to, compute, data_type(scale) as c_int) }
        })?;
        let layout = |element, rows: usize, cols: usize| {
            Owned::new(describing, functions.destroy_matrix, |to| {
                let kind = data_type(element) as c_int;
                // SAFETY: `to` is the pointer of a local variable of `Owned::new`.
                unsafe { (functions.create_matrix)(to, kind, rows as u64, cols as u64, rows as i64) }
            })
            .and_then(|matrix| {
                if batches > 1 {
                    set_matrix(functions, &matrix, BATCHES, &(batches as i32))?;
                    set_matrix(functions, &matrix, BATCH_STRIDE, &((rows * cols) as i64))?;
                }
                Ok(matrix)
            })
        };
        let (a_rows, a_cols) = if a_transposed { (reduction, rows) } else { (rows, reduction) };
        let (b_rows, b_cols) = if b_transposed { (cols, reduction) } else { (reduction, cols) };
        let (a, b, d) =
            (layout(element, a_rows, a_cols)?, layout(element, b_rows, b_cols)?, layout(output, rows, cols)?);
        let parts = Self { product, a, b, d, batches };
        for (attribute, transposed) in [(TRANSPOSE_A, a_transposed), (TRANSPOSE_B, b_transposed)] {
            parts.set(functions, attribute, &i32::from(transposed))?;
        }
        Ok(parts)
    }

    /// Sets an attribute of the GEMM, of the type that the library's documentation specifies.
    pub(super) fn set<T: Copy>(&self, functions: &Functions, attribute: c_int, value: &T) -> Result<()> {
        let value = ptr::from_ref(value).cast();
        // SAFETY: the description is valid, and the pointer is valid for as many bytes as are named; the library copies
        // them.
        let set = unsafe { (functions.set_product)(self.product.object, attribute, value, size_of::<T>()) };
        succeed("describing the product", set)
    }
}

/// Sets an attribute of a matrix, of the type that the library's documentation specifies.
fn set_matrix<T: Copy>(functions: &Functions, matrix: &Owned, attribute: c_int, value: &T) -> Result<()> {
    let value = ptr::from_ref(value).cast();
    // SAFETY: the description is valid, and the pointer is valid for as many bytes as are named; the library copies
    // them.
    let set = unsafe { (functions.set_matrix)(matrix.object, attribute, value, size_of::<T>()) };
    succeed("describing the product", set)
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, ffi::c_void};

    use super::*;
    use crate::{
        DevicePtr,
        cublaslt::functions::{Algorithm, Found},
        loader::fake_functions,
    };

    thread_local! {
        /// Calls that succeed before one fails.
        static LEFT: Cell<u32> = const { Cell::new(0) };
        /// Objects that exist.
        static OBJECTS: Cell<i32> = const { Cell::new(0) };
    }

    fn call() -> c_int {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        c_int::from(left == 0)
    }

    fn create() -> c_int {
        let status = call();
        OBJECTS.set(OBJECTS.get() + 1 - status);
        status
    }

    fn destroy() -> c_int {
        OBJECTS.set(OBJECTS.get() - 1);
        0
    }

    /// A library whose calls succeed `LEFT` times, and that counts its objects.
    fn counting() -> Functions {
        type CudaStream = cudarc::driver::sys::CUstream;
        type Value = *const c_void;
        fake_functions! {
            open(*mut Object) => create();
            close(Object) => destroy();
            create_product(*mut Object, c_int, c_int) => create();
            destroy_product(Object) => destroy();
            set_product(Object, c_int, Value, usize) => call();
            create_matrix(*mut Object, c_int, u64, u64, i64) => create();
            destroy_matrix(Object) => destroy();
            set_matrix(Object, c_int, Value, usize) => call();
            create_preference(*mut Object) => create();
            destroy_preference(Object) => destroy();
            set_preference(Object, c_int, Value, usize) => call();
            heuristics(Object, Object, Object, Object, Object, Object, Object, c_int, *mut Found, *mut c_int) => call();
            multiply(
                Object, Object, Value, DevicePtr, Object, DevicePtr, Object, Value, DevicePtr, Object, DevicePtr,
                Object, *const Algorithm, DevicePtr, usize, CudaStream
            ) => call();
        }
    }

    #[test]
    fn what_was_created_is_destroyed_wherever_describing_fails() {
        let functions = counting();
        let dense = DenseProblem {
            element: DataType::BF16,
            output: DataType::BF16,
            rows: 64,
            cols: 16,
            reduction: 64,
            a_transposed: true,
            b_transposed: false,
            accumulate: false,
        };
        // Four objects and two attributes.
        for left in 0..6 {
            LEFT.set(left);
            assert!(Parts::new(&functions, dense, 1).is_err(), "{left}");
            assert_eq!(OBJECTS.get(), 0, "call {left} fails");
        }
        LEFT.set(6);
        let parts = Parts::new(&functions, dense, 1).unwrap();
        assert_eq!(OBJECTS.get(), 4);
        drop(parts);
        assert_eq!(OBJECTS.get(), 0);
        // Two more attributes of each matrix.
        for left in 0..12 {
            LEFT.set(left);
            assert!(Parts::new(&functions, dense, 3).is_err(), "{left}");
            assert_eq!(OBJECTS.get(), 0, "call {left} fails");
        }
        LEFT.set(12);
        drop(Parts::new(&functions, dense, 3).unwrap());
        assert_eq!(OBJECTS.get(), 0);
    }
}
