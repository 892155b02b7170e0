//! The shapes of an operator's results from those of its arguments, for torch.compile: numbers, or torch's symbols.

use pyo3::{exceptions::PyRuntimeError, prelude::*, types::PyTuple};

use twofour::int4::Granularity;

use super::{kernel::Number, scalar_type::ScalarType};

/// A number of a shape, or a symbol that stands for one.
#[derive(Debug, Clone)]
pub(crate) struct Size<'py>(Bound<'py, PyAny>);

impl<'py> Size<'py> {
    /// The sum with another number.
    pub(crate) fn plus(&self, other: impl IntoPyObject<'py>) -> PyResult<Self> {
        self.0.add(other).map(Size)
    }

    /// The product with another number.
    pub(crate) fn times(&self, other: impl IntoPyObject<'py>) -> PyResult<Self> {
        self.0.mul(other).map(Size)
    }

    /// The quotient, rounded down.
    pub(crate) fn div_floor(&self, divisor: usize) -> PyResult<Self> {
        self.0.floor_div(divisor).map(Size)
    }

    /// The quotient, rounded up.
    pub(crate) fn div_ceil(&self, divisor: usize) -> PyResult<Self> {
        self.0.neg()?.floor_div(divisor)?.neg().map(Size)
    }

    /// The next multiple of a number.
    pub(crate) fn next_multiple_of(&self, of: usize) -> PyResult<Self> {
        self.div_ceil(of)?.times(of)
    }

    /// Whether it is below a number; a symbol is a known number afterwards, or in a known range.
    pub(crate) fn is_below(&self, bound: usize) -> PyResult<bool> {
        self.0.lt(bound)
    }
}

impl<'py> IntoPyObject<'py> for Size<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = std::convert::Infallible;

    fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

/// What is known of a tensor before it is computed.
#[derive(Debug, Clone)]
pub(crate) struct Shape<'py> {
    sizes: Vec<Size<'py>>,
    /// `None`: that of the operator's first argument.
    dtype: Option<ScalarType>,
}

impl<'py> Shape<'py> {
    /// A tensor of those sizes, of the type of the operator's first argument.
    pub(crate) fn new(sizes: impl IntoIterator<Item = Size<'py>>) -> Self {
        Shape { sizes: sizes.into_iter().collect(), dtype: None }
    }

    /// The same of another type.
    pub(crate) fn of(self, dtype: impl Into<Option<ScalarType>>) -> Self {
        Shape { dtype: dtype.into(), ..self }
    }

    /// The sizes, and the name of the type.
    pub(crate) fn into_python(self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Option<&'static str>)> {
        Ok((PyTuple::new(py, self.sizes)?, self.dtype.map(ScalarType::name)))
    }
}

/// A tensor among an operator's arguments.
#[derive(Debug)]
pub(crate) struct Operand<'py> {
    /// Its sizes.
    pub(crate) sizes: Vec<Size<'py>>,
    /// Its type, where kernels take that one.
    pub(crate) dtype: Option<ScalarType>,
    /// Whether it is on a GPU.
    pub(crate) on_gpu: bool,
}

impl<'py> Operand<'py> {
    fn of(tensor: &Bound<'py, PyAny>) -> PyResult<Self> {
        let sizes = tensor.getattr("shape")?.try_iter()?.map(|size| size.map(Size)).collect::<PyResult<_>>()?;
        let dtype = tensor.getattr("dtype")?.str()?;
        let kind: String = tensor.getattr("device")?.getattr("type")?.extract()?;
        let dtype = ScalarType::named(dtype.to_string_lossy().trim_start_matches("torch."));
        Ok(Operand { sizes, dtype, on_gpu: kind == "cuda" })
    }

    /// Rows and columns.
    ///
    /// # Errors
    /// A `RuntimeError` for another rank than 2, as the kernels'.
    pub(crate) fn matrix(&self) -> PyResult<[&Size<'py>; 2]> {
        match self.sizes.as_slice() {
            [rows, cols] => Ok([rows, cols]),
            other => {
                let rank = other.len();
                Err(PyRuntimeError::new_err(format!("a matrix must have 2 dimensions, not {rank}")))
            }
        }
    }

    /// A result with the same sizes, but for the last.
    pub(crate) fn with_last(mut self, last: Size<'py>) -> Shape<'py> {
        self.sizes.pop();
        self.sizes.push(last);
        Shape::new(self.sizes)
    }
}

/// An operator's arguments, all of its schema.
#[derive(Debug)]
pub(crate) struct Arguments<'py>(pub(crate) Bound<'py, PyTuple>);

impl<'py> Arguments<'py> {
    /// The tensor at a place.
    pub(crate) fn tensor(&self, at: usize) -> PyResult<Operand<'py>> {
        Operand::of(&self.0.get_item(at)?)
    }

    /// The tensors of a list at a place.
    pub(crate) fn tensors(&self, at: usize) -> PyResult<Vec<Operand<'py>>> {
        self.0.get_item(at)?.try_iter()?.map(|tensor| Operand::of(&tensor?)).collect()
    }

    /// The number of a dimension at a place.
    pub(crate) fn size(&self, at: usize) -> PyResult<Size<'py>> {
        self.0.get_item(at).map(Size)
    }

    /// A number at a place that is no dimension.
    pub(crate) fn int(&self, at: usize) -> PyResult<i64> {
        self.0.get_item(at)?.extract()
    }

    /// A truth at a place.
    pub(crate) fn flag(&self, at: usize) -> PyResult<bool> {
        self.0.get_item(at)?.extract()
    }

    /// A number of a shape.
    pub(crate) fn number(&self, number: usize) -> PyResult<Size<'py>> {
        Ok(Size(number.into_pyobject(self.0.py())?.into_any()))
    }

    /// What shares a scale of 4-bit integers, by the number at a place.
    pub(crate) fn granularity(&self, at: usize) -> PyResult<Granularity> {
        Granularity::of(self.int(at)?).map_err(|failure| PyRuntimeError::new_err(failure.to_string()))
    }

    /// The result with the sizes of the first argument, but for the last, which is a dimension at a place.
    pub(crate) fn with_last(&self, at: usize) -> PyResult<Vec<Shape<'py>>> {
        Ok(vec![self.tensor(0)?.with_last(self.size(at)?)])
    }

    /// A result with the sizes of the first argument.
    pub(crate) fn like_first(&self) -> PyResult<Vec<Shape<'py>>> {
        Ok(vec![Shape::new(self.tensor(0)?.sizes)])
    }

    /// A tensor without elements.
    pub(crate) fn empty(&self) -> PyResult<Shape<'py>> {
        Ok(Shape::new([self.number(0)?]))
    }
}

/// The shapes of an operator's results.
pub(crate) type Shapes = for<'py> fn(&Arguments<'py>) -> PyResult<Vec<Shape<'py>>>;
