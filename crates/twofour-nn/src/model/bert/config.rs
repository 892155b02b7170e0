//! The description of an encoder that trains.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, model::TransformerConfig};

/// What an encoder is trained for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EncoderTask {
    /// To predict the tokens that are masked (Devlin et al., 2019).
    MaskedTokens,
    /// To find where the answer to a question begins and ends in a text (Rajpurkar et al., "SQuAD", 2016).
    Answers,
}

/// An encoder, its task, and the length of the sequences that it is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BertConfig {
    /// The encoder.
    pub encoder: TransformerConfig,
    /// The task.
    pub task: EncoderTask,
    /// Tokens of each sequence in training, at most the encoder's context.
    pub positions: usize,
}

impl BertConfig {
    /// The share of a sequence's tokens that are masked.
    pub const MASKED_SHARE: f64 = 0.15;

    /// Checks the sizes.
    ///
    /// # Errors
    /// Those of [`TransformerConfig::validate`]; sequences longer than the context, or of fewer than eight tokens.
    pub fn validate(&self) -> Result<()> {
        self.encoder.validate()?;
        if !(8..=self.encoder.context()).contains(&self.positions) {
            let found = format!("{} for a context of {}", self.positions, self.encoder.context());
            let expected = "from 8 to the context";
            return Err(Error::Setting { what: "tokens of a sequence", found, expected });
        }
        Ok(())
    }

    /// Targets of a sequence: its masked tokens, or the two ends of its answer.
    pub fn targets(&self) -> usize {
        match self.task {
            EncoderTask::MaskedTokens => (self.positions as f64 * Self::MASKED_SHARE).round().max(1.0) as usize,
            EncoderTask::Answers => 2,
        }
    }

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let (width, vocabulary) = (self.encoder.width, self.encoder.vocabulary());
        let head = match self.task {
            EncoderTask::MaskedTokens => {
                vec![("head.transform".to_owned(), width, width), ("embedding".to_owned(), vocabulary, width)]
            }
            EncoderTask::Answers => vec![("answers".to_owned(), 2, width)],
        };
        self.encoder.linear_layers().into_iter().chain(head).collect()
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> usize {
        let (width, vocabulary) = (self.encoder.width, self.encoder.vocabulary());
        // The decoder of masked tokens is the embedding, with a bias.
        let head = match self.task {
            EncoderTask::MaskedTokens => width * width + width + 2 * width + vocabulary,
            EncoderTask::Answers => 2 * width + 2,
        };
        self.encoder.parameters() + head
    }
}
