//! What an image encoder's first layer reads.

use twofour::kernel::{Activation, KernelElement};

use super::TransformerConfig;
use crate::{
    Error, Result,
    model::config::ImageInput,
    model::inference::{
        linear::{Linear, LinearPart},
        parts::Parts,
        passes::{narrowed, widened},
        weight::Weight,
    },
};

/// Embeddings of patches and positions, the class token and registers.
#[derive(Debug)]
pub(super) struct PatchEmbeddings<T: KernelElement> {
    patches: Linear<T>,
    table: Vec<f32>,
}

impl<T: KernelElement> PatchEmbeddings<T> {
    pub(super) fn build(config: &TransformerConfig, parts: &impl Parts<T>) -> Result<Self> {
        let shape = (config.width, config.image()?.patch_len());
        let weight = Weight::Dense(narrowed(&parts.vector("patch.weight", shape.0 * shape.1)?));
        Ok(PatchEmbeddings {
            patches: Linear::new(vec![LinearPart::of(weight, shape, None)])?,
            table: position_table(config, parts)?,
        })
    }

    /// The hidden states of images `[images, channels, height, width]` before the first layer: `[images · tokens,
    /// width]`.
    pub(super) fn forward(&self, config: &TransformerConfig, pixels: &[f32]) -> Result<Vec<f32>> {
        let rows: Vec<T> = narrowed(&patch_rows(config, pixels)?);
        let tokens = rows.len() / config.image()?.patch_len();
        let mut x = widened(&self.patches.forward(&rows, tokens, Activation::Identity)?);
        for image in x.chunks_exact_mut(self.table.len()) {
            image.iter_mut().zip(&self.table).for_each(|(x, table)| *x += table);
        }
        Ok(x)
    }
}

/// What is added to the product of each of an image's rows, `[tokens, width]`: its position, and the patches' bias or
/// the class token; a register is the token alone.
pub(in crate::model) fn position_table<T: KernelElement>(
    config: &TransformerConfig,
    parts: &impl Parts<T>,
) -> Result<Vec<f32>> {
    let (width, ImageInput { class_token, registers, .. }) = (config.width, *config.image()?);
    let positions = config.context() - registers;
    let mut table = parts.vector("positions", positions * width)?;
    let bias = parts.vector("patch.bias", width)?;
    let class = if class_token { parts.vector("class", width)? } else { vec![] };
    let added = class.chunks_exact(width).chain(std::iter::repeat(bias.as_slice()));
    for (row, added) in table.chunks_exact_mut(width).zip(added) {
        row.iter_mut().zip(added).for_each(|(row, added)| *row += added);
    }
    if registers > 0 {
        let begin = usize::from(class_token) * width;
        table.splice(begin..begin, parts.vector("registers", registers * width)?);
    }
    Ok(table)
}

/// The patches of images `[images, channels, height, width]` as rows `[images · tokens, channels · patch · patch]`;
/// those of a class token and of registers are zeros.
pub(in crate::model) fn patch_rows(config: &TransformerConfig, pixels: &[f32]) -> Result<Vec<f32>> {
    let input = config.image()?;
    let ImageInput { image: [height, width], channels, patch, .. } = *input;
    let of_image = input.image_len();
    if pixels.is_empty() || !pixels.len().is_multiple_of(of_image) {
        let found = format!("{} values", pixels.len());
        return Err(Error::Setting {
            what: "images",
            found,
            expected: "one or more of the model's size: channels times height times width values each; scale them to \
                       it",
        });
    }
    let mut rows = Vec::with_capacity(pixels.len() / of_image * input.tokens() * input.patch_len());
    for image in pixels.chunks_exact(of_image) {
        rows.extend(std::iter::repeat_n(0f32, input.learned_tokens() * input.patch_len()));
        for (top, left) in
            (0..height / patch).flat_map(|row| (0..width / patch).map(move |column| (row * patch, column * patch)))
        {
            for line in (0..channels).flat_map(|channel| (0..patch).map(move |y| channel * height + top + y)) {
                rows.extend_from_slice(&image[line * width + left..][..patch]);
            }
        }
    }
    Ok(rows)
}
