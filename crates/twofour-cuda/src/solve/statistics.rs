//! Statistics of inputs in device memory.

use twofour::calibration::{CrossProducts, DenseSide, Hessian};

use super::GpuBackend;
use crate::{
    Result,
    arguments::product,
    layer::{Accumulate, DenseLinear, DeviceBuffer, DeviceSlice},
};

/// Sums over tokens, on a GPU, of the products of a layer's inputs, and of what the dense model has for the same tokens
/// with these inputs, where that is asked for: a [`Hessian`] and [`CrossProducts`].
#[derive(Debug)]
pub struct InputSums {
    backend: GpuBackend,
    features: usize,
    tokens: u64,
    own: DeviceBuffer,
    beside: Option<(DenseSide, DeviceBuffer)>,
}

impl InputSums {
    /// No tokens yet, of a layer with this many input features.
    ///
    /// # Errors
    /// Those of the device's memory.
    pub fn new(backend: &GpuBackend, features: usize, beside: Option<DenseSide>) -> Result<Self> {
        let of_beside = |side| -> Result<_> { Ok((side, backend.zeros(product(rows_of(side, features), features)?)?)) };
        Ok(InputSums {
            backend: backend.clone(),
            features,
            tokens: 0,
            own: backend.zeros(product(features, features)?)?,
            beside: beside.map(of_beside).transpose()?,
        })
    }

    /// Adds the inputs of some tokens, f32 `[tokens, features]`, and what the dense model has for them, where the sums
    /// are of that, too.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) and others for tensors that do not fit; those of the device.
    pub fn add(&mut self, x: DeviceSlice<'_>, beside: Option<DeviceSlice<'_>>) -> Result<()> {
        let (context, features) = (&self.backend.context, self.features);
        let tokens = x.len().checked_div(features).unwrap_or(0);
        if tokens == 0 {
            return Ok(());
        }
        let shape = DenseLinear { out_features: features, in_features: features };
        shape.weight_gradient(context, x, x, tokens, Accumulate::Add, self.own.as_slice_mut())?;
        if let (Some((side, sums)), Some(dense)) = (&mut self.beside, beside) {
            let shape = DenseLinear { out_features: rows_of(*side, features), in_features: features };
            shape.weight_gradient(context, dense, x, tokens, Accumulate::Add, sums.as_slice_mut())?;
        }
        self.tokens += tokens as u64;
        Ok(())
    }

    /// Number of input features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// The sums, in host memory.
    ///
    /// # Errors
    /// [`twofour::Error::Statistic`] for inputs whose sums are not finite; those of the device.
    pub fn finish(self) -> Result<(Hessian, Option<CrossProducts>)> {
        let hessian = Hessian::from_matrix(self.features, self.own.to_host()?, self.tokens)?;
        let of_beside = |(side, sums): (DenseSide, DeviceBuffer)| -> Result<CrossProducts> {
            Ok(CrossProducts::from_sums(side, self.features, sums.to_host()?)?)
        };
        Ok((hessian, self.beside.map(of_beside).transpose()?))
    }
}

/// Features of what the dense model has.
fn rows_of(side: DenseSide, features: usize) -> usize {
    if let DenseSide::Outputs(outputs) = side { outputs } else { features }
}
