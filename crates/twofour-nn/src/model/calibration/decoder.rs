//! Decoders, block by block.

use std::ops::ControlFlow;

use twofour::file::Reader;

use super::{BlockwiseCheckpoint, CheckpointBlock, Observation, Observe, Replace};
use crate::{
    Result,
    model::{
        Checkpoint, Positions, Tokenizer, TransformerConfig,
        inference::{
            attention::Seen,
            build::Parts,
            cache::Cache,
            embed,
            layer::{Layer, Role},
            rotation::Rotations,
        },
    },
};

/// A block with what runs it.
pub(super) struct Block<'a> {
    pub(super) config: &'a TransformerConfig,
    pub(super) layer: Layer<f32>,
    pub(super) weights: StoredWeights,
}

/// The stored weights of a block's linear layers, and whether they are transposed.
pub(super) struct StoredWeights {
    of_roles: Vec<(Role, Vec<String>, bool)>,
}

impl StoredWeights {
    /// The weights that `stored(role)` names.
    pub(super) fn new(stored: impl Fn(Role) -> Option<(Vec<String>, bool)>) -> Self {
        let of = |role: Role| stored(role).map(|(names, is_transposed)| (role, names, is_transposed));
        StoredWeights { of_roles: Role::ALL.into_iter().filter_map(of).collect() }
    }

    /// Shows the input of a linear layer.
    fn show(&self, role: Role, x: &[f32], tokens: usize, observe: Observe<'_>) -> ControlFlow<()> {
        match self.of_roles.iter().find(|(own, ..)| *own == role) {
            Some((_, weights, is_transposed)) => {
                observe(Observation { weights, x, tokens, is_transposed: *is_transposed })
            }
            None => ControlFlow::Continue(()),
        }
    }
}

impl BlockwiseCheckpoint for Checkpoint {
    fn reader(&self) -> &Reader {
        self.reader()
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        self.tokenizer()
    }

    fn framing(&self, _: &Tokenizer) -> Result<[Vec<u32>; 2]> {
        Ok([vec![], vec![]])
    }

    fn context(&self) -> usize {
        self.config().context()
    }

    fn width(&self) -> usize {
        self.config().width
    }

    fn blocks(&self) -> usize {
        self.config().layers
    }

    fn embed(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let (config, parts) = (self.config(), self.parts());
        let width = config.width;
        let (head, own) = match config.is_tied() {
            true => (Some(Parts::<f32>::linear(&parts, "head", (config.vocabulary(), width))?), None),
            false => (None, Some(Parts::<f32>::embedding(&parts, [config.vocabulary(), width])?)),
        };
        let row = |token: usize| match (&own, &head) {
            (Some(table), _) => table.row(token, width),
            (None, Some(head)) => head.dense_row(token),
            (None, None) => None,
        };
        let positions = match config.positions {
            Positions::Rotary(_) => None,
            Positions::Learned => Some(Parts::<f32>::table(&parts, "positions.weight", [config.context(), width])?),
        };
        texts.iter().map(|text| embed((&row, config), positions.as_deref(), text, 0)).collect()
    }

    fn block(&self, index: usize, replace: Option<Replace<'_>>) -> Result<Box<dyn CheckpointBlock + '_>> {
        let config = self.config();
        let layer = Layer::build(config, &self.parts().replacing(replace), index)?;
        let weights = StoredWeights::new(|role| self.stored(&format!("blocks.{index}.{}", role.name())));
        Ok(Box::new(Block { config, layer, weights }))
    }
}

impl CheckpointBlock for Block<'_> {
    fn run(&self, x: &mut Vec<f32>, observe: Observe<'_>) -> Result<()> {
        let tokens = x.len() / self.config.width;
        let tables = Rotations::of(self.config).map(|rotations| rotations.tables(0..tokens));
        let mut cache = Cache::default();
        let seen = match self.config.attention.is_causal {
            true => Seen::Cache { cache: &mut cache, position: 0, rotary: tables.as_ref() },
            false => Seen::Sequences(&[tokens]),
        };
        self.layer.forward(self.config, x, seen, &mut |role, x: &[f32]| self.weights.show(role, x, tokens, observe))
    }
}
