//! Steps of several parameters in one launch.

use super::{AdamW, AdamWPhase, AdamWSettings, AdamWState, AdamWStep, launch::AdamWParameters, parameters_of};
use crate::{DevicePtr, Result, Stream, device::Launch, raw::grid::BLOCK};

/// Parameters of a launch.
const TENSORS: usize = 64;

/// What the kernel reads of one parameter, in its memory layout.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Tensor {
    weight: DevicePtr,
    gradient: DevicePtr,
    first: DevicePtr,
    second: DevicePtr,
    copy: DevicePtr,
    count: u64,
    copy_is_bf16: u32,
    unused: u32,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct Together {
    tensors: [Tensor; TENSORS],
    others: AdamWParameters,
}

// What a kernel may have as parameters.
const _: () = assert!(size_of::<Together>() <= 4096);

impl AdamW {
    /// Updates several parameters and their moments in place, each as [`AdamW::step`] does without a mask: for the many
    /// vectors of a model, whose launches take longer than their bytes. The masked decay of `step` is not looked at.
    ///
    /// # Errors
    /// Those of [`AdamW::step`].
    ///
    /// # Safety
    /// That of [`AdamW::step`], for each parameter.
    pub unsafe fn step_together(
        &self,
        stream: Stream,
        parameters: &[AdamWState],
        settings: AdamWSettings,
        step: AdamWStep,
    ) -> Result<()> {
        let step = AdamWStep { masked_decay: None, ..step };
        let of = |parameter: &AdamWState| parameters_of(*parameter, settings, step, AdamWPhase::default());
        let all = parameters.iter().map(of).collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = all.into_iter().filter(|own| own.count > 0).collect();
        for some in all.chunks(TENSORS) {
            let mut together = Together { tensors: [Tensor::default(); TENSORS], others: some[0] };
            for (tensor, own) in together.tensors.iter_mut().zip(some) {
                let AdamWParameters { weight, gradient, first, second, copy, count, copy_is_bf16, .. } = *own;
                *tensor = Tensor { weight, gradient, first, second, copy, count, copy_is_bf16, unused: 0 };
            }
            let most = some.iter().map(|own| own.count).max().unwrap_or(0);
            let blocks = most.div_ceil(4 * u64::from(BLOCK)) as u32;
            let launch = Launch::simple((blocks, some.len() as u32), BLOCK);
            // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function
            // requires.
            unsafe { self.together.launch(stream, launch, &together) }?;
        }
        Ok(())
    }
}
