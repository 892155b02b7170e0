//! libtorch's stable C interface, found in the libtorch that the process has loaded.
//!
//! Nothing links to torch: one library serves every torch from 2.11 on (`torch/csrc/inductor/aoti_torch/c/shim.h` and
//! `torch/csrc/stable/c/shim.h` declare these functions). Those that return an `i32` return 0 for success.

use std::{
    cell::RefCell,
    ffi::{CString, OsStr, c_char, c_void},
    sync::OnceLock,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A tensor, owned by whoever holds the handle.
pub(crate) type Handle = *mut c_void;

/// A kernel for torch's dispatcher: takes its arguments from the stack's slots and leaves its results there.
pub(crate) type Kernel = unsafe extern "C-unwind" fn(stack: *mut u64, arguments: u64, results: u64);

/// What torch's threads call for a range of a loop: its begin, its end and the loop's context.
pub(crate) type ParallelFunction = unsafe extern "C" fn(begin: i64, end: i64, context: *mut c_void);

macro_rules! shim {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the interface.
        #[allow(non_snake_case)]
        pub(crate) struct Shim {
            $(pub(crate) $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

        impl Shim {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Shim {
                    $($name: {
                        // SAFETY: libtorch declares the function with this signature in its stable headers.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0")) }?;
                        *symbol
                    },)*
                })
            }
        }
    };
}

shim! {
    aoti_torch_library_init_impl: fn(*const c_char, *const c_char, *const c_char, u32, *mut *mut c_void) -> i32;
    aoti_torch_library_impl: fn(*mut c_void, *const c_char, Kernel) -> i32;
    aoti_torch_get_data_ptr: fn(Handle, *mut *mut c_void) -> i32;
    aoti_torch_get_dim: fn(Handle, *mut i64) -> i32;
    aoti_torch_get_sizes: fn(Handle, *mut *mut i64) -> i32;
    aoti_torch_get_dtype: fn(Handle, *mut i32) -> i32;
    aoti_torch_get_device_type: fn(Handle, *mut i32) -> i32;
    aoti_torch_get_device_index: fn(Handle, *mut i32) -> i32;
    aoti_torch_is_contiguous: fn(Handle, *mut bool) -> i32;
    aoti_torch_empty_strided: fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> i32;
    aoti_torch__reinterpret_tensor: fn(Handle, i64, *const i64, *const i64, i64, *mut Handle) -> i32;
    aoti_torch_mm_out: fn(Handle, Handle, Handle) -> i32;
    aoti_torch_addmm_out: fn(Handle, Handle, Handle, Handle, f32, f32) -> i32;
    aoti_torch_copy_: fn(Handle, Handle, i32) -> i32;
    aoti_torch_delete_tensor_object: fn(Handle) -> i32;
    torch_new_list_reserve_size: fn(usize, *mut *mut c_void) -> i32;
    torch_list_size: fn(*mut c_void, *mut usize) -> i32;
    torch_list_get_item: fn(*mut c_void, usize, *mut u64) -> i32;
    torch_list_push_back: fn(*mut c_void, u64) -> i32;
    torch_delete_list: fn(*mut c_void) -> i32;
    aoti_torch_check: fn(bool, *const c_char, *const c_char, u32, *const c_char);
    torch_get_num_threads: fn(*mut u32) -> i32;
    torch_parallel_for: fn(i64, i64, i64, ParallelFunction, *mut c_void) -> i32;
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// Loads the interface from a libtorch that is in the process already.
///
/// # Errors
/// The loader's, where the file is not loaded or lacks a function: a torch older than 2.11.
pub(crate) fn load(libtorch_cpu: &OsStr) -> Result<(), libloading::Error> {
    if SHIM.get().is_some() {
        return Ok(());
    }
    // SAFETY: `RTLD_NOLOAD` runs no initializer: the library is loaded already.
    let library = unsafe { Library::open(Some(libtorch_cpu), RTLD_NOW | RTLD_LOCAL | NOLOAD) }?;
    let shim = Shim::load(&library)?;
    // torch is never unloaded; closing our handle would only count down.
    std::mem::forget(library);
    let _ = SHIM.set(shim);
    Ok(())
}

/// `RTLD_NOLOAD` of Linux and of macOS.
pub(crate) const NOLOAD: i32 = if cfg!(target_os = "macos") { 0x10 } else { 0x4 };

/// The interface.
///
/// # Panics
/// Before [`load`]; no kernel is registered, and so none called, before it.
pub(crate) fn shim() -> &'static Shim {
    SHIM.get().expect("the interface is loaded before kernels are registered")
}

thread_local! {
    /// The message of the last exception that this thread threw: the throwing frame has no destructor that could free
    /// it.
    static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
}

/// Throws the C++ exception that Python gets as a `RuntimeError` with this message. What the caller's frame owns is not
/// dropped: it must own nothing.
pub(crate) fn throw(message: CString) -> ! {
    // torch copies the message before it throws.
    let message = MESSAGE.with(|last| {
        last.replace(message);
        last.borrow().as_ptr()
    });
    // SAFETY: all strings end in a zero byte, and the message stays until this thread throws the next.
    unsafe { (shim().aoti_torch_check)(false, c"twofour".as_ptr(), c"twofour".as_ptr(), 0, message) };
    std::process::abort()
}
