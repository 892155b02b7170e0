//! The loss of a classifier over class indices, fused with its softmax.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use twofour_transformer::cpu::cross_entropy::{gradient_in_place, loss};

use super::rows;

/// Mean of `-log softmax(logits)[target]` over all rows, in nats, as a scalar with a gradient for the logits.
///
/// `logits` is `[.., classes]`; `targets` holds one index (u32 or u8) for each of its rows. Neither probabilities nor
/// their logarithms are stored. Targets are read on the CPU: of CUDA logits give targets on the CPU, or the call waits
/// for the device.
///
/// # Errors
/// A target that is no class, as many targets as there are rows not given, or no rows at all.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let classes = rows::last_dim(logits, "cross_entropy")?;
    let count = logits.elem_count().checked_div(classes).unwrap_or(0);
    if count == 0 || targets.elem_count() != count {
        bail!(
            "cross_entropy: logits have shape {:?}, targets {:?}; it takes one target for each of one or more rows",
            logits.dims(),
            targets.dims()
        );
    }
    let targets = targets.to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>()?;
    if let Some((row, target)) = targets.iter().enumerate().find(|(_, t)| **t as usize >= classes) {
        bail!("cross_entropy: target {target} of row {row} is not one of the {classes} classes");
    }
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        return crate::cuda::cross_entropy(logits, &targets, classes);
    }
    rows::operand(logits)?.apply_op1(CrossEntropy { targets, classes })
}

struct CrossEntropy {
    targets: Vec<u32>,
    classes: usize,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = rows::slice(logits, layout, "cross_entropy")?;
        let mean = loss(logits, self.classes, &self.targets) / self.targets.len() as f64;
        Ok((CpuStorage::F32(vec![mean as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let scale = dloss.to_dtype(DType::F32)?.to_scalar::<f32>()? / self.targets.len() as f32;
        let mut dx = rows::with_slice(logits, "cross_entropy backward", |x| Ok(x.to_vec()))?;
        gradient_in_place(&mut dx, self.classes, &self.targets, scale);
        Ok(Some(Tensor::from_vec(dx, logits.shape(), logits.device())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences, random};

    fn targets(count: usize, classes: u32) -> Result<Tensor> {
        Tensor::from_vec((0..count as u32).map(|i| i * 7 % classes).collect::<Vec<_>>(), count, &Device::Cpu)
    }

    #[test]
    fn agrees_with_candles_in_value_and_gradient() -> Result<()> {
        for (rows, classes) in [(1, 1), (5, 256), (100, 37)] {
            let t = targets(rows, classes as u32)?;
            let case = Case::new(&[vec![rows, classes]], 51)?;
            against_reference(
                &case,
                |v| cross_entropy(&(&v[0] * 5.0)?, &t),
                |v| candle_nn::loss::cross_entropy(&(&v[0] * 5.0)?, &t),
                1e-6,
            )?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        let t = targets(4, 9)?;
        finite_differences(&Case::new(&[vec![2, 2, 9]], 52)?, |v| cross_entropy(&v[0], &t))
    }

    #[test]
    fn bad_targets_are_refused_with_their_place() -> Result<()> {
        let logits = random(&[3, 4], 53)?;
        let error = cross_entropy(&logits, &Tensor::new(&[0u32, 4, 1], &Device::Cpu)?).unwrap_err().to_string();
        assert!(error.contains("target 4 of row 1"), "{error}");
        assert!(cross_entropy(&logits, &targets(2, 4)?).is_err());
        assert!(cross_entropy(&Tensor::zeros((0, 4), DType::F32, &Device::Cpu)?, &targets(0, 4)?).is_err());
        Ok(())
    }
}
