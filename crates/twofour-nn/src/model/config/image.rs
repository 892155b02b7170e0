//! What enters and what leaves a model of images.

use super::expect_size;
use crate::{Error, Result};

/// Embeddings of the patches of images of one size, behind learned tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInput {
    /// Height and width of an image, in pixels; multiples of the patch.
    pub image: [usize; 2],
    /// Values of a pixel.
    pub channels: usize,
    /// Height and width of a patch, in pixels.
    pub patch: usize,
    /// Whether a learned token stands before the patches.
    pub class_token: bool,
    /// Learned tokens between the class token and the patches, without positions (Darcet et al., "Vision Transformers
    /// Need Registers", 2024).
    pub registers: usize,
}

/// The linear layer that scores classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHead {
    /// Number of classes.
    pub classes: usize,
    /// The part of the hidden states that it reads.
    pub input: ImageHeadInput,
}

/// The part of the hidden states that the head of classes reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageHeadInput {
    /// The class token (ViT).
    ClassToken,
    /// The class token, and behind it the mean of the patches (DINOv2).
    ClassTokenAndMean,
    /// The mean of the patches.
    Mean,
}

impl ImageHeadInput {
    /// Its elements for a model of that width.
    pub fn elements(self, width: usize) -> usize {
        match self {
            ImageHeadInput::ClassToken | ImageHeadInput::Mean => width,
            ImageHeadInput::ClassTokenAndMean => 2 * width,
        }
    }
}

impl ImageInput {
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
        usize::from(self.class_token).saturating_add(self.registers)
    }

    /// Values of an image.
    pub fn image_len(&self) -> usize {
        self.channels * self.image[0] * self.image[1]
    }

    /// Values of a patch.
    pub fn patch_len(&self) -> usize {
        self.channels * self.patch * self.patch
    }

    pub(super) fn validate(&self) -> Result<()> {
        let ImageInput { image, channels, patch, registers, .. } = *self;
        for size in [image[0], image[1], channels, patch] {
            expect_size("a size of the images", size, 20)?;
        }
        if image.iter().any(|side| !side.is_multiple_of(patch)) {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "a divisor of the image's height and width" });
        }
        if channels.saturating_mul(patch * patch) > 1 << 20 || self.patches() > 1 << 20 {
            let found = format!("{patch} for images of {image:?}");
            return Err(Error::Setting { what: "patch", found, expected: "at most 2^20 values, and 2^20 patches" });
        }
        if registers > 1 << 20 {
            let found = registers.to_string();
            return Err(Error::Setting { what: "registers", found, expected: "at most 2^20" });
        }
        Ok(())
    }
}
