//! Multiplying with a 2:4 weight on a CPU: `y = act(x · Wᵀ + bias)` and `dx = dy · W`.
//!
//! A [`Compressed`](crate::Compressed) weight becomes a [`SparseWeight`] (in strips of sixteen rows) for one [`Engine`]; a dense one becomes a [`DenseWeight`], or is multiplied where it lies as a [`DenseRef`], whose kernels are written
//! with the same care, so that comparing the two is fair. Activations are `[tokens, features]`, row-major.
//!
//! [`Engine::best`] picks the instructions once; `TWOFOUR_ENGINE` forces one. The calling thread is helped by threads of this module's own, all together at most
//! as many as rayon's pool has: see [`share`].

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod arguments;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod borrowed;
mod decode;
mod dense_block;
mod dense_ref;
mod dense_weight;
mod element;
mod engine;
mod epilogue;
pub(crate) mod float_gemm;
mod int4;
mod int8;
#[cfg(target_arch = "x86_64")]
mod prefill;
mod quantize;
mod reference;
mod remask;
mod scratch;
mod share;
mod sparse_weight;
mod strips;
#[cfg(test)]
mod tests;
mod transposed_product;
#[cfg(target_arch = "x86_64")]
mod vector;
mod w4a8;
mod widest;

pub(crate) use aligned::Aligned;
pub use borrowed::{PACKED_ALIGNMENT, SparseWeightMut, SparseWeightRef, packed_bytes};
pub use dense_ref::DenseRef;
pub use dense_weight::DenseWeight;
pub use element::KernelElement;
pub use engine::{ENGINE_VARIABLE, Engine};
pub use epilogue::{Activation, Epilogue};
pub use int4::{SparseWeightInt4Ref, pack_int4, packed_bytes_int4};
pub use int8::{DenseWeightI8, SparseWeightI8, SparseWeightI8Ref, pack_i8, packed_bytes_i8};
pub use quantize::quantize;
pub(crate) use remask::Selection;
pub use share::{Executor, share, with_executor, with_threads};
pub(crate) use share::{LEAST_PART, share_elements};
pub use sparse_weight::SparseWeight;
pub(crate) use transposed_product::transposed_product;
pub use w4a8::SparseWeightInt4;
pub(crate) use widest::{Inlined, widest, widest_inlined};
