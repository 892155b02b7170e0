//! The description of an image encoder.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, engine::Nonlinearity};

/// An image encoder: patches of an image, positions, and layers of full attention and feed-forward blocks with a norm before each. ViT (Dosovitskiy et al., "An Image is Worth
/// 16x16 Words", 2021), DINOv2 (Oquab et al., 2023) and SAM's image encoder (Kirillov et al., "Segment Anything", 2023; its blocks are those of Li et al., "Exploring Plain Vision
/// Transformer Backbones for Object Detection", 2022) are such encoders.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageEncoderConfig {
    /// Height and width of an image, in pixels; multiples of the patch.
    pub image: [usize; 2],
    /// Values of a pixel.
    pub channels: usize,
    /// Height and width of a patch, in pixels.
    pub patch: usize,
    /// Number of layers.
    pub layers: usize,
    /// Width of the hidden states.
    pub width: usize,
    /// Heads of attention; a divisor of the width.
    pub heads: usize,
    /// Width of the feed-forward block's hidden layer.
    pub feed_forward: usize,
    /// Added to the variance in norms.
    pub epsilon: f32,
    /// The function of the feed-forward block.
    pub activation: Nonlinearity,
    /// Whether the hidden layer is `activation(gate) ⊙ up`, of twice as many output features of the first layer: the gate's, then the other's (DINOv2's SwiGLU).
    pub gated: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether a learned token stands before the patches.
    pub class_token: bool,
    /// Learned tokens between the class token and the patches, without positions (Darcet et al., "Vision Transformers Need Registers", 2024).
    pub registers: usize,
    /// Whether the output of each block is multiplied by learned factors, one for each element (DINOv2's layer scale).
    pub layer_scale: bool,
    /// Whether scores have a term for the distance of query and key, of rows and of columns (SAM).
    pub relative_positions: bool,
    /// Attention within windows, in some layers (SAM).
    pub windows: Option<ImageWindows>,
    /// What follows the last layer.
    pub output: ImageOutput,
}

/// Attention within square windows of patches. Windows at the right and the lower edge are padded with zeros, which attention sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageWindows {
    /// Height and width of a window, in patches.
    pub side: usize,
    /// The layers with attention over the whole image instead.
    pub global: Vec<usize>,
}

/// What follows the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum ImageOutput {
    /// A norm.
    Norm {
        /// The linear layer that scores classes.
        head: Option<ImageHead>,
    },
    /// SAM's neck: a convolution of 1x1 to so many channels, a norm over them, a convolution of 3x3, and a norm.
    Neck {
        /// Channels of the output.
        channels: usize,
    },
}

/// The linear layer that scores classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageHead {
    /// Number of classes.
    pub classes: usize,
    /// What it reads.
    pub input: ImageHeadInput,
}

/// What scores classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageHeadInput {
    /// The class token (ViT).
    ClassToken,
    /// The class token, and behind it the mean of the patches (DINOv2).
    ClassTokenAndMean,
}

impl ImageHeadInput {
    /// Its elements for a model of that width.
    pub fn len(self, width: usize) -> usize {
        match self {
            ImageHeadInput::ClassToken => width,
            ImageHeadInput::ClassTokenAndMean => 2 * width,
        }
    }

    /// Whether it has no elements, which no width of at least 1 makes so.
    pub fn is_empty(self, width: usize) -> bool {
        self.len(width) == 0
    }
}

impl ImageEncoderConfig {
    /// SAM's image encoders by name: `sam-vit-b` (90 M parameters), `sam-vit-l` (308 M) and `sam-vit-h` (637 M), for images of 1024 by 1024 pixels.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "sam-vit-b" => Self::sam(1024, 768, 12, 12, &[2, 5, 8, 11]),
            "sam-vit-l" => Self::sam(1024, 1024, 24, 16, &[5, 11, 17, 23]),
            "sam-vit-h" => Self::sam(1024, 1280, 32, 16, &[7, 15, 23, 31]),
            _ => return None,
        })
    }

    /// The names that [`ImageEncoderConfig::named`] has.
    pub const NAMES: [&'static str; 3] = ["sam-vit-b", "sam-vit-l", "sam-vit-h"];

    /// SAM's image encoder for square images of that side.
    fn sam(side: usize, width: usize, layers: usize, heads: usize, global: &[usize]) -> Self {
        ImageEncoderConfig {
            image: [side; 2],
            channels: 3,
            patch: 16,
            layers,
            width,
            heads,
            feed_forward: 4 * width,
            epsilon: 1e-6,
            activation: Nonlinearity::Gelu,
            gated: false,
            qkv_bias: true,
            class_token: false,
            registers: 0,
            layer_scale: false,
            relative_positions: true,
            windows: Some(ImageWindows { side: 14, global: global.to_vec() }),
            output: ImageOutput::Neck { channels: 256 },
        }
    }

    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, a patch that does not divide the image, heads that do not divide the width, global layers that do not exist, a class
    /// token beside windows, relative positions or a neck, and a head or registers without one.
    pub fn validate(&self) -> Result<()> {
        // Bounds a hostile file's sizes before anything is allocated by them.
        const LARGEST: usize = 1 << 20;
        let ImageEncoderConfig { image, channels, patch, layers, width, heads, feed_forward, .. } = *self;
        let (side, classes) = (
            self.windows.as_ref().map_or(1, |windows| windows.side),
            match self.output {
                ImageOutput::Norm { head } => head.map_or(1, |head| head.classes),
                ImageOutput::Neck { channels } => channels,
            },
        );
        for size in [image[0], image[1], channels, patch, layers, width, heads, feed_forward, side, classes] {
            if size == 0 || size > LARGEST {
                let (what, found) = ("a size of the image encoder", size.to_string());
                return Err(Error::Setting { what, found, expected: "between 1 and 2^20" });
            }
        }
        if image.iter().any(|side| !side.is_multiple_of(patch)) {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "a divisor of the image's height and width" });
        }
        if channels.saturating_mul(patch * patch) > LARGEST || self.patches() > LARGEST {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "at most 2^20 values, and 2^20 patches" });
        }
        if !width.is_multiple_of(heads) {
            let found = format!("{heads} for width {width}");
            return Err(Error::Setting { what: "heads", found, expected: "a divisor of the width" });
        }
        if let Some(layer) = self.windows.iter().flat_map(|w| &w.global).find(|layer| **layer >= layers) {
            let found = format!("{layer} of {layers}");
            return Err(Error::Setting { what: "a layer with global attention", found, expected: "one of the layers" });
        }
        let is_grid =
            self.windows.is_some() || self.relative_positions || matches!(self.output, ImageOutput::Neck { .. });
        let has_head = matches!(self.output, ImageOutput::Norm { head: Some(_) });
        if self.registers > LARGEST {
            let found = self.registers.to_string();
            return Err(Error::Setting { what: "registers", found, expected: "at most 2^20" });
        }
        if self.class_token && is_grid || !self.class_token && (has_head || self.registers > 0) {
            let found = if self.class_token { "beside windows, relative positions or a neck" } else { "absent" };
            let expected = "there for a head or registers, and absent where patches form a grid";
            return Err(Error::Setting { what: "the class token", found: found.to_owned(), expected });
        }
        Ok(())
    }

    /// Rows and columns of patches.
    pub fn grid(&self) -> [usize; 2] {
        self.image.map(|side| side / self.patch.max(1))
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        let [rows, columns] = self.grid();
        rows.saturating_mul(columns)
    }

    /// Tokens of an image: the class token, registers, and its patches.
    pub fn tokens(&self) -> usize {
        self.learned_tokens().saturating_add(self.patches())
    }

    /// Tokens before the patches: the class token and registers.
    pub fn learned_tokens(&self) -> usize {
        usize::from(self.class_token) + self.registers
    }

    /// Output features of the feed-forward block's first layer.
    pub fn up_width(&self) -> usize {
        if self.gated { 2 * self.feed_forward } else { self.feed_forward }
    }

    /// Values of an image.
    pub fn image_len(&self) -> usize {
        self.channels * self.image[0] * self.image[1]
    }

    /// Values of a patch.
    pub fn patch_len(&self) -> usize {
        self.channels * self.patch * self.patch
    }

    /// The side of a layer's windows; none where attention is over the whole image.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.as_ref().filter(|windows| !windows.global.contains(&layer)).map(|windows| windows.side)
    }

    /// Rows and columns of the tokens that a layer's queries see.
    pub(in crate::model) fn span(&self, layer: usize) -> [usize; 2] {
        self.window(layer).map_or(self.grid(), |side| [side; 2])
    }

    /// Rows and columns of an image's hidden states, [`ImageEncoder::forward`](super::ImageEncoder::forward)'s: tokens, and their elements.
    pub fn hidden_shape(&self) -> [usize; 2] {
        match self.output {
            ImageOutput::Norm { .. } => [self.tokens(), self.width],
            ImageOutput::Neck { channels } => [self.tokens(), channels],
        }
    }
}
