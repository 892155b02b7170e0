//! Checks of a description.

use super::{
    AttentionConfig, ExpertsConfig, ImageHead, ImageHeadInput, ImageInput, ModelInput, ModelOutput, Positions,
    TokenInput, TransformerConfig,
};
use crate::{Error, Result};

/// An error for a size that is zero or above a power of two: it bounds the sizes of a hostile file before anything is
/// allocated by them.
pub(super) fn expect_size(what: &'static str, size: usize, bits: u32) -> Result<()> {
    if (1..=1 << bits).contains(&size) {
        return Ok(());
    }
    let expected = if bits == 20 { "between 1 and 2^20" } else { "between 1 and 2^24" };
    Err(Error::Setting { what, found: size.to_string(), expected })
}

impl TransformerConfig {
    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, a patch that does not divide the image, heads that do not
    /// fit each other, a head of an odd number of elements that is to
    /// be rotated, experts that do not fit each other, windows for another number of layers, numbers that are not above
    /// 0, a class token beside windows, relative positions or a neck, and a head for classes or registers without one.
    pub fn validate(&self) -> Result<()> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.attention;
        let sizes = match self.input {
            ModelInput::Tokens(TokenInput { vocabulary, context, .. }) => [vocabulary, context],
            ModelInput::Image(image) => {
                image.validate()?;
                [1, image.tokens()]
            }
        };
        for (what, size) in [
            ("vocabulary", sizes[0]),
            ("context", sizes[1]),
            ("layers", self.layers),
            ("width", self.width),
            ("heads", heads),
            ("key-value heads", kv_heads),
            ("elements of a head", head_dim),
            ("feed_forward", self.feed_forward.hidden),
        ] {
            expect_size(what, size, 24)?;
        }
        if let ModelInput::Tokens(TokenInput { token_types: types @ 1.., .. }) = self.input {
            expect_size("token types", types, 24)?;
        }
        expect_size("the width of the table of tokens", self.table_width(), 24)?;
        if !heads.is_multiple_of(kv_heads) {
            let found = format!("{kv_heads} for {heads} heads");
            return Err(Error::Setting { what: "key-value heads", found, expected: "a divisor of the heads" });
        }
        if !self.attention.is_causal && self.query_width() != self.width {
            let found = format!("{heads} for width {}", self.width);
            return Err(Error::Setting { what: "heads", found, expected: "a divisor of the width" });
        }
        if matches!(self.positions, Positions::Rotary(_)) && !self.rotated().is_multiple_of(2) {
            let found = self.rotated().to_string();
            return Err(Error::Setting { what: "elements of a head", found, expected: "even, as rotation requires" });
        }
        if self.rotated() > head_dim {
            let (what, found) = ("rotated elements of a head", self.rotated().to_string());
            return Err(Error::Setting { what, found, expected: "no more than a head has" });
        }
        for rope in self.ropes() {
            rope.validate(self.rotated())?;
        }
        self.experts.as_ref().map_or(Ok(()), ExpertsConfig::validate)?;
        self.attention.latent.as_ref().map_or(Ok(()), |latent| latent.validate(&self.attention))?;
        self.expect_windows()?;
        let scale = match self.input {
            ModelInput::Tokens(input) => input.scale,
            ModelInput::Image(_) => None,
        };
        let AttentionConfig { scale: of_scores, soft_cap, qkv_bound, .. } = self.attention;
        for (what, number) in [
            ("the scale of embeddings", scale),
            ("the scale of scores", of_scores),
            ("the bound of scores", soft_cap),
            ("the bound of queries, keys and values", qkv_bound),
            ("the bound of the head's scores", self.logit_soft_cap()),
        ] {
            if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
                return Err(Error::Setting { what, found: number.to_string(), expected: "a number above 0" });
            }
        }
        self.expect_output()
    }

    fn expect_windows(&self) -> Result<()> {
        let windows = &self.attention.windows;
        if windows.is_empty() || windows.len() == self.layers && !windows.contains(&Some(0)) {
            return Ok(());
        }
        let found = match windows.iter().position(|window| *window == Some(0)) {
            Some(layer) => format!("0 for layer {layer}"),
            None => format!("{} for {} layers", windows.len(), self.layers),
        };
        Err(Error::Setting { what: "sliding windows", found, expected: "a positive number or none for each layer" })
    }

    fn expect_output(&self) -> Result<()> {
        let is_neck = matches!(self.output, ModelOutput::Neck { .. });
        let is_grid = !self.attention.windows.is_empty() || self.attention.relative_positions || is_neck;
        if let ModelOutput::Neck { channels: size }
        | ModelOutput::Hidden { head: Some(ImageHead { classes: size, .. }) } = self.output
        {
            expect_size("classes or channels", size, 20)?;
        }
        let ModelInput::Image(ImageInput { class_token, registers, .. }) = self.input else {
            if is_neck || self.attention.relative_positions {
                let (what, found) = ("the neck or relative positions", "in a model of text".to_owned());
                return Err(Error::Setting { what, found, expected: "in a model of images" });
            }
            return Ok(());
        };
        let reads_class = match self.output {
            ModelOutput::Hidden { head: Some(ImageHead { input, .. }) } => input != ImageHeadInput::Mean,
            _ => false,
        };
        if class_token && is_grid || !class_token && (reads_class || registers > 0) {
            let found = if class_token { "beside windows, relative positions or a neck" } else { "absent" };
            let expected = "there for a head or registers, and absent where patches form a grid";
            return Err(Error::Setting { what: "the class token", found: found.to_owned(), expected });
        }
        Ok(())
    }
}
