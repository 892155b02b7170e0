//! AdamW on CUDA tensors.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Mutex,
};

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp2, Layout, Tensor, Var, backend::BackendStorage as _,
    cuda_backend::DeviceId,
};
use twofour_cuda::{
    DataType,
    layer::{DeviceBuffer, LayerContext},
};
use twofour_transformer::{
    cuda as transformer,
    cuda::{AdamWSettings, AdamWTensors, ClippedGradients, GradientClip, StepSchedule, adamw, clip_gradients},
    engine::AdamWStep,
};

use super::{
    context,
    memory::{Locked, Output, Read, read, write},
    not_on_the_cpu,
};
use crate::{Result, float::expect_length};

/// The two moments of a parameter, f32 in device memory.
#[derive(Debug)]
pub(crate) struct Moments {
    first: DeviceBuffer,
    second: DeviceBuffer,
}

impl Moments {
    /// Zeros for a parameter.
    pub(crate) fn new(device: &CudaDevice, len: usize) -> Result<Self> {
        let context = context::of(device)?;
        let zeros = || DeviceBuffer::zeros(&context, DataType::F32, len);
        Ok(Moments { first: zeros()?, second: zeros()? })
    }

    /// Copies in host memory. Waits.
    pub(crate) fn to_host(&self) -> Result<[Vec<f32>; 2]> {
        Ok([self.first.to_host()?, self.second.to_host()?])
    }

    /// Overwrites them. Waits.
    pub(crate) fn write(&mut self, [first, second]: [&[f32]; 2]) -> Result<()> {
        expect_length("the first moment", first.len(), Some(self.first.len()))?;
        expect_length("the second moment", second.len(), Some(self.second.len()))?;
        self.first.write(first)?;
        Ok(self.second.write(second)?)
    }
}

/// What one step of the parameters of a device has in common.
#[derive(Debug)]
struct OfDevice {
    context: LayerContext,
    /// The factor of all gradients, f32 `[1]`, and its bits.
    scale: DeviceBuffer,
    scale_bits: u32,
    /// The constants of the step for each weight decay, by its bits, and the step and the settings that they are for.
    schedules: HashMap<u64, (StepSchedule, Option<(u64, AdamWSettings)>)>,
}

/// The constants of a step in the memory of each device.
#[derive(Debug, Default)]
pub(crate) struct Schedules(HashMap<DeviceId, OfDevice>);

impl Schedules {
    /// Updates a parameter along its gradient.
    pub(crate) fn step(&mut self, var: &Var, gradient: &Tensor, moments: &mut Moments, step: &AdamWStep) -> Result<()> {
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step: count, gradient_scale, .. } = *step;
        let settings = AdamWSettings { learning_rate, beta1, beta2, epsilon, weight_decay };
        let device = context::device_of("a parameter", var.device())?;
        let of_device = match self.0.entry(device.id()) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(entry) => {
                let context = context::of(device)?;
                let scale = DeviceBuffer::from_host(&context, &[1f32])?;
                entry.insert(OfDevice { context, scale, scale_bits: 1f32.to_bits(), schedules: HashMap::new() })
            }
        };
        let OfDevice { context, scale, scale_bits, schedules } = of_device;
        if *scale_bits != gradient_scale.to_bits() {
            scale.write(&[gradient_scale])?;
            *scale_bits = gradient_scale.to_bits();
        }
        let (schedule, known) = match schedules.entry(weight_decay.to_bits()) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(entry) => entry.insert((StepSchedule::new(context)?, None)),
        };
        if *known != Some((count, settings)) {
            schedule.set(count.saturating_sub(1), learning_rate)?;
            schedule.advance(settings, None)?;
            *known = Some((count, settings));
        }
        // Kernels read 16 bytes at a time: a view into the middle of a storage may be aligned to less.
        let gradient = if gradient.layout().start_offset() == 0 { gradient.contiguous()? } else { gradient.copy()? };
        let update = Update { context, scale, schedule, settings, moments: Mutex::new(moments) };
        Ok(var.inplace_op2(&gradient, &update)?)
    }
}

/// The update of one parameter. The operator is borrowed immutably while it runs, hence the lock around the moments.
struct Update<'a> {
    context: &'a LayerContext,
    scale: &'a DeviceBuffer,
    schedule: &'a StepSchedule,
    settings: AdamWSettings,
    moments: Mutex<&'a mut Moments>,
}

impl Update<'_> {
    fn run(
        &self,
        var: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
    ) -> Result<()> {
        let context = self.context;
        let len = layout.shape().elem_count();
        if len == 0 {
            return Ok(());
        }
        let mut moments = self.moments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Moments { first, second } = &mut **moments;
        let (device, is_wide) = (var.device.clone(), var.dtype() == DType::F32);
        let gradient = read("a gradient", context, gradient, gradient_layout)?;
        let mut parameter = write("a parameter", context, var, layout)?;
        // The update of a parameter of 16 bits is computed in f32 and rounded.
        let mut wide = if is_wide { None } else { Some(Output::new(&device, len, DType::F32)?) };
        let mut wide = wide.as_mut().map(|wide| wide.write(context)).transpose()?;
        if let Some(wide) = &mut wide {
            transformer::convert(context, parameter.slice().as_slice(), wide.slice())?;
        }
        let (weight, copy) = match &mut wide {
            Some(wide) => (wide.slice(), Some(parameter.slice())),
            None => (parameter.slice(), None),
        };
        let tensors = AdamWTensors {
            weight,
            copy,
            gradient: gradient.slice(),
            first: first.as_slice_mut(),
            second: second.as_slice_mut(),
            gradient_scale: Some(self.scale.as_slice()),
            skip: None,
        };
        Ok(adamw(context, (1, len), tensors, None, self.schedule, self.settings)?)
    }
}

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> candle_core::Result<()> {
        not_on_the_cpu("adamw")
    }

    fn cuda_fwd(
        &self,
        var: &mut CudaStorage,
        layout: &Layout,
        gradient: &CudaStorage,
        gradient_layout: &Layout,
    ) -> candle_core::Result<()> {
        Ok(self.run(var, layout, gradient, gradient_layout)?)
    }
}

/// The sum of the squares of gradients on any GPUs; NaN or infinite where an element is. Waits.
pub(crate) fn sum_of_squares(gradients: &[&Tensor]) -> Result<f64> {
    let mut left = gradients.to_vec();
    let mut sum = 0.0;
    while let Some(first) = left.first() {
        let device = context::device_of("a gradient", first.device())?.clone();
        let (own, others): (Vec<&Tensor>, Vec<&Tensor>) =
            left.into_iter().partition(|gradient| gradient.device().same_device(&Device::Cuda(device.clone())));
        sum += norm(&device, &own)?.powi(2);
        left = others;
    }
    Ok(sum)
}

/// The norm of gradients on one device as one vector; NaN or infinite where an element is. Squares are summed in f64,
/// and the norm is rounded to f32. Waits.
fn norm(device: &CudaDevice, gradients: &[&Tensor]) -> Result<f64> {
    let context = context::of(device)?;
    let wide = |gradient: &&Tensor| gradient.to_dtype(DType::F32)?.contiguous();
    let gradients = gradients.iter().map(wide).collect::<candle_core::Result<Vec<_>>>()?;
    let locked: Vec<_> = gradients.iter().map(|gradient| Locked::new("a gradient", gradient)).collect();
    let reads = locked.iter().map(|locked| locked.read(&context)).collect::<Result<Vec<_>>>()?;
    let slices: Vec<_> = reads.iter().map(Read::slice).collect();
    let zero = |dtype| DeviceBuffer::zeros(&context, dtype, 1);
    let (mut norm, mut scale, mut non_finite) = (zero(DataType::F32)?, zero(DataType::F32)?, zero(DataType::I32)?);
    let to = ClippedGradients {
        norm: norm.as_slice_mut(),
        scale: scale.as_slice_mut(),
        non_finite: non_finite.as_slice_mut(),
    };
    clip_gradients(&context, &slices, GradientClip::to(f32::INFINITY), to)?;
    Ok(f64::from(norm.to_host::<f32>()?.first().copied().unwrap_or(f32::NAN)))
}
