//! Elements of a tensor that was read.

use std::{
    fmt,
    marker::PhantomData,
    ops::Deref,
    sync::{Mutex, PoisonError},
};

use bytemuck::Pod;

use crate::{Result, kernel::Aligned};

/// Elements of a tensor, row-major.
///
/// They are in memory of their own, or borrowed from the file's bytes where those are in memory
/// ([`super::Reader::from_bytes`]).
pub struct Elements<'a, T>(Storage<'a, T>);

enum Storage<'a, T> {
    Borrowed(&'a [T]),
    Owned(Vec<T>),
    Read(ReadBuffer<'a>, PhantomData<T>),
}

impl<'a, T: Pod> Elements<'a, T> {
    /// The elements of bytes in memory: borrowed where they are aligned for `T`.
    pub(super) fn of_bytes(bytes: &'a [u8]) -> Self {
        Self(match bytemuck::try_cast_slice(bytes) {
            Ok(elements) => Storage::Borrowed(elements),
            Err(_) => Storage::Owned(bytemuck::allocation::pod_collect_to_vec(bytes)),
        })
    }

    /// The elements of what was read.
    pub(super) fn of_buffer(buffer: ReadBuffer<'a>) -> Self {
        Self(Storage::Read(buffer, PhantomData))
    }

    /// The elements in a vector: copied, unless they are in one.
    pub fn into_owned(self) -> Vec<T> {
        match self.0 {
            Storage::Owned(elements) => elements,
            _ => self.to_vec(),
        }
    }
}

impl<T: Pod> Deref for Elements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Storage::Borrowed(elements) => elements,
            Storage::Owned(elements) => elements,
            Storage::Read(buffer, _) => bytemuck::cast_slice(buffer.bytes()),
        }
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Elements<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Memory of an open file that its next read may use again: new pages from the operating system take longer than
/// reading a cached file into them.
#[derive(Debug, Default)]
pub(super) struct Spare(Mutex<Option<Aligned<u8>>>);

impl Spare {
    /// A buffer of `len` bytes of whatever contents.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub(super) fn take(&self, len: usize) -> Result<ReadBuffer<'_>> {
        let spare = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // One that is too small goes before another is made.
        let memory = match spare.filter(|memory| memory.len() >= len) {
            Some(memory) => memory,
            None => Aligned::try_zeroed(len)?,
        };
        Ok(ReadBuffer { memory, len, spare: self })
    }
}

/// Memory that goes back when it is dropped.
pub(super) struct ReadBuffer<'a> {
    memory: Aligned<u8>,
    /// Bytes in use.
    len: usize,
    spare: &'a Spare,
}

impl ReadBuffer<'_> {
    fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    /// The bytes, to be written to.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

impl Drop for ReadBuffer<'_> {
    fn drop(&mut self) {
        let mut spare = self.spare.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.as_ref().is_none_or(|spare| spare.len() < self.memory.len()) {
            *spare = Some(std::mem::replace(&mut self.memory, Aligned::zeroed(0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_by_no_two_at_the_same_time() {
        let spare = Spare::default();
        let fill = |len: usize, value: u8| {
            let mut buffer = spare.take(len).unwrap();
            buffer.bytes_mut().fill(value);
            buffer
        };
        let place = |buffer: &ReadBuffer<'_>| buffer.bytes().as_ptr();
        let (long, other) = (fill(1000, 1), fill(100, 2));
        assert_eq!((long.bytes(), other.bytes()), ([1; 1000].as_slice(), [2; 100].as_slice()));
        let kept = place(&long);
        drop(long);
        drop(other);
        let again = fill(300, 3);
        assert_eq!((place(&again), again.bytes()), (kept, [3; 300].as_slice()));
        assert_eq!(*Elements::<u16>::of_buffer(again), [0x0303; 150]);
        assert_eq!(fill(2000, 4).bytes(), [4; 2000]);
    }
}
