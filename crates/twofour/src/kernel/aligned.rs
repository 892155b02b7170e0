//! Memory aligned to cache lines, so that vectors do not straddle two.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use crate::{Result, memory};

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; CACHE_LINE]);

/// Elements that start at a cache line.
#[derive(Debug, Clone)]
pub struct Aligned<T> {
    lines: Vec<CacheLine>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` elements of zero bytes.
    pub(crate) fn zeroed(len: usize) -> Self {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<CacheLine>());
        // Zeroed pages come from the operating system without being written.
        Self { lines: bytemuck::zeroed_vec(lines), len, element: PhantomData }
    }

    /// As [`Aligned::zeroed`], for the memory of a tensor.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] where the system refuses it.
    pub(crate) fn try_zeroed(len: usize) -> Result<Self> {
        let lines = len.saturating_mul(size_of::<T>()).div_ceil(size_of::<CacheLine>());
        Ok(Self { lines: memory::zeroed(lines)?, len, element: PhantomData })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] where the system refuses its memory.
    pub(super) fn copy_of(values: &[T]) -> Result<Self> {
        let mut copy = Self::try_zeroed(values.len())?;
        copy.copy_from_slice(values);
        Ok(copy)
    }
}

impl<T: Pod> std::ops::Deref for Aligned<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<T: Pod> std::ops::DerefMut for Aligned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}
