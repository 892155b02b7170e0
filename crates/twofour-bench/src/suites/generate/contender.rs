//! This program as a contender.

use std::{
    io::{BufRead, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use half::{bf16, f16};
use twofour::int4::Granularity;
use twofour_cli::exit::Usage;
use twofour_nn::model::{Checkpoint, Decoder, Inference, LanguageModel, RandomWeights, Sampling, TransformerConfig};

use super::generation::{Introduction, Task, Times};

/// The model that is measured.
#[derive(Debug, Clone)]
pub(crate) struct ModelSource {
    /// The name of a published model, or a checkpoint's directory.
    pub(crate) model: String,
    /// Layers, if not the model's own number.
    pub(crate) layers: Option<usize>,
    /// Tokens of the vocabulary, if not the model's own number.
    pub(crate) vocabulary: Option<usize>,
}

/// The weights of a contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Weights {
    /// As they are in the checkpoint
    Stored,
    /// Dense f32
    DenseF32,
    /// Dense bf16
    DenseBf16,
    /// Dense f16
    DenseF16,
    /// Dense 8-bit integers with a scale for each row
    DenseInt8,
    /// 2:4 f32
    #[value(name = "2:4-f32")]
    SparseF32,
    /// 2:4 bf16
    #[value(name = "2:4-bf16")]
    SparseBf16,
    /// 2:4 bf16; embedding and head dense int8
    #[value(name = "2:4-bf16-int8-head")]
    SparseBf16Int8Head,
    /// 2:4 f16
    #[value(name = "2:4-f16")]
    SparseF16,
    /// 2:4 int8 with a scale for each row; embedding and head dense int8
    #[value(name = "2:4-int8")]
    SparseInt8,
    /// 2:4 int4 with a scale for 128 columns; embedding and head dense int8
    #[value(name = "2:4-int4")]
    SparseInt4,
}

impl Weights {
    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl ModelSource {
    /// The directory, where the model is a checkpoint.
    pub(crate) fn directory(&self) -> Option<PathBuf> {
        Checkpoint::is_at(Path::new(&self.model)).then(|| PathBuf::from(&self.model))
    }

    /// The description of the model that is measured.
    pub(crate) fn config(&self) -> Result<TransformerConfig> {
        let mut config =
            match (TransformerConfig::named(&self.model).filter(TransformerConfig::is_decoder), self.directory()) {
                (Some(config), _) => config,
                (None, Some(directory)) => Checkpoint::open(directory)?.config().clone(),
                (None, None) => {
                    let names: Vec<_> = TransformerConfig::decoders().collect();
                    bail!(Usage(format!(
                        "--model {}: neither a checkpoint's directory nor one of {}",
                        self.model,
                        names.join(", ")
                    )));
                }
            };
        if let Some(layers) = self.layers {
            config.layers = layers;
            config.attention.windows.truncate(layers);
        }
        if let Some(vocabulary) = self.vocabulary {
            config = config.with_vocabulary(vocabulary);
        }
        config.validate()?;
        Ok(config)
    }

    /// The model with weights of that type, random unless they are the stored ones.
    pub(crate) fn decoder(&self, weights: Weights) -> Result<Box<dyn Decoder>> {
        let config = || self.config();
        fn random<T: twofour::kernel::KernelElement>(
            config: TransformerConfig,
            layers: RandomWeights,
            head: RandomWeights,
        ) -> Result<Box<dyn Decoder>> {
            Ok(Box::new(Inference::<T>::random(config, layers, head, 0)?))
        }
        use RandomWeights::{Dense, DenseInt8, Int4, Int8, Sparse};
        match weights {
            Weights::Stored => Ok(LanguageModel::load(&self.model)?.decoder),
            Weights::DenseF32 => random::<f32>(config()?, Dense, Dense),
            Weights::DenseBf16 => random::<bf16>(config()?, Dense, Dense),
            Weights::DenseF16 => random::<f16>(config()?, Dense, Dense),
            Weights::DenseInt8 => random::<bf16>(config()?, DenseInt8, DenseInt8),
            Weights::SparseF32 => random::<f32>(config()?, Sparse, Dense),
            Weights::SparseBf16 => random::<bf16>(config()?, Sparse, Dense),
            Weights::SparseBf16Int8Head => random::<bf16>(config()?, Sparse, DenseInt8),
            Weights::SparseF16 => random::<f16>(config()?, Sparse, Dense),
            Weights::SparseInt8 => random::<bf16>(config()?, Int8, DenseInt8),
            Weights::SparseInt4 => random::<bf16>(config()?, Int4(Granularity::Group), DenseInt8),
        }
    }
}

/// Runs as a contender until `input` ends.
pub(crate) fn serve(source: &ModelSource, weights: Weights, input: impl BufRead, mut output: impl Write) -> Result<()> {
    let decoder = source.decoder(weights)?;
    let mut tell = |line: String| -> Result<()> {
        writeln!(output, "{line}")?;
        Ok(output.flush()?)
    };
    let introduction = Introduction {
        contender: format!("twofour {}", weights.name()),
        version: None,
        weight_bytes: decoder.weight_bytes() as u64,
    };
    tell(serde_json::to_string(&introduction)?)?;
    for line in input.lines() {
        let task: Task = serde_json::from_str(&line?).context("a line of stdin is no task")?;
        tell(serde_json::to_string(&generate(decoder.as_ref(), task)?)?)?;
    }
    Ok(())
}

/// Reads a prompt and writes tokens after it.
fn generate(decoder: &dyn Decoder, Task { prompt, length }: Task) -> Result<Times> {
    let vocabulary = decoder.config().vocabulary();
    let prompt: Vec<u32> = (0..prompt).map(|index| ((300 + index * 7) % vocabulary) as u32).collect();
    let begun = Instant::now();
    let mut first = None;
    // Greedy, and never ended by a token.
    decoder.generate(&prompt, length + 1, Sampling { temperature: 0.0, seed: 0 }, &mut |_| {
        first.get_or_insert_with(|| begun.elapsed());
        ControlFlow::Continue(())
    })?;
    let (all, first) = (begun.elapsed(), first.unwrap_or_default());
    Ok(Times { prefill_s: first.as_secs_f64(), decode_s: (all - first).as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_program_introduces_itself_and_answers_each_task() {
        let source = ModelSource { model: "llama-3.2-1b".to_owned(), layers: Some(1), vocabulary: Some(512) };
        let tasks = "{\"prompt\": 3, \"length\": 2}\n{\"prompt\": 20, \"length\": 0}\n";
        let mut output = vec![];
        serve(&source, Weights::SparseInt4, tasks.as_bytes(), &mut output).unwrap();
        let lines: Vec<&str> = std::str::from_utf8(&output).unwrap().lines().collect();
        let introduction: Introduction = serde_json::from_str(lines[0]).unwrap();
        assert_eq!(introduction.contender, "twofour 2:4-int4");
        // 3.125 bits of each element of the layers, and 8 bits and a scale of the head's.
        let layers = 2048 * (2048 + 2 * 512 + 2048 + 3 * 8192) / 8 * 13 / 4;
        assert_eq!(introduction.weight_bytes, layers + 512 * (2048 + 4));
        let times: Vec<Times> = lines[1..].iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(times.len() == 2 && times[0].decode_s > times[1].decode_s && times[1].prefill_s > 0.0, "{times:?}");
        assert!(serve(&source, Weights::SparseInt4, "hello\n".as_bytes(), vec![]).is_err());
    }

    #[test]
    fn a_model_is_a_name_or_a_directory() {
        let source = |model: &str| ModelSource { model: model.to_owned(), layers: Some(2), vocabulary: None };
        let config = source("llama-3-8b").config().unwrap();
        assert_eq!((config.layers, config.width, config.vocabulary()), (2, 4096, 128_256));
        let error = source("llama-4").config().unwrap_err();
        assert!(error.is::<Usage>() && error.to_string().contains("llama-3.2-1b"), "{error}");
    }
}
