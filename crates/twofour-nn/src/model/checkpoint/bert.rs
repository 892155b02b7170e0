//! BERT.

use std::path::{Path, PathBuf};

use twofour::{
    DataType, Mask,
    file::{Overwrite, Reader, StoredElement},
    kernel::KernelElement,
};

use super::{
    Checkpoint, CheckpointError, StoredParts,
    fields::Fields,
    layout::{Layout, StoredLinear},
    llama::activation,
    place,
    save::{copy_beside, write_weights},
};
use crate::{
    Error, Result,
    engine::Engine,
    model::{
        Bert, BertConfig, EncoderTask, SavedModel, Tokenizer,
        bert::initial,
        config::{GptConfig, ModelInput, TokenInput, TransformerConfig},
        encoder::Encoder,
        file,
        language::dtype_of,
        run::{CheckpointModel, Run},
        saved::{beyond_mask, violation},
    },
};

/// The linear layer that scores each token as the first and the last one of an answer.
pub(crate) const ANSWERS: &str = "answers";

/// The layer and the norm before the scores of masked tokens.
const TRANSFORM: &str = "cls.predictions.transform.dense";
const MASKED_NORM: &str = "cls.predictions.transform.LayerNorm";

/// What is added to the scores of masked tokens.
const MASKED_BIAS: &str = "cls.predictions.bias";

/// The weight that scores masked tokens, where it is not the embedding of tokens.
const MASKED_DECODER: &str = "cls.predictions.decoder";

/// The model's names for the layer before the scores of masked tokens, and for a weight of the scores of its own.
pub(crate) const MASKED_TRANSFORM: &str = "head.transform";
pub(crate) const OWN_DECODER: &str = "head.decoder";

/// An encoder's directory whose configuration and headers were read and checked. Weights are read when an [`Encoder`] is made of it.
#[derive(Debug)]
pub struct EncoderCheckpoint {
    directory: PathBuf,
    config: TransformerConfig,
    reader: Reader,
    layout: Layout,
}

impl EncoderCheckpoint {
    /// Opens a directory with `config.json` of `model_type` `bert` and safetensors, or one file of weights or index in it, or the file of a training run's checkpoint. Heads for tasks, whose names begin with `cls.`, `classifier.` or `qa_outputs.`,
    /// are ignored.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration or tensors that do not fit; those of [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if CheckpointModel::<BertConfig>::is_at(path) {
            return Self::of_run(path);
        }
        let fields = place::fields_of(path)?;
        if fields.text_if("model_type")? != Some("bert") {
            let found = fields.get("model_type").map_or("absent".to_owned(), ToString::to_string);
            let path = fields.path().to_owned();
            return Err(CheckpointError::UnsupportedModel { path, found, supported: "bert" }.into());
        }
        let config = config(&fields)?;
        config.validate().map_err(|error| fields.not_valid(&error))?;
        let reader = place::reader_of(path, &fields)?;
        if config.layers > reader.tensors().count() {
            return Err(fields.unsupported("num_hidden_layers", "the files have fewer tensors than that").into());
        }
        let has = |prefix: &str| reader.tensors().any(|tensor| tensor.name.starts_with(prefix));
        let prefix = if has("bert.") { "bert." } else { "" };
        let shape_of = |name: &str| reader.tensor(name).ok().map(|view| view.info.shape.clone());
        let mut layout = layout(&config, prefix, has(&format!("{prefix}pooler.")), shape_of)?;
        add_heads(&mut layout, &config, shape_of);
        if layout.linears.contains_key(MASKED_TRANSFORM) && has_own_decoder(&reader, prefix)? {
            layout.linear(
                OWN_DECODER,
                StoredLinear { has_bias: false, ..linear_of(MASKED_DECODER, config.vocabulary(), config.width) },
            );
        }
        layout.check(&reader)?;
        Ok(EncoderCheckpoint { directory: place::directory_of(path), config, reader, layout })
    }

    /// Whether the directory has a configuration of `model_type` `bert`, or the path is the checkpoint's file of a run that trains one.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        let path = path.as_ref();
        CheckpointModel::<BertConfig>::is_at(path)
            || super::model_type(path).is_ok_and(|found| found.as_deref() == Some("bert"))
    }

    /// The encoder of a training run's checkpoint, as it computes, beside the files of the model that the run leaves, or has started from.
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
            false => Self::open(SavedModel::locate(run.from().ok_or_else(no_run)?))?.directory,
        };
        Ok(EncoderCheckpoint { directory, config: encoder.clone(), reader, layout })
    }

    /// The directory of tokenizer and configuration.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The encoder's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The files of weights.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The type of the weights: that of the largest tensor that is stored dense as f32, f16 or bf16; f32 where there is none.
    pub fn dtype(&self) -> DataType {
        dtype_of(&self.reader)
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::read(&self.directory.join("tokenizer.json"))
    }

    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4, go to the 2:4 kernels.
    ///
    /// # Errors
    /// [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<Encoder<T>> {
        Encoder::build(self.config.clone(), &self.parts())
    }

    /// [`EncoderCheckpoint::inference`] with every linear layer for the dense kernel, in `T`: what a 2:4 encoder is compared with.
    ///
    /// # Errors
    /// Those of [`EncoderCheckpoint::inference`].
    pub fn dense_inference<T: KernelElement + StoredElement>(&self) -> Result<Encoder<T>> {
        Encoder::build(self.config.clone(), &self.parts().dense())
    }

    /// Reads the weights into a model that trains for a task on sequences of that many tokens, on any engine; compressed ones are decompressed. A head that is not
    /// stored is random and depends on the seed.
    ///
    /// # Errors
    /// Those of [`BertConfig::validate`](crate::model::BertConfig::validate), of reading, and of the engine's memory; for masked tokens a checkpoint whose scores have a
    /// weight of their own.
    pub fn model<E: Engine>(&self, engine: &E, task: EncoderTask, positions: usize, seed: u64) -> Result<Bert<E>> {
        let (parts, config) = (self.parts(), BertConfig { encoder: self.config.clone(), task, positions });
        if task == EncoderTask::MaskedTokens && parts.has_linear(OWN_DECODER) {
            return Err(Error::Setting {
                what: "the head of masked tokens",
                found: format!("`{MASKED_DECODER}.weight`, other values than the embedding's"),
                expected: "the embedding of tokens, which trains with the head",
            });
        }
        Bert::build(engine, &config, |name, shape| match self.layout.has(name) {
            true => parts.values(name),
            false => Ok(initial(seed, name, shape)),
        })
    }

    /// The first group of a linear layer's weight that has more than two nonzeros among its four, by the names of the stored weight; none where the weight is 2:4 along
    /// the input features. -0.0 counts as zero. Of a layer that is not stored, that it is not.
    ///
    /// # Errors
    /// Those of reading.
    pub fn violation(&self, layer: &str) -> Result<Option<String>> {
        let parts = self.parts();
        let stored = parts.weights_of(layer);
        let Some(linear) = self.layout.linears.get(layer) else {
            return Ok(Some("it is not in the checkpoint".to_owned()));
        };
        let outputs = linear.parts.iter().map(|(_, outputs)| outputs).sum();
        violation(&self.reader, &stored, (outputs, linear.inputs), || parts.values(&format!("{layer}.weight")))
    }

    /// The first nonzero of a linear layer's weight that a mask of its shape prunes; none where all of these are zero.
    ///
    /// # Errors
    /// No such layer, or one of another shape.
    pub fn mask_violation(&self, layer: &str, mask: &Mask) -> Result<Option<String>> {
        let values = self.parts().values(&format!("{layer}.weight"))?;
        let expected = mask.rows() * mask.cols();
        if values.len() != expected {
            return Err(Error::Length { what: "a weight under its mask", expected, found: values.len() });
        }
        Ok(beyond_mask(&values, mask))
    }

    /// Writes a model that [`EncoderCheckpoint::model`] made, and that may have been trained since, to a directory that transformers loads as `BertForQuestionAnswering` or
    /// `BertForMaskedLM`: weights in one file of `dtype` (f32, bf16 or f16), dense, the pruned elements of 2:4 layers as zeros; tokenizer and other files of this directory copied,
    /// but not weights of other formats and not hidden files. Names begin with `bert.`, as these classes have it. The configuration is this directory's with that class's name;
    /// `quantization_config`, which describes weights that are compressed, is left out. Neither class has a pooler, and heads of other tasks are left out, too.
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
        write_weights(&layout, (engine, model), directory, overwrite, dtype)?;
        match self.reader.directory() {
            Some(_) => copy_beside((&self.reader, &self.directory), directory, Some(class)),
            None => copy_beside((&Reader::open(&self.directory)?, &self.directory), directory, Some(class)),
        }
    }

    /// Weight, `[2, width]`, and bias of the head that scores each token as the first and as the last one of an answer; none where it is not stored.
    pub(crate) fn answer_head(&self) -> Result<Option<(Vec<f32>, [f32; 2])>> {
        if !self.layout.linears.contains_key(ANSWERS) {
            return Ok(None);
        }
        let parts = self.parts();
        let of = |part: &str| parts.values(&format!("{ANSWERS}.{part}"));
        let (weight, bias) = (of("weight")?, of("bias")?);
        Ok(bias.try_into().ok().map(|bias| (weight, bias)))
    }

    /// Whether the head that scores the vocabulary for masked tokens is stored.
    pub fn has_masked_head(&self) -> bool {
        self.layout.linears.contains_key(MASKED_TRANSFORM)
    }

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        StoredParts::new(&self.reader, &self.layout, false)
    }
}

/// Whether the scores of masked tokens have a stored weight with other values than the embedding of tokens: it is used then, as in transformers 5.
fn has_own_decoder(reader: &Reader, prefix: &str) -> Result<bool> {
    let names = [format!("{MASKED_DECODER}.weight"), format!("{prefix}embeddings.word_embeddings.weight")];
    let [Ok(own), Ok(embedding)] = names.map(|name| reader.tensor(&name)) else { return Ok(false) };
    if own.info.shape != embedding.info.shape {
        return Ok(false);
    }
    Ok(own.info.dtype != embedding.info.dtype || *own.bytes()? != *embedding.bytes()?)
}

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("is_decoder", false, "attention is full")?;
    fields.expect_flag("add_cross_attention", false, "there is no other sequence to attend to")?;
    if fields.text_if("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
        return Err(fields.unsupported("position_embedding_type", "positions are absolute"));
    }
    let sizes = GptConfig {
        layers: fields.size("num_hidden_layers")?,
        width: fields.size("hidden_size")?,
        heads: fields.size("num_attention_heads")?,
        context: fields.size("max_position_embeddings")?,
        feed_forward: fields.size("intermediate_size")?,
    };
    let mut bert = TransformerConfig::bert(&sizes, fields.size("vocab_size")?);
    if let (ModelInput::Tokens(tokens), Some(types)) = (&mut bert.input, fields.size_if("type_vocab_size")?) {
        tokens.token_types = types;
    }
    bert.norm.epsilon = fields.positive("layer_norm_eps", 1e-12)? as f32;
    bert.feed_forward.activation = activation(fields, "hidden_act", "gelu")?;
    Ok(bert)
}

/// The shape of a stored tensor; none where there is no such tensor.
trait ShapeOf: Fn(&str) -> Option<Vec<usize>> + Copy {}

impl<F: Fn(&str) -> Option<Vec<usize>> + Copy> ShapeOf for F {}

/// The stored names of a norm's weight and bias: `gamma` and `beta` in checkpoints that were converted from TensorFlow, such as bert-base-uncased.
fn norm_names(norm: &str, shape_of: impl ShapeOf) -> [(&'static str, String); 2] {
    [("weight", "gamma"), ("bias", "beta")].map(|(part, old)| {
        let [name, old] = [part, old].map(|part| format!("{norm}.{part}"));
        let is_old = shape_of(&name).is_none() && shape_of(&old).is_some();
        (part, if is_old { old } else { name })
    })
}

/// Where the tensors lie; `prefix` is `bert.`, or nothing where the model was stored without a head's class.
fn layout(config: &TransformerConfig, prefix: &str, has_pooler: bool, shape_of: impl ShapeOf) -> Result<Layout> {
    let (width, feed_forward) = (config.width, config.feed_forward.hidden);
    let TokenInput { vocabulary, context, token_types, .. } = *config.tokens()?;
    let mut layout = Layout {
        ignored: vec!["embeddings.position_ids"],
        ignored_beginnings: vec!["cls.", "classifier.", "qa_outputs."],
        ..Layout::default()
    };
    let embeddings = |part: &str| format!("{prefix}embeddings.{part}");
    layout.tensor("embedding.weight", embeddings("word_embeddings.weight"), [vocabulary, width]);
    layout.tensor("positions.weight", embeddings("position_embeddings.weight"), [context, width]);
    layout.tensor("types.weight", embeddings("token_type_embeddings.weight"), [token_types, width]);
    let norm = |layout: &mut Layout, ours: String, theirs: String| {
        for (part, name) in norm_names(&theirs, shape_of) {
            layout.tensor(format!("{ours}.{part}"), name, [width]);
        }
    };
    norm(&mut layout, "embedding.norm".to_owned(), embeddings("LayerNorm"));
    let linear = |parts: Vec<(String, usize)>, inputs: usize| StoredLinear {
        parts,
        inputs,
        has_bias: true,
        is_transposed: false,
    };
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        let qkv = ["query", "key", "value"].map(|part| (theirs(&format!("attention.self.{part}")), width));
        layout.linear(ours("attn.qkv"), linear(qkv.to_vec(), width));
        layout.linear(ours("attn.out"), linear(vec![(theirs("attention.output.dense"), width)], width));
        norm(&mut layout, ours("attn.norm"), theirs("attention.output.LayerNorm"));
        layout.linear(ours("mlp.up"), linear(vec![(theirs("intermediate.dense"), feed_forward)], width));
        layout.linear(ours("mlp.down"), linear(vec![(theirs("output.dense"), width)], feed_forward));
        norm(&mut layout, ours("mlp.norm"), theirs("output.LayerNorm"));
    }
    if has_pooler {
        layout.linear("pooler", linear(vec![(format!("{prefix}pooler.dense"), width)], width));
    }
    Ok(layout)
}

/// Adds the heads that are stored in the shapes that they have here; others are ignored.
fn add_heads(layout: &mut Layout, config: &TransformerConfig, shape_of: impl ShapeOf) {
    let (vocabulary, width) = (config.vocabulary(), config.width);
    let is = |name: &str, shape: &[usize]| shape_of(name).is_some_and(|found| found == shape);
    if is("qa_outputs.weight", &[2, width]) && is("qa_outputs.bias", &[2]) {
        add_answers(layout, config);
    }
    let [(_, gain), (_, bias)] = norm_names(MASKED_NORM, shape_of);
    let has_vectors = [format!("{TRANSFORM}.bias"), gain, bias].iter().all(|name| is(name, &[width]));
    if is(&format!("{TRANSFORM}.weight"), &[width, width]) && has_vectors && is(MASKED_BIAS, &[vocabulary]) {
        add_masked(layout, config, shape_of);
    }
}

/// Where the tensors of a model with the head of a task lie, and the name of its class in transformers.
fn layout_of_task(encoder: &TransformerConfig, task: EncoderTask) -> Result<(Layout, &'static str)> {
    let mut layout = layout(encoder, "bert.", false, |_| None)?;
    match task {
        EncoderTask::Answers => {
            add_answers(&mut layout, encoder);
            Ok((layout, "BertForQuestionAnswering"))
        }
        EncoderTask::MaskedTokens => {
            add_masked(&mut layout, encoder, |_| None);
            Ok((layout, "BertForMaskedLM"))
        }
    }
}

fn linear_of(name: &str, outputs: usize, inputs: usize) -> StoredLinear {
    StoredLinear { parts: vec![(name.to_owned(), outputs)], inputs, has_bias: true, is_transposed: false }
}

/// Adds the head of answers.
fn add_answers(layout: &mut Layout, config: &TransformerConfig) {
    layout.linear(ANSWERS, linear_of("qa_outputs", 2, config.width));
}

/// Adds the head of masked tokens, whose decoder is the embedding of tokens.
fn add_masked(layout: &mut Layout, config: &TransformerConfig, shape_of: impl ShapeOf) {
    let (vocabulary, width) = (config.vocabulary(), config.width);
    layout.linear(MASKED_TRANSFORM, linear_of(TRANSFORM, width, width));
    for (part, name) in norm_names(MASKED_NORM, shape_of) {
        layout.tensor(format!("head.norm.{part}"), name, [width]);
    }
    layout.tensor("embedding.bias", MASKED_BIAS, [vocabulary]);
}
