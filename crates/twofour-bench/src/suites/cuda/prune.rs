//! The suite `prune`.

use anyhow::{Context, Result};
use clap::Args;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;
use serde::Serialize;
use twofour::select::Transposable;
use twofour_cli::{
    measure::random::Random,
    present::{table::Table, units},
};
use twofour_cuda::{
    DataType, Device, Error, Stream,
    compare::{Contender, Timer},
    raw::{
        DenseWeight, MetaOrder, Packed,
        prune::{BothWays, MaskChoice, NO_NAN, Pruner, Watch, first_nan},
    },
};

use super::{
    shapes::WeightOptions,
    suite::{Bench, Suite},
};

/// One contender's time for one weight.
#[derive(Debug, Serialize)]
pub(crate) struct PruneRow {
    /// Data type of the weight.
    dtype: &'static str,
    /// Data type of the compressed values.
    output: &'static str,
    /// Rows and columns.
    shape: [usize; 2],
    /// The contender.
    contender: &'static str,
    /// The rule or operation.
    kernel: String,
    /// Median, microseconds.
    us: f64,
    /// The minimum, microseconds.
    min_us: f64,
    /// The maximum, microseconds.
    max_us: f64,
    /// 10^9 bytes a second, counting the bytes that must be read and written.
    gb_per_s: f64,
}

/// The weights that are pruned.
const SHAPES: [[usize; 2]; 5] = [[4096, 14336], [14336, 4096], [8192, 8192], [1024, 4096], [4096, 1024]];

/// Measure selecting a transposable mask and compressing the weight and its transpose from one read
///
/// Beside a plain copy of as many bytes.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda prune --shape 4096x4096 --rounds 20 -o prune.json")]
pub(crate) struct Prune {
    #[command(flatten)]
    weights: WeightOptions,
}

impl Suite for Prune {
    const NAME: &'static str = "prune";
    const NOTE: &'static str = "Medians. TB/s: of the bytes that must be read and written, whatever the kernel does.";
    type Row = PruneRow;

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<PruneRow>> {
        let weights = self.weights.weights(&SHAPES);
        let mut rows = Vec::new();
        for (done, shape) in weights.iter().enumerate() {
            bench.begin(&format!("prune [{}, {}]", shape[0], shape[1]), done, weights.len());
            rows.extend(prune(bench.device, *shape, bench.rounds)?);
        }
        Ok(rows)
    }

    fn table(rows: &[PruneRow]) -> Table {
        let mut table = Table::of(["weight", "dtype", "baseline", "kernel"], ["time", "TB/s"]);
        for row in rows {
            table.row([
                format!("[{}, {}]", row.shape[0], row.shape[1]),
                if row.dtype == row.output { row.dtype.into() } else { format!("{} to {}", row.dtype, row.output) },
                row.contender.into(),
                row.kernel.clone(),
                units::microseconds(row.us),
                format!("{:.2}", row.gb_per_s / 1e3),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        self.weights.told()
    }
}

/// Times pruning of a random weight along both axes, by the common rules, beside a plain copy of as many bytes.
fn prune(device: &Device, [rows, cols]: [usize; 2], rounds: u32) -> Result<Vec<PruneRow>> {
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
        ..BothWays::default()
    };
    let watch = Watch { nan: at(nan.device_ptr(&stream)), flips: None };
    let from_wide = Pruner::new(device, DataType::F32, DataType::BF16)?;
    let from_narrow = Pruner::new(device, DataType::BF16, DataType::BF16)?;
    let to_eight_bits = Pruner::new(device, DataType::BF16, DataType::E4M3);
    let to_eight_bits = match to_eight_bits {
        Err(Error::Unsupported { .. }) => None,
        pruner => Some(pruner?),
    };
    let (wide_at, narrow_at) = (at(wide.device_ptr(&stream)), at(narrow.device_ptr(&stream)));
    let run = |pruner: &Pruner, data: u64, rule: Transposable| {
        let weight = DenseWeight { data, rows, cols };
        // SAFETY: all memory is allocated above, as long as the shape asks for, and lives until the stream has been
        // waited for.
        unsafe {
            pruner.both_ways(
                Stream(stream.cu_stream()),
                weight,
                MaskChoice::Rule(rule),
                to,
                MetaOrder::Canonical,
                watch,
            )
        }
    };

    // Bytes an element: the weight, and twice half a value and an eighth of a byte.
    let bytes = |weight: f64, value: f64| (weight + value + 0.25) * (rows * cols) as f64;
    // A copy reads as many bytes as it writes.
    let copied = (bytes(2.0, 2.0) / 2.0) as usize;
    let source: CudaSlice<u8> = stream.alloc_zeros(copied)?;
    let mut target: CudaSlice<u8> = stream.alloc_zeros(copied)?;
    let mut timer = Timer::new(device, &stream)?;
    let copy = || Ok(stream.memcpy_dtod(&source, &mut target)?);
    let mut contenders: Vec<Contender<'_, anyhow::Error>> = vec![Contender::new("copy", "device to device", copy)];
    // Of each contender, the types of the weight and of the values, and the bytes that must be read and written.
    let mut works = vec![("bf16", "bf16", bytes(2.0, 2.0))];
    let mut add = |pruner, data, rule: Transposable, work| {
        contenders.push(Contender::new("twofour", rule.name(), move || Ok(run(pruner, data, rule)?)));
        works.push(work);
    };
    for rule in [Transposable::GreedyAbs, Transposable::GreedySigned, Transposable::Optimal] {
        add(&from_narrow, narrow_at, rule, ("bf16", "bf16", bytes(2.0, 2.0)));
        add(&from_wide, wide_at, rule, ("f32", "bf16", bytes(4.0, 2.0)));
    }
    if let Some(pruner) = &to_eight_bits {
        add(pruner, narrow_at, Transposable::GreedyAbs, ("bf16", "e4m3", bytes(2.0, 1.0)));
    }
    let times = timer.alternate(&mut contenders, rounds)?;
    drop(contenders);
    let found = stream.clone_dtoh(&nan)?;
    stream.synchronize()?;
    first_nan(found[0], cols).context("random weights")?;
    let rows = times.into_iter().zip(works).map(|(time, (dtype, output, bytes))| PruneRow {
        dtype,
        output,
        shape: [rows, cols],
        contender: time.contender,
        kernel: time.kernel,
        us: time.us,
        min_us: time.min_us,
        max_us: time.max_us,
        gb_per_s: bytes / time.us * 1e-3,
    });
    Ok(rows.collect())
}
