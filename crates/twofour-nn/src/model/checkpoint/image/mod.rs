//! Image encoders.

mod layout;
mod sam;
mod vit;

use std::path::Path;

use twofour::{
    DataType,
    file::{Reader, StoredElement},
    kernel::KernelElement,
};

use super::{CheckpointError, StoredParts, layout::Layout, place};
use crate::{
    Result,
    model::{config::TransformerConfig, image::ImageEncoder, language::dtype_of},
};

/// An image encoder's directory whose configuration and headers were read and checked. Weights are read when an [`ImageEncoder`] is made of it.
///
/// | `model_type` | the encoder | ignored tensors |
/// |---|---|---|
/// | `vit` | ViT | the pooler |
/// | `dinov2`, `dinov2_with_registers` | DINOv2, with one activation or SwiGLU in its feed-forward blocks | the mask token |
/// | `sam`, `sam_vision_model` | the image encoder of SAM | prompt encoder, mask decoder, and the embedding that they share |
///
/// ViT and DINOv2 have a head for classes where `classifier.weight` is stored.
#[derive(Debug)]
pub struct ImageCheckpoint {
    config: TransformerConfig,
    reader: Reader,
    layout: Layout,
}

/// The kinds of image encoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Transformer(vit::Family),
    Sam,
    SamVision,
}

impl Kind {
    const SUPPORTED: &'static str = "vit, dinov2, dinov2_with_registers, sam and sam_vision_model";

    fn of(name: Option<&str>) -> Option<Self> {
        Some(match name? {
            "vit" => Kind::Transformer(vit::Family::Vit),
            "dinov2" => Kind::Transformer(vit::Family::Dinov2),
            "dinov2_with_registers" => Kind::Transformer(vit::Family::Dinov2WithRegisters),
            "sam" => Kind::Sam,
            "sam_vision_model" => Kind::SamVision,
            _ => return None,
        })
    }
}

impl ImageCheckpoint {
    /// Opens a directory with `config.json` of one of the types above, and safetensors, or one file of weights or index in it.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration or tensors that do not fit, or for sizes that [`TransformerConfig::validate`] refuses; those of [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let fields = place::fields_of(path)?;
        let Some(kind) = Kind::of(fields.text_if("model_type")?) else {
            let found = fields.get("model_type").map_or("absent".to_owned(), ToString::to_string);
            let path = fields.path().to_owned();
            return Err(CheckpointError::UnsupportedModel { path, found, supported: Kind::SUPPORTED }.into());
        };
        let reader = place::reader_of(path, &fields)?;
        let shape_of = |name: &str| stored_shape(&reader, name);
        let config = match kind {
            Kind::Transformer(family) => vit::config(&fields, family, shape_of)?,
            Kind::Sam => sam::config(&fields.object_if("vision_config")?.ok_or_else(|| {
                fields.unsupported("vision_config", "the description of the image encoder is required")
            })?)?,
            Kind::SamVision => sam::config(&fields)?,
        };
        config.validate().map_err(|error| fields.not_valid(&error))?;
        if config.layers > reader.tensors().count() {
            return Err(fields.unsupported("num_hidden_layers", "the files have fewer tensors than that").into());
        }
        let has = |prefix: &str| reader.tensors().any(|tensor| tensor.name.starts_with(prefix));
        let layout = match kind {
            Kind::Transformer(family) => {
                vit::layout(&config, family, if has(family.prefix()) { family.prefix() } else { "" })?
            }
            Kind::Sam | Kind::SamVision => sam::layout(&config)?,
        };
        layout.check(&reader)?;
        Ok(ImageCheckpoint { config, reader, layout })
    }

    /// Whether the directory has a configuration of an image encoder's `model_type`.
    pub fn is_at(directory: impl AsRef<Path>) -> bool {
        super::model_type(directory.as_ref()).is_ok_and(|found| Kind::of(found.as_deref()).is_some())
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

    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4, go to the 2:4 kernels.
    ///
    /// # Errors
    /// [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<ImageEncoder<T>> {
        ImageEncoder::build(self.config.clone(), &self.parts())
    }

    /// [`ImageCheckpoint::inference`] with every linear layer for the dense kernel, in `T`: what a 2:4 encoder is compared with.
    ///
    /// # Errors
    /// Those of [`ImageCheckpoint::inference`].
    pub fn dense_inference<T: KernelElement + StoredElement>(&self) -> Result<ImageEncoder<T>> {
        ImageEncoder::build(self.config.clone(), &self.parts().dense())
    }

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        StoredParts::new(&self.reader, &self.layout, false)
    }
}

/// The shape of a tensor, plain or compressed.
fn stored_shape(reader: &Reader, name: &str) -> Option<Vec<usize>> {
    let plain = || reader.tensor(name).ok().map(|view| view.info.shape.clone());
    reader.compressed_info(name).ok().map(|info| vec![info.rows, info.cols]).or_else(plain)
}
