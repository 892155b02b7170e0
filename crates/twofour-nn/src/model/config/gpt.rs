//! The sizes of a model.

use serde::{Deserialize, Serialize};

use super::TransformerConfig;
use crate::{Error, Result};

/// The sizes of a byte-level GPT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Number of layers, each an attention block and a feed-forward block.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention; they divide the width into even parts.
    pub heads: usize,
    /// The longest sequence, in bytes.
    pub context: usize,
    /// Width of the feed-forward block's hidden layer.
    pub feed_forward: usize,
}

impl GptConfig {
    /// The model of `twofour quickstart`: small enough to see some hundred thousand bytes in a minute or two on two
    /// threads, after which
    /// it writes words. Its 5.4 million weights in linear layers are 20.5 MiB of f32 dense and 11.1 MiB with 2:4
    /// blocks, more than
    /// L2 holds.
    #[must_use]
    pub fn quickstart() -> Self {
        GptConfig { layers: 2, width: 512, heads: 8, context: 128, feed_forward: 1536 }
    }

    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, or heads that do not divide the width into even parts.
    pub fn validate(&self) -> Result<()> {
        // Bounds a hostile file's sizes before anything is allocated by them.
        const LARGEST: usize = 1 << 20;
        const MAX_ANGLES: usize = 1 << 25;
        let sizes = [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("context", self.context),
            ("feed_forward", self.feed_forward),
        ];
        for (what, size) in sizes {
            if size == 0 || size > LARGEST {
                return Err(Error::Setting { what, found: size.to_string(), expected: "between 1 and 2^20" });
            }
        }
        if !self.width.is_multiple_of(2 * self.heads) {
            let found = format!("{} for width {}", self.heads, self.width);
            return Err(Error::Setting {
                what: "heads",
                found,
                expected: "a divisor of the width that leaves an even number of elements for each head",
            });
        }
        // The rotary tables hold an angle for each position and pair of elements, and no tensor of a file vouches for
        // them.
        let angles = self.context * (self.width / self.heads / 2);
        if angles > MAX_ANGLES {
            let found = format!("{} with heads of {} elements", self.context, self.width / self.heads);
            let expected = "at most 2^26 elements of all positions of one head together";
            return Err(Error::Setting { what: "context", found, expected });
        }
        Ok(())
    }

    /// The sizes of a decoder, if it is a byte-level GPT.
    pub(in crate::model) fn of(config: &TransformerConfig) -> Option<Self> {
        let own = GptConfig {
            layers: config.layers,
            width: config.width,
            heads: config.attention.heads,
            context: config.context(),
            feed_forward: config.feed_forward.hidden,
        };
        (TransformerConfig::from(&own) == *config).then_some(own)
    }

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        TransformerConfig::from(self).linear_layers()
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> usize {
        TransformerConfig::from(self).parameters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_do_not_fit_are_refused_by_name() {
        let good = GptConfig::quickstart();
        good.validate().unwrap();
        for (bad, word) in [
            (GptConfig { layers: 0, ..good }, "layers"),
            (GptConfig { context: usize::MAX, ..good }, "context"),
            (GptConfig { heads: 7, ..good }, "heads"),
            (GptConfig { width: 24, heads: 8, ..good }, "heads"),
            // Tables of 2^39 angles: never made.
            (GptConfig { width: 1 << 20, heads: 1, context: 1 << 20, ..good }, "context"),
        ] {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let text = serde_json::to_string(&GptConfig::quickstart()).unwrap();
        assert_eq!(serde_json::from_str::<GptConfig>(&text).unwrap(), GptConfig::quickstart());
        assert!(serde_json::from_str::<GptConfig>(&text.replace("heads", "hands")).is_err());
    }
}
