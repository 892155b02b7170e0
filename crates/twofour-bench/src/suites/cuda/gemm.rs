//! The suite `gemm`.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use clap::Args;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use serde::Serialize;
use twofour::int4::Granularity;
use twofour_cli::present::{table::Table, units};
use twofour_cuda::{
    DataType, Device, Stream,
    cache::Cache,
    compare::{Contender, Dispatcher, Engine, Int4Trial, RandomInt4, RandomWeight, Time, Timer, Trial, read::Reader},
    problem::{GemmProblem, Int4Problem, Order},
    raw::gemm::int4::Int4Gemm,
};

use super::{
    sample::read,
    shapes::{ProductOptions, product},
    suite::{Bench, Suite},
};

/// One contender's time for one GEMM.
#[derive(Debug, Serialize)]
pub(crate) struct GemmRow {
    /// Data type of W and X.
    pub(crate) dtype: &'static str,
    /// Data type of the result.
    pub(crate) output: &'static str,
    /// Tokens, in_features, out_features.
    pub(crate) shape: [usize; 3],
    /// The contender.
    pub(crate) contender: &'static str,
    /// Its kernel.
    pub(crate) kernel: String,
    /// Median, microseconds.
    pub(crate) us: f64,
    /// The minimum, microseconds.
    pub(crate) min_us: f64,
    /// The maximum, microseconds.
    pub(crate) max_us: f64,
    /// 10^12 operations a second, counting those of the dense GEMM.
    pub(crate) tflops: f64,
    /// 10^9 bytes of the weight a second, dense or 2:4 as the contender reads it.
    pub(crate) gb_per_s: f64,
    /// Microseconds a launch after a second of back-to-back launches; null where that was not measured.
    pub(crate) sustained_us: Option<f64>,
}

/// Tokens, in_features, out_features: squares, and layers of Llama 3 8B and of the ViT that 2:4 training was designed
/// for.
const SHAPES: [[usize; 3]; 6] = [
    [8192, 8192, 8192],
    [4096, 4096, 4096],
    [4096, 4096, 14336],
    [4096, 14336, 4096],
    [13008, 1024, 4096],
    [13008, 4096, 1024],
];

/// Data types of prefill.
const TYPES: [DataType; 4] = [DataType::BF16, DataType::F16, DataType::E4M3, DataType::I8];

/// The most tokens for which GEMMs are memory-bound.
const FEW: usize = 64;

/// The contender with int4 weights, and the kernel that only reads those.
const INT4: &str = "twofour-int4";
const READ_INT4: &str = "read-int4";

/// The shape that is also measured with back-to-back launches.
const SUSTAINED: [usize; 3] = SHAPES[0];

/// Measure GEMMs of many tokens (prefill) with a 2:4 weight
///
/// Ours, cuSPARSELt's best algorithm, and cuBLASLt's best with the weight as if it were dense; and the dispatcher's
/// choice. TWOFOUR_CUSPARSELT and TWOFOUR_CUBLASLT can name the libraries' folders.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda gemm --rounds 20 -o gemm.json")]
pub(crate) struct Gemms {
    #[command(flatten)]
    products: ProductOptions,
}

impl Suite for Gemms {
    const NAME: &'static str = "gemm";
    const NOTE: &'static str =
        "Medians. TFLOP/s: of the dense product's operations. Sustained: after a second without a pause.";
    const HAS_LIBRARIES: bool = true;
    type Row = GemmRow;

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<GemmRow>> {
        // Results of other runs are not used.
        let forgetful = tempfile::tempdir()?;
        let dispatcher = Dispatcher::with_cache(bench.device, &Cache::at(forgetful.path()));
        let shapes = self.products.products(&SHAPES);
        let works: Vec<_> = TYPES.iter().flat_map(|t| shapes.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, shape)) in works.iter().enumerate() {
            bench.begin(&format!("{element} {}", product(*shape)), done, works.len());
            let [tokens, reduction, features] = *shape;
            let layer = RandomLayer::new(bench.device, &dispatcher, *element, [features, reduction])?;
            rows.extend(layer.measure(tokens, bench.rounds)?);
        }
        Ok(rows)
    }

    fn table(rows: &[GemmRow]) -> Table {
        let mut table = Table::of(["product", "dtype", "baseline", "kernel"], ["time", "TFLOP/s", "GB/s", "sustained"]);
        for row in rows {
            table.row([
                product(row.shape),
                row.dtype.into(),
                row.contender.into(),
                row.kernel.clone(),
                units::microseconds(row.us),
                format!("{:.0}", row.tflops),
                format!("{:.0}", row.gb_per_s),
                row.sustained_us.map_or_else(String::new, units::microseconds),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        self.products.told()
    }
}

/// A random 2:4 weight on a device.
pub(super) struct RandomLayer<'a> {
    device: &'a Device,
    dispatcher: &'a Dispatcher,
    stream: Arc<CudaStream>,
    element: DataType,
    features: usize,
    reduction: usize,
    weight: Arc<RandomWeight>,
    /// The int4 weight, for small batches of 16-bit X.
    int4: Option<Arc<RandomInt4>>,
}

impl<'a> RandomLayer<'a> {
    pub(super) fn new(
        device: &'a Device,
        dispatcher: &'a Dispatcher,
        element: DataType,
        [features, reduction]: [usize; 2],
    ) -> Result<Self> {
        let stream = device.context().new_stream()?;
        let weight = Arc::new(RandomWeight::new(&stream, element, features, reduction)?);
        Ok(Self { device, dispatcher, stream, element, features, reduction, weight, int4: None })
    }

    /// Returns a weight that is also measured in int4.
    pub(super) fn with_int4(self) -> Result<Self> {
        let weight = RandomInt4::new(&self.stream, self.features, self.reduction, Granularity::Group)?;
        let int4 = Some(Arc::new(weight));
        Ok(Self { int4, ..self })
    }

    /// Times the GEMM with a number of tokens: the best of our methods, of cuSPARSELt's algorithms, and of cuBLASLt's
    /// with the dense weight, as the dispatcher measured or cached them; and the engine that the dispatcher chooses. A
    /// library without an algorithm for the problem is left out.
    pub(super) fn measure(&self, tokens: usize, rounds: u32) -> Result<Vec<GemmRow>> {
        let Self { device, dispatcher, ref stream, element, features, reduction, ref weight, ref int4 } = *self;
        let output = if element.bytes() == 2 { element } else { DataType::BF16 };
        let problem = GemmProblem::plain(element, output, features, tokens, reduction);
        let trial = Trial::with_weight(device, dispatcher.libraries(), problem, stream, weight.clone())?;
        let choice = dispatcher.choose_by(&trial)?;
        let engines = ["cublaslt", "cusparselt", "twofour"].into_iter().filter_map(|name| choice.of(name));
        let engines: Vec<Engine> = engines.map(|measured| measured.how).collect();
        let products = engines.iter().map(|e| Ok(trial.product(*e)?)).collect::<Result<Vec<_>>>()?;
        let chosen = trial.product(choice.best().how)?;
        // Our best method, as the dispatcher measured or cached it.
        let (granularity, order) = (Granularity::Group, Order::TokensFirst);
        let four_bits =
            Int4Problem { element, output, granularity, features, tokens, reduction, order, epilogue: None };
        let int4 = int4.as_ref().map(|weight| Int4Trial::with_weight(device, four_bits, stream, weight.clone()));
        let int4 = int4.transpose()?;
        let decode = match &int4 {
            Some(trial) => {
                let method = dispatcher.choose_int4_by(trial)?.best().how;
                Some((trial, Int4Gemm::with(device, four_bits, method)?))
            }
            None => None,
        };
        let reader = &Reader::new(device)?;
        let mut contenders: Vec<Contender<'_>> = products.iter().map(|product| trial.contender(product)).collect();
        contenders.push(trial.contender(&chosen).named("dispatch"));

        let mut timer = Timer::new(device, stream)?;
        // The bandwidth limit of small batches.
        let weight_bytes = features * reduction * element.bytes() / 2 + features * reduction / 8;
        let (raw, sink) = (Stream(stream.cu_stream()), stream.alloc_zeros::<u8>(16)?);
        let (read_at, sink) = (weight.dense.device_ptr(stream).0, sink.device_ptr(stream).0);
        // SAFETY: a dense weight is longer than a 2:4 one; both live until the stream has been waited for.
        let reading = |bytes| move || unsafe { reader.read(raw, read_at, bytes, sink) };
        if tokens <= FEW {
            contenders.push(Contender::new("read", "the 2:4 weight's bytes", reading(weight_bytes)));
        }

        if let Some((trial, decode)) = &decode {
            contenders.push(trial.contender(decode).named(INT4));
            contenders.push(Contender::new(
                READ_INT4,
                "the four-bit weight's bytes",
                reading(four_bits.weight_bytes()),
            ));
        }

        let times = timer.alternate(&mut contenders, rounds)?;
        let sustained: Vec<Option<f64>> = if [tokens, reduction, features] == SUSTAINED {
            let sustained = contenders.iter_mut().map(|c| Ok(Some(timer.sustained(c, Duration::from_secs(2))?)));
            sustained.collect::<Result<_>>()?
        } else {
            vec![None; contenders.len()]
        };
        drop(contenders);
        self.expect_alike(&trial, &engines, int4.as_ref().map(Int4Trial::out))?;

        let operations = 2.0 * (tokens * reduction * features) as f64;
        let row = |(time, sustained_us): (Time, Option<f64>)| {
            let weights = match time.contender {
                "cublaslt" => features * reduction * element.bytes(),
                INT4 | READ_INT4 => four_bits.weight_bytes(),
                _ => weight_bytes,
            };
            GemmRow {
                dtype: element.name(),
                output: output.name(),
                shape: [tokens, reduction, features],
                contender: time.contender,
                kernel: time.kernel,
                us: time.us,
                min_us: time.min_us,
                max_us: time.max_us,
                tflops: operations / time.us * 1e-6,
                gb_per_s: weights as f64 / time.us * 1e-3,
                sustained_us,
            }
        };
        Ok(times.into_iter().zip(sustained).map(row).collect())
    }

    /// Checks that contenders compute the same results; for int4 within quantization error.
    fn expect_alike(&self, trial: &Trial, engines: &[Engine], int4: Option<&CudaSlice<u8>>) -> Result<()> {
        let Some(dense) = engines.iter().find(|engine| matches!(engine, Engine::CublasLt(_))) else { return Ok(()) };
        let problem = trial.problem();
        // Every kernel computes the first results in its first wave and with all of its CTAs.
        let sample = problem.tokens.min(64) * problem.features;
        let dense = read(&self.stream, trial.out(*dense), 0..sample, problem.output)?;
        let size = dense.iter().map(|v| v.abs()).sum::<f64>() / dense.len() as f64;
        for engine in engines.iter().filter(|engine| !matches!(engine, Engine::CublasLt(_))) {
            let found = read(&self.stream, trial.out(*engine), 0..sample, problem.output)?;
            let apart = found.iter().zip(&dense).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let name = engine.name();
            ensure!(apart < 0.05 * size, "{name} and cublaslt differ by {apart} where results are {size} on average");
        }
        if let Some(int4) = int4 {
            let found = read(&self.stream, int4, 0..sample, problem.output)?;
            let apart = found.iter().zip(&dense).map(|(a, b)| (a - b).abs()).sum::<f64>() / dense.len() as f64;
            ensure!(apart < 0.25 * size, "{INT4} and cublaslt differ by {apart} on average where results are {size}");
        }
        Ok(())
    }
}
