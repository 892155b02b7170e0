//! Images in an engine's memory.

use super::{Pooling, VitConfig};
use crate::{
    Error, Result,
    engine::{Engine, Kind},
};

/// The most tokens of all images: batches name them by 32-bit numbers.
const MAX_TOKENS: usize = i32::MAX as usize;

impl VitConfig {
    /// Brings images to the engine's memory, `[height, width, channels]` each: the tokens of one after those of the
    /// other, by which batches name them.
    ///
    /// # Errors
    /// Images of another shape than the model's, a class that the model does not have; not enough memory.
    pub(super) fn uploaded<'a, E: Engine>(
        &self,
        engine: &E,
        shape: [usize; 3],
        images: impl Iterator<Item = &'a [u8]>,
        classes: &[u8],
    ) -> Result<E::Buffer> {
        let [rows, columns] = self.image;
        if shape != [rows, columns, self.channels] {
            let (what, found) = ("height, width and channels of the images", format!("{shape:?}"));
            return Err(Error::Setting { what, found, expected: "the model's" });
        }
        if let Some((position, &class)) =
            classes.iter().enumerate().find(|(_, class)| usize::from(**class) >= self.classes)
        {
            let (what, vocabulary) = ("labels", self.classes);
            return Err(Error::token(what, class.into(), position, vocabulary));
        }
        let tokens = classes.len() * self.tokens();
        if tokens > MAX_TOKENS {
            let (what, found) = ("tokens of all images", tokens.to_string());
            return Err(Error::Setting { what, found, expected: "at most 2^31; use larger patches" });
        }
        let mut values = Vec::with_capacity(tokens * self.patch_len());
        images.for_each(|image| self.tokens_of(image, &mut values));
        let mut buffer = engine.zeros(Kind::Compute, values.len())?;
        engine.write(&mut buffer, &values)?;
        Ok(buffer)
    }

    /// The tokens of an image as the first linear layer takes them, pixels from -1 to 1: a class token of zeros where
    /// there is one, and the patches row by row, each with its values by row, column and channel.
    fn tokens_of(&self, pixels: &[u8], to: &mut Vec<f32>) {
        let VitConfig { image: [_, columns], channels, patch, .. } = *self;
        if self.pooling == Pooling::Class {
            to.extend(std::iter::repeat_n(0.0, self.patch_len()));
        }
        for rows in pixels.chunks_exact(patch * columns * channels) {
            for left in (0..columns).step_by(patch) {
                for row in rows.chunks_exact(columns * channels) {
                    let values = &row[left * channels..(left + patch) * channels];
                    to.extend(values.iter().map(|&value| f32::from(value) / 127.5 - 1.0));
                }
            }
        }
    }
}
