//! `twofour bench cuda`.

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use twofour_cuda::{DataType, Device, cache::Cache, dispatch::Dispatcher};

use super::{
    super::train::TrainDevice,
    cuda_answer::{Answer, Rows, Versions},
    cuda_shapes::ShapeOptions,
    cuda_tables::product,
    grid::GridOptions,
    output::Output,
};
use crate::{
    exit::{Usage, Verdict},
    measure::cuda::{
        self, AttentionRow, GemmRow, GenerationRow, GridEpilogue, Layer, Libraries, PruneRow, StepModel, StepRow,
        TrainRow,
    },
    present::{Screen, progress::Progress},
};

/// Measure the kernels of a GPU
///
/// Device time between events, contenders interleaved in shuffled order, random data, and a cold L2; the result is the median.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour bench cuda --suite prune
  twofour bench cuda --suite gemm --rounds 20 -o gemm.json
  twofour bench cuda --suite layer --shape 3072x768 --tokens 2048,8192
  twofour bench cuda --suite step --model vit-l -o step-vit.json
  twofour bench cuda --suite generate --batch 1,8 --weights dense-bf16,2:4-bf16 --rounds 5
  twofour bench cuda --suite grid --limit 240 -o grid.json       # again and again until all cells are there
  twofour bench cuda --suite grid --epilogue bias --shapes layers.txt -o bias.json

Suites:
  prune   selecting a transposable mask and compressing W and its transpose from one read, beside a plain copy of as many bytes
  gemm    GEMMs of many tokens with a 2:4 weight: ours, cuSPARSELt's best algorithm, and cuBLASLt's best with the weight as if it
          were dense; and the dispatcher's cached choice. Both libraries must be installed; TWOFOUR_CUSPARSELT and TWOFOUR_CUBLASLT can name their folders
  decode  memory-bound GEMMs of small batches by the same contenders, beside a kernel that reads the 2:4 weight's bytes and
          does nothing else; in bf16 also with an int4 weight with a scale for every 128 columns, and a read of its bytes
  train-linear
          a layer forward and backward: dense by cuBLASLt, and 2:4 with a new transposable mask in every step, the weight gradient dense
          or from an unbiased 2:4 estimate of the output gradient
  layer   a training step of a layer with bias by the 2:4 layer's calls, its mask selected and packed in every step, and dense by cuBLASLt with the bias
          and its gradient in epilogues
  attention
          attention forward and backward in bf16: kernels that keep scores in registers, and batched GEMMs with a softmax
  step    whole training steps with AdamW in bf16, of a GPT at GPT-2 774M's sizes and at a third of its layers, over 8 sequences of 1024 bytes, and
          of ViT-L over 32 images of 257 tokens and 8 of 1626: dense, and with 2:4 MLPs whose masks are selected in every step, transposable
          and for the GPT along rows; with the device time of each phase, and the memory. --model selects: gpt2-12-layers, gpt2-774m,
          vit-l-32x257, vit-l-8x1626, or all of gpt2 or vit-l. bench/python/gpt_step.py and vit_step.py measure PyTorch's
  block   training steps of models of one block of these: gpt2-block, vit-l-block-32x257, vit-l-block-8x1626
  generate
          whole-model decoding with random weights of --model's shape, prompt 64, by a replayed CUDA graph, for each of --batch and --weights:
          tokens a second, bytes, bandwidth; all forms of weights are in memory at a time
  overhead
          host microseconds of a planned call, ours and the libraries'
  grid    the linear layers of GPT-2, BERT, ViT, Llama, Qwen and Mixtral, fused and single, at 1 to 16384 tokens in bf16 and up to 8192 in
          f16, e4m3 and i8: our fastest kernel, cuBLASLt's and cuSPARSELt's, a dispatcher's choice, and the choice of the cost model
          without measurement. About 2,100 cells. The JSON is written every few seconds, and a later run with the same -o FILE measures only what is
          missing there (--force begins anew); a heat map is written beside it as .svg (`twofour bench draw` draws it again). --epilogue measures
          layers with a bias, GELU or scales, whose kernels and choices are others")]
pub(super) struct Cuda {
    /// What to measure
    #[arg(long, value_enum, value_name = "SUITE", default_value_t = Suite::Prune)]
    suite: Suite,

    /// The GPU: cuda, or cuda:NUMBER
    #[arg(long, default_value = "cuda", value_name = "DEVICE", value_parser = gpu)]
    device: usize,

    /// Runs of each contender that count
    ///
    /// In the suite grid this is the maximum; long launches have fewer runs.
    #[arg(long, default_value_t = 30, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(5..=10_000))]
    rounds: u32,

    #[command(flatten)]
    shape: ShapeOptions,

    /// Weights of the suite grid instead of the models': `OUT IN [NAME]` on each line, or a JSON list of [OUT, IN, "NAME"]
    #[arg(long, value_name = "FILE")]
    shapes: Option<PathBuf>,

    /// What the GEMMs of the suite grid do with their sums; with an epilogue cuSPARSELt is left out
    #[arg(long, value_enum, value_name = "EPILOGUE")]
    epilogue: Option<GridEpilogue>,

    /// Seconds after which the suite grid begins no further cell
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    /// The shape of the suite generate: llama-3-8b (the default), llama-3.2-1b, llama-3.2-3b; or the models of the suites step and block (all by default)
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Sequences at a time in the suite generate
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", value_name = "NUMBERS", value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: Vec<u32>,

    /// Tokens that a sequence's cache has room for in the suite generate
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(128..=8192))]
    context: u32,

    /// Weights in the suite generate: dense-bf16, 2:4-bf16, dense-int8, 2:4-int8, 2:4-int4; dense-int8-cublaslt, int8-weight-only (dense, a scale for each row), int4-weight-only (dense, groups of 64)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "dense-bf16,2:4-bf16,dense-int8,2:4-int8,2:4-int4",
        value_name = "FORMS"
    )]
    weights: Vec<String>,

    #[command(flatten)]
    output: Output,
}

/// The number of a GPU, which may stand alone.
fn gpu(text: &str) -> Result<usize, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match text.parse::<TrainDevice>()? {
        TrainDevice::Cuda(numbers) if numbers.len() == 1 => Ok(numbers[0]),
        TrainDevice::Cuda(_) => Err("kernels are measured on one GPU, as in cuda:0".to_owned()),
        TrainDevice::Cpu => Err("these are kernels of a GPU; `twofour bench cpu` measures the CPU".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// Prune, and compress the weight and its transpose
    Prune,
    /// GEMMs of many tokens (prefill)
    Gemm,
    /// GEMMs of small batches (decode)
    Decode,
    /// A layer forward and backward
    TrainLinear,
    /// A training step of the 2:4 layer
    Layer,
    /// Attention forward and backward
    Attention,
    /// Training steps of a GPT and of a ViT
    Step,
    /// Training steps of one block
    Block,
    /// Whole-model decoding
    Generate,
    /// Host time of a call
    Overhead,
    /// The layers of models
    Grid,
}

impl Suite {
    pub(super) fn name(self) -> &'static str {
        match self {
            Suite::Prune => "prune",
            Suite::Gemm => "gemm",
            Suite::Decode => "decode",
            Suite::TrainLinear => "train-linear",
            Suite::Layer => "layer",
            Suite::Attention => "attention",
            Suite::Step => "step",
            Suite::Block => "block",
            Suite::Generate => "generate",
            Suite::Overhead => "overhead",
            Suite::Grid => "grid",
        }
    }
}

/// Measures training a layer: data type, tokens with input and output features, rounds.
type TrainMeasure = fn(&Device, &Libraries, DataType, [usize; 3], u32) -> Result<Vec<TrainRow>>;

impl Cuda {
    /// Runs the command.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        self.shape.expect_of(self.suite)?;
        if self.suite == Suite::Grid {
            return self.grid().run(screen);
        }
        let of_grid = [
            (self.shapes.is_some(), "--shapes"),
            (self.epilogue.is_some(), "--epilogue"),
            (self.limit.is_some(), "--limit"),
        ];
        for (given, option) in of_grid {
            if given {
                bail!(Usage(format!("{option} is for --suite grid, and this is {}", self.suite.name())));
            }
        }
        let models = match self.suite {
            Suite::Step => self.models(&cuda::STEP_MODELS)?,
            Suite::Block => self.models(&cuda::BLOCK_MODELS)?,
            Suite::Generate => vec![],
            _ if self.model.is_some() => {
                let reason = "--model is for --suite generate, step and block, and this is";
                bail!(Usage(format!("{reason} {}", self.suite.name())));
            }
            _ => vec![],
        };
        self.output.expect_writable()?;
        let device = Device::open(self.device)?;
        let mut progress = screen.progress();
        let (rows, libraries) = match self.suite {
            Suite::Prune => (Rows::Prune(self.prune(&device, &mut progress)?), None),
            Suite::Attention => (Rows::Attention(self.attention(&device, &mut progress)?), None),
            Suite::Generate => (Rows::Generation(self.generation(&device, &mut progress)?), None),
            Suite::Step | Suite::Block => (Rows::Step(self.step(&device, &mut progress, &models)?), None),
            _ => {
                let libraries = Libraries::open(&device);
                libraries.missing().into_iter().for_each(|missing| screen.warn(missing));
                let [cublaslt, cusparselt] = libraries.versions()?;
                let rows = self.beside(&libraries, &device, &mut progress)?;
                (rows, Some(Versions { cublaslt, cusparselt }))
            }
        };
        drop(progress);
        let answer = Answer { machine: cuda::gpu(&device)?, libraries, command: self.told(), rows };
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    fn grid(&self) -> GridOptions<'_> {
        GridOptions {
            device: self.device,
            rounds: self.rounds,
            shapes: self.shapes.as_deref(),
            epilogue: self.epilogue.unwrap_or_default(),
            limit: self.limit.map(|seconds| Duration::from_secs(seconds.into())),
            output: &self.output,
        }
    }

    /// Measures the suites with NVIDIA's libraries as contenders.
    fn beside(&self, libraries: &Libraries, device: &Device, progress: &mut Progress) -> Result<Rows> {
        Ok(match self.suite {
            Suite::Decode => Rows::Gemm(self.decode(device, progress)?),
            Suite::TrainLinear => Rows::Train(self.train(device, libraries, progress, cuda::train_linear)?),
            Suite::Layer => Rows::Train(self.train(device, libraries, progress, cuda::layer)?),
            Suite::Overhead => Rows::Overhead(cuda::overhead(device, libraries, self.rounds)?),
            _ => Rows::Gemm(self.gemm(device, progress)?),
        })
    }

    /// The shapes and types of training by `measure`.
    fn train(
        &self,
        device: &Device,
        libraries: &Libraries,
        progress: &mut Progress,
        measure: TrainMeasure,
    ) -> Result<Vec<TrainRow>> {
        let shapes = self.shape.products(&cuda::TRAIN_SHAPES);
        let works: Vec<_> = cuda::TRAIN_TYPES.iter().flat_map(|t| shapes.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, shape)) in works.iter().enumerate() {
            progress.steps(&format!("{element} {}", product(*shape)), done as u64, works.len() as u64);
            rows.extend(measure(device, libraries, *element, *shape, self.rounds)?);
        }
        Ok(rows)
    }

    fn generation(&self, device: &Device, progress: &mut Progress) -> Result<Vec<GenerationRow>> {
        let model = self.shape();
        let Some(config) = cuda::shape(model) else {
            bail!(Usage(format!("--model {model}: expected llama-3-8b, llama-3.2-1b or llama-3.2-3b")));
        };
        let mut weights = vec![];
        for name in &self.weights {
            match cuda::WEIGHTS.iter().find(|(known, _)| known == name) {
                Some((_, form)) => weights.push((name.clone(), *form)),
                None => {
                    let known: Vec<&str> = cuda::WEIGHTS.iter().map(|(name, _)| *name).collect();
                    bail!(Usage(format!("--weights {name}: expected some of {}", known.join(", "))));
                }
            }
        }
        let batches: Vec<usize> = self.batch.iter().map(|batch| *batch as usize).collect();
        let (mut done, all) = (0, weights.len() as u64 * (1 + batches.len() as u64));
        let settings = (batches.as_slice(), self.context as usize, self.rounds as usize);
        cuda::generation(device, model, &config, &weights, settings, &mut |what| {
            progress.steps(what, done, all);
            done += 1;
        })
    }

    fn prune(&self, device: &Device, progress: &mut Progress) -> Result<Vec<PruneRow>> {
        let works = self.shape.weights(&cuda::PRUNE_SHAPES);
        let mut rows = Vec::new();
        for (done, shape) in works.iter().enumerate() {
            progress.steps(&format!("prune [{}, {}]", shape[0], shape[1]), done as u64, works.len() as u64);
            rows.extend(cuda::prune(device, *shape, self.rounds)?);
        }
        Ok(rows)
    }

    fn attention(&self, device: &Device, progress: &mut Progress) -> Result<Vec<AttentionRow>> {
        let works = cuda::ATTENTION_SHAPES;
        let mut rows = Vec::new();
        for (done, shape) in works.into_iter().enumerate() {
            let what = format!("attention, {} x {} tokens", shape.batch, shape.positions);
            progress.steps(&what, done as u64, works.len() as u64);
            rows.extend(cuda::attention(device, shape, self.rounds)?);
        }
        Ok(rows)
    }

    /// The shape of the suite generate.
    fn shape(&self) -> &str {
        self.model.as_deref().unwrap_or("llama-3-8b")
    }

    /// The models of a suite that were asked for.
    fn models(&self, all: &[StepModel]) -> Result<Vec<StepModel>> {
        let given = self.shape.models(self.suite)?;
        let Some(name) = &self.model else { return Ok(if given.is_empty() { all.to_vec() } else { given }) };
        if !given.is_empty() {
            bail!(Usage("--model and --shape each name what is trained; leave one out".to_owned()));
        }
        let models: Vec<_> = cuda::named(all, name).cloned().collect();
        if models.is_empty() {
            let known: Vec<_> = all.iter().map(StepModel::name).collect();
            let known = known.join(", ");
            bail!(Usage(format!(
                "--model {name}: expected {known}, or what some of these names begin with: gpt2, vit-l"
            )));
        }
        Ok(models)
    }

    fn step(&self, device: &Device, progress: &mut Progress, models: &[StepModel]) -> Result<Vec<StepRow>> {
        let mut rows = Vec::new();
        for (done, model) in models.iter().enumerate() {
            progress.steps(model.name(), done as u64, models.len() as u64);
            rows.extend(cuda::step(device, model, self.rounds)?);
        }
        Ok(rows)
    }

    fn gemm(&self, device: &Device, progress: &mut Progress) -> Result<Vec<GemmRow>> {
        // Results of other runs are not used.
        let forgetful = tempfile::tempdir()?;
        let dispatcher = Dispatcher::with_cache(device, &Cache::at(forgetful.path()));
        let shapes = self.shape.products(&cuda::GEMM_SHAPES);
        let works: Vec<_> = cuda::GEMM_TYPES.iter().flat_map(|t| shapes.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, shape)) in works.iter().enumerate() {
            progress.steps(&format!("{element} {}", product(*shape)), done as u64, works.len() as u64);
            let [tokens, reduction, features] = *shape;
            let layer = Layer::random(device, &dispatcher, *element, [features, reduction])?;
            rows.extend(layer.measure(tokens, self.rounds)?);
        }
        Ok(rows)
    }

    fn decode(&self, device: &Device, progress: &mut Progress) -> Result<Vec<GemmRow>> {
        // Results of other runs are not used.
        let forgetful = tempfile::tempdir()?;
        let dispatcher = Dispatcher::with_cache(device, &Cache::at(forgetful.path()));
        let (layers, counts) = (self.shape.weights(&cuda::DECODE_LAYERS), self.shape.tokens(&cuda::DECODE_TOKENS));
        let works: Vec<_> = cuda::DECODE_TYPES.iter().flat_map(|t| layers.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, layer)) in works.iter().enumerate() {
            progress.steps(&format!("{element} [{}, {}]", layer[0], layer[1]), done as u64, works.len() as u64);
            let layer = Layer::random(device, &dispatcher, *element, *layer)?;
            let layer = if *element == DataType::BF16 { layer.with_int4()? } else { layer };
            for tokens in &counts {
                rows.extend(layer.measure(*tokens, self.rounds)?);
            }
        }
        Ok(rows)
    }

    /// The command as one would type it again.
    fn told(&self) -> String {
        let mut told = format!(
            "twofour bench cuda --suite {} --device {} --rounds {}",
            self.suite.name(),
            self.device,
            self.rounds
        );
        if self.suite == Suite::Generate {
            let batch: Vec<String> = self.batch.iter().map(u32::to_string).collect();
            let (batch, weights) = (batch.join(","), self.weights.join(","));
            told +=
                &format!(" --model {} --batch {batch} --context {} --weights {weights}", self.shape(), self.context);
        } else if let Some(model) = &self.model {
            told += &format!(" --model {model}");
        }
        told += &self.shape.told();
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_as_elsewhere_or_by_its_number() {
        assert_eq!(["0", "3", "cuda", "cuda:2"].map(gpu), [Ok(0), Ok(3), Ok(0), Ok(2)]);
        assert!(["cpu", "cuda:0,1", "-1", "gpu", ""].map(gpu).iter().all(Result::is_err));
    }
}
