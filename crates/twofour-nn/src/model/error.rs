//! What can be wrong with a checkpoint directory.

use std::{io, path::PathBuf};

/// A checkpoint directory that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file of the directory cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// `config.json` is no JSON object.
    #[error("{}: {reason}", path.display())]
    NotAConfig {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A model of a family that this program does not have.
    #[error("{}: model type {found} is not supported; supported are {supported}", path.display())]
    UnsupportedModel {
        /// The configuration's file.
        path: PathBuf,
        /// Its `model_type`.
        found: String,
        /// The families.
        supported: String,
    },
    /// A field of the configuration that is absent, or of another type.
    #[error("{}: field `{field}` is {found}, but {expected} is required", path.display())]
    Field {
        /// The configuration's file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, or `absent`.
        found: String,
        /// What is required.
        expected: &'static str,
    },
    /// A field of the configuration with a value that changes the model in a way that this program does not have.
    #[error("{}: `{field}` = {found} is not supported; {supported}", path.display())]
    UnsupportedField {
        /// The configuration's file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What is supported.
        supported: &'static str,
    },
    /// Weights that another tool quantized or compressed.
    #[error(
        "{}: `quantization_config` says that another tool stored the weights: {by}; none of them is in a format that \
         is read, so start from the unquantized model",
        path.display()
    )]
    ForeignWeights {
        /// The configuration's file.
        path: PathBuf,
        /// The tool, and what it made of the weights, as far as the configuration tells.
        by: String,
    },
    /// A tensor of weights that another tool packed, of which the configuration says nothing.
    #[error(
        "{}: another tool packed the weights (`{name}`), as GPTQ, AWQ and bitsandbytes do, and the configuration has \
         no `quantization_config` that says how; start from the unquantized model",
        path.display()
    )]
    ForeignTensor {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor that the configuration requires and the files lack.
    #[error("{}: tensor `{name}` is missing; the configuration requires it with shape {expected:?}", path.display())]
    MissingTensor {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A decoder without a head that scores tokens, of which such a head was asked.
    #[error(
        "{}: the model has no head that scores tokens: `lm_head.weight` is not stored, as in embedding and reward \
         models; it can be pruned, compressed and quantized, but text cannot be scored or generated with it, and it \
         cannot be trained",
        path.display()
    )]
    NoHead {
        /// The weights' file, or its index.
        path: PathBuf,
    },
    /// An encoder without a head that scores the vocabulary for masked tokens, of which such a head was asked.
    #[error(
        "{}: the model has no head for masked tokens (`cls.predictions`), so it gives a text no perplexity; compare \
         its sentence embeddings with those of another model",
        path.display()
    )]
    NoMaskedHead {
        /// The weights' file, or its index.
        path: PathBuf,
    },
    /// A tensor that has no place in the model.
    #[error("{}: tensor `{name}` has no place in a model of this configuration", path.display())]
    ExtraTensor {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor whose shape is not the configuration's.
    #[error("{}: tensor `{name}` has shape {found:?}, but the configuration requires {expected:?}", path.display())]
    Shape {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A tensor of a type that weights cannot have.
    #[error("{}: tensor `{name}` is of type {found}; f32, f16, bf16 and compressed weights are \
             supported", path.display())]
    DType {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A weight that is to become smaller, and is not stored dense as floats.
    #[error(
        "{}: tensor `{name}` is {found}, and only weights that are stored dense as f32, f16 or bf16 can become \
         smaller; decompress the model, or start from the one that it was made from",
        path.display()
    )]
    NotFloats {
        /// The weights' file, or its index.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
}
