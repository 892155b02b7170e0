//! Device time of GPU kernels: contenders by turns, between two events, after the second-level cache was flushed.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, sys::CUevent_flags};
use half::bf16;
use serde::Serialize;
use twofour::select::Transposable;
use twofour_cuda::{
    Device, Stream,
    compiler::Compiler,
    prune::{BothWays, Choice, DenseWeight, Element, MetaOrder, NO_NAN, Packed, Pruner, Watch, first_nan},
};

use super::random::Random;

/// The GPU that figures belong to.
#[derive(Debug, Serialize)]
pub(crate) struct Gpu {
    /// Its name, as the driver tells it.
    pub(crate) gpu: String,
    /// What kernels are compiled for.
    pub(crate) architecture: String,
    /// Its multiprocessors.
    pub(crate) multiprocessors: u32,
    /// The CUDA version that the driver supports.
    pub(crate) driver: String,
    /// The compiler's version; null where kernels came from the cache.
    pub(crate) nvrtc: Option<String>,
}

/// What GPU this is.
pub(crate) fn gpu(device: &Device) -> Result<Gpu> {
    let (major, minor) = device.driver_version()?;
    Ok(Gpu {
        gpu: device.name()?,
        architecture: device.architecture().to_string(),
        multiprocessors: device.multiprocessors(),
        driver: format!("{major}.{minor}"),
        nvrtc: Compiler::find().map(|compiler| format!("{}.{}", compiler.version().0, compiler.version().1)),
    })
}

/// One contender's time for one weight.
#[derive(Debug, Serialize)]
pub(crate) struct PruneRow {
    /// Of the weight; compressed values are bf16.
    pub(crate) dtype: &'static str,
    /// Rows and columns.
    pub(crate) shape: [usize; 2],
    /// Whose.
    pub(crate) contender: &'static str,
    /// The rule, or what was done.
    pub(crate) kernel: &'static str,
    /// Median, microseconds.
    pub(crate) us: f64,
    /// The least, microseconds.
    pub(crate) min_us: f64,
    /// The most, microseconds.
    pub(crate) max_us: f64,
    /// Of the bytes that must be read and written.
    pub(crate) gb_per_s: f64,
}

/// The weights that are pruned.
pub(crate) const PRUNE_SHAPES: [(usize, usize); 5] =
    [(4096, 14336), (14336, 4096), (8192, 8192), (1024, 4096), (4096, 1024)];

/// More than any second-level cache.
const FLUSH: usize = 256 << 20;

/// Times pruning of a random weight both ways, by the rules that people use, beside a plain copy of as many bytes.
pub(crate) fn prune(device: &Device, (rows, cols): (usize, usize), rounds: u32) -> Result<Vec<PruneRow>> {
    let stream = device.context().new_stream()?;
    let mut random = Random::new();
    // The sum of four is bell-shaped enough: ties between magnitudes are what matters.
    let mut number = || (0..4).map(|_| random.float()).sum::<f32>();
    let wide: Vec<f32> = (0..rows * cols).map(|_| number()).collect();
    let narrow: Vec<bf16> = wide.iter().map(|v| bf16::from_f32(*v)).collect();
    let (wide, narrow) = (stream.clone_htod(&wide)?, stream.clone_htod(&narrow)?);
    let packed = || -> Result<(CudaSlice<u16>, CudaSlice<u32>)> {
        Ok((stream.alloc_zeros(rows * cols / 2)?, stream.alloc_zeros(rows * cols / 32)?))
    };
    let (values, meta) = packed()?;
    let (values_transposed, meta_transposed) = packed()?;
    let nan = stream.clone_htod(&[NO_NAN])?;
    let at = |pointer: (u64, _)| pointer.0;
    let to = BothWays {
        packed: Some(Packed { values: at(values.device_ptr(&stream)), meta: at(meta.device_ptr(&stream)) }),
        transposed: Some(Packed {
            values: at(values_transposed.device_ptr(&stream)),
            meta: at(meta_transposed.device_ptr(&stream)),
        }),
        tiles: None,
    };
    let watch = Watch { nan: at(nan.device_ptr(&stream)), flips: None };
    let from_wide = Pruner::new(device, Element::F32, Element::BF16)?;
    let from_narrow = Pruner::new(device, Element::BF16, Element::BF16)?;
    let (wide_at, narrow_at) = (at(wide.device_ptr(&stream)), at(narrow.device_ptr(&stream)));
    let run = |pruner: &Pruner, data: u64, rule: Transposable| {
        let weight = DenseWeight { data, rows, cols };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been waited for.
        unsafe {
            pruner.both_ways(Stream(stream.cu_stream()), weight, Choice::Rule(rule), to, MetaOrder::Canonical, watch)
        }
    };

    // Bytes an element: the weight, and twice half a value and an eighth of a byte.
    let bytes = |weight: f64| (weight + 2.25) * (rows * cols) as f64;
    // A copy reads as many bytes as it writes.
    let copied = (bytes(2.0) / 2.0) as usize;
    let source: CudaSlice<u8> = stream.alloc_zeros(copied)?;
    let mut target: CudaSlice<u8> = stream.alloc_zeros(copied)?;
    let mut timer = Timer::new(device, &stream)?;
    let mut contenders: Vec<Contender> =
        vec![Contender { dtype: "bf16", rule: None, bytes: bytes(2.0), times: Vec::new() }];
    for (dtype, weight) in [("bf16", 2.0), ("f32", 4.0)] {
        for rule in [Transposable::GreedyAbs, Transposable::Optimal] {
            contenders.push(Contender { dtype, rule: Some(rule), bytes: bytes(weight), times: Vec::new() });
        }
    }
    for round in 0..rounds + 2 {
        for Contender { dtype, rule, times, .. } in &mut contenders {
            let (pruner, data) = if *dtype == "f32" { (&from_wide, wide_at) } else { (&from_narrow, narrow_at) };
            let us = timer.time(|| match rule {
                None => Ok(stream.memcpy_dtod(&source, &mut target)?),
                Some(rule) => Ok(run(pruner, data, *rule)?),
            })?;
            // The first rounds warm up.
            if round >= 2 {
                times.push(us);
            }
        }
    }
    let found = stream.clone_dtoh(&nan)?;
    stream.synchronize()?;
    first_nan(found[0], cols).context("random weights")?;
    let row = |Contender { dtype, rule, bytes, mut times }: Contender| {
        times.sort_by(f64::total_cmp);
        let us = times[times.len() / 2];
        let (contender, kernel) = rule.map_or(("copy", "device to device"), |rule| ("twofour", rule.name()));
        let (min_us, max_us) = (times[0], times[times.len() - 1]);
        PruneRow { dtype, shape: [rows, cols], contender, kernel, us, min_us, max_us, gb_per_s: bytes / us * 1e-3 }
    };
    Ok(contenders.into_iter().map(row).collect())
}

/// Who is timed: the kernels with a rule, or without one a plain copy.
struct Contender {
    dtype: &'static str,
    rule: Option<Transposable>,
    /// That must be read and written.
    bytes: f64,
    /// Microseconds.
    times: Vec<f64>,
}

/// Times what is launched on a stream.
struct Timer<'a> {
    stream: &'a Arc<CudaStream>,
    flush: CudaSlice<u8>,
    begun: cudarc::driver::CudaEvent,
    ended: cudarc::driver::CudaEvent,
}

impl<'a> Timer<'a> {
    fn new(device: &Device, stream: &'a Arc<CudaStream>) -> Result<Self> {
        let event = || device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Self { stream, flush: stream.alloc_zeros(FLUSH)?, begun: event()?, ended: event()? })
    }

    /// Microseconds of device time, from a cold second-level cache.
    fn time(&mut self, launch: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.stream.memset_zeros(&mut self.flush)?;
        self.begun.record(self.stream)?;
        launch()?;
        self.ended.record(self.stream)?;
        self.ended.synchronize()?;
        Ok(f64::from(self.begun.elapsed_ms(&self.ended)?) * 1e3)
    }
}
