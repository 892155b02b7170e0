//! BERT.

use std::path::Path;

use twofour::{
    DataType, Mask,
    file::{Overwrite, Reader},
};

use super::{
    Checkpoint, CheckpointError, StoredParts,
    opened::Opened,
    place::locate,
    save::{copy_beside, write_weights},
};
use crate::{
    Error, Result,
    engine::Engine,
    model::{
        Bert, BertConfig, EncoderTask, Tokenizer,
        bert::initial,
        config::TransformerConfig,
        families::{
            Kind,
            bert::{ANSWERS, MASKED_DECODER, MASKED_TRANSFORM, OWN_DECODER, layout_of_task},
        },
        file,
        run::{CheckpointModel, Run},
        violations::{beyond_mask, violation},
    },
};

/// An encoder's directory whose configuration and headers were read and checked. Weights are read when an
/// [`Encoder`](crate::model::Encoder) is made of it.
#[derive(Debug)]
pub struct EncoderCheckpoint {
    opened: Opened,
}

impl EncoderCheckpoint {
    /// Opens a directory with `config.json` of `model_type` `bert` and safetensors, or one file of weights or index in
    /// it, or the file of a training run's checkpoint. Heads for tasks, whose names begin with `cls.`, `classifier.` or
    /// `qa_outputs.`, are ignored.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration or tensors that do not fit; those of [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if CheckpointModel::<BertConfig>::is_at(path) {
            return Self::of_run(path);
        }
        let (opened, _) = Opened::new(path, Kind::Encoder)?;
        Ok(EncoderCheckpoint { opened })
    }

    /// Whether the directory has a configuration of `model_type` `bert`, or the path is the checkpoint's file of a run
    /// that trains one.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        let path = path.as_ref();
        CheckpointModel::<BertConfig>::is_at(path) || super::kind(path).is_ok_and(|kind| kind == Some(Kind::Encoder))
    }

    /// The encoder of a training run's checkpoint, as it computes, beside the files of the model that the run leaves,
    /// or has started from.
    fn of_run(path: &Path) -> Result<Self> {
        let checkpoint = CheckpointModel::<BertConfig>::new(Reader::open(path)?)?;
        let BertConfig { encoder, task, .. } = checkpoint.config();
        encoder.validate()?;
        let (layout, _) = layout_of_task(encoder, *task)?;
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = vec![];
        for (ours, tensor) in &layout.tensors {
            tensors.push((tensor.name.clone(), tensor.shape.clone(), checkpoint.values(ours)?));
        }
        for (ours, linear) in &layout.linears {
            let [mut weight, mut bias] =
                [checkpoint.values(&format!("{ours}.weight"))?, checkpoint.values(&format!("{ours}.bias"))?];
            for (name, outputs) in &linear.parts {
                let rest = [weight.len().min(outputs * linear.inputs), bias.len().min(*outputs)];
                let others = [weight.split_off(rest[0]), bias.split_off(rest[1])];
                tensors.push((format!("{name}.weight"), linear.stored_shape(*outputs).to_vec(), weight));
                tensors.push((format!("{name}.bias"), vec![*outputs], bias));
                [weight, bias] = others;
            }
        }
        let reader = file::in_memory(path, serde_json::json!({}), tensors.into_iter().map(Ok))?;
        layout.check(&reader)?;
        let no_run = || CheckpointError::NotAConfig {
            path: path.to_owned(),
            reason: "it is not in the folder of its run, which has the recipe and the tokenizer".to_owned(),
        };
        let run = Run::of(path)?.ok_or_else(no_run)?;
        let own = run.model_folder();
        let directory = match Checkpoint::is_at(&own) {
            true => own,
            false => Self::open(locate(&run.from().ok_or_else(no_run)?))?.opened.directory,
        };
        Ok(EncoderCheckpoint { opened: Opened { directory, config: encoder.clone(), reader, layout } })
    }

    /// The directory of tokenizer and configuration.
    pub(crate) fn directory(&self) -> &Path {
        &self.opened.directory
    }

    /// The encoder's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.opened.config
    }

    /// The files of weights.
    pub fn reader(&self) -> &Reader {
        &self.opened.reader
    }

    /// The type of the weights: that of the largest tensor that is stored dense as f32, f16 or bf16; f32 where there is
    /// none.
    pub fn dtype(&self) -> DataType {
        self.opened.dtype()
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        self.opened.tokenizer()
    }

    /// Reads the weights into a model that trains for a task on sequences of that many tokens, on any engine;
    /// compressed ones are decompressed. A head that is not stored is random and depends on the seed.
    ///
    /// # Errors
    /// Those of [`BertConfig::validate`](crate::model::BertConfig::validate), of reading, and of the engine's memory;
    /// for masked tokens a checkpoint whose scores have a weight of their own.
    pub fn model<E: Engine>(&self, engine: &E, task: EncoderTask, positions: usize, seed: u64) -> Result<Bert<E>> {
        let (parts, config) = (self.parts(), BertConfig { encoder: self.opened.config.clone(), task, positions });
        if task == EncoderTask::MaskedTokens && parts.has_linear(OWN_DECODER) {
            return Err(Error::Setting {
                what: "the head of masked tokens",
                found: format!("`{MASKED_DECODER}.weight`, other values than the embedding's"),
                expected: "the embedding of tokens, which trains with the head",
            });
        }
        Bert::build(engine, &config, |name, shape| match self.opened.layout.has(name) {
            true => parts.values(name),
            false => Ok(initial(seed, name, shape)),
        })
    }

    /// The first group of a linear layer's weight that has more than two nonzeros among its four, by the names of the
    /// stored weight; none where the weight is 2:4 along the input features. -0.0 counts as zero. Of a layer that is
    /// not stored, that it is not.
    ///
    /// # Errors
    /// Those of reading.
    pub fn violation(&self, layer: &str) -> Result<Option<String>> {
        let parts = self.parts();
        let stored = parts.weights_of(layer);
        let Some(linear) = self.opened.layout.linears.get(layer) else {
            return Ok(Some("it is not in the checkpoint".to_owned()));
        };
        let outputs = linear.parts.iter().map(|(_, outputs)| outputs).sum();
        violation(&self.opened.reader, &stored, (outputs, linear.inputs), || parts.values(&format!("{layer}.weight")))
    }

    /// The first nonzero of a linear layer's weight that a mask of its shape prunes; none where all of these are zero.
    ///
    /// # Errors
    /// No such layer, or one of another shape.
    pub fn mask_violation(&self, layer: &str, mask: &Mask) -> Result<Option<String>> {
        let values = self.parts().values(&format!("{layer}.weight"))?;
        let expected = mask.rows() * mask.cols();
        if values.len() != expected {
            return Err(Error::length("a weight under its mask", expected, values.len()));
        }
        Ok(beyond_mask(&values, mask))
    }

    /// Writes a model that [`EncoderCheckpoint::model`] made, and that may have been trained since, to a directory that
    /// transformers loads as `BertForQuestionAnswering` or `BertForMaskedLM`: weights in one file of `dtype` (f32, bf16
    /// or f16), dense, the pruned elements of 2:4 layers as zeros; tokenizer and other files of this directory copied,
    /// but not weights of other formats and not hidden files. Names begin with `bert.`, as these classes have it. The
    /// configuration is this directory's with that class's name; `quantization_config`, which describes weights that
    /// are compressed, is left out. Neither class has a pooler, and heads of other tasks are left out, too.
    ///
    /// # Errors
    /// A file of weights that exists unless `overwrite` allows it, another type, those of writing and of the engine.
    pub fn save<E: Engine>(
        &self,
        (engine, model): (&E, &Bert<E>),
        directory: impl AsRef<Path>,
        overwrite: Overwrite,
        dtype: DataType,
    ) -> Result<()> {
        let BertConfig { encoder, task, .. } = model.config();
        let (layout, class) = layout_of_task(encoder, *task)?;
        let directory = directory.as_ref();
        write_weights((&layout, None), (engine, model), directory, overwrite, dtype)?;
        match self.opened.reader.directory() {
            Some(_) => copy_beside((&self.opened.reader, &self.opened.directory), directory, Some(class)),
            None => {
                copy_beside((&Reader::open(&self.opened.directory)?, &self.opened.directory), directory, Some(class))
            }
        }
    }

    /// Weight, `[2, width]`, and bias of the head that scores each token as the first and as the last one of an answer;
    /// none where it is not stored.
    pub(crate) fn answer_head(&self) -> Result<Option<(Vec<f32>, [f32; 2])>> {
        if !self.opened.layout.linears.contains_key(ANSWERS) {
            return Ok(None);
        }
        let parts = self.parts();
        let of = |part: &str| parts.values(&format!("{ANSWERS}.{part}"));
        let (weight, bias) = (of("weight")?, of("bias")?);
        Ok(bias.try_into().ok().map(|bias| (weight, bias)))
    }

    /// Whether the head that scores the vocabulary for masked tokens is stored.
    pub fn has_masked_head(&self) -> bool {
        self.opened.layout.linears.contains_key(MASKED_TRANSFORM)
    }

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        self.opened.parts()
    }
}
