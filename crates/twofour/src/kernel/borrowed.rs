//! A packed weight in memory that belongs to others, such as a tensor of another framework.

use rayon::prelude::*;

use super::{
    aligned::CACHE_LINE,
    arguments::{expect_bias, expect_len, widen},
    decode,
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    reference,
    remask::Selection,
    strips::{self, ROWS, Strips, StripsMut, StripsRef},
};
#[cfg(target_arch = "x86_64")]
use super::{
    amx, bf16,
    prefill::{Many, Prefill},
};
use crate::{Compressed, Element, Mask, MatrixRef, Result};

/// Alignment in bytes that the memory of a packed weight must have.
pub const PACKED_ALIGNMENT: usize = CACHE_LINE;

/// Bytes of a packed weight of `T`, `[out_features, in_features]`. The layout is the same for every engine of a CPU. It may change
/// between versions, so it is no file format.
///
/// # Errors
/// [`crate::Error::TooLarge`].
pub fn packed_bytes<T: KernelElement>(out_features: usize, in_features: usize) -> Result<usize> {
    strips::bytes_of::<T>(out_features, in_features)
}

/// A packed 2:4 weight `[out_features, in_features]` in borrowed memory, which [`SparseWeightMut`] filled.
#[derive(Debug)]
pub struct SparseWeightRef<'a, T> {
    weight: StripsRef<'a, T>,
    cpu: Cpu,
}

impl<T> Clone for SparseWeightRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SparseWeightRef<'_, T> {}

impl<'a, T: KernelElement> SparseWeightRef<'a, T> {
    /// The weight in `bytes`, to be multiplied by [`Engine::best`]. Any contents are a weight: a GEMM with memory that was never filled is
    /// sound, but its result is meaningless.
    ///
    /// # Errors
    /// [`crate::Error::Length`] for another length than [`packed_bytes`], [`crate::Error::Unaligned`] for another alignment than
    /// [`PACKED_ALIGNMENT`], [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn new(out_features: usize, in_features: usize, bytes: &'a [u8]) -> Result<Self> {
        Ok(Self { weight: Strips::over(out_features, in_features, bytes)?, cpu: Cpu::detect(Engine::best()?)? })
    }

    pub(super) fn of(weight: StripsRef<'a, T>, cpu: Cpu) -> Self {
        Self { weight, cpu }
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.weight.rows()
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.weight.cols()
    }

    /// The weight in canonical form, as a copy.
    pub fn to_compressed(&self) -> Compressed<T> {
        self.weight.to_compressed()
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinity or a NaN that meets one leaves no trace.
    ///
    /// bf16 from [`Engine::Avx512`] on is multiplied by instructions that take subnormal factors, products and sums (magnitudes below 2^-126) for zero.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.in_features())?;
        expect_len("y", y, tokens, self.out_features())?;
        expect_bias(&epilogue, self.out_features())?;
        #[cfg(target_arch = "x86_64")]
        if let Some(sums) = amx::sparse_floats(self.cpu, self.weight, x, tokens) {
            sums.store_floats(tokens, epilogue, y);
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(()) = bf16::sparse_linear(self.cpu, self.weight, x, tokens, epilogue, y) {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::SPARSE) {
            prefill.sparse_linear(self.weight, x, epilogue, y);
            return Ok(());
        }
        let x = decode::prepare(x, self.in_features(), self.weight.padded_cols());
        decode::product(self.cpu, self.weight, &x, tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    /// Products accumulate in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinite or NaN gradient that meets one leaves no trace. Every type is multiplied in f32 arithmetic.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        expect_len("dy", dy, tokens, self.out_features())?;
        expect_len("dx", dx, tokens, self.in_features())?;
        if dx.is_empty() {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::GRADIENT) {
            prefill.sparse_input_gradient(self.weight, dy, dx);
            return Ok(());
        }
        let dy = widen(dy);
        dx.par_chunks_mut(self.in_features()).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; dx.len()];
            reference::sparse_input_gradient(
                self.weight,
                &dy[token * self.out_features()..][..self.out_features()],
                &mut sums,
            );
            for (dx, sum) in dx.iter_mut().zip(sums) {
                *dx = T::from_f32(sum);
            }
        });
        Ok(())
    }
}

/// Borrowed memory that a 2:4 weight `[out_features, in_features]` is packed into.
#[derive(Debug)]
pub struct SparseWeightMut<'a, T> {
    weight: StripsMut<'a, T>,
}

impl<'a, T: KernelElement> SparseWeightMut<'a, T> {
    /// Memory for a weight of that shape.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Unaligned`] and [`crate::Error::TooLarge`], as in [`SparseWeightRef::new`].
    pub fn new(out_features: usize, in_features: usize, bytes: &'a mut [u8]) -> Result<Self> {
        // Packing writes no rows past the weight's: those of the last strip hold zeros.
        if let Some(last) = bytes.len().checked_sub(bytes.len() / out_features.div_ceil(ROWS).max(1)) {
            bytes[last..].fill(0);
        }
        Ok(Self { weight: Strips::over(out_features, in_features, bytes)? })
    }

    pub(super) fn of(weight: StripsMut<'a, T>) -> Self {
        Self { weight }
    }

    /// Packs a compressed weight.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the shape is another.
    pub fn pack(&mut self, weight: &Compressed<T>) -> Result<()> {
        self.weight.pack_again(weight)
    }

    /// Chooses the mask of a matrix of the same shape, writes it to `mask`, packs what it keeps, and returns how many mask elements changed:
    /// one pass.
    ///
    /// # Errors
    /// Those of [`Strips::remask`].
    pub(crate) fn remask<M: Element>(
        &mut self,
        matrix: MatrixRef<'_, M>,
        selection: Selection,
        mask: &mut Mask,
    ) -> Result<u64> {
        self.weight.remask(matrix, selection, mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Error,
        kernel::{Aligned, SparseWeight},
    };
    use half::bf16;

    /// Packs in borrowed memory and in memory of the weight's own, and multiplies with both.
    fn check<T: KernelElement>(rows: usize, cols: usize, tokens: usize) {
        let dense: Vec<T> = (0..rows * cols).map(|i| T::from_f32((i * 7 % 13) as f32 - 6.0)).collect();
        let compressed = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        let owned = SparseWeight::pack(compressed.clone()).unwrap();
        let bytes = packed_bytes::<T>(rows, cols).unwrap();
        let (mut memory, mut again) = (Aligned::<u8>::zeroed(bytes), Aligned::<u8>::zeroed(bytes));
        again.fill(0xA5);
        SparseWeightMut::new(rows, cols, &mut again).unwrap().pack(&compressed).unwrap();
        SparseWeightMut::new(rows, cols, &mut memory).unwrap().pack(&compressed).unwrap();
        let borrowed = SparseWeightRef::<T>::new(rows, cols, &memory).unwrap();
        assert_eq!(borrowed.to_compressed(), compressed);
        assert_eq!(*memory, *again, "every byte is written");
        let x: Vec<T> = (0..tokens * cols).map(|i| T::from_f32((i * 5 % 11) as f32 - 5.0)).collect();
        let (mut a, mut b) = (vec![T::ZERO; tokens * rows], vec![T::ZERO; tokens * rows]);
        owned.linear(&x, tokens, Epilogue::default(), &mut a).unwrap();
        borrowed.linear(&x, tokens, Epilogue::default(), &mut b).unwrap();
        assert_eq!(a, b);
    }

    #[test]
    fn borrowed_memory_multiplies_as_owned_does() {
        for (rows, cols, tokens) in [(1, 4, 1), (17, 70, 3), (33, 128, 40), (0, 8, 2), (5, 0, 2)] {
            check::<f32>(rows, cols, tokens);
            check::<bf16>(rows, cols, tokens);
        }
    }

    #[test]
    fn memory_that_does_not_fit_is_refused() {
        let bytes = packed_bytes::<f32>(20, 12).unwrap();
        let memory = Aligned::<u8>::zeroed(bytes + 4);
        let of = |range: std::ops::Range<usize>| SparseWeightRef::<f32>::new(20, 12, &memory[range]).map(|_| ());
        assert!(of(0..bytes).is_ok());
        assert!(matches!(of(0..bytes - 1), Err(Error::Length { found, .. }) if found == bytes - 1));
        assert!(matches!(of(4..bytes + 4), Err(Error::Unaligned { alignment: 64, .. })));
        assert!(matches!(packed_bytes::<f32>(usize::MAX, usize::MAX), Err(Error::TooLarge { .. })));
    }
}
