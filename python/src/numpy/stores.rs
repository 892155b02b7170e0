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

/// A store as Python gives it: form, block, rows and columns, where lines begin, indices, the bytes of the values, and
/// their dtype.
#[derive(FromPyObject)]
pub(super) struct Given<'py>(
    String,
    (usize, usize),
    (usize, usize),
    PyReadonlyArray1<'py, i64>,
    PyReadonlyArray1<'py, i64>,
    PyReadonlyArray1<'py, u8>,
    String,
);

/// The parts of a store that was given, borrowed from Python.
struct Borrowed<'a> {
    form: Form,
    shape: (usize, usize),
    starts: &'a [i64],
    indices: &'a [i64],
    values: &'a [u8],
    dtype: DataType,
}

impl Given<'_> {
    fn borrowed(&self) -> PyResult<Borrowed<'_>> {
        let Given(form, block, shape, starts, indices, values, dtype) = self;
        Ok(Borrowed {
            form: Form::named(form, *block)?,
            shape: *shape,
            starts: starts.as_slice()?,
            indices: indices.as_slice()?,
            values: values.as_slice()?,
            dtype: dtype::named(dtype)?,
        })
    }
}

/// A kind of store.
#[derive(Clone, Copy, PartialEq)]
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
    fn of_parts(given: &Borrowed<'_>) -> Result<Self> {
        let &Borrowed { form, shape: (rows, cols), starts, indices, values, .. } = given;
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

/// Writes the products with `[tokens, columns]` inputs, and a bias, to `[tokens, rows]` outputs, all as bytes.
type Product = Box<dyn Fn(&[u8], usize, Option<&[f32]>, &mut [u8]) -> Result<()> + Send + Sync>;

/// The product with a weight of so many rows.
fn product<T: KernelElement>(
    rows: usize,
    linear: impl Fn(&[T], usize, Epilogue<'_>, &mut [T]) -> Result<()> + Send + Sync + 'static,
) -> Product {
    Box::new(move |x, tokens, bias, y| {
        let mut out = vec![T::ZERO; tokens.saturating_mul(rows)];
        linear(&elements::<T>(x), tokens, Epilogue { bias, ..Epilogue::default() }, &mut out)?;
        store("products", &out, y)
    })
}

impl<T: KernelElement> Stored<T> {
    /// The product with this weight; blocks are packed.
    fn into_product(self, rows: usize) -> Result<Product> {
        Ok(match self {
            Stored::Coo(coo) => product::<T>(rows, move |x, tokens, epilogue, y| coo.linear(x, tokens, epilogue, y)),
            Stored::Csr(csr) => product::<T>(rows, move |x, tokens, epilogue, y| csr.linear(x, tokens, epilogue, y)),
            Stored::Csc(csc) => product::<T>(rows, move |x, tokens, epilogue, y| csc.linear(x, tokens, epilogue, y)),
            Stored::Bsr(bsr) => {
                let packed = BlockSparseWeight::pack(&bsr)?;
                product::<T>(rows, move |x, tokens, epilogue, y| packed.linear(x, tokens, epilogue, y))
            }
        })
    }
}

fn parts_of(py: Python<'_>, parts: Owned) -> Parts<'_> {
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
    Ok(parts_of(py, parts))
}

/// The parts of a sparse matrix in another store, after those that it has were checked.
#[pyfunction]
pub(super) fn store_converted<'py>(
    py: Python<'py>,
    given: Given<'_>,
    to: &str,
    block: (usize, usize),
) -> PyResult<Parts<'py>> {
    let (from, to) = (given.borrowed()?, Form::named(to, block)?);
    let parts = unlocked(py, || {
        match_element!(from.dtype, |T| {
            let stored = Stored::<T>::of_parts(&from)?;
            Ok(if from.form == to { stored } else { Stored::of_csr(stored.to_csr(), to)? }.parts())
        })
    })?;
    Ok(parts_of(py, parts))
}

/// Writes the dense matrix of a sparse one to `out`.
#[pyfunction]
pub(super) fn store_to_dense(py: Python<'_>, given: Given<'_>, mut out: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
    let (given, out) = (given.borrowed()?, out.as_slice_mut()?);
    unlocked(py, || {
        match_element!(given.dtype, |T| store("dense matrix", &Stored::<T>::of_parts(&given)?.to_dense()?, out))
    })
}

/// A sparse weight that is made ready for products: its parts checked, its blocks packed.
#[pyclass(frozen, module = "twofour._native")]
pub(super) struct StoreProduct(Product);

#[pymethods]
impl StoreProduct {
    /// The weight of a store of float32, float16 or bfloat16.
    #[new]
    fn new(py: Python<'_>, given: Given<'_>) -> PyResult<Self> {
        fn ready<T: KernelElement>(given: &Borrowed<'_>) -> Result<Product> {
            Stored::<T>::of_parts(given)?.into_product(given.shape.0)
        }
        let name = &given.6;
        let given = given.borrowed()?;
        let ready = match given.dtype {
            DataType::F32 => ready::<f32>,
            DataType::F16 => ready::<f16>,
            DataType::BF16 => ready::<bf16>,
            _ => {
                let reason = format!("a weight of {name} is not multiplied; float32, float16, bfloat16 are");
                return Err(PyTypeError::new_err(reason));
            }
        };
        Ok(StoreProduct(unlocked(py, || ready(&given))?))
    }

    /// Writes `x · Wᵀ + bias` to `out`, for `x` of `tokens` rows of the weight's dtype.
    fn linear(
        &self,
        py: Python<'_>,
        x: PyReadonlyArray1<'_, u8>,
        tokens: usize,
        bias: Option<PyReadonlyArray1<'_, f32>>,
        mut out: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let (x, out) = (x.as_slice()?, out.as_slice_mut()?);
        let bias = bias.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
        unlocked(py, || (self.0)(x, tokens, bias, out))
    }
}
