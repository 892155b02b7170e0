//! Memory of an engine.

use std::fmt::Debug;

use twofour::DataType;

use super::{Buffer, Kind};
use crate::Result;

/// The memory of a device, and the type that it computes in.
///
/// An engine whose compute type is f32 accepts a [`Kind::Wide`] buffer wherever [`Kind::Compute`] is required, so that
/// parameters need no copies.
pub trait Memory: Debug + Send + Sync + Sized + 'static {
    /// Memory.
    type Buffer: Buffer;

    /// The engine's name, as in `cpu`.
    fn name(&self) -> &'static str;

    /// The type of activations and of GEMM operands: f32, bf16 or f16.
    fn compute_type(&self) -> DataType;

    /// Memory of zeros.
    ///
    /// # Errors
    /// Not enough memory.
    fn zeros(&self, kind: Kind, len: usize) -> Result<Self::Buffer>;

    /// Sets all elements of a [`Kind::Wide`] or [`Kind::Compute`] buffer to zero.
    ///
    /// # Errors
    /// Those of the device.
    fn clear(&self, buffer: &mut Self::Buffer) -> Result<()>;

    /// Overwrites a [`Kind::Wide`] or [`Kind::Compute`] buffer with f32 values, rounded to its type.
    ///
    /// # Errors
    /// Another length or kind.
    fn write(&self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<()>;

    /// Overwrites a [`Kind::Index`] buffer.
    ///
    /// # Errors
    /// Another length or kind.
    fn write_ids(&self, buffer: &mut Self::Buffer, ids: &[u32]) -> Result<()>;

    /// The elements of a [`Kind::Wide`] or [`Kind::Compute`] buffer as f32. Waits.
    ///
    /// # Errors
    /// Another kind.
    fn read(&self, buffer: &Self::Buffer) -> Result<Vec<f32>>;

    /// Rounds a [`Kind::Wide`] buffer to a [`Kind::Compute`] one of the same length.
    ///
    /// # Errors
    /// Another length or kind.
    fn round(&self, from: &Self::Buffer, to: &mut Self::Buffer) -> Result<()>;
}
