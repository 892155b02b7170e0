//! One parameter's AdamW update, as candle's in-place operator.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp2, Layout, bail};
use twofour_transformer::{
    cpu::adamw::{self, AdamWSlices},
    engine::AdamWStep,
};

use crate::float::{Float, convert, update_as};

/// The update of one parameter. The operator is borrowed immutably while it runs, hence the lock around the moments.
pub(super) struct Update<'a> {
    pub(super) step: AdamWStep,
    pub(super) moments: Mutex<&'a mut [Vec<f32>; 2]>,
}

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, var: &mut CpuStorage, l: &Layout, gradient: &CpuStorage, gl: &Layout) -> candle_core::Result<()> {
        match (var, gradient) {
            (CpuStorage::F32(p), CpuStorage::F32(g)) => self.run(p, l, g, gl),
            (CpuStorage::BF16(p), CpuStorage::BF16(g)) => self.run(p, l, g, gl),
            (CpuStorage::F16(p), CpuStorage::F16(g)) => self.run(p, l, g, gl),
            _ => bail!("adamw: parameter and gradient must both be F32, BF16 or F16"),
        }
    }
}

impl Update<'_> {
    fn run<T: Float>(&self, p: &mut [T], l: &Layout, g: &[T], gl: &Layout) -> candle_core::Result<()> {
        let (Some((start, end)), Some((g_start, g_end))) = (l.contiguous_offsets(), gl.contiguous_offsets()) else {
            bail!("adamw: the parameter is not contiguous");
        };
        let mut moments = self.moments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let [first, second] = &mut **moments;
        let gradient = convert::<T, f32>(&g[g_start..g_end]);
        update_as::<T, f32>(&mut p[start..end], |parameter| {
            adamw::step(&self.step, AdamWSlices { parameter, gradient: &gradient, first, second }, None);
            Ok(())
        })?;
        Ok(())
    }
}
