//! A directory of a model of any family.

use std::path::{Path, PathBuf};

use twofour::{DataType, file::Reader};

use super::{CheckpointError, EMBEDDING, HEAD, StoredParts, TOKENIZER_FILE, place};
use crate::{
    Result,
    model::{
        ModelOutput, Tokenizer, TransformerConfig,
        families::{Family, Kind, Source, fields::Fields, layout::Layout},
        file,
    },
};

/// Whether a head of that name is stored that is not the embedding: it is used then, whatever the configuration says of
/// tying, as in transformers 5.
fn has_own_head(reader: &Reader, head: &str, embedding: &str) -> Result<bool> {
    if reader.compressed_info(head).is_ok() {
        return Ok(true);
    }
    let of = |name: &str| reader.tensors().find(|tensor| tensor.name == name);
    let (Some(head), Some(embedding)) = (of(head), of(embedding)) else { return Ok(false) };
    if head.shape != embedding.shape {
        return Ok(false);
    }
    Ok(head.dtype != embedding.dtype
        || *reader.tensor(&head.name)?.bytes()? != *reader.tensor(&embedding.name)?.bytes()?)
}

/// What the names of heads for other tasks than scoring tokens begin with.
const TASK_HEADS: [&str; 4] = ["score.", "classifier.", "qa_outputs.", "v_head."];

/// Whether a decoder is stored with a head of that name that scores tokens. The embedding of a classifier is none, even
/// where the configuration ties it to one.
fn has_head(reader: &Reader, tied: bool, head: &str) -> bool {
    let is_stored = reader.tensors().any(|tensor| tensor.name == head);
    let has_task_head = || {
        let mut names = reader.tensors().map(|tensor| &tensor.name);
        names.any(|name| TASK_HEADS.iter().any(|beginning| name.starts_with(beginning)))
    };
    is_stored || reader.compressed_info(head).is_ok() || tied && !has_task_head()
}

/// A directory whose configuration and headers were read and checked.
#[derive(Debug)]
pub(in crate::model) struct Opened {
    pub(in crate::model) directory: PathBuf,
    pub(in crate::model) config: TransformerConfig,
    pub(in crate::model) reader: Reader,
    pub(in crate::model) layout: Layout,
}

impl Opened {
    /// Opens a directory, or one file of weights or index in it, or a GGUF file, with a model of a kind.
    pub(in crate::model) fn new(path: &Path, kind: Kind) -> Result<(Self, Fields)> {
        let fields = place::fields_of(path)?;
        let name = fields.text_if("model_type")?;
        let Some(family) = name.and_then(Family::named).filter(|family| family.kind == kind) else {
            let found = name.map_or("absent".to_owned(), |name| format!("`{name}`"));
            let (path, supported) = (fields.path().to_owned(), Family::names(&[kind]));
            return Err(CheckpointError::UnsupportedModel { path, found, supported }.into());
        };
        let reader = place::reader_of(path, &fields)?;
        let source = Source::new(family, &fields, &reader);
        let mut config = (family.config)(&source)?;
        config.validate().map_err(|error| fields.not_valid(&error))?;
        // Every layer needs tensors: a number of layers or experts that the files cannot hold is refused before
        // anything is made of it.
        let tensors = reader.tensors().count();
        let blocks = |layer: usize| config.experts(layer).map_or(1, |experts| experts.count);
        if config.layers > tensors || (0..config.layers).map(blocks).sum::<usize>() > tensors {
            return Err(fields.unsupported(family.layers, "the files have fewer tensors than that").into());
        }
        let mut layout = (family.layout)(&source, &config)?;
        if let ModelOutput::Vocabulary { tied, .. } = config.output
            && kind == Kind::Decoder
        {
            let untied = ModelOutput::Vocabulary { tied: false, soft_cap: None };
            let own = (family.layout)(&source, &TransformerConfig { output: untied, ..config.clone() })?;
            let head = own.linears.get(HEAD).and_then(|head| head.parts.first());
            let head = head.map(|(name, _)| format!("{name}.weight")).unwrap_or_default();
            let embedding = own.tensors.get(EMBEDDING).map(|table| table.name.as_str()).unwrap_or_default();
            let has_head = has_head(&reader, tied, &head);
            if tied && (!has_head || has_own_head(&reader, &head, embedding)?) {
                layout = own;
                if let ModelOutput::Vocabulary { tied, .. } = &mut config.output {
                    *tied = false;
                }
            }
            layout.ignored_beginnings.extend(TASK_HEADS.map(Into::into));
            if !has_head {
                layout.linears.remove(HEAD);
            }
        }
        layout.check(&reader)?;
        Ok((Opened { directory: place::directory_of(path), config, reader, layout }, fields))
    }

    /// The type of the weights: that of the largest tensor that is stored dense as f32, f16 or bf16; f32 where there is
    /// none.
    pub(in crate::model) fn dtype(&self) -> DataType {
        file::dtype_of(&self.reader)
    }

    pub(in crate::model) fn tokenizer(&self) -> Result<Tokenizer> {
        match self.reader.described().contains(&TOKENIZER_FILE) {
            true => Tokenizer::parse(self.reader.path(), &self.reader.beside(TOKENIZER_FILE)?.unwrap_or_default()),
            false => Tokenizer::read(&self.directory.join(TOKENIZER_FILE)),
        }
    }

    pub(in crate::model) fn parts(&self) -> StoredParts<'_> {
        StoredParts::new(&self.reader, &self.layout, self.config.is_tied())
    }
}
