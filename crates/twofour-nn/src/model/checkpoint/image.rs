//! Image encoders.

use std::path::Path;

use twofour::{DataType, file::Reader};

#[cfg(doc)]
use super::CheckpointError;
use super::{StoredParts, opened::Opened};
use crate::{
    Result,
    model::{config::TransformerConfig, families::Kind},
};

/// An image encoder's directory whose configuration and headers were read and checked. Weights are read when an
/// [`ImageEncoder`](crate::model::ImageEncoder) is made of it.
///
/// By `model_type`:
/// - `vit`: ViT. Ignored: the pooler.
/// - `dinov2`, `dinov2_with_registers`: DINOv2, with one activation or SwiGLU in its feed-forward blocks. Ignored: the
///   mask token.
/// - `sam`, `sam_vision_model`: the image encoder of SAM. Ignored: prompt encoder, mask decoder, and the embedding that
///   they share.
///
/// ViT and DINOv2 have a head for classes where `classifier.weight` is stored.
#[derive(Debug)]
pub struct ImageCheckpoint {
    opened: Opened,
}

impl ImageCheckpoint {
    /// Opens a directory with `config.json` of one of the types above, and safetensors, or one file of weights or index
    /// in it.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration or tensors that do not fit, or for sizes that
    /// [`TransformerConfig::validate`] refuses; those of [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (opened, _) = Opened::new(path.as_ref(), Kind::Image)?;
        Ok(ImageCheckpoint { opened })
    }

    /// Whether the directory has a configuration of an image encoder's `model_type`.
    pub fn is_at(directory: impl AsRef<Path>) -> bool {
        super::kind(directory.as_ref()).is_ok_and(|kind| kind == Some(Kind::Image))
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

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        self.opened.parts()
    }
}
