//! Running texts through a checkpoint block after block, with the weights of one block in memory at a time: what pruning by activations needs.

use std::fmt;

use super::{
    Checkpoint, Positions,
    inference::{
        build::Parts,
        cache::Cache,
        embed,
        layer::{Layer, Place, Role},
    },
};
use crate::{Error, Result, cpu::rope::Table};

/// The input of linear layers.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The names of the weights that are multiplied with it, as the checkpoint has them: queries, keys and values share one input, and so do gate and up.
    pub weights: &'a [String],
    /// The input, `[tokens, in_features]`.
    pub x: &'a [f32],
    /// Number of tokens.
    pub tokens: usize,
    /// Whether the weights are stored as `[in_features, out_features]` (GPT-2).
    pub is_transposed: bool,
}

/// The values of a weight that replaces the stored one, by its name and in its stored shape; none to leave it.
pub type Replace<'a> = &'a dyn Fn(&str) -> Option<Vec<f32>>;

/// Texts on their way through a checkpoint. In memory are the hidden states of all texts, in f32, and the weights of one block.
///
/// ```no_run
/// use twofour_nn::model::{Calibration, Checkpoint};
/// let checkpoint = Checkpoint::open("model")?;
/// let text = checkpoint.tokenizer()?.encode("calibration text")?;
/// let mut calibration = Calibration::new(&checkpoint, &[text])?;
/// while !calibration.is_finished() {
///     calibration.observe(&mut |input| println!("{:?}: {} tokens", input.weights, input.tokens))?;
///     // Prune the block's weights here, and go on with what the pruned block computes.
///     calibration.advance(&|_| None)?;
/// }
/// # Ok::<(), twofour_nn::Error>(())
/// ```
pub struct Calibration<'a> {
    checkpoint: &'a Checkpoint,
    /// The hidden states of each text, `[tokens, width]`.
    texts: Vec<Vec<f32>>,
    /// Cosines and sines for the longest text.
    rotary: Option<Table>,
    block: usize,
}

impl fmt::Debug for Calibration<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calibration").field("texts", &self.texts.len()).field("block", &self.block).finish()
    }
}

impl<'a> Calibration<'a> {
    /// Texts, as tokens, before the first block.
    ///
    /// # Errors
    /// A text that is empty or longer than the model's context, a token outside the vocabulary; those of reading the embedding.
    pub fn new(checkpoint: &'a Checkpoint, texts: &[Vec<u32>]) -> Result<Self> {
        let config = checkpoint.config();
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
        for text in texts {
            if text.is_empty() || text.len() > config.context {
                let found = format!("{} tokens for a context of {}", text.len(), config.context);
                return Err(Error::Setting { what: "a calibration text", found, expected: "from 1 to the context" });
            }
        }
        let (parts, width) = (checkpoint.parts(), config.width);
        let (head, own) = match config.tied {
            true => (Some(Parts::<f32>::linear(&parts, "head", (config.vocabulary, width))?), None),
            false => (None, Some(Parts::<f32>::embedding(&parts, [config.vocabulary, width])?)),
        };
        let row = |token: usize| match (&own, &head) {
            (Some(table), _) => table.row(token, width),
            (None, Some(head)) => head.dense_row(token),
            (None, None) => None,
        };
        let (positions, rotary) = match config.positions {
            Positions::Rotary(rope) => (None, Some(Table::of(0..longest, &rope.frequencies(config.head_dim)))),
            Positions::Learned => {
                (Some(Parts::<f32>::table(&parts, "positions.weight", [config.context, width])?), None)
            }
        };
        let texts = texts.iter().map(|text| embed((&row, config), positions.as_deref(), text, 0));
        Ok(Calibration { checkpoint, texts: texts.collect::<Result<_>>()?, rotary, block: 0 })
    }

    /// The block that [`Calibration::observe`] and [`Calibration::advance`] run next.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Whether the texts are through the last block.
    pub fn is_finished(&self) -> bool {
        self.block >= self.checkpoint.config().layers
    }

    /// Runs every text through the next block with its stored weights, and shows the inputs of the block's linear layers, text by text. The texts stay in front of the
    /// block.
    ///
    /// # Errors
    /// Those of reading the block's weights and of its products; a call after the last block.
    pub fn observe(&self, observe: &mut dyn FnMut(Observation<'_>)) -> Result<()> {
        let layer = self.layer(None)?;
        let stored = |part: &str| self.checkpoint.stored(&format!("blocks.{}.{part}", self.block));
        let roles = [Role::Qkv, Role::Out, Role::Up, Role::Down];
        let weights = roles.map(|role| stored(role.name()));
        for text in &self.texts {
            let mut x = text.clone();
            self.run(&layer, &mut x, &mut |role: Role, x: &[f32]| {
                let at = roles.iter().position(|own| *own == role);
                if let Some((weights, is_transposed)) = at.and_then(|at| weights[at].as_ref()) {
                    let tokens = text.len() / self.checkpoint.config().width;
                    observe(Observation { weights, x, tokens, is_transposed: *is_transposed });
                }
            })?;
        }
        Ok(())
    }

    /// Runs every text through the next block, with the weights that `replace` returns in place of the stored ones.
    ///
    /// # Errors
    /// Those of [`Calibration::observe`]; a replaced weight of another length.
    pub fn advance(&mut self, replace: Replace<'_>) -> Result<()> {
        let layer = self.layer(Some(replace))?;
        let mut texts = std::mem::take(&mut self.texts);
        let outcome = texts.iter_mut().try_for_each(|x| self.run(&layer, x, &mut |_, _| {}));
        self.texts = texts;
        outcome?;
        self.block += 1;
        Ok(())
    }

    /// The hidden states of each text in front of the next block, `[tokens, width]`.
    pub fn texts(&self) -> &[Vec<f32>] {
        &self.texts
    }

    fn layer(&self, replace: Option<Replace<'_>>) -> Result<Layer<f32>> {
        if self.is_finished() {
            let found = self.block.to_string();
            return Err(Error::Setting { what: "block", found, expected: "one of the model's" });
        }
        let parts = self.checkpoint.parts().replacing(replace);
        Layer::build(self.checkpoint.config(), &parts, self.block)
    }

    fn run(&self, layer: &Layer<f32>, x: &mut [f32], observe: &mut dyn FnMut(Role, &[f32])) -> Result<()> {
        let place = Place { layer: self.block, position: 0, rotary: self.rotary.as_ref() };
        layer.forward(self.checkpoint.config(), x, &mut Cache::default(), place, observe)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::Path};

    use super::*;

    #[test]
    fn blocks_one_by_one_compute_what_the_model_does() {
        for family in ["llama", "mistral", "qwen2", "qwen3", "gpt2"] {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
            let checkpoint = Checkpoint::open(directory).unwrap();
            let texts = [vec![3u32, 5, 7, 11, 13, 17, 19, 23, 29], vec![2, 4, 8]];
            let mut calibration = Calibration::new(&checkpoint, &texts).unwrap();
            let mut seen: BTreeMap<String, Vec<usize>> = BTreeMap::new();
            let mut inputs = 0;
            while !calibration.is_finished() {
                let observed = calibration.observe(&mut |input| {
                    inputs += input.x.len();
                    for weight in input.weights {
                        let shape = &checkpoint.reader().tensor(weight).unwrap().info.shape;
                        assert_eq!(input.x.len(), input.tokens * shape[usize::from(!input.is_transposed)], "{weight}");
                        seen.entry(weight.clone()).or_default().push(input.tokens);
                    }
                });
                observed.unwrap();
                calibration.advance(&|_| None).unwrap();
            }
            assert!(calibration.observe(&mut |_| {}).is_err() && inputs > 0);
            let is_linear =
                |name: &str| name.contains("proj.weight") || (name.contains(".c_") && name.ends_with("weight"));
            let linears = checkpoint.reader().tensors().filter(|tensor| is_linear(&tensor.name));
            let names: Vec<_> = linears.map(|tensor| tensor.name.clone()).collect();
            assert!(seen.len() == names.len() && seen.values().all(|tokens| tokens == &[9, 3]), "{family}: {seen:?}");
            // Through the norm and the head, the hidden states are the model's logits.
            let model = checkpoint.inference::<f32>().unwrap();
            for (text, x) in texts.iter().zip(calibration.texts()) {
                let expected = model.session().logits(text).unwrap();
                let found = model.head_of(x).unwrap();
                assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{family}");
            }
        }
    }

    #[test]
    fn replaced_weights_are_computed_with() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/llama");
        let checkpoint = Checkpoint::open(directory).unwrap();
        let of = |replace: Replace<'_>| {
            let mut calibration = Calibration::new(&checkpoint, &[vec![3, 5, 7]]).unwrap();
            calibration.advance(replace).map(|()| calibration.texts()[0].clone())
        };
        let plain = of(&|_| None).unwrap();
        let zeroed = of(&|name| name.ends_with("down_proj.weight").then(|| vec![0.0; 16 * 24])).unwrap();
        assert_ne!(plain, zeroed);
        assert!(of(&|name| name.ends_with("down_proj.weight").then(Vec::new)).is_err());
        assert!(
            Calibration::new(&checkpoint, &[vec![]]).is_err() && Calibration::new(&checkpoint, &[vec![80]]).is_err()
        );
    }
}
