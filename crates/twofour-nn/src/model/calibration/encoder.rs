//! Encoders, block by block.

use twofour::file::Reader;

use super::{
    BlockwiseCheckpoint, CheckpointBlock, Observation, Observe, Replace,
    decoder::{Block, StoredWeights},
};
use crate::{
    Result,
    model::{EncoderCheckpoint, EncoderInput, Tokenizer, encoder::Embeddings, inference::layer::Layer},
};

const POOLER: &str = "pooler";

/// The pooler as the last block: it reads the first token of each text, and changes no hidden state.
struct PoolerBlock {
    width: usize,
    weights: Vec<String>,
}

impl BlockwiseCheckpoint for EncoderCheckpoint {
    fn reader(&self) -> &Reader {
        self.reader()
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        self.tokenizer()
    }

    fn framing(&self, tokenizer: &Tokenizer) -> Result<[Vec<u32>; 2]> {
        tokenizer.framing()
    }

    fn context(&self) -> usize {
        self.config().context()
    }

    fn width(&self) -> usize {
        self.config().width
    }

    fn blocks(&self) -> usize {
        self.config().layers + usize::from(self.parts().has_linear(POOLER))
    }

    fn embed(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let embeddings = Embeddings::<f32>::build(self.config(), &self.parts())?;
        texts.iter().map(|tokens| embeddings.forward(self.config(), &[EncoderInput { tokens, types: None }])).collect()
    }

    fn block(&self, index: usize, replace: Option<Replace<'_>>) -> Result<Box<dyn CheckpointBlock + '_>> {
        let config = self.config();
        if index == config.layers {
            let weights = self.parts().weights_of(POOLER);
            return Ok(Box::new(PoolerBlock { width: config.width, weights }));
        }
        let layer = Layer::build(config, &self.parts().replacing(replace), index)?;
        let parts = self.parts();
        let stored = |name: &str| parts.has_linear(name).then(|| (parts.weights_of(name), false));
        let weights = StoredWeights::new(|role| stored(&format!("blocks.{index}.{}", role.name())));
        Ok(Box::new(Block { config, layer, weights }))
    }
}

impl CheckpointBlock for PoolerBlock {
    fn run(&self, x: &mut Vec<f32>, observe: Observe<'_>) -> Result<()> {
        let first = x.get(..self.width).unwrap_or_default();
        // Nothing is computed after it.
        let _ = observe(Observation { weights: &self.weights, x: first, tokens: 1, is_transposed: false });
        Ok(())
    }
}
