//! The sizes of a vision transformer.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What the head of a vision transformer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pooling {
    /// The class token, which is before the patches.
    #[default]
    Class,
    /// The mean over the patches; there is no class token.
    Mean,
}

/// The sizes of a [`Vit`](super::Vit).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
    /// Height and width of an image, in pixels; multiples of the patch.
    pub image: [usize; 2],
    /// Values of a pixel.
    pub channels: usize,
    /// Height and width of a patch, in pixels.
    pub patch: usize,
    /// Number of classes.
    pub classes: usize,
    /// What the head reads.
    pub pooling: Pooling,
    /// Number of layers, each an attention block and a feed-forward block.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention; they divide the width into even parts.
    pub heads: usize,
    /// Width of the feed-forward block's hidden layer.
    pub feed_forward: usize,
    /// Added to the variance in norms.
    pub epsilon: f32,
    /// Whether feed-forward blocks have squared ReLU in place of GELU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub squared_relu: bool,
}

impl VitConfig {
    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, a patch that does not divide the image, or heads that do
    /// not divide the width into even parts.
    pub fn validate(&self) -> Result<()> {
        // Bounds a hostile file's sizes before anything is allocated by them.
        const LARGEST: usize = 1 << 20;
        let sizes = [
            ("image", self.image[0]),
            ("image", self.image[1]),
            ("channels", self.channels),
            ("patch", self.patch),
            ("classes", self.classes),
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("feed_forward", self.feed_forward),
        ];
        for (what, size) in sizes {
            if size == 0 || size > LARGEST {
                return Err(Error::Setting { what, found: size.to_string(), expected: "between 1 and 2^20" });
            }
        }
        if self.image.iter().any(|side| !side.is_multiple_of(self.patch)) {
            let found = format!("{} for images of {:?}", self.patch, self.image);
            return Err(Error::Setting { what: "patch", found, expected: "a divisor of the image's height and width" });
        }
        if self.patch_len() > LARGEST || self.tokens() > LARGEST {
            let found = format!("{} for images of {:?}", self.patch, self.image);
            return Err(Error::Setting { what: "patch", found, expected: "at most 2^20 values, and 2^20 patches" });
        }
        if !self.width.is_multiple_of(2 * self.heads) {
            let found = format!("{} for width {}", self.heads, self.width);
            let expected = "a divisor of the width that leaves an even number of elements for each head";
            return Err(Error::Setting { what: "heads", found, expected });
        }
        Ok(())
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        self.image.iter().map(|side| side / self.patch.max(1)).product()
    }

    /// Values of a patch.
    pub fn patch_len(&self) -> usize {
        self.patch * self.patch * self.channels
    }

    /// Tokens of an image: its patches, after a class token where there is one.
    pub fn tokens(&self) -> usize {
        self.patches() + usize::from(self.pooling == Pooling::Class)
    }

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let VitConfig { width, feed_forward, .. } = *self;
        let block = |layer: usize| {
            [
                (format!("blocks.{layer}.attn.qkv"), 3 * width, width),
                (format!("blocks.{layer}.attn.out"), width, width),
                (format!("blocks.{layer}.mlp.up"), feed_forward, width),
                (format!("blocks.{layer}.mlp.down"), width, feed_forward),
            ]
        };
        let patches = ("patches".to_owned(), width, self.patch_len());
        let head = ("head".to_owned(), self.classes, width);
        [patches].into_iter().chain((0..self.layers).flat_map(block)).chain([head]).collect()
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> usize {
        let linears: usize = self.linear_layers().into_iter().map(|(_, out, inputs)| out * inputs + out).sum();
        linears + (2 * self.layers + 1) * 2 * self.width + self.tokens() * self.width
    }
}
