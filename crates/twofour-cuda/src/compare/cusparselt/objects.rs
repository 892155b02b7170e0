//! The library's objects of a planned GEMM, destroyed with their owner.

use std::fmt;

use super::functions::{
    ALGORITHM, COLUMN_MAJOR, Functions, HALF, Object, Opaque, PLAIN, ROW_MAJOR, Status, TRANSPOSED, succeed,
};
use crate::{DataType, Result, cublaslt::data_type, problem::GemmProblem};

/// An object of the library that is destroyed with its owner. The library's functions take mutable pointers, but do not
/// write to these objects after planning.
pub(super) struct Owned {
    memory: Box<Opaque>,
    /// `None` for an object that needs no destruction, or was not initialized.
    destroy: Option<unsafe extern "C" fn(Object) -> Status>,
}

impl Owned {
    /// Returns memory for an object that needs no destruction.
    fn plain() -> Self {
        Self { memory: Opaque::new(), destroy: None }
    }

    /// Returns an object that `initialize` initializes and `destroy` destroys; it is destroyed only if initialization
    /// succeeds.
    fn new(
        action: &'static str,
        destroy: unsafe extern "C" fn(Object) -> Status,
        initialize: impl FnOnce(Object) -> Status,
    ) -> Result<Self> {
        let mut owned = Self::plain();
        succeed(action, initialize(owned.at()))?;
        owned.destroy = Some(destroy);
        Ok(owned)
    }

    pub(super) fn at(&mut self) -> Object {
        &mut *self.memory
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owned")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the object was initialized, and its only owner is gone. A failure cannot be reported.
            let _ = unsafe { destroy(self.at()) };
        }
    }
}

/// The library's objects of a planned GEMM. Each refers to those below it: fields are destroyed in this order.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) plan: Owned,
    pub(super) selection: Owned,
    _product: Owned,
    _matrices: [Owned; 3],
}

impl Objects {
    pub(super) fn new(
        functions: &Functions,
        handle: Object,
        problem: GemmProblem,
        algorithm: Option<i32>,
    ) -> Result<Self> {
        let GemmProblem { element, output, features, tokens, reduction, .. } = problem;
        let (features, tokens, reduction) = (features as i64, tokens as i64, reduction as i64);
        let compute = if element == DataType::I8 { 0 } else { 2 };
        let (input, result) = (data_type(element), data_type(output));
        let matrix =
            |action, initialize: &dyn Fn(Object) -> Status| Owned::new(action, functions.forget_matrix, initialize);
        let (structured, dense) = (functions.structured, functions.dense);
        // SAFETY: the object is memory of 16 KiB, more than the library writes.
        let w = |w| unsafe { structured(handle, w, features, reduction, reduction, 16, input, ROW_MAJOR, HALF) };
        // SAFETY: the object is memory of 16 KiB, more than the library writes.
        let x = |x| unsafe { dense(handle, x, tokens, reduction, reduction, 16, input, ROW_MAJOR) };
        // Column-major [features, tokens] is row-major [tokens, features].
        // SAFETY: the object is memory of 16 KiB, more than the library writes.
        let y = |y| unsafe { dense(handle, y, features, tokens, features, 16, result, COLUMN_MAJOR) };
        let mut matrices =
            [matrix("describing W", &w)?, matrix("describing X", &x)?, matrix("describing the result", &y)?];
        let [w, x, y] = matrices.each_mut().map(Owned::at);
        let (mut product, mut selection) = (Owned::plain(), Owned::plain());
        // SAFETY: all objects are boxed memory of 16 KiB, more than the library writes, and live as long as the plan,
        // which refers to them.
        unsafe {
            let described = (functions.product)(handle, product.at(), PLAIN, TRANSPOSED, w, x, y, y, compute);
            succeed("describing the product", described)?;
            let selected = (functions.selection)(handle, selection.at(), product.at(), 0);
            succeed("selecting an algorithm", selected)?;
            if let Some(id) = algorithm {
                let id = std::ptr::from_ref(&id).cast();
                succeed("selecting an algorithm", (functions.set)(handle, selection.at(), ALGORITHM, id, 4))?;
            }
        }
        // SAFETY: all objects are boxed memory of 16 KiB, more than the library writes, and live as long as the plan,
        // which refers to them.
        let plan = |plan| unsafe { (functions.plan)(handle, plan, product.at(), selection.at()) };
        let plan = Owned::new("planning", functions.forget_plan, plan)?;
        Ok(Self { plan, selection, _product: product, _matrices: matrices })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        ffi::{c_int, c_void},
    };

    use super::*;
    use crate::{DevicePtr, loader::fake_functions};

    thread_local! {
        /// Initializations that succeed before one fails.
        static LEFT: Cell<u32> = const { Cell::new(0) };
        /// Matrices and plans that exist.
        static MATRICES: Cell<i32> = const { Cell::new(0) };
        static PLANS: Cell<i32> = const { Cell::new(0) };
    }

    fn initialize() -> Status {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        c_int::from(left == 0)
    }

    fn count(objects: &'static std::thread::LocalKey<Cell<i32>>) -> Status {
        let status = initialize();
        objects.set(objects.get() + 1 - status);
        status
    }

    type CudaStream = cudarc::driver::sys::CUstream;

    /// A library whose initializations succeed `LEFT` times, and that counts its objects.
    fn counting() -> Functions {
        fake_functions! {
            init(Object) => 0;
            version(Object, *mut c_int) => 0;
            dense(Object, Object, i64, i64, i64, u32, u32, c_int) => count(&MATRICES);
            structured(Object, Object, i64, i64, i64, u32, u32, c_int, c_int) => count(&MATRICES);
            forget_matrix(Object) => {
                assert_eq!(PLANS.get(), 0, "a plan outlives its matrices");
                MATRICES.set(MATRICES.get() - 1);
                0
            };
            product(Object, Object, c_int, c_int, Object, Object, Object, Object, c_int) => initialize();
            selection(Object, Object, Object, c_int) => initialize();
            set(Object, Object, c_int, *const c_void, usize) => initialize();
            get(Object, Object, c_int, *mut c_void, usize) => 0;
            plan(Object, Object, Object, Object) => count(&PLANS);
            forget_plan(Object) => {
                PLANS.set(PLANS.get() - 1);
                0
            };
            workspace(Object, Object, *mut usize) => 0;
            compressed_size(Object, Object, *mut usize, *mut usize) => 0;
            compress(Object, Object, DevicePtr, DevicePtr, DevicePtr, CudaStream) => 0;
            multiply(
                Object, Object, *const f32, DevicePtr, DevicePtr, *const f32, DevicePtr, DevicePtr, DevicePtr,
                *mut CudaStream, i32
            ) => 0;
        }
    }

    #[test]
    fn what_was_initialized_is_destroyed_wherever_planning_fails() {
        let functions = counting();
        let mut handle = Opaque::new();
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 64, 16, 64);
        for left in 0..7 {
            LEFT.set(left);
            assert!(Objects::new(&functions, &mut *handle, problem, Some(0)).is_err(), "{left}");
            assert_eq!((PLANS.get(), MATRICES.get()), (0, 0), "call {left} fails");
        }
        LEFT.set(7);
        let objects = Objects::new(&functions, &mut *handle, problem, Some(0)).unwrap();
        assert_eq!((PLANS.get(), MATRICES.get()), (1, 3));
        drop(objects);
        assert_eq!((PLANS.get(), MATRICES.get()), (0, 0));
    }
}
