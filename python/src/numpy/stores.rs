//! Sparse weights of any pattern: their parts, checked, from one store to another, and their products.

use half::{bf16, f16};
use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};
use twofour::{
    DataType, Element, Error, MatrixRef, Result,
    kernel::{BlockSparseRef, Epilogue, KernelElement},
    match_element,
    store::{Bsr, Coo, Csc, Csr},
};

use super::{
    dtype::{self, elements, store},
    unlocked,
};

/// Parts of a store: where lines begin (of coordinates the rows), indices, and the bytes of the values.
type Parts<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<u8>>);

/// What Python has of a sparse matrix beside its parts: store, block, shape, and the dtype of the values.
type Given = (String, (usize, usize), (usize, usize), String);

/// The parts of a sparse matrix of Python's.
type GivenParts<'py> = (PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, u8>);

/// A sparse matrix of Python's.
struct Raw<'a> {
    form: Form,
    shape: (usize, usize),
    starts: &'a [i64],
    indices: &'a [i64],
    values: &'a [u8],
}

impl<'a> Raw<'a> {
    fn of((form, block, shape, _): &Given, (starts, indices, values): &'a GivenParts<'_>) -> PyResult<Self> {
        let (starts, indices, values) = (starts.as_slice()?, indices.as_slice()?, values.as_slice()?);
        Ok(Raw { form: Form::named(form, *block)?, shape: *shape, starts, indices, values })
    }
}

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
    fn of(&Raw { form, shape: (rows, cols), starts, indices, values }: &Raw<'_>) -> Result<Self> {
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
            Stored::Bsr(bsr) => BlockSparseRef::of(bsr)?.linear(&x, tokens, epilogue, &mut out),
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
pub(super) fn store_converted<'py>(
    py: Python<'py>,
    matrix: Given,
    parts: GivenParts<'py>,
    to: &str,
    to_block: (usize, usize),
) -> PyResult<Parts<'py>> {
    let (dtype, to, raw) = (dtype::named(&matrix.3)?, Form::named(to, to_block)?, Raw::of(&matrix, &parts)?);
    fn converted<T: Element>(stored: Stored<T>, same: bool, to: Form) -> Result<Owned> {
        Ok(if same { stored } else { Stored::of_csr(stored.to_csr(), to)? }.parts())
    }
    let same = match (raw.form, to) {
        (Form::Bsr(block), Form::Bsr(other)) => block == other,
        (form, to) => std::mem::discriminant(&form) == std::mem::discriminant(&to),
    };
    let parts = unlocked(py, || {
        match_element!(dtype, |T| Stored::<T>::of(&raw).and_then(|stored| converted(stored, same, to)))
    })?;
    Ok(given(py, parts))
}

/// Writes the dense matrix of a sparse one to `out`.
#[pyfunction]
pub(super) fn store_to_dense<'py>(
    py: Python<'py>,
    matrix: Given,
    parts: GivenParts<'py>,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let (dtype, raw, out) = (dtype::named(&matrix.3)?, Raw::of(&matrix, &parts)?, out.as_slice_mut()?);
    unlocked(py, || match_element!(dtype, |T| store("dense matrix", &Stored::<T>::of(&raw)?.to_dense()?, out)))
}

/// Writes `x · Wᵀ + bias` to `out`, for a sparse weight and `x` of `tokens` rows of its dtype.
#[pyfunction]
pub(super) fn store_linear<'py>(
    py: Python<'py>,
    weight: Given,
    parts: GivenParts<'py>,
    x: PyReadonlyArray1<'_, u8>,
    tokens: usize,
    bias: Option<PyReadonlyArray1<'_, f32>>,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let (raw, x, out) = (Raw::of(&weight, &parts)?, x.as_slice()?, out.as_slice_mut()?);
    let bias = bias.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
    macro_rules! linear {
        ($type:ty) => {
            unlocked(py, || Stored::<$type>::of(&raw)?.linear(x, tokens, bias, raw.shape.0, out))
        };
    }
    match dtype::named(&weight.3)? {
        DataType::F32 => linear!(f32),
        DataType::F16 => linear!(f16),
        DataType::BF16 => linear!(bf16),
        _ => Err(PyTypeError::new_err(format!(
            "a weight of {} is not multiplied; float32, float16, bfloat16 are",
            weight.3
        ))),
    }
}
