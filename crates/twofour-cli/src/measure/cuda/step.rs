//! The suites `step` and `block`: whole training steps of a GPT, dense and with 2:4 MLPs whose masks are selected in every step.

use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Serialize;
use twofour::{layer::MaskRule, select::Transposable};
use twofour_cuda::{DataType, Device};
use twofour_nn::{
    engine::cuda::CudaEngine,
    model::{DecoderConfig, Gpt, GptConfig},
    recipe::{Method, TrainingSettings},
    train::{Corpus, SparsityPlan, Trainer},
};

/// Sequences of a batch.
const BATCH: usize = 8;

/// Steps of each contender before its first one that counts: plans and memory, then masks.
const WARM_UP: usize = 4;

/// Steps that are launched call by call.
const LAUNCHED: usize = 11;

/// Steps whose phases are measured.
const PHASED: usize = 5;

/// GPT-2 774M's blocks, over bytes.
const LARGE: GptConfig = GptConfig { layers: 36, width: 1280, heads: 20, context: 1024, feed_forward: 5120 };

/// The models of the suite `step`: a third of GPT-2 774M, and all of it.
pub(crate) const STEP_MODELS: [GptConfig; 2] = [GptConfig { layers: 12, ..LARGE }, LARGE];

/// The model of the suite `block`: one block of GPT-2 774M.
pub(crate) const BLOCK_MODELS: [GptConfig; 1] = [GptConfig { layers: 1, ..LARGE }];

/// One contender's training step.
#[derive(Debug, Serialize)]
pub(crate) struct StepRow {
    /// Data type of activations and of GEMM operands; masters, gradients and moments are f32.
    pub(crate) dtype: &'static str,
    /// Layers, width, heads, context, width of the feed-forward block.
    pub(crate) model: [usize; 5],
    /// Parameters.
    pub(crate) parameters: usize,
    /// Sequences of a batch.
    pub(crate) batch: usize,
    /// The contender.
    pub(crate) contender: &'static str,
    /// Whether the contenders' steps were interleaved; otherwise memory holds one model, and they ran one after the other.
    pub(crate) interleaved: bool,
    /// Median milliseconds of a step, as the host sees it.
    pub(crate) ms: f64,
    /// The 90th percentile, milliseconds.
    pub(crate) p90_ms: f64,
    /// The minimum, milliseconds.
    pub(crate) min_ms: f64,
    /// Whether the steps were replays of a CUDA graph.
    pub(crate) captured: bool,
    /// Median milliseconds of steps that are launched call by call.
    pub(crate) launched_ms: f64,
    /// Tokens a second, at the median.
    pub(crate) tokens_per_s: f64,
    /// Device memory that the model, its optimizer and its steps took.
    pub(crate) bytes: usize,
    /// Milliseconds of device time of each phase of a step; the median of steps that were measured apart.
    pub(crate) phases: Vec<Phase>,
    /// The loss of the last step.
    pub(crate) loss: f64,
}

/// A phase of a step.
#[derive(Debug, Serialize)]
pub(crate) struct Phase {
    /// Its name.
    pub(crate) phase: &'static str,
    /// Milliseconds.
    pub(crate) ms: f64,
}

/// How the contenders' MLPs are.
const CONTENDERS: [(&str, Option<MaskRule>); 3] = [
    ("dense", None),
    ("2:4, greedy", Some(MaskRule::Transposable(Transposable::GreedyAbs))),
    ("2:4, magnitude", Some(MaskRule::Magnitude)),
];

/// A contender with its model.
struct Contender {
    name: &'static str,
    trainer: Trainer<CudaEngine>,
    times: Vec<f64>,
    bytes: usize,
    loss: f64,
}

/// Times steps of a model, `rounds` of each contender, interleaved where memory holds all models at once.
pub(crate) fn step(device: &Device, config: GptConfig, rounds: u32) -> Result<Vec<StepRow>> {
    let free = || Ok::<usize, anyhow::Error>(device.context().mem_get_info()?.0);
    let before = free()?;
    let first = Contender::new(device, config, CONTENDERS[0])?;
    let fits = first.bytes.saturating_mul(CONTENDERS.len()) <= before / 20 * 19;
    let mut rows = Vec::new();
    if fits {
        let mut all = vec![first];
        for which in CONTENDERS.into_iter().skip(1) {
            all.push(Contender::new(device, config, which)?);
        }
        for round in 0..rounds as usize {
            // Every round begins with another contender, and every other one goes backwards.
            let mut order: Vec<usize> = (0..all.len()).map(|i| (i + round) % CONTENDERS.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for which in order {
                all[which].step()?;
            }
        }
        for contender in &mut all {
            rows.push(contender.row(config, true)?);
        }
        return Ok(rows);
    }
    let mut held = Some(first);
    for which in CONTENDERS {
        let mut contender = match held.take() {
            Some(first) => first,
            None => Contender::new(device, config, which)?,
        };
        for _ in 0..rounds {
            contender.step()?;
        }
        rows.push(contender.row(config, false)?);
    }
    Ok(rows)
}

impl Contender {
    fn new(device: &Device, config: GptConfig, (name, rule): (&'static str, Option<MaskRule>)) -> Result<Self> {
        let before = device.context().mem_get_info()?.0;
        let settings = settings();
        let engine = CudaEngine::new(device, DataType::BF16)?;
        let model =
            Gpt::build(&engine, &DecoderConfig::from(&config), |name, shape| Ok(values(name, shape.iter().product())))?;
        let layers: Vec<String> = model.linears().map(|linear| linear.name().to_owned()).collect();
        let plan = match rule {
            None => SparsityPlan::dense(),
            Some(rule) => {
                let layers = layers.into_iter().filter(|name| name.contains(".mlp.")).collect();
                SparsityPlan { rule, ..SparsityPlan::of_method(Method::Ste, layers, settings.steps) }
            }
        };
        let trainer = Trainer::with_model(engine, model, &settings, plan, Arc::new(corpus()?))?;
        let mut contender = Contender { name, trainer, times: vec![], bytes: 0, loss: f64::NAN };
        for _ in 0..WARM_UP {
            contender.step()?;
        }
        contender.times.clear();
        contender.bytes = before.saturating_sub(device.context().mem_get_info()?.0);
        Ok(contender)
    }

    fn step(&mut self) -> Result<()> {
        let report = self.trainer.step()?;
        anyhow::ensure!(!report.skipped, "{}: loss or gradients of step {} are not finite", self.name, report.step);
        self.times.push(report.seconds * 1e3);
        self.loss = report.loss;
        Ok(())
    }

    fn row(&mut self, config: GptConfig, interleaved: bool) -> Result<StepRow> {
        let mut times = std::mem::take(&mut self.times);
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times.get(((times.len() - 1) as f64 * share).round() as usize).copied();
        let ms = at(0.5).context("no rounds")?;
        let captured = self.trainer.engine().replayed_steps() > 0;
        self.trainer.engine().capture_steps(false);
        for _ in 0..LAUNCHED {
            self.step()?;
        }
        let launched_ms = median(std::mem::take(&mut self.times));
        let mut phases: Vec<(&'static str, Vec<f64>)> = vec![];
        for _ in 0..PHASED {
            self.trainer.engine().measure_phases();
            self.step()?;
            for (name, ms) in self.trainer.engine().take_phases()? {
                match phases.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, all)) => all.push(ms),
                    None => phases.push((name, vec![ms])),
                }
            }
        }
        let GptConfig { layers, width, heads, context, feed_forward } = config;
        let parameters = self.trainer.model().parameters();
        Ok(StepRow {
            dtype: DataType::BF16.name(),
            model: [layers, width, heads, context, feed_forward],
            parameters: parameters.iter().map(|parameter| parameter.shape().iter().product::<usize>()).sum(),
            batch: BATCH,
            contender: self.name,
            interleaved,
            ms,
            p90_ms: at(0.9).unwrap_or(ms),
            min_ms: at(0.0).unwrap_or(ms),
            captured,
            launched_ms,
            tokens_per_s: (BATCH * context) as f64 / ms * 1e3,
            bytes: self.bytes,
            phases: phases.into_iter().map(|(phase, all)| Phase { phase, ms: median(all) }).collect(),
            loss: self.loss,
        })
    }
}

/// The settings of a run that never ends.
fn settings() -> TrainingSettings {
    TrainingSettings { batch: BATCH, steps: 10_000, warm_up: 100, learning_rate: 3e-4, ..Default::default() }
}

/// A MiB of bytes that look random. The trainer requires a validation part.
fn corpus() -> Result<Corpus> {
    let text = (0..1u32 << 20).map(|at| (bits(at) >> 24) as u8).collect();
    Ok(Corpus::new(text, 0.01)?)
}

/// The median of some numbers.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Bits that look random.
fn bits(at: u32) -> u32 {
    let mixed = (at ^ at >> 16).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35)
}

/// Initial values, of the deviation that a GPT has: drawn quickly, because nothing is learned from them.
fn values(name: &str, count: usize) -> Vec<f32> {
    if name.ends_with("bias") {
        return vec![0.0; count];
    }
    if name.ends_with("norm.weight") {
        return vec![1.0; count];
    }
    let seed = name.bytes().fold(0u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    let value = |at: u32| (bits(at.wrapping_add(seed)) as f32 / u32::MAX as f32 - 0.5) * 0.07;
    (0..count as u32).map(value).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use twofour_nn::{
        engine::cpu::CpuEngine,
        model::{DecoderConfig, Gpt, GptConfig},
        train::{SparsityPlan, Trainer},
    };

    use super::{BATCH, LARGE, bits, corpus, settings, values};

    /// What a GPU is given trains: here with a tiny model of the same context on a CPU.
    #[test]
    fn the_settings_and_the_text_train() {
        corpus().unwrap().expect_sequences_of(LARGE.context).unwrap();
        let config = GptConfig { layers: 1, width: 8, heads: 2, context: 16, feed_forward: 16 };
        let model = Gpt::build(&CpuEngine, &DecoderConfig::from(&config), |name, shape| {
            Ok(values(name, shape.iter().product()))
        })
        .unwrap();
        let corpus = Arc::new(corpus().unwrap());
        let mut trainer = Trainer::with_model(CpuEngine, model, &settings(), SparsityPlan::dense(), corpus).unwrap();
        let report = trainer.step().unwrap();
        assert_eq!((report.skipped, report.targets), (false, BATCH * 16));
    }

    #[test]
    fn initial_values_spread_as_a_gpt_s() {
        let values = values("blocks.0.mlp.up.weight", 100_000);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        let deviation = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!(mean.abs() < 5e-4 && (0.019..0.022).contains(&deviation), "{mean}, {deviation}");
        let mut bytes = [0; 256];
        (0..1u32 << 16).for_each(|at| bytes[(bits(at) >> 24) as usize] += 1);
        assert!(bytes.iter().all(|count| (150..400).contains(count)), "{bytes:?}");
    }
}
