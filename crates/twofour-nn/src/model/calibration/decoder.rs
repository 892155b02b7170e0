//! Decoders, block by block.

use twofour::file::Reader;

use super::{BlockInput, BlockwiseCheckpoint, CheckpointBlock, FreeFeatures, Outputs, Replace};
use crate::{
    Result,
    model::{
        Checkpoint, Positions, Tokenizer, TransformerConfig,
        families::layout::StoredLinear,
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
    config: &'a TransformerConfig,
    layer: Layer<f32>,
    inputs: Vec<BlockInput>,
    free: Vec<Option<FreeFeatures>>,
}

impl<'a> Block<'a> {
    /// The block of a layer, whose linear layers lie as `stored` says.
    pub(super) fn new<'s>(
        config: &'a TransformerConfig,
        layer: Layer<f32>,
        stored: impl Fn(Role) -> Option<&'s StoredLinear>,
    ) -> Self {
        let input = |role: Role| match stored(role) {
            Some(StoredLinear { parts, is_transposed, .. }) => {
                let weights = parts.iter().map(|(name, _)| format!("{name}.weight")).collect();
                BlockInput { weights, is_transposed: *is_transposed }
            }
            None => BlockInput::default(),
        };
        let free = Role::ALL.map(|role| FreeFeatures::of(config, role, &stored)).into();
        Block { config, layer, inputs: Role::ALL.map(input).into(), free }
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
        let parts = self.parts();
        Ok(Box::new(Block::new(config, layer, |role| parts.stored(&format!("blocks.{index}.{}", role.name())))))
    }
}

impl CheckpointBlock for Block<'_> {
    fn inputs(&self) -> &[BlockInput] {
        &self.inputs
    }

    fn free_features(&self, index: usize) -> Option<&FreeFeatures> {
        self.free.get(index)?.as_ref()
    }

    fn input(&self, index: usize, x: &[f32], between: Vec<f32>) -> Vec<f32> {
        self.layer.input(Role::ALL[index], x, between)
    }

    fn step(&self, index: usize, input: &[f32], x: &mut [f32], outputs: Option<Outputs<'_>>) -> Result<Vec<f32>> {
        let tokens = x.len() / self.config.width;
        let tables = Rotations::of(self.config).map(|rotations| rotations.tables(0..tokens));
        let mut cache = Cache::default();
        let seen = match self.config.attention.is_causal {
            true => Seen::Cache { cache: &mut cache, position: 0, rotary: tables.as_ref() },
            false => Seen::Sequences(&[tokens]),
        };
        self.layer.step(self.config, Role::ALL[index], input, x, seen, outputs)
    }
}
