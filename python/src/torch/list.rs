//! torch's lists of tensors, as operators take and return them.

use std::{ffi::c_void, mem, ptr};

use super::{Failure, Result, Tensor, shim::shim};

/// A list that owns its own memory, but not its tensors: the one who takes the list owns them.
pub(crate) struct List(*mut c_void);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and valid.
        unsafe { (shim().torch_delete_list)(self.0) };
    }
}

fn done(status: i32) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Failure::runtime("torch refuses a list of tensors")) }
}

impl List {
    /// Takes over a list.
    ///
    /// # Safety
    /// The handle is of a list, and the caller's.
    pub(super) unsafe fn from_handle(handle: *mut c_void) -> Self {
        List(handle)
    }

    /// Gives the handle away, and with it the tensors.
    pub(super) fn into_handle(self) -> *mut c_void {
        let handle = self.0;
        mem::forget(self);
        handle
    }

    /// A list of tensors.
    ///
    /// # Errors
    /// A `RuntimeError` where torch has no memory.
    pub(crate) fn of(tensors: Vec<Tensor>) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for a handle.
        done(unsafe { (shim().torch_new_list_reserve_size)(tensors.len(), &mut handle) })?;
        let list = List(handle);
        for tensor in tensors {
            // SAFETY: the list is valid, and takes the tensor over.
            done(unsafe { (shim().torch_list_push_back)(list.0, tensor.into_handle() as u64) })?;
        }
        Ok(list)
    }

    /// The tensors.
    ///
    /// # Errors
    /// A `RuntimeError` where torch refuses.
    ///
    /// # Safety
    /// The list is of tensors, and they are the caller's.
    pub(super) unsafe fn into_tensors(self) -> Result<Vec<Tensor>> {
        let mut count = 0;
        // SAFETY: the list is valid, and `count` a place for a number.
        done(unsafe { (shim().torch_list_size)(self.0, &mut count) })?;
        let tensor = |index| {
            let mut slot = 0;
            // SAFETY: the list is valid and has that element, and `slot` is a place for one.
            done(unsafe { (shim().torch_list_get_item)(self.0, index, &mut slot) })?;
            // SAFETY: the element is a tensor, which the caller gave away with the list.
            Ok(unsafe { Tensor::from_handle(slot as *mut _) })
        };
        (0..count).map(tensor).collect()
    }
}
