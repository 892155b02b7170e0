//! Sparse weights of any pattern: their parts, checked, from one store to another, and their products.

use half::{bf16, f16};
use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};
use twofour::{
    DataType, Element, Error, MatrixRef, Result,
    kernel::{BlockSparseWeight, Epilogue, KernelElement},
    match_element,
    store::{Bsr, Coo, Csc, Csr},
};

use super::{
    dtype::{self, elements, store},
    unlocked,
};

/// Parts of a store: where lines begin (of coordinates the rows), indices, and the bytes of the values.
type Parts<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<u8>>);

/// A kind of store.
#[derive(Clone, Copy)]
enum Form {
    Coo,
    Csr,
    Csc,
    Bsr([usize; 2]),
}

impl Form {
    fn named(name: &str, block: (usize, usize)) -> PyResult<Self> {
        match name {
            "coo" => Ok(Form::Coo),
            "csr" => Ok(Form::Csr),
            "csc" => Ok(Form::Csc),
            "bsr" => Ok(Form::Bsr([block.0, block.1])),
            _ => Err(PyValueError::new_err(format!("form must be one of coo, csr, csc, bsr, and is {name:?}"))),
        }
    }
}

/// A sparse matrix in any store.
enum Stored<T> {
    Coo(Coo<T>),
    Csr(Csr<T>),
    Csc(Csc<T>),
    Bsr(Bsr<T>),
}

/// The parts of a store in memory of its own.
struct Owned {
    starts: Vec<i64>,
    indices: Vec<i64>,
    values: Vec<u8>,
}

/// An index of a store of at most 2³² lines and elements of memory.
fn index<I: TryFrom<i64>>(part: &'static str, values: &[i64]) -> Result<Vec<I>> {
    let index = |(index, value): (usize, &i64)| {
        I::try_from(*value).map_err(|_| Error::StorePart {
            form: "sparse matrix",
            part,
            index,
            found: usize::try_from(*value).unwrap_or(0),
            expected: format!("an index, not {value}"),
        })
    };
    values.iter().enumerate().map(index).collect()
}

impl<T: Element> Stored<T> {
    fn of_parts(
        form: Form,
        (rows, cols): (usize, usize),
        starts: &[i64],
        indices: &[i64],
        values: &[u8],
    ) -> Result<Self> {
        let values = elements::<T>(values).into_owned();
        let (first, indices) = ("beginning", index("index", indices)?);
        Ok(match form {
            Form::Coo => Stored::Coo(Coo::from_parts(rows, cols, index("row", starts)?, indices, values)?),
            Form::Csr => Stored::Csr(Csr::from_parts(rows, cols, index(first, starts)?, indices, values)?),
            Form::Csc => Stored::Csc(Csc::from_parts(rows, cols, index(first, starts)?, indices, values)?),
            Form::Bsr(block) => {
                Stored::Bsr(Bsr::from_parts((rows, cols), block, index(first, starts)?, indices, values)?)
            }
        })
    }

    fn of_csr(csr: Csr<T>, form: Form) -> Result<Self> {
        Ok(match form {
            Form::Coo => Stored::Coo(Coo::from(&csr)),
            Form::Csr => Stored::Csr(csr),
            Form::Csc => Stored::Csc(Csc::from(&csr)),
            Form::Bsr(block) => Stored::Bsr(Bsr::from_csr(&csr, block)?),
        })
    }

    fn to_csr(&self) -> Csr<T> {
        match self {
            Stored::Coo(coo) => Csr::from(coo),
            Stored::Csr(csr) => csr.clone(),
            Stored::Csc(csc) => Csr::from(csc),
            Stored::Bsr(bsr) => Csr::from(bsr),
        }
    }

    fn to_dense(&self) -> Result<Vec<T>> {
        match self {
            Stored::Coo(coo) => coo.to_dense(),
            Stored::Csr(csr) => csr.to_dense(),
            Stored::Csc(csc) => csc.to_dense(),
            Stored::Bsr(bsr) => bsr.to_dense(),
        }
    }

    fn parts(&self) -> Owned {
        let wide = |starts: &[usize]| starts.iter().map(|start| *start as i64).collect();
        let long = |indices: &[u32]| indices.iter().map(|index| i64::from(*index)).collect();
        let (starts, indices, values): (Vec<i64>, Vec<i64>, &[T]) = match self {
            Stored::Coo(coo) => (long(coo.row_indices()), long(coo.columns()), coo.values()),
            Stored::Csr(csr) => (wide(csr.starts()), long(csr.columns()), csr.values()),
            Stored::Csc(csc) => (wide(csc.starts()), long(csc.row_indices()), csc.values()),
            Stored::Bsr(bsr) => (wide(bsr.starts()), long(bsr.columns()), bsr.values()),
        };
        Owned { starts, indices, values: bytemuck::cast_slice(values).to_vec() }
    }
}

impl<T: KernelElement> Stored<T> {
    fn linear(&self, x: &[u8], tokens: usize, bias: Option<&[f32]>, rows: usize, y: &mut [u8]) -> Result<()> {
        let (x, epilogue) = (elements::<T>(x), Epilogue { bias, ..Epilogue::default() });
        let mut out = vec![T::ZERO; tokens.saturating_mul(rows)];
        match self {
            Stored::Coo(coo) => coo.linear(&x, tokens, epilogue, &mut out),
            Stored::Csr(csr) => csr.linear(&x, tokens, epilogue, &mut out),
            Stored::Csc(csc) => csc.linear(&x, tokens, epilogue, &mut out),
            Stored::Bsr(bsr) => BlockSparseWeight::pack(bsr)?.linear(&x, tokens, epilogue, &mut out),
        }?;
        store("products", &out, y)
    }
}

fn given(py: Python<'_>, parts: Owned) -> Parts<'_> {
    (PyArray1::from_vec(py, parts.starts), PyArray1::from_vec(py, parts.indices), PyArray1::from_vec(py, parts.values))
}

/// The parts of a dense matrix in a store.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_of_dense<'py>(
    py: Python<'py>,
    matrix: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    form: &str,
    block: (usize, usize),
) -> PyResult<Parts<'py>> {
    fn of<T: Element>(bytes: &[u8], rows: usize, cols: usize, form: Form) -> Result<Owned> {
        let values = elements::<T>(bytes);
        let matrix = MatrixRef::new(rows, cols, &values)?;
        Ok(match form {
            Form::Bsr(block) => Stored::Bsr(Bsr::from_dense(matrix, block)?),
            form => Stored::of_csr(Csr::from_dense(matrix)?, form)?,
        }
        .parts())
    }
    let (dtype, form, bytes) = (dtype::named(dtype)?, Form::named(form, block)?, matrix.as_slice()?);
    let parts = unlocked(py, || match_element!(dtype, |T| of::<T>(bytes, rows, cols, form)))?;
    Ok(given(py, parts))
}

/// The parts of a sparse matrix in another store, after those that it has were checked.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_converted<'py>(
    py: Python<'py>,
    form: &str,
    block: (usize, usize),
    rows: usize,
    cols: usize,
    starts: PyReadonlyArray1<'_, i64>,
    indices: PyReadonlyArray1<'_, i64>,
    values: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    to: &str,
    to_block: (usize, usize),
) -> PyResult<Parts<'py>> {
    let (dtype, form, to) = (dtype::named(dtype)?, Form::named(form, block)?, Form::named(to, to_block)?);
    let (starts, indices, values) = (starts.as_slice()?, indices.as_slice()?, values.as_slice()?);
    fn converted<T: Element>(stored: Stored<T>, same: bool, to: Form) -> Result<Owned> {
        Ok(if same { stored } else { Stored::of_csr(stored.to_csr(), to)? }.parts())
    }
    let same = match (form, to) {
        (Form::Bsr(block), Form::Bsr(other)) => block == other,
        (form, to) => std::mem::discriminant(&form) == std::mem::discriminant(&to),
    };
    let parts = unlocked(py, || {
        match_element!(dtype, |T| {
            let stored = Stored::<T>::of_parts(form, (rows, cols), starts, indices, values);
            stored.and_then(|stored| converted(stored, same, to))
        })
    })?;
    Ok(given(py, parts))
}

/// Writes the dense matrix of a sparse one to `out`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_to_dense(
    py: Python<'_>,
    form: &str,
    block: (usize, usize),
    rows: usize,
    cols: usize,
    starts: PyReadonlyArray1<'_, i64>,
    indices: PyReadonlyArray1<'_, i64>,
    values: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let (dtype, form) = (dtype::named(dtype)?, Form::named(form, block)?);
    let (starts, indices, values) = (starts.as_slice()?, indices.as_slice()?, values.as_slice()?);
    let out = out.as_slice_mut()?;
    unlocked(py, || {
        match_element!(dtype, |T| {
            let stored = Stored::<T>::of_parts(form, (rows, cols), starts, indices, values);
            stored.and_then(|stored| store("dense matrix", &stored.to_dense()?, out))
        })
    })
}

/// Writes `x · Wᵀ + bias` to `out`, for a sparse weight and `x` of `tokens` rows of its dtype.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_linear(
    py: Python<'_>,
    form: &str,
    block: (usize, usize),
    rows: usize,
    cols: usize,
    starts: PyReadonlyArray1<'_, i64>,
    indices: PyReadonlyArray1<'_, i64>,
    values: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    x: PyReadonlyArray1<'_, u8>,
    tokens: usize,
    bias: Option<PyReadonlyArray1<'_, f32>>,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let (name, form) = (dtype, Form::named(form, block)?);
    let (starts, indices, values) = (starts.as_slice()?, indices.as_slice()?, values.as_slice()?);
    let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
    let bias = bias.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
    let shape = (rows, cols);
    macro_rules! linear {
        ($type:ty) => {
            unlocked(py, || {
                let stored = Stored::<$type>::of_parts(form, shape, starts, indices, values);
                stored.and_then(|stored| stored.linear(x, tokens, bias, rows, out))
            })
        };
    }
    match dtype::named(name)? {
        DataType::F32 => linear!(f32),
        DataType::F16 => linear!(f16),
        DataType::BF16 => linear!(bf16),
        _ => Err(PyTypeError::new_err(format!("a weight of {name} is not multiplied; float32, float16, bfloat16 are"))),
    }
}
