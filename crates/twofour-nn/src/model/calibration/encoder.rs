//! Encoders, block by block.

use twofour::file::Reader;
#[cfg(feature = "cuda")]
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

#[cfg(feature = "cuda")]
use super::gpu::gpu_block;
use super::{BlockInput, BlockwiseCheckpoint, CheckpointBlock, Replace, States, Stepped, decoder::Block};
use crate::{
    Result,
    model::{EncoderCheckpoint, EncoderInput, Tokenizer, encoder::Embeddings},
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
            return Ok(Box::new(self.pooler()));
        }
        Ok(Box::new(Block::new(config, index, &self.parts().replacing(replace), &self.parts())?))
    }

    #[cfg(feature = "cuda")]
    fn gpu_block(
        &self,
        context: &LayerContext,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock<DeviceBuffer> + '_>> {
        if index == self.config().layers {
            return Ok(Box::new(self.pooler()));
        }
        gpu_block((context, self.config()), index, &self.parts().replacing(replace), &self.parts())
    }
}

impl EncoderCheckpoint {
    fn pooler(&self) -> PoolerBlock {
        let input = BlockInput { weights: self.parts().weights_of(POOLER), is_transposed: false };
        PoolerBlock { width: self.config().width, input }
    }
}

impl<S: States> CheckpointBlock<S> for PoolerBlock {
    fn inputs(&self) -> &[BlockInput] {
        std::slice::from_ref(&self.input)
    }

    fn input(&self, _: usize, x: &mut S, _: Option<S>) -> Result<S> {
        x.first(self.width)
    }

    /// Nothing is computed after it.
    fn step(&self, _: usize, _: &S, _: &mut S, _: bool) -> Result<Stepped<S>> {
        Ok(Stepped { next: None, products: None })
    }
}
