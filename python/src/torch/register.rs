//! Registering the operators' kernels. Python defines the operators, since torch's stable C interface has no tags.

use std::{
    ffi::{CStr, CString, OsStr, c_void},
    ptr,
    sync::Mutex,
};

use super::{
    cpu, cuda,
    shim::{self, Kernel, shim},
};

/// An operator's schema, or its name, and a kernel.
pub(super) type Definition = (&'static str, Kernel);

static REGISTERED: Mutex<bool> = Mutex::new(false);

/// Registers the kernels with the torch whose libraries are named, for GPUs where there is a libtorch_cuda. Returns the schemas of the operators, which the
/// caller defines; none if they were registered before.
///
/// # Errors
/// A text that says what torch lacks.
pub(crate) fn register(libtorch_cpu: &OsStr, libtorch_cuda: Option<&OsStr>) -> Result<Vec<&'static str>, String> {
    let mut registered = REGISTERED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *registered {
        return Ok(Vec::new());
    }
    shim::load(libtorch_cpu)
        .map_err(|e| format!("{} is not the library of torch 2.11 or newer: {e}", libtorch_cpu.display()))?;
    cpu::note_forks();
    let mut kernels: *mut c_void = ptr::null_mut();
    // SAFETY: strings end in a zero byte; torch keeps the library for ever.
    check("init", unsafe {
        (shim().aoti_torch_library_init_impl)(NAMESPACE.as_ptr(), c"CPU".as_ptr(), FILE.as_ptr(), 0, &mut kernels)
    })?;
    for (schema, kernel) in cpu::OPERATORS {
        let name = CString::new(schema.split('(').next().unwrap_or_default()).map_err(|e| e.to_string())?;
        // SAFETY: the kernel takes the arguments of the schema beside it.
        check(schema, unsafe { (shim().aoti_torch_library_impl)(kernels, name.as_ptr(), *kernel) })?;
    }
    if let Some(path) = libtorch_cuda {
        cuda::load(path).map_err(|e| format!("{} is not the library of torch 2.11 or newer: {e}", path.display()))?;
        let mut kernels: *mut c_void = ptr::null_mut();
        // SAFETY: strings end in a zero byte; torch keeps the library for ever.
        check("init", unsafe {
            (shim().aoti_torch_library_init_impl)(NAMESPACE.as_ptr(), c"CUDA".as_ptr(), FILE.as_ptr(), 0, &mut kernels)
        })?;
        for (name, kernel) in cuda::KERNELS {
            let text = CString::new(*name).map_err(|e| e.to_string())?;
            // SAFETY: the kernel takes the arguments of the operator of that name.
            check(name, unsafe { (shim().aoti_torch_library_impl)(kernels, text.as_ptr(), *kernel) })?;
        }
    }
    *registered = true;
    Ok(cpu::OPERATORS.iter().map(|(schema, _)| *schema).collect())
}

const NAMESPACE: &CStr = c"twofour";
const FILE: &CStr = c"twofour";

fn check(what: &str, status: i32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("torch refused to register {what}")) }
}
