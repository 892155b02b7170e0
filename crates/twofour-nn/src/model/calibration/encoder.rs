//! Encoders, block by block.

use twofour::file::Reader;

use super::{BlockInput, BlockwiseCheckpoint, CheckpointBlock, Outputs, Replace, decoder::Block};
use crate::{
    Result,
    model::{EncoderCheckpoint, EncoderInput, Tokenizer, encoder::Embeddings, inference::layer::Layer},
};

const POOLER: &str = "pooler";

/// The pooler as the last block: it reads the first token of each text, and changes no hidden state.
struct PoolerBlock {
    width: usize,
    input: BlockInput,
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
            let input = BlockInput { weights: self.parts().weights_of(POOLER), is_transposed: false };
            return Ok(Box::new(PoolerBlock { width: config.width, input }));
        }
        let layer = Layer::build(config, &self.parts().replacing(replace), index)?;
        let parts = self.parts();
        Ok(Box::new(Block::new(config, layer, index, &parts)))
    }
}

impl CheckpointBlock for PoolerBlock {
    fn inputs(&self) -> &[BlockInput] {
        std::slice::from_ref(&self.input)
    }

    fn input(&self, _: usize, x: &[f32], _: Vec<f32>) -> Vec<f32> {
        x.get(..self.width).unwrap_or_default().to_vec()
    }

    /// Nothing is computed after it.
    fn step(&self, _: usize, _: &[f32], _: &mut [f32], _: Option<Outputs<'_>>) -> Result<Vec<f32>> {
        Ok(vec![])
    }
}
