//! A weight in whatever form, and its products.

use std::sync::Arc;

use candle_core::Tensor;
use half::{bf16, f16};
use twofour::kernel::{Epilogue, KernelElement, SparseWeight, SparseWeightI8};
use twofour::{Compressed, Mask, MatrixRef};

use super::{
    dense_product,
    float::{Float, convert, expect_length, with_elements, write_as},
};
use crate::{Error, Result};

/// A packed 2:4 weight and, where the mask is transposable and it was asked for, its packed transpose.
#[derive(Debug, Clone)]
pub(crate) struct Packed<T: KernelElement> {
    rows: SparseWeight<T>,
    transposed: Option<SparseWeight<T>>,
}

impl<T: Float> Packed<T> {
    /// Packs what `mask` keeps of `weight`. With `transposed_mask`, the transpose is packed too.
    pub(super) fn new(weight: MatrixRef<'_, T>, mask: &Mask, transposed_mask: Option<&Mask>) -> Result<Self> {
        let rows = SparseWeight::pack(Compressed::from_masked(weight, mask)?)?;
        let transposed = match transposed_mask {
            None => None,
            Some(mask) => {
                let data = weight.transposed();
                let matrix = MatrixRef::new(weight.cols(), weight.rows(), &data)?;
                Some(SparseWeight::pack(Compressed::from_masked(matrix, mask)?)?)
            }
        };
        Ok(Packed { rows, transposed })
    }

    /// Takes over a weight that is compressed already.
    pub(super) fn from_compressed(weight: Compressed<T>) -> Result<Self> {
        Ok(Packed { rows: SparseWeight::pack(weight)?, transposed: None })
    }

    /// Packs new values under a (new) mask in the memory of the old ones.
    pub(super) fn repack(
        &mut self,
        weight: MatrixRef<'_, T>,
        mask: &Mask,
        transposed_mask: Option<&Mask>,
    ) -> Result<()> {
        self.rows.repack(weight, mask)?;
        if let (Some(transposed), Some(mask)) = (&mut self.transposed, transposed_mask) {
            let data = weight.transposed();
            transposed.repack(MatrixRef::new(weight.cols(), weight.rows(), &data)?, mask)?;
        }
        Ok(())
    }

    /// The weight in canonical form, made anew.
    pub(super) fn to_compressed(&self) -> Compressed<T> {
        self.rows.to_compressed()
    }

    fn bytes(&self) -> usize {
        self.rows.bytes() + self.transposed.as_ref().map_or(0, SparseWeight::bytes)
    }
}

/// A weight `[out, in]` as the products below take it.
#[derive(Debug, Clone)]
pub(crate) enum Weight {
    /// A dense f32 tensor on the CPU.
    Dense(Tensor),
    /// Compressed, f32.
    F32(Arc<Packed<f32>>),
    /// Compressed, bf16.
    Bf16(Arc<Packed<bf16>>),
    /// Compressed, f16.
    F16(Arc<Packed<f16>>),
    /// Compressed, i8 with a scale for each row.
    I8(Arc<SparseWeightI8>),
}

/// A float whose packed weight is one of [`Weight`]'s kinds.
pub(super) trait Stored: Float {
    fn wrap(packed: Arc<Packed<Self>>) -> Weight;
    fn packed(weight: &Weight) -> Option<&Packed<Self>>;
    fn packed_mut(weight: &mut Weight) -> Option<&mut Arc<Packed<Self>>>;
}

macro_rules! stored {
    ($float:ty, $kind:ident) => {
        impl Stored for $float {
            fn wrap(packed: Arc<Packed<Self>>) -> Weight {
                Weight::$kind(packed)
            }

            fn packed(weight: &Weight) -> Option<&Packed<Self>> {
                match weight {
                    Weight::$kind(packed) => Some(packed),
                    _ => None,
                }
            }

            fn packed_mut(weight: &mut Weight) -> Option<&mut Arc<Packed<Self>>> {
                match weight {
                    Weight::$kind(packed) => Some(packed),
                    _ => None,
                }
            }
        }
    };
}

stored!(f32, F32);
stored!(bf16, Bf16);
stored!(f16, F16);

/// `(tokens, out, in)`.
pub(crate) type Dims = (usize, usize, usize);

impl Weight {
    /// `y = act(x·Wᵀ + bias)`; `x` is `[tokens, in]`, `y` is `[tokens, out]`. Where `T` is not the weight's type, `x` is
    /// converted to it and `y` from it.
    pub(crate) fn forward<T: Float>(&self, x: &[T], dims: Dims, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        fn packed<T: Float, B: Float>(
            weight: &Packed<B>,
            x: &[T],
            (tokens, ..): Dims,
            epilogue: Epilogue<'_>,
            y: &mut [T],
        ) -> Result<()> {
            let x = convert::<T, B>(x);
            write_as::<T, B>(y, |y| Ok(weight.rows.linear(&x, tokens, epilogue, y)?))
        }
        check_lengths("the input", x, dims.0, dims.2)?;
        check_lengths("the output", y, dims.0, dims.1)?;
        match self {
            Weight::Dense(w) => {
                let x = convert::<T, f32>(x);
                write_as::<T, f32>(y, |y| {
                    with_elements("the weight", w, |w| dense_product::forward(&x, w, dims, epilogue, y))
                })
            }
            Weight::F32(w) => packed(w, x, dims, epilogue, y),
            Weight::Bf16(w) => packed(w, x, dims, epilogue, y),
            Weight::F16(w) => packed(w, x, dims, epilogue, y),
            Weight::I8(w) => {
                let x = convert::<T, f32>(x);
                write_as::<T, f32>(y, |y| Ok(w.linear(&x, dims.0, epilogue, y)?))
            }
        }
    }

    /// `dx = dy·W`; `dy` is `[tokens, out]`, `dx` is `[tokens, in]`.
    pub(crate) fn input_gradient<T: Float>(&self, dy: &[T], dims: Dims, dx: &mut [T]) -> Result<()> {
        fn packed<T: Float, B: Float>(weight: &Packed<B>, dy: &[T], (tokens, ..): Dims, dx: &mut [T]) -> Result<()> {
            let dy = convert::<T, B>(dy);
            write_as::<T, B>(dx, |dx| {
                match &weight.transposed {
                    Some(transposed) => transposed.linear(&dy, tokens, Epilogue::default(), dx)?,
                    None => weight.rows.input_gradient(&dy, tokens, dx)?,
                }
                Ok(())
            })
        }
        check_lengths("the output gradient", dy, dims.0, dims.1)?;
        check_lengths("the input gradient", dx, dims.0, dims.2)?;
        match self {
            Weight::Dense(w) => {
                let dy = convert::<T, f32>(dy);
                write_as::<T, f32>(dx, |dx| {
                    with_elements("the weight", w, |w| dense_product::input_gradient(&dy, w, dims, dx))
                })
            }
            Weight::F32(w) => packed(w, dy, dims, dx),
            Weight::Bf16(w) => packed(w, dy, dims, dx),
            Weight::F16(w) => packed(w, dy, dims, dx),
            Weight::I8(_) => Err(Error::WrongForm {
                found: "compressed to i8",
                remedy: "gradients pass through dense, sparse and float-compressed layers only",
            }),
        }
    }

    /// Bytes that the weight takes in memory: of a packed one its values and metadata.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.elem_count() * w.dtype().size_in_bytes(),
            Weight::F32(w) => w.bytes(),
            Weight::Bf16(w) => w.bytes(),
            Weight::F16(w) => w.bytes(),
            Weight::I8(w) => w.bytes(),
        }
    }
}

/// `dW = dyᵀ·x`, and zero where `keep` keeps nothing; `dw` is `[out, in]`.
pub(crate) fn weight_gradient<T: Float>(
    dy: &[T],
    x: &[T],
    dims: Dims,
    keep: Option<&Mask>,
    dw: &mut [T],
) -> Result<()> {
    check_lengths("the output gradient", dy, dims.0, dims.1)?;
    check_lengths("the input", x, dims.0, dims.2)?;
    check_lengths("the weight gradient", dw, dims.1, dims.2)?;
    let (dy, x) = (convert::<T, f32>(dy), convert::<T, f32>(x));
    write_as::<T, f32>(dw, |dw| {
        dense_product::weight_gradient(&dy, &x, dims, dw);
        if let Some(mask) = keep {
            zero_unkept(mask, dw);
        }
        Ok(())
    })
}

/// The sums of `dy`'s columns; `db` has `out` elements.
pub(crate) fn bias_gradient<T: Float>(dy: &[T], db: &mut [f32]) -> Result<()> {
    use rayon::prelude::*;
    // Columns that one task sums: a few cache lines of each row.
    const BLOCK: usize = 256;
    let outputs = db.len();
    if outputs == 0 {
        return expect_length("the output gradient", dy.len(), Some(0));
    }
    if !dy.len().is_multiple_of(outputs) {
        return Err(Error::Length { what: "the output gradient", expected: outputs, found: dy.len() });
    }
    db.par_chunks_mut(BLOCK).enumerate().for_each(|(block, sums)| {
        sums.fill(0.0);
        for row in dy.chunks_exact(outputs) {
            for (sum, value) in sums.iter_mut().zip(&row[block * BLOCK..]) {
                *sum += twofour::Element::to_f32(*value);
            }
        }
    });
    Ok(())
}

fn check_lengths<T>(what: &'static str, slice: &[T], rows: usize, cols: usize) -> Result<()> {
    expect_length(what, slice.len(), rows.checked_mul(cols))
}

fn zero_unkept(mask: &Mask, dw: &mut [f32]) {
    use rayon::prelude::*;
    dw.par_chunks_mut(mask.cols().max(1)).enumerate().for_each(|(row, values)| {
        for (word, values) in mask.row_words(row).iter().zip(values.chunks_mut(64)) {
            for (bit, value) in values.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *value = 0.0;
                }
            }
        }
    });
}
