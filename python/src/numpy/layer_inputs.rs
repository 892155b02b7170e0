//! Pruning a linear layer by what is known of its inputs.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};
use twofour::{
    Arithmetic, DataType, Element, MatrixRef, Result,
    calibration::{CrossProducts, DenseSide, Statistic, StatisticKind},
    match_element,
    solve::{Cpu, METHODS, Pruned, Pruning, Rank, low_rank, method},
};

use super::{
    dtype::{self, elements, store},
    errors::exception,
    masks::parse,
    unlocked,
};

/// The inputs of a linear layer, and those that it has in the dense model beside them.
#[pyclass(module = "twofour._native")]
pub(super) struct LayerInputs {
    features: usize,
    statistic: Option<Statistic>,
    beside: Option<CrossProducts>,
}

#[pymethods]
impl LayerInputs {
    /// No inputs yet, of so many features.
    #[new]
    fn new(features: usize) -> PyResult<Self> {
        let statistic = Statistic::new(StatisticKind::Hessian, features).map_err(exception)?;
        Ok(LayerInputs { features, statistic, beside: None })
    }

    /// Adds float32 inputs, `[tokens, features]` as bytes, and those of the same tokens in the dense model. These are
    /// given with every batch or with none.
    #[pyo3(signature = (inputs, dense=None))]
    fn add(
        &mut self,
        py: Python<'_>,
        inputs: PyReadonlyArray1<'_, u8>,
        dense: Option<PyReadonlyArray1<'_, u8>>,
    ) -> PyResult<()> {
        let (inputs, dense) = (inputs.as_slice()?, dense.as_ref().map(|dense| dense.as_slice()).transpose()?);
        let is_first = self.statistic.as_ref().is_none_or(|statistic| statistic.norms().tokens() == 0);
        if !is_first && dense.is_some() != self.beside.is_some() {
            return Err(PyValueError::new_err(
                "inputs of the dense model were given with some batches and not with others: give them with all or \
                 none",
            ));
        }
        unlocked(py, || {
            let inputs = elements::<f32>(inputs);
            if let Some(dense) = dense {
                let beside = match &mut self.beside {
                    Some(beside) => beside,
                    none => none.insert(CrossProducts::new(DenseSide::Inputs, self.features)?),
                };
                beside.add(&elements::<f32>(dense), &inputs)?;
            }
            self.statistic.as_mut().map_or(Ok(()), |statistic| statistic.add(&inputs))
        })
    }

    /// Writes the pruned matrix to `out`.
    #[allow(clippy::too_many_arguments)]
    fn prune(
        &self,
        py: Python<'_>,
        matrix: PyReadonlyArray1<'_, u8>,
        dtype: &str,
        rows: usize,
        pattern: &str,
        method_name: &str,
        swaps: usize,
        refit: usize,
        compensation: f64,
        mut out: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let Some(method) = method(method_name) else {
            let names: Vec<&str> = METHODS.iter().map(|method| method.name()).collect();
            let message = format!("method must be one of {}, and is {method_name:?}", names.join(", "));
            return Err(PyValueError::new_err(message));
        };
        let name = dtype;
        let dtype = dtype::named(name)?;
        if !matches!(dtype, DataType::F32 | DataType::F16 | DataType::BF16) {
            let message = format!("weights of {name} are not adjusted: prune the weight before it is quantized");
            return Err(PyTypeError::new_err(message));
        }
        let pruning = Pruning { swaps, refit, compensation, ..Pruning::new(method, parse(pattern)?) };
        pruning.expect_pattern().map_err(exception)?;
        let (bytes, out) = (matrix.as_slice()?, out.as_slice_mut()?);
        unlocked(py, || match_element!(dtype, |T| self.pruned::<T>(bytes, rows, &pruning, out)))
    }

    /// The rank that a number, or a share such as `5%`, is for a matrix of so many rows.
    fn rank(&self, rank: &str, rows: usize) -> PyResult<usize> {
        Ok(rank.parse::<Rank>().map_err(exception)?.of(rows, self.features))
    }

    /// Writes the factors of a float32 matrix, `[rows, rank]` and `[rank, features]`, to `left` and `right`.
    fn low_rank(
        &self,
        py: Python<'_>,
        matrix: PyReadonlyArray1<'_, u8>,
        rows: usize,
        rank: usize,
        mut left: PyReadwriteArray1<'_, u8>,
        mut right: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let bytes = matrix.as_slice()?;
        let (left, right) = (left.as_slice_mut()?, right.as_slice_mut()?);
        unlocked(py, || {
            let values = elements::<f32>(bytes);
            let factors = low_rank(MatrixRef::new(rows, self.features, &values)?, self.statistic.as_ref(), rank)?;
            store("left factor", factors.left(), left)?;
            store("right factor", factors.right(), right)
        })
    }
}

impl LayerInputs {
    fn pruned<T: Element + Arithmetic>(
        &self,
        bytes: &[u8],
        rows: usize,
        pruning: &Pruning,
        out: &mut [u8],
    ) -> Result<()> {
        let values = elements::<T>(bytes);
        let wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        let matrix = MatrixRef::new(rows, self.features, &wide)?;
        let pruned: Vec<T> = match pruning.prune(&Cpu, matrix, self.statistic.as_ref(), self.beside.as_ref())? {
            Pruned::Mask(mask) => mask.apply(MatrixRef::new(rows, self.features, &values)?)?,
            Pruned::Solved(solved) => solved.weight.iter().map(|value| T::from_f32(*value)).collect(),
        };
        store("pruned matrix", &pruned, out)
    }
}
