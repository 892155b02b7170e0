//! BERT.

use super::{Family, Kind, SizeFields, Source, fields::Fields, layout::Layout, llama::activation};
use crate::{
    Result,
    model::{
        CheckpointError, EncoderTask,
        config::{ModelInput, TokenInput, TransformerConfig},
    },
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "bert",
    kind: Kind::Encoder,
    layers: "num_hidden_layers",
    prefixes: &["bert."],
    sizes: Some(SizeFields::features("intermediate_size")),
    config: |source| config(source.fields),
    layout: layout_of_source,
}];

/// The linear layer that scores each token as the first and the last one of an answer.
pub(in crate::model) const ANSWERS: &str = "answers";

/// The layer and the norm before the scores of masked tokens.
const TRANSFORM: &str = "cls.predictions.transform.dense";
const MASKED_NORM: &str = "cls.predictions.transform.LayerNorm";

/// What is added to the scores of masked tokens.
const MASKED_BIAS: &str = "cls.predictions.bias";

/// The weight that scores masked tokens, where it is not the embedding of tokens.
pub(in crate::model) const MASKED_DECODER: &str = "cls.predictions.decoder";

/// The model's names for the layer before the scores of masked tokens, and for a weight of the scores of its own.
pub(in crate::model) const MASKED_TRANSFORM: &str = "head.transform";
pub(in crate::model) const OWN_DECODER: &str = "head.decoder";

/// The shape of a stored tensor; none where there is no such tensor.
type ShapeOf<'a> = &'a dyn Fn(&str) -> Option<Vec<usize>>;

/// Where the tensors lie, with the heads that are stored in the shapes that they have here; others are ignored.
fn layout_of_source(source: &Source<'_>, config: &TransformerConfig) -> Result<Layout> {
    let shape_of: ShapeOf<'_> = &|name| source.shape_of(name);
    let pooler = format!("{}pooler.", source.prefix);
    let has_pooler = source.reader.tensors().any(|tensor| tensor.name.starts_with(&pooler));
    let mut layout = layout(config, source.prefix, has_pooler, shape_of)?;
    add_heads(&mut layout, config, shape_of);
    if layout.linears.contains_key(MASKED_TRANSFORM) && has_own_decoder(source)? {
        let decoder = vec![(MASKED_DECODER.to_owned(), config.vocabulary())];
        layout.parts(OWN_DECODER, decoder, config.width, false);
    }
    Ok(layout)
}

/// Whether the scores of masked tokens have a stored weight with other values than the embedding of tokens: it is used
/// then, as in transformers 5.
fn has_own_decoder(source: &Source<'_>) -> Result<bool> {
    let Source { reader, prefix, .. } = *source;
    let names = [format!("{MASKED_DECODER}.weight"), format!("{prefix}embeddings.word_embeddings.weight")];
    let [Ok(own), Ok(embedding)] = names.map(|name| reader.tensor(&name)) else { return Ok(false) };
    if own.info.shape != embedding.info.shape {
        return Ok(false);
    }
    Ok(own.info.dtype != embedding.info.dtype || *own.bytes()? != *embedding.bytes()?)
}

fn config(fields: &Fields) -> std::result::Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("is_decoder", false, "attention is full")?;
    fields.expect_flag("add_cross_attention", false, "there is no other sequence to attend to")?;
    if fields.text_if("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
        return Err(fields.unsupported("position_embedding_type", "positions are absolute"));
    }
    let sizes = fields.sizes()?;
    let mut bert = TransformerConfig::bert(&sizes, fields.size("vocab_size")?);
    if let (ModelInput::Tokens(tokens), Some(types)) = (&mut bert.input, fields.size_if("type_vocab_size")?) {
        tokens.token_types = types;
    }
    bert.norm.epsilon = fields.positive("layer_norm_eps", 1e-12)? as f32;
    bert.feed_forward.activation = activation(fields, "hidden_act", "gelu")?;
    Ok(bert)
}

/// The stored names of a norm's weight and bias: `gamma` and `beta` in checkpoints that were converted from TensorFlow,
/// such as bert-base-uncased.
fn norm_names(norm: &str, shape_of: ShapeOf<'_>) -> [(&'static str, String); 2] {
    [("weight", "gamma"), ("bias", "beta")].map(|(part, old)| {
        let [name, old] = [part, old].map(|part| format!("{norm}.{part}"));
        let is_old = shape_of(&name).is_none() && shape_of(&old).is_some();
        (part, if is_old { old } else { name })
    })
}

/// Where the tensors lie; `prefix` is `bert.`, or nothing where the model was stored without a head's class.
fn layout(config: &TransformerConfig, prefix: &str, has_pooler: bool, shape_of: ShapeOf<'_>) -> Result<Layout> {
    let (width, feed_forward) = (config.width, config.feed_forward.hidden);
    let TokenInput { vocabulary, context, token_types, .. } = *config.tokens()?;
    let mut layout = Layout {
        ignored: vec!["embeddings.position_ids"],
        ignored_beginnings: ["cls.", "classifier.", "qa_outputs."].map(Into::into).into(),
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
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        let qkv = ["query", "key", "value"].map(|part| (theirs(&format!("attention.self.{part}")), width));
        layout.parts(ours("attn.qkv"), qkv.to_vec(), width, true);
        layout.one_linear(ours("attn.out"), theirs("attention.output.dense"), (width, width));
        norm(&mut layout, ours("attn.norm"), theirs("attention.output.LayerNorm"));
        layout.one_linear(ours("mlp.up"), theirs("intermediate.dense"), (feed_forward, width));
        layout.one_linear(ours("mlp.down"), theirs("output.dense"), (width, feed_forward));
        norm(&mut layout, ours("mlp.norm"), theirs("output.LayerNorm"));
    }
    if has_pooler {
        layout.one_linear("pooler", format!("{prefix}pooler.dense"), (width, width));
    }
    Ok(layout)
}

/// Adds the heads that are stored in the shapes that they have here; others are ignored.
fn add_heads(layout: &mut Layout, config: &TransformerConfig, shape_of: ShapeOf<'_>) {
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
pub(in crate::model) fn layout_of_task(
    encoder: &TransformerConfig,
    task: EncoderTask,
) -> Result<(Layout, &'static str)> {
    let mut layout = layout(encoder, "bert.", false, &|_| None)?;
    match task {
        EncoderTask::Answers => {
            add_answers(&mut layout, encoder);
            Ok((layout, "BertForQuestionAnswering"))
        }
        EncoderTask::MaskedTokens => {
            add_masked(&mut layout, encoder, &|_| None);
            Ok((layout, "BertForMaskedLM"))
        }
    }
}

/// Adds the head of answers.
fn add_answers(layout: &mut Layout, config: &TransformerConfig) {
    layout.one_linear(ANSWERS, "qa_outputs", (2, config.width));
}

/// Adds the head of masked tokens, whose decoder is the embedding of tokens.
fn add_masked(layout: &mut Layout, config: &TransformerConfig, shape_of: ShapeOf<'_>) {
    let (vocabulary, width) = (config.vocabulary(), config.width);
    layout.one_linear(MASKED_TRANSFORM, TRANSFORM, (width, width));
    for (part, name) in norm_names(MASKED_NORM, shape_of) {
        layout.tensor(format!("head.norm.{part}"), name, [width]);
    }
    layout.tensor("embedding.bias", MASKED_BIAS, [vocabulary]);
}
