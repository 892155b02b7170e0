//! One parameter's AdamW update, as candle's in-place operator.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp2, Layout, bail};
use rayon::prelude::*;
use twofour::{Arithmetic, Element};

use crate::linear::float::Float;

/// Elements that one task updates.
pub(super) const TASK: usize = 1 << 14;

/// The numbers of one parameter's update.
#[derive(Debug, Clone, Copy)]
pub(super) struct Update {
    pub(super) scale: f32,
    pub(super) decay: f32,
    pub(super) beta1: f32,
    pub(super) rest1: f32,
    pub(super) beta2: f32,
    pub(super) rest2: f32,
    pub(super) first_scale: f32,
    pub(super) second_scale: f32,
    pub(super) epsilon: f32,
    pub(super) learning_rate: f32,
}

impl Update {
    fn run<T: Element + Arithmetic>(&self, parameter: &mut [T], gradient: &[T], first: &mut [f32], second: &mut [f32]) {
        for (((p, g), m), v) in parameter.iter_mut().zip(gradient).zip(first).zip(second) {
            let g = g.to_f32() * self.scale;
            *m = *m * self.beta1 + g * self.rest1;
            *v = *v * self.beta2 + g * g * self.rest2;
            let step = *m * self.first_scale / ((*v * self.second_scale).sqrt() + self.epsilon);
            *p = T::from_f32(p.to_f32() * self.decay - step * self.learning_rate);
        }
    }
}

/// [`Update`] as candle's in-place operator. The operator is borrowed immutably while it runs, hence the lock.
pub(super) struct Step<'a> {
    pub(super) update: Update,
    pub(super) moments: Mutex<(&'a mut Vec<f32>, &'a mut Vec<f32>)>,
}

impl InplaceOp2 for Step<'_> {
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

impl Step<'_> {
    fn run<T: Float>(&self, p: &mut [T], l: &Layout, g: &[T], gl: &Layout) -> candle_core::Result<()> {
        let (Some((start, end)), Some((g_start, g_end))) = (l.contiguous_offsets(), gl.contiguous_offsets()) else {
            bail!("adamw: the parameter is not contiguous");
        };
        let mut moments = self.moments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (first, second) = &mut *moments;
        p[start..end]
            .par_chunks_mut(TASK)
            .zip(g[g_start..g_end].par_chunks(TASK))
            .zip(first.par_chunks_mut(TASK).zip(second.par_chunks_mut(TASK)))
            .for_each(|((p, g), (m, v))| self.update.run(p, g, m, v));
        Ok(())
    }
}
