//! Rotary position embedding (Su et al., 2021), element `i` paired with element `i + d/2`.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use twofour_transformer::cpu::rope::{rotate, rotate_back};

use super::rows;

/// Rotates `x: [.., positions, d]` by the angles whose cosines and sines are `cos, sin: [positions, d/2]`, with a
/// gradient for `x` (the tables are constants).
///
/// Element `i < d/2` of a row is paired with element `i + d/2`, as in Llama. Computed in f32, returned in the dtype of
/// `x`.
///
/// # Errors
/// An odd `d`, or tables of another shape.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (positions, d) = match x.dims() {
        [.., t, d] => (*t, *d),
        other => bail!("rope: expected [.., positions, d], found {other:?}"),
    };
    if !d.is_multiple_of(2) || cos.dims() != [positions, d / 2] || sin.dims() != cos.dims() {
        bail!(
            "rope: x has {positions} positions of {d} elements, so the tables must be [{positions}, {}] and d even; \
             found {:?} and {:?}",
            d / 2,
            cos.dims(),
            sin.dims()
        );
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::rope(x, cos, sin);
    }
    let table = |t: &Tensor| rows::with_slice(t, "rope table", |s| Ok(Arc::<[f32]>::from(s)));
    let op = Rope { cos: table(cos)?, sin: table(sin)?, half: d / 2 };
    rows::operand(x)?.apply_op1(op)?.to_dtype(x.dtype())
}

struct Rope {
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    half: usize,
}

impl Rope {
    fn rotate_all(&self, x: &mut [f32], rotation: impl Fn(&mut [f32], &[f32], &[f32]) + Sync) {
        let half = self.half;
        if half == 0 || self.cos.is_empty() {
            return;
        }
        let positions = self.cos.len() / half;
        rows::for_each(x, 2 * half, |first, x| {
            for (row, x) in x.chunks_exact_mut(2 * half).enumerate() {
                let at = (first + row) % positions * half;
                rotation(x, &self.cos[at..at + half], &self.sin[at..at + half]);
            }
        });
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut y = rows::slice(x, layout, "rope")?.to_vec();
        self.rotate_all(&mut y, rotate);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut dx = rows::with_slice(dy, "rope backward", |dy| Ok(dy.to_vec()))?;
        self.rotate_all(&mut dx, rotate_back);
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}

#[cfg(test)]
mod tests {
    use twofour_transformer::cpu::rope::Table;

    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences, random};

    /// Cosines and sines of the first `positions` rows of a table as tensors `[positions, head_dim / 2]` on the CPU.
    fn tensors(table: &Table, positions: usize) -> Result<(Tensor, Tensor)> {
        let device = candle_core::Device::Cpu;
        let shape = (positions, table.head_dim() / 2);
        let rows = (0..positions).map(|position| table.at(position));
        let (cos, sin): (Vec<&[f32]>, Vec<&[f32]>) = rows.unzip();
        Ok((Tensor::from_vec(cos.concat(), shape, &device)?, Tensor::from_vec(sin.concat(), shape, &device)?))
    }

    #[test]
    fn agrees_with_the_slow_path_in_values_and_gradients() -> Result<()> {
        for (b, h, t, d) in [(2, 3, 7, 8), (1, 1, 1, 2), (2, 2, 40, 64)] {
            let (cos, sin) = tensors(&Table::new(t, d / 2), t)?;
            let case = Case::new(&[vec![b, h, t, d]], 31)?;
            against_reference(
                &case,
                |v| rope(&v[0], &cos, &sin),
                |v| candle_nn::rotary_emb::rope_slow(&v[0], &cos, &sin),
                1e-5,
            )?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        let (cos, sin) = tensors(&Table::new(5, 3), 5)?;
        finite_differences(&Case::new(&[vec![2, 5, 6]], 32)?, |v| rope(&v[0], &cos, &sin))
    }

    #[test]
    fn tables_of_the_wrong_shape_are_refused() -> Result<()> {
        let (cos, sin) = tensors(&Table::new(5, 3), 5)?;
        assert!(rope(&random(&[2, 4, 6], 1)?, &cos, &sin).is_err());
        assert!(rope(&random(&[2, 5, 7], 1)?, &cos, &sin).is_err());
        assert!(rope(&random(&[6], 1)?, &cos, &sin).is_err());
        Ok(())
    }
}
