//! Turns a Rust function into a kernel of torch's dispatcher.

use std::{
    any::Any,
    ffi::CString,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    failure::{Failure, Result},
    list::List,
    shim::throw,
    tensor::Tensor,
};

/// An argument of a kernel.
pub(crate) trait Argument: Sized {
    /// Takes the argument out of its slot.
    ///
    /// # Errors
    /// Where a number means nothing.
    ///
    /// # Safety
    /// The slot holds an argument of this type, as the operator's schema says; a tensor's is not taken twice.
    unsafe fn take(slot: u64) -> Result<Self>;
}

impl Argument for Tensor {
    unsafe fn take(slot: u64) -> Result<Self> {
        // SAFETY: the slot holds a tensor, which belongs to the kernel.
        Ok(unsafe { Tensor::from_handle(slot as *mut _) })
    }
}

/// A tensor that an operator of the same kernel does without.
impl Argument for Option<Tensor> {
    unsafe fn take(slot: u64) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Tensor::take(slot) }.map(Some)
    }
}

/// The tensors of a list.
impl Argument for Vec<Tensor> {
    unsafe fn take(slot: u64) -> Result<Self> {
        // SAFETY: the slot holds a list of tensors, which belong to the kernel.
        unsafe { List::from_handle(slot as *mut _).into_tensors() }
    }
}

impl Argument for bool {
    unsafe fn take(slot: u64) -> Result<Self> {
        Ok(slot & 0xff != 0)
    }
}

impl Argument for f64 {
    unsafe fn take(slot: u64) -> Result<Self> {
        Ok(f64::from_bits(slot))
    }
}

/// A number that the schema calls `int`, under the Rust type of what it means.
pub(crate) trait Number: Sized {
    /// What the number means.
    ///
    /// # Errors
    /// Where it means nothing.
    fn of(number: i64) -> Result<Self>;
}

impl<T: Number> Argument for T {
    unsafe fn take(slot: u64) -> Result<Self> {
        T::of(slot as i64)
    }
}

/// The results of a kernel.
pub(crate) trait Results {
    /// Puts them into the slots.
    fn put(self, slots: &mut [u64]);
}

macro_rules! results {
    ($($field:tt: $type:ident),*) => {
        impl Results for ($(results!(@ $type),)*) {
            fn put(self, slots: &mut [u64]) {
                $(slots[$field] = self.$field.into_handle() as u64;)*
            }
        }
    };
    (@ $type:ident) => { $type };
}

impl Results for Tensor {
    fn put(self, slots: &mut [u64]) {
        slots[0] = self.into_handle() as u64;
    }
}
impl Results for List {
    fn put(self, slots: &mut [u64]) {
        slots[0] = self.into_handle() as u64;
    }
}
impl Results for f64 {
    fn put(self, slots: &mut [u64]) {
        slots[0] = self.to_bits();
    }
}
results!(0: Tensor, 1: Tensor);
results!(0: List, 1: List);
results!(0: Tensor, 1: Tensor, 2: Tensor);

/// A Rust function with the arguments of an operator.
pub(crate) trait Function<A> {
    /// Takes the arguments out of the slots, calls the function and puts the results there.
    ///
    /// # Safety
    /// The slots hold the arguments that the operator's schema names, and belong to the caller.
    unsafe fn call(&self, slots: &mut [u64]) -> Result<()>;
}

macro_rules! functions {
    () => {};
    ($first:ident $(, $rest:ident)*) => {
        impl<Body, R: Results, $first: Argument, $($rest: Argument),*> Function<($first, $($rest,)*)> for Body
        where
            Body: Fn($first, $($rest),*) -> Result<R>,
        {
            #[allow(non_snake_case, unused_mut)]
            unsafe fn call(&self, slots: &mut [u64]) -> Result<()> {
                let mut index = 0;
                // SAFETY: the slots hold the arguments of the schema, in order. All are taken before one is refused.
                let $first = unsafe { $first::take(slots[index]) };
                $(
                    index += 1;
                    // SAFETY: as above.
                    let $rest = unsafe { $rest::take(slots[index]) };
                )*
                self($first?, $($rest?),*)?.put(slots);
                Ok(())
            }
        }
        functions!($($rest),*);
    };
}
functions!(A, B, C, D, E, F, G, H, I, J, K, L, M);

/// Runs a kernel, and throws what it returns or panics with as a C++ exception.
///
/// # Safety
/// torch calls it with the stack of an operator whose schema has the arguments and results of `operator`.
pub(crate) unsafe fn enter<A>(operator: impl Function<A>, stack: *mut u64, arguments: u64, results: u64) {
    // SAFETY: torch's stack has a slot for each argument and for each result.
    let slots = unsafe { std::slice::from_raw_parts_mut(stack, arguments.max(results) as usize) };
    // SAFETY: the slots are those of the schema.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { operator.call(slots) }));
    let message = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure.into_message(),
        Err(payload) => panicked(payload),
    };
    throw(message)
}

/// The message of a panic, a defect of this package.
fn panicked(payload: Box<dyn Any + Send>) -> CString {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
    drop(payload);
    Failure::runtime(format!("twofour failed unexpectedly: {text}; please report it")).into_message()
}

/// The kernel of a Rust function, whose parameters are the arguments of the schema beside it.
macro_rules! kernel {
    ($function:expr) => {{
        unsafe extern "C-unwind" fn entry(stack: *mut u64, arguments: u64, results: u64) {
            // SAFETY: the kernel is registered for the schema beside it, which has the function's arguments.
            unsafe { $crate::torch::kernel::enter($function, stack, arguments, results) }
        }
        entry as $crate::torch::Kernel
    }};
}
pub(crate) use kernel;
