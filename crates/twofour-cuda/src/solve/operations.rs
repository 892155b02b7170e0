//! The operations of solvers on a GPU.

use std::ops::Range;

use twofour::{
    DataType, Mask, MatrixRef, Pattern,
    calibration::Hessian,
    solve::{AlpsState, Backend, Cpu, RefitRows, Values},
};

use super::{GpuBackend, shape};
use crate::{
    Error, Result,
    arguments::{Memory as _, product, side},
    layer::{DeviceBuffer, LayerContext},
    raw::solve::{SolveKernel, SolveParameters},
};

impl From<Error> for twofour::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Core(error) => error,
            other => twofour::Error::Backend(Box::new(other)),
        }
    }
}

/// f32 values on the device.
fn floats(values: &Values) -> twofour::Result<&DeviceBuffer> {
    values.memory()
}

fn floats_mut(values: &mut Values) -> twofour::Result<&mut DeviceBuffer> {
    values.memory_mut()
}

/// A mask on the device, a byte for each element.
struct DeviceMask(DeviceBuffer);

/// f64 numbers of rows, as pairs of elements.
struct RowSums(DeviceBuffer);

fn mask_of(values: &Values) -> twofour::Result<&DeviceBuffer> {
    values.memory::<DeviceMask>().map(|mask| &mask.0)
}

/// The address of values that a kernel reads.
fn read(context: &LayerContext, what: &'static str, values: &DeviceBuffer, len: usize) -> Result<u64> {
    values.as_slice().at(what, context, DataType::F32, len)
}

/// The address of values that a kernel writes.
fn written(context: &LayerContext, what: &'static str, values: &mut DeviceBuffer, len: usize) -> Result<u64> {
    values.as_slice_mut().at(what, context, DataType::F32, len)
}

fn read_mask(context: &LayerContext, mask: &DeviceBuffer, len: usize) -> Result<u64> {
    mask.as_slice().at("a mask", context, DataType::I8, len)
}

impl GpuBackend {
    /// The f64 numbers of rows, in host memory.
    fn sums_to_host(&self, sums: &DeviceBuffer) -> Result<Vec<f64>> {
        let halves: Vec<f32> = sums.to_host()?;
        let number =
            |[low, high]: &[f32; 2]| f64::from_bits(u64::from(high.to_bits()) << 32 | u64::from(low.to_bits()));
        Ok(halves.as_chunks().0.iter().map(number).collect())
    }

    /// The sum over all rows of the products of the elements of two weights.
    fn products_of_rows(&self, a: &DeviceBuffer, b: &DeviceBuffer, cols: usize) -> Result<f64> {
        let (context, (rows, cols)) = (&self.context, shape(a.len(), cols)?);
        let mut sums = self.zeros(2 * rows as usize)?;
        let parameters = SolveParameters {
            a: read(context, "a weight", a, a.len())?,
            b: read(context, "its product", b, a.len())?,
            sums: written(context, "sums of rows", &mut sums, 2 * rows as usize)?,
            rows,
            cols,
            ..SolveParameters::default()
        };
        // SAFETY: the buffers have been found to have so many rows.
        unsafe { self.launch(SolveKernel::RowProducts, &parameters) }?;
        Ok(self.sums_to_host(&sums)?.iter().sum())
    }

    /// The parameters of a refit's kernels.
    fn refit_parameters(&self, rows: &mut RefitRows) -> twofour::Result<SolveParameters> {
        let (context, len) = (&self.context, floats(&rows.weight)?.len());
        let (count, cols) = shape(len, rows.cols)?;
        Ok(SolveParameters {
            a: read(context, "the preconditioner", floats(&rows.inverse)?, rows.cols)?,
            b: read(context, "a direction's product", floats(&rows.product)?, len)?,
            kept: read_mask(context, mask_of(&rows.mask)?, len)?,
            x: written(context, "residuals", floats_mut(&mut rows.residual)?, len)?,
            y: written(context, "weights", floats_mut(&mut rows.weight)?, len)?,
            z: written(context, "directions", floats_mut(&mut rows.direction)?, len)?,
            sums: {
                let sums: &mut RowSums = rows.norms.memory_mut()?;
                written(context, "sums of rows", &mut sums.0, 2 * count as usize)?
            },
            rows: count,
            cols,
            ..SolveParameters::default()
        })
    }
}

impl Backend for GpuBackend {
    fn upload(&self, values: Vec<f32>) -> twofour::Result<Values> {
        Ok(Values::new(DeviceBuffer::from_host(&self.context, &values)?))
    }

    fn download(&self, values: Values) -> twofour::Result<Vec<f32>> {
        Ok(floats(&values)?.to_host()?)
    }

    fn copy(&self, values: &Values) -> twofour::Result<Values> {
        let values = floats(values)?;
        Ok(Values::new(values.copied(0..values.len())?))
    }

    fn zeros(&self, len: usize) -> twofour::Result<Values> {
        Ok(Values::new(GpuBackend::zeros(self, len)?))
    }

    fn row_sums(&self, rows: usize) -> twofour::Result<Values> {
        Ok(Values::new(RowSums(GpuBackend::zeros(self, product(rows, 2)?)?)))
    }

    fn upload_mask(&self, mask: &Mask, rows: Range<usize>) -> twofour::Result<Values> {
        let mut kept = vec![0i8; product(rows.len(), mask.cols())?];
        for (row, kept) in rows.zip(kept.chunks_mut(mask.cols().max(1))) {
            let words = mask.row_words(row);
            kept.iter_mut().enumerate().for_each(|(col, kept)| *kept = (words[col / 64] >> (col % 64) & 1) as i8);
        }
        Ok(Values::new(DeviceMask(DeviceBuffer::from_host(&self.context, &kept)?)))
    }

    fn download_mask(&self, mask: &Values, rows: usize, cols: usize) -> twofour::Result<Mask> {
        let kept: Vec<i8> = mask_of(mask)?.to_host()?;
        if kept.len() != product(rows, cols)? {
            let (what, expected) = ("mask", rows * cols);
            return Err(twofour::Error::Length { what, expected, found: kept.len() });
        }
        Ok(Mask::from_fn(rows, cols, |row, col| kept[row * cols + col] != 0))
    }

    fn product(&self, x: &Values, square: &Values, order: usize, out: &mut Values) -> twofour::Result<()> {
        let (x, square, out) = (floats(x)?, floats(square)?, floats_mut(out)?);
        let (rows, _) = shape(x.len(), order)?;
        Ok(self.multiply((x.as_slice(), rows as usize), (square.as_slice(), order), out.as_slice_mut())?)
    }

    /// In f32; where that does not suffice, in f64 on the CPU.
    fn inverse(&self, square: &Values, order: usize, shift: f32) -> twofour::Result<Result<Values, usize>> {
        let square = floats(square)?;
        let mut shifted = square.copied(0..square.len())?;
        let parameters = SolveParameters {
            x: written(&self.context, "a matrix", &mut shifted, product(order, order)?)?,
            rows: side("rows", order)?,
            shift,
            ..SolveParameters::default()
        };
        // SAFETY: the buffer has been found to have so many rows.
        unsafe { self.launch(SolveKernel::ShiftDiagonal, &parameters) }?;
        if let Ok(inverse) = self.inverse_of(&shifted, order)? {
            return Ok(Ok(Values::new(inverse)));
        }
        let found = Cpu.inverse(&Cpu.upload(square.to_host()?)?, order, shift)?;
        found.map_or_else(|row| Ok(Err(row)), |inverse| self.upload(Cpu.download(inverse)?).map(Ok))
    }

    fn largest(
        &self,
        pattern: Pattern,
        cols: usize,
        fit: &Values,
        added: Option<(f32, &Values)>,
    ) -> twofour::Result<Values> {
        let (context, fit) = (&self.context, floats(fit)?);
        let (rows, columns) = shape(fit.len(), cols)?;
        let (factor, added) = match added {
            None => (0.0, 0),
            Some((factor, values)) => (factor, read(context, "what is added", floats(values)?, fit.len())?),
        };
        let mut mask = DeviceBuffer::zeros(context, DataType::I8, fit.len())?;
        let parameters = SolveParameters {
            a: read(context, "scores", fit, fit.len())?,
            b: added,
            mask: mask.as_slice_mut().at("a mask", context, DataType::I8, fit.len())?,
            rows,
            cols: columns,
            n: pattern.n() as u32,
            m: pattern.m() as u32,
            factor,
            ..SolveParameters::default()
        };
        // SAFETY: the buffers have been found to have so many rows.
        unsafe { self.launch(SolveKernel::Largest, &parameters) }?;
        Ok(Values::new(DeviceMask(mask)))
    }

    fn differences(&self, a: &Values, b: &Values) -> twofour::Result<u64> {
        let (context, a, b) = (&self.context, mask_of(a)?, mask_of(b)?);
        let mut count = DeviceBuffer::from_ids(context, &[0])?;
        let parameters = SolveParameters {
            kept: read_mask(context, a, a.len())?,
            other: read_mask(context, b, a.len())?,
            count: count.as_slice_mut().at("a count", context, DataType::I32, 1).map_err(twofour::Error::from)?,
            elements: a.len() as u64,
            ..SolveParameters::default()
        };
        // SAFETY: both masks have been found to be equally long.
        unsafe { self.launch(SolveKernel::Differences, &parameters) }?;
        Ok(count.ids_to_host()?.first().copied().map_or(0, u64::from))
    }

    fn apply(&self, mask: &Values, _: usize, values: &mut Values) -> twofour::Result<()> {
        let (context, mask, values) = (&self.context, mask_of(mask)?, floats_mut(values)?);
        let len = values.len();
        let parameters = SolveParameters {
            kept: read_mask(context, mask, len)?,
            x: written(context, "weights", values, len)?,
            elements: len as u64,
            ..SolveParameters::default()
        };
        // SAFETY: both have been found to be equally long.
        Ok(unsafe { self.launch(SolveKernel::Apply, &parameters) }?)
    }

    fn alps_right(&self, state: &mut AlpsState, _: usize, penalty: f32, shift: f32) -> twofour::Result<()> {
        let (context, len) = (&self.context, floats(&state.sparse)?.len());
        let parameters = SolveParameters {
            a: read(context, "outputs", floats(&state.outputs)?, len)?,
            b: read(context, "multipliers", floats(&state.multiplier)?, len)?,
            c: read(context, "a fit", floats(&state.fit)?, len)?,
            x: written(context, "a right side", floats_mut(&mut state.sparse)?, len)?,
            elements: len as u64,
            factor: penalty,
            shift,
            ..SolveParameters::default()
        };
        // SAFETY: all have been found to be equally long.
        Ok(unsafe { self.launch(SolveKernel::AlpsRight, &parameters) }?)
    }

    fn alps_project(&self, state: &mut AlpsState, _: usize, mask: &Values, penalty: f32) -> twofour::Result<()> {
        let (context, len) = (&self.context, floats(&state.sparse)?.len());
        let parameters = SolveParameters {
            a: read(context, "a fit", floats(&state.fit)?, len)?,
            kept: read_mask(context, mask_of(mask)?, len)?,
            x: written(context, "weights", floats_mut(&mut state.sparse)?, len)?,
            y: written(context, "multipliers", floats_mut(&mut state.multiplier)?, len)?,
            elements: len as u64,
            factor: penalty,
            ..SolveParameters::default()
        };
        // SAFETY: all have been found to be equally long.
        Ok(unsafe { self.launch(SolveKernel::AlpsProject, &parameters) }?)
    }

    fn refit_begin(&self, rows: &mut RefitRows) -> twofour::Result<()> {
        let parameters = self.refit_parameters(rows)?;
        // SAFETY: all have been found to have so many rows.
        Ok(unsafe { self.launch(SolveKernel::RefitBegin, &parameters) }?)
    }

    fn refit_step(&self, rows: &mut RefitRows) -> twofour::Result<()> {
        let parameters = self.refit_parameters(rows)?;
        // SAFETY: all have been found to have so many rows.
        Ok(unsafe { self.launch(SolveKernel::RefitStep, &parameters) }?)
    }

    fn squared_outputs(&self, hessian: &Hessian, weight: MatrixRef<'_, f32>) -> twofour::Result<f64> {
        let (rows, cols) = (weight.rows(), hessian.features());
        if weight.cols() != cols {
            let (what, found) = ("columns of the weight", weight.cols());
            return Err(twofour::Error::Length { what, expected: cols, found });
        }
        if rows == 0 || cols == 0 {
            return Ok(0.0);
        }
        let square = DeviceBuffer::from_host(&self.context, &hessian.symmetric())?;
        let weight = DeviceBuffer::from_host(&self.context, weight.data())?;
        let mut outputs = GpuBackend::zeros(self, weight.len())?;
        self.multiply((weight.as_slice(), rows), (square.as_slice(), cols), outputs.as_slice_mut())?;
        Ok(self.products_of_rows(&weight, &outputs, cols)?.max(0.0))
    }
}
