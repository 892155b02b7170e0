//! A packed 2:4 weight.

use std::ops::Deref;

use rayon::prelude::*;

use super::{
    aligned::{Aligned, CACHE_LINE},
    arguments::{expect_bias, expect_len, widened},
    engine::Cpu,
    epilogue::Epilogue,
    few,
    format::{Format, KernelElement, Tokens, Weight},
    many::{self, Factor},
    remask::Selection,
    strips::{ROWS, Shape, Strips, StripsRef},
};
use crate::{Compressed, Element, Mask, MatrixRef, Result, kernel::Engine};

/// Alignment in bytes that the memory of a packed weight must have.
pub const PACKED_ALIGNMENT: usize = CACHE_LINE;

/// Bytes of a packed weight of `F`, `[out_features, in_features]`. The layout is the same for every engine of a CPU. It
/// may change between versions, so it is no file format. [`packed_bytes_int4`](super::packed_bytes_int4) is for int4.
///
/// # Errors
/// [`crate::Error::TooLarge`].
pub fn packed_bytes<F: Format<Grouping = ()>>(out_features: usize, in_features: usize) -> Result<usize> {
    Shape::<F> { rows: out_features, cols: in_features, grouping: () }.bytes()
}

/// A 2:4 weight `[out_features, in_features]` of format `F` in strips of sixteen rows, for one [`Engine`]. `B` is its
/// memory: of its own ([`SparseWeight`]), borrowed ([`SparseWeightRef`]), or borrowed to be filled
/// ([`SparseWeightMut`]).
///
/// ```
/// use twofour::{Compressed, MatrixRef, kernel::{Epilogue, SparseWeight}};
/// let w = [0.0f32, 2.0, 0.0, 3.0, 1.0, 0.0, 0.0, 0.0];
/// let w = SparseWeight::pack(Compressed::from_dense(MatrixRef::new(2, 4, &w)?)?)?;
/// let mut y = [0.0; 2];
/// w.linear(&[1.0, 10.0, 100.0, 1000.0], 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [3020.0, 1.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug)]
pub struct Packed<'a, F: Format, B = Aligned<u8>> {
    pub(super) weight: Strips<F, B>,
    pub(super) beside: F::Beside<'a>,
    pub(super) cpu: Cpu,
}

/// A packed weight in memory of its own.
pub type SparseWeight<F> = Packed<'static, F>;

/// A packed weight in memory that belongs to others, such as a tensor of another framework.
pub type SparseWeightRef<'a, F> = Packed<'a, F, &'a [u8]>;

/// Borrowed memory that a weight is packed into.
pub type SparseWeightMut<'a, F> = Packed<'a, F, &'a mut [u8]>;

impl<F: Format, B: Clone> Clone for Packed<'_, F, B> {
    fn clone(&self) -> Self {
        Packed { weight: self.weight.clone(), beside: self.beside.clone(), cpu: self.cpu }
    }
}

impl<F: Format, B: Deref<Target = [u8]>> Packed<'_, F, B> {
    /// The engine that multiplies.
    pub fn engine(&self) -> Engine {
        self.cpu.engine()
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.weight.shape.rows
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.weight.shape.cols
    }

    /// Bytes of values, metadata and scales.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + F::bytes_beside(&self.beside)
    }

    /// The weight, borrowed.
    pub fn view(&self) -> SparseWeightRef<'_, F> {
        Packed { weight: self.weight.view(), beside: F::borrow(&self.beside), cpu: self.cpu }
    }
}

impl<F: Format<Grouping = ()>, B: Deref<Target = [u8]>> Packed<'_, F, B> {
    /// The weight in canonical form, as a copy; for 8-bit integers without its scales.
    pub fn to_compressed(&self) -> Compressed<F::Value> {
        self.weight.to_compressed()
    }
}

impl<T: KernelElement> SparseWeight<T> {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// Those of [`Engine::best`].
    pub fn pack(weight: Compressed<T>) -> Result<Self> {
        Self::pack_for(weight, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it.
    pub fn pack_for(weight: Compressed<T>, engine: Engine) -> Result<Self> {
        Ok(Self { weight: Strips::pack(&weight, ())?, beside: (), cpu: Cpu::detect(engine)? })
    }

    /// Compresses a matrix of the same shape into this weight's memory, keeping what the mask keeps: what sparse
    /// training does after every step.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where a shape differs, [`crate::Error::TooManyKept`] where the mask is not 2:4 along
    /// rows; the weight's contents are then unspecified.
    pub fn repack(&mut self, matrix: MatrixRef<'_, T>, mask: &Mask) -> Result<()> {
        self.weight.repack(matrix, mask)
    }

    /// The weight's memory, to be filled.
    pub(crate) fn view_mut(&mut self) -> SparseWeightMut<'_, T> {
        Packed { weight: self.weight.view_mut(), beside: (), cpu: self.cpu }
    }
}

impl<'a, T: KernelElement> SparseWeightRef<'a, T> {
    /// The weight in `bytes`, to be multiplied by [`Engine::best`]. Any contents are a weight: a GEMM with memory that
    /// was never filled is sound, but its result is meaningless.
    ///
    /// # Errors
    /// [`crate::Error::Length`] for another length than [`packed_bytes`], [`crate::Error::Unaligned`] for another
    /// alignment than [`PACKED_ALIGNMENT`], [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn new(out_features: usize, in_features: usize, bytes: &'a [u8]) -> Result<Self> {
        let shape = Shape { rows: out_features, cols: in_features, grouping: () };
        Ok(Self::of(Strips::over(shape, bytes)?, Cpu::detect(Engine::best()?)?))
    }

    pub(super) fn of(weight: StripsRef<'a, T>, cpu: Cpu) -> Self {
        Packed { weight, beside: (), cpu }
    }
}

impl<T: KernelElement, B: Deref<Target = [u8]>> Packed<'_, T, B> {
    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate
    /// in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinity or a NaN that meets one leaves no trace.
    ///
    /// bf16 from [`Engine::Avx512`] on is multiplied by instructions that take subnormal factors, products and sums
    /// (magnitudes below 2^-126) for zero.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.in_features())?;
        expect_len("y", y, tokens, self.out_features())?;
        expect_bias(&epilogue, self.out_features())?;
        let (weight, cpu) = (self.weight.view(), self.cpu);
        if T::own_linear(cpu, Weight::Sparse(weight), Tokens { x, count: tokens, epilogue }, y) {
            return Ok(());
        }
        if tokens >= cpu.many().sparse {
            many::product(cpu, Factor::KeptOfRows(weight), x, epilogue, y);
            return Ok(());
        }
        let x = few::widen(x, self.in_features(), weight.shape.padded_cols());
        few::strips::multiply(cpu, weight, &x, tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    /// Products accumulate in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinite or NaN gradient that meets one leaves no trace. Every
    /// type is multiplied in f32 arithmetic.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        let (rows, cols) = (self.out_features(), self.in_features());
        expect_len("dy", dy, tokens, rows)?;
        expect_len("dx", dx, tokens, cols)?;
        if dx.is_empty() {
            return Ok(());
        }
        let weight = self.weight.view();
        if tokens >= self.cpu.many().gradient {
            many::product(self.cpu, Factor::KeptOfColumns(weight), dy, Epilogue::default(), dx);
            return Ok(());
        }
        let dy = widened(dy);
        dx.par_chunks_mut(cols).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; cols];
            // Added up in order of row.
            for (row, dy) in dy[token * rows..][..rows].iter().enumerate() {
                let strip = weight.strip(row / ROWS);
                for (group, four) in sums.chunks_mut(4).enumerate() {
                    for (position, value) in strip.kept(row % ROWS, group) {
                        // Past the last column only zeros are stored.
                        if let Some(slot) = four.get_mut(position) {
                            *slot += value.to_f32() * dy;
                        }
                    }
                }
            }
            dx.iter_mut().zip(sums).for_each(|(dx, sum)| *dx = T::from_f32(sum));
        });
        Ok(())
    }
}

impl<'a, T: KernelElement> SparseWeightMut<'a, T> {
    /// Memory for a weight of that shape.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::Unaligned`] and [`crate::Error::TooLarge`], as in
    /// [`SparseWeightRef::new`].
    pub fn new(out_features: usize, in_features: usize, bytes: &'a mut [u8]) -> Result<Self> {
        let shape = Shape { rows: out_features, cols: in_features, grouping: () };
        // Packing writes no rows past the weight's: those of the last strip hold zeros.
        if let Some(last) = bytes.len().checked_sub(bytes.len() / shape.strips().max(1)) {
            bytes[last..].fill(0);
        }
        Ok(Packed { weight: Strips::over(shape, bytes)?, beside: (), cpu: Cpu::SCALAR })
    }

    /// Packs a compressed weight.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the shape is another.
    pub fn pack(&mut self, weight: &Compressed<T>) -> Result<()> {
        self.weight.pack_again(weight)
    }

    /// Chooses the mask of a matrix of the same shape, writes it to `mask`, packs what it keeps, and returns how many
    /// mask elements changed: one pass.
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
    use crate::{Error, kernel::Aligned};
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
