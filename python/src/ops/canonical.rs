//! The canonical form of packed weights: values `[rows, 2 * groups]` and metadata `[rows, words]` of int32.

use twofour::Element;
use twofour_cuda::layer::borrowed;

use super::*;

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("canonical(Tensor packed, int rows, int cols) -> (Tensor values, Tensor meta)", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| parts_shapes(&arguments.size(1)?, &arguments.size(2)?)),
    Operator::new("from_canonical(Tensor values, Tensor meta, int cols) -> Tensor", kernel!(pack_cpu))
        .cuda(kernel!(pack_cuda))
        .shapes(|arguments| {
            let values = arguments.tensor(0)?;
            let [rows, _] = values.matrix()?;
            Ok(vec![shape(values.dtype, values.on_gpu, rows, &arguments.size(2)?)?])
        }),
];

fn cpu(packed: Tensor, rows: usize, cols: usize) -> Result<(Tensor, Tensor)> {
    let dtype = packed.dtype()?;
    for_stored!(dtype, "the packed weight", on_cpu::<T>(&packed, rows, cols))
}

fn on_cpu<T: Stored>(packed: &Tensor, rows: usize, cols: usize) -> Result<(Tensor, Tensor)> {
    to_parts(&T::unpack(packed, rows, cols)?, T::STORED)
}

/// Converts in the host's memory.
fn cuda(packed: Tensor, rows: usize, cols: usize) -> Result<(Tensor, Tensor)> {
    let dtype = packed.dtype()?;
    let (values, meta) = match dtype {
        ScalarType::F32 => to_parts(&wide::compressed(&packed, rows, cols)?, dtype)?,
        _ => for_stored!(dtype, "the packed weight", on_cuda::<T>(&packed, rows, cols))?,
    };
    Ok((values.copied_to(packed.device(), "the values")?, meta.copied_to(packed.device(), "the metadata")?))
}

fn on_cuda<T: Stored>(packed: &Tensor, rows: usize, cols: usize) -> Result<(Tensor, Tensor)> {
    let host = packed.copied_to(Device::HOST, "the packed weight")?;
    to_parts(&borrowed::decode::<T>(&host.elements("the packed weight", T::STORED)?, rows, cols)?, T::STORED)
}

fn pack_cpu(values: Tensor, meta: Tensor, cols: usize) -> Result<Tensor> {
    let dtype = values.dtype()?;
    for_stored!(dtype, "the values", packed_on_cpu::<T>(&values, &meta, cols))
}

fn packed_on_cpu<T: Stored>(values: &Tensor, meta: &Tensor, cols: usize) -> Result<Tensor> {
    T::pack(&from_parts::<T>(values, meta, cols)?)
}

/// Converts in the host's memory.
fn pack_cuda(values: Tensor, meta: Tensor, cols: usize) -> Result<Tensor> {
    let (device, dtype) = (values.device(), values.dtype()?);
    let values = values.copied_to(Device::HOST, "the values")?;
    let meta = meta.copied_to(Device::HOST, "the metadata")?;
    let host = match dtype {
        ScalarType::F32 => in_one_dimension(&from_parts::<f32>(&values, &meta, cols)?.to_dense(), dtype)?,
        _ => for_stored!(dtype, "the values", packed_on_cuda::<T>(&values, &meta, cols))?,
    };
    host.copied_to(device, "the packed weight")
}

fn packed_on_cuda<T: Stored>(values: &Tensor, meta: &Tensor, cols: usize) -> Result<Tensor> {
    in_one_dimension(&borrowed::encode(&from_parts::<T>(values, meta, cols)?)?, T::STORED)
}

fn in_one_dimension<T: Element>(elements: &[T], dtype: ScalarType) -> Result<Tensor> {
    let mut host = Tensor::empty(&[elements.len() as i64], dtype)?;
    host.elements_mut::<T>()?.copy_from_slice(elements);
    Ok(host)
}
