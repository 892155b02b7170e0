//! What the kernels read as parameters, in their memory layout; `kernel.cu` says what each is.

use super::operands::AdamWSettings;
use crate::DevicePtr;

/// The kernel's parameters, in its memory layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AdamWParameters {
    pub(super) weight: DevicePtr,
    pub(super) gradient: DevicePtr,
    pub(super) first: DevicePtr,
    pub(super) second: DevicePtr,
    pub(super) tiles: DevicePtr,
    pub(super) gradient_scale: DevicePtr,
    pub(super) numbers_at: DevicePtr,
    pub(super) copy: DevicePtr,
    pub(super) skip: DevicePtr,
    pub(super) rate_at: DevicePtr,
    pub(super) partial: DevicePtr,
    pub(super) count: u64,
    pub(super) rate: f64,
    pub(super) pruned_decay: f64,
    pub(super) cols: u32,
    pub(super) copy_is_bf16: u32,
    pub(super) is_frozen: u32,
    pub(super) decays_pruned: u32,
    pub(super) masked_decay: f32,
    pub(super) beta1: f32,
    pub(super) rest1: f32,
    pub(super) beta2: f32,
    pub(super) rest2: f32,
    pub(super) epsilon: f32,
    pub(super) frozen_scale: f32,
    pub(super) numbers: AdamWNumbers,
}

/// The constants of a step that depend on its number and learning rate, in the kernel's memory layout.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct AdamWNumbers {
    pub(super) decay: f32,
    pub(super) first_scale: f32,
    pub(super) second_scale: f32,
    pub(super) learning_rate: f32,
}

impl AdamWNumbers {
    pub(super) fn of(step: u64, settings: AdamWSettings) -> Self {
        let AdamWSettings { learning_rate, beta1, beta2, weight_decay, .. } = settings;
        Self {
            decay: (1.0 - learning_rate * weight_decay) as f32,
            first_scale: corrected(beta1, step),
            second_scale: corrected(beta2, step),
            learning_rate: learning_rate as f32,
        }
    }
}

/// The parameters of the kernel that counts steps, in its memory layout.
#[repr(C)]
pub(super) struct RawSchedule {
    pub(super) step: DevicePtr,
    pub(super) learning_rate: DevicePtr,
    pub(super) numbers: DevicePtr,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) weight_decay: f64,
    pub(super) skip: DevicePtr,
}

/// The parameters of the kernel that adds the changes of second moments, in its memory layout.
#[repr(C)]
pub(super) struct ChangesParameters {
    pub(super) partial: DevicePtr,
    pub(super) sum: DevicePtr,
    pub(super) count: u32,
}

/// What corrects a moment for its start at zero after so many steps.
pub(super) fn corrected(beta: f64, step: u64) -> f32 {
    (1.0 / (1.0 - beta.powf(step as f64))) as f32
}
