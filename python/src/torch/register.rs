//! Registering the operators' kernels. Python defines the operators, since torch's stable C interface has no tags.

use std::{
    ffi::{CStr, CString, OsStr, c_void},
    ptr,
    sync::Mutex,
};

use super::{
    operator::Operator,
    shim::{self, Kernel, shim},
};
use crate::{cpu, cuda};

static REGISTERED: Mutex<bool> = Mutex::new(false);

/// Registers the kernels with the torch whose libraries are named, for GPUs where there is a libtorch_cuda. Returns
/// whether they were not registered before; a second call does nothing.
///
/// # Errors
/// A text that says what torch lacks.
pub(crate) fn register(
    operators: &[Operator],
    libtorch_cpu: &OsStr,
    libtorch_cuda: Option<&OsStr>,
) -> Result<bool, String> {
    let mut registered = REGISTERED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *registered {
        return Ok(false);
    }
    shim::load(libtorch_cpu)
        .map_err(|e| format!("{} is not the library of torch 2.11 or newer: {e}", libtorch_cpu.display()))?;
    cpu::note_forks();
    implement(c"CPU", operators.iter().map(|operator| (operator.name(), operator.cpu)))?;
    if let Some(path) = libtorch_cuda {
        cuda::load(path).map_err(|e| format!("{} is not the library of torch 2.11 or newer: {e}", path.display()))?;
        implement(c"CUDA", operators.iter().filter_map(|operator| Some((operator.name(), operator.cuda?))))?;
    }
    *registered = true;
    Ok(true)
}

/// Registers kernels for torch's tensors of one kind of device.
fn implement(key: &CStr, kernels: impl Iterator<Item = (&'static str, Kernel)>) -> Result<(), String> {
    let mut library: *mut c_void = ptr::null_mut();
    // SAFETY: strings end in a zero byte; torch keeps the library for ever.
    check("init", unsafe {
        (shim().aoti_torch_library_init_impl)(NAME.as_ptr(), key.as_ptr(), NAME.as_ptr(), 0, &mut library)
    })?;
    for (name, kernel) in kernels {
        let text = CString::new(name).map_err(|e| e.to_string())?;
        // SAFETY: the kernel takes the arguments of the operator of that name.
        check(name, unsafe { (shim().aoti_torch_library_impl)(library, text.as_ptr(), kernel) })?;
    }
    Ok(())
}

/// The namespace, and what torch names as the file of the registration.
const NAME: &CStr = c"twofour";

fn check(what: &str, status: i32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("torch refused to register {what}")) }
}
