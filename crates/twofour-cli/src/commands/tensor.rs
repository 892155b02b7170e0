//! Access to a stored tensor's elements, generic over dtype and form.

use anyhow::{Result, bail};
use twofour::{
    Element, MatrixRef,
    file::{CompressedInfo, Reader, StoredElement, TensorInfo, ValueFormat},
    match_element,
    role::Kernel,
};

/// Returns a plain tensor's elements, in its order.
pub(crate) fn floats(reader: &Reader, name: &str) -> Result<Vec<f32>> {
    fn typed<T: Element + StoredElement>(reader: &Reader, name: &str) -> twofour::Result<Vec<f32>> {
        Ok(reader.tensor(name)?.elements::<T>()?.iter().map(|value| value.to_f32()).collect())
    }
    let Some(dtype) = reader.tensor(name)?.info.dtype.element() else {
        bail!("tensor `{name}` is of a dtype that cannot be pruned");
    };
    Ok(match_element!(dtype, |T| typed::<T>(reader, name))?)
}

/// Code over a matrix of any element type.
pub(crate) trait OnMatrix {
    /// The result.
    type Output;

    /// Computes the result.
    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Self::Output;
}

/// Runs code over a plain two-dimensional tensor. Returns `None` for a dtype that twofour does not support, and for a
/// tensor that is not a matrix.
pub(crate) fn on_plain<C: OnMatrix + Clone>(
    reader: &Reader,
    tensor: &TensorInfo,
    code: C,
) -> Result<Option<C::Output>> {
    match tensor.shape.len() {
        2 => Ok(on_matrices(reader, tensor, code)?.pop()),
        _ => Ok(None),
    }
}

/// Runs code over a plain matrix, over the matrix of a convolution, or over each matrix of experts in one tensor, in
/// order. Returns nothing for a dtype that twofour does not support, and for a tensor of another kind.
pub(crate) fn on_matrices<C: OnMatrix + Clone>(
    reader: &Reader,
    tensor: &TensorInfo,
    code: C,
) -> Result<Vec<C::Output>> {
    fn typed<T: Element + StoredElement, C: OnMatrix + Clone>(
        reader: &Reader,
        (tensor, count, rows, cols): (&TensorInfo, usize, usize, usize),
        code: &C,
    ) -> Result<Vec<C::Output>> {
        let elements = reader.tensor(&tensor.name)?.elements::<T>()?;
        if let Some(kernel) = Kernel::of_weight(&tensor.name, &tensor.shape) {
            let mut matrix = elements.to_vec();
            kernel.to_matrix(&elements, &mut matrix);
            return Ok(vec![code.clone().run(MatrixRef::new(rows, cols, &matrix)?)]);
        }
        let one = |matrix: usize| &elements[matrix * rows * cols..(matrix + 1) * rows * cols];
        (0..count).map(|matrix| Ok(code.clone().run(MatrixRef::new(rows, cols, one(matrix))?))).collect()
    }
    let kernel = Kernel::of_weight(&tensor.name, &tensor.shape);
    let (count, rows, cols) = match (kernel, tensor.shape.as_slice()) {
        (Some(kernel), _) => (1, kernel.rows(), kernel.cols()),
        (None, &[rows, cols]) => (1, rows, cols),
        (None, &[count, rows, cols]) => (count, rows, cols),
        _ => return Ok(vec![]),
    };
    let Some(dtype) = tensor.dtype.element() else { return Ok(vec![]) };
    let place = (tensor, count, rows, cols);
    match_element!(dtype, |T| typed::<T, C>(reader, place, &code))
}

/// Runs code over the dense matrix of a compressed weight, after checking every rule of the compressed form. Of
/// integers with scales it is that of their products.
pub(crate) fn on_compressed<C: OnMatrix>(reader: &Reader, weight: &CompressedInfo, code: C) -> Result<C::Output> {
    fn typed<T: Element + StoredElement, C: OnMatrix>(
        reader: &Reader,
        weight: &CompressedInfo,
        code: C,
    ) -> Result<C::Output> {
        let dense = reader.compressed::<T>(&weight.name)?.to_dense();
        Ok(code.run(MatrixRef::new(weight.rows, weight.cols, &dense)?))
    }
    let products = match weight.format {
        ValueFormat::Int4(_) => Some(reader.int4(&weight.name)?.dequantize()),
        ValueFormat::GroupedI8(_) | ValueFormat::ScaledI8 => Some(reader.int8(&weight.name)?.dequantize()),
        _ => None,
    };
    if let Some(products) = products {
        return Ok(code.run(MatrixRef::new(weight.rows, weight.cols, &products.to_dense())?));
    }
    match_element!(weight.format.dense(), |T| typed::<T, C>(reader, weight, code))
}
