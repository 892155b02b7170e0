//! Perplexity of a model in which one weight is another.

use std::path::Path;

use anyhow::Result;
use half::{bf16, f16};
use serde::Serialize;
use twofour::{DataType, file::StoredElement, kernel::KernelElement};
use twofour_nn::model::{Checkpoint, Perplexity, Windows};

use crate::{
    commands::{eval, text},
    exit::Usage,
    memory,
    present::Screen,
};

/// Perplexity of the dense model.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct DensePerplexity {
    pub(super) perplexity: f64,
    pub(super) tokens: usize,
    window: usize,
}

/// A text by which a decoder is judged.
#[derive(Debug)]
pub(super) struct Judge {
    checkpoint: Checkpoint,
    tokens: Vec<u32>,
    windows: Windows,
    dense: DensePerplexity,
}

impl Judge {
    /// Measures the dense model on the first tokens of a text.
    pub(super) fn new(screen: &Screen, checkpoint: Checkpoint, path: &Path, most: usize) -> Result<Self> {
        memory::expect_room_for_weights(checkpoint.reader(), checkpoint.dtype())?;
        let tokenizer = checkpoint.tokenizer()?;
        let mut tokens = text::encode(&tokenizer, &text::read(path)?, screen)?;
        tokens.truncate(most);
        let windows = eval::windows((None, None), checkpoint.config(), &tokenizer)?;
        if tokens.len() < 2 {
            return Err(Usage(format!("{}: one token or none, where two or more are scored", path.display())).into());
        }
        let dense = DensePerplexity { perplexity: 0.0, tokens: 0, window: windows.window };
        let judge = Judge { checkpoint, tokens, windows, dense };
        let Perplexity { perplexity, tokens } = judge.measure(&|_| None)?;
        Ok(Judge { dense: DensePerplexity { perplexity, tokens, ..dense }, ..judge })
    }

    /// The dense model's.
    pub(super) fn dense(&self) -> DensePerplexity {
        self.dense
    }

    /// The perplexity with other elements, in its stored shape, in a weight's place.
    pub(super) fn with(&self, name: &str, elements: &[f32]) -> Result<f64> {
        Ok(self.measure(&|other| (other == name).then(|| elements.to_vec()))?.perplexity)
    }

    fn measure(&self, replace: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<Perplexity> {
        match self.checkpoint.dtype() {
            DataType::F16 => self.typed::<f16>(replace),
            DataType::BF16 => self.typed::<bf16>(replace),
            _ => self.typed::<f32>(replace),
        }
    }

    fn typed<T: KernelElement + StoredElement>(
        &self,
        replace: &dyn Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<Perplexity> {
        let model = self.checkpoint.inference_with::<T>(replace)?;
        Ok(model.perplexity(&self.tokens, self.windows, |_, _| ())?)
    }
}
