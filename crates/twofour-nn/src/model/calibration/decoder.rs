//! Decoders, block by block.

use twofour::file::Reader;
#[cfg(feature = "cuda")]
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

#[cfg(feature = "cuda")]
use super::gpu::gpu_block;
use super::{
    BlockInput, BlockwiseCheckpoint, CheckpointBlock, FreeFeatures, InputPart, Replace, Stepped,
    inputs::{free_features, input_of},
};
use crate::{
    Error, Result,
    model::{
        Checkpoint, StoredParts, Tokenizer, TransformerConfig,
        inference::{
            attention::Seen,
            cache::Cache,
            entry::Entry,
            experts::{Experts, Routed, rows},
            latent::Latents,
            layer::{Layer, Outputs, Role},
            parts::Parts,
            rotation::Rotations,
        },
    },
};

/// A block with what runs it.
pub(super) struct Block<'a> {
    config: &'a TransformerConfig,
    layer: Layer<f32>,
    inputs: Vec<BlockInput>,
    /// The step of each input, and the number of the expert or latent that reads it, where the input is a part of the
    /// step's.
    places: Vec<(usize, Option<usize>)>,
    free: Vec<Option<FreeFeatures>>,
}

impl<'a> Block<'a> {
    /// The block of that number, of the weights that `replaced` has, which lie as `stored` says.
    pub(super) fn new(
        config: &'a TransformerConfig,
        index: usize,
        replaced: &StoredParts<'_>,
        stored: &StoredParts<'_>,
    ) -> Result<Self> {
        let layer = Layer::build(config, replaced, index)?;
        let input = |name: &str| input_of(stored, &format!("blocks.{index}.{name}"));
        let (mut inputs, mut places) = (vec![], vec![]);
        for (step, role) in Role::of(config).iter().copied().enumerate() {
            if role == Role::Latents {
                for (part, (name, ..)) in config.of_latents().into_iter().enumerate() {
                    inputs.push(input(name));
                    places.push((step, Some(part)));
                }
                continue;
            }
            match config.experts(index).filter(|_| matches!(role, Role::Up | Role::Down)) {
                None => {
                    inputs.push(input(role.name()));
                    places.push((step, None));
                }
                Some(experts) => {
                    let part = if role == Role::Up { "up" } else { "down" };
                    let own = (0..experts.count).map(|expert| format!("mlp.experts.{expert}.{part}"));
                    let shared = experts.shared.map(|_| format!("mlp.shared.{part}"));
                    for (expert, name) in own.chain(shared).enumerate() {
                        inputs.push(input(&name));
                        places.push((step, Some(expert)));
                    }
                }
            }
        }
        let free = free_features(config, index, stored);
        Ok(Block { config, layer, inputs, places, free })
    }

    fn role(&self, step: usize) -> Role {
        let roles = Role::of(self.config);
        roles[step.min(roles.len() - 1)]
    }

    /// The experts, with the one that reads an input and the step that computes it.
    fn expert(&self, index: usize) -> Option<(&Experts<f32>, usize, Role)> {
        let (step, expert) = self.places.get(index)?;
        let role = self.role(*step);
        self.layer.experts().filter(|_| role != Role::Latents).zip(*expert).map(|(experts, own)| (experts, own, role))
    }

    /// What reads latents, with the number of the one that reads an input.
    fn latent(&self, index: usize) -> Option<(&Latents<f32>, usize)> {
        let (step, latent) = self.places.get(index)?;
        self.layer.latents().filter(|_| self.role(*step) == Role::Latents).zip(*latent)
    }
}

impl BlockwiseCheckpoint for Checkpoint {
    fn reader(&self) -> &Reader {
        self.reader()
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        self.tokenizer()
    }

    fn framing(&self, tokenizer: &Tokenizer) -> Result<[Vec<u32>; 2]> {
        if !self.config().begins_windows() {
            return Ok([vec![], vec![]]);
        }
        let [before, _] = tokenizer.framing()?;
        Ok([before, vec![]])
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
        let shape = (config.vocabulary(), config.table_width());
        let head = config.is_tied().then(|| Parts::<f32>::linear(&parts, "head", shape)).transpose()?;
        let entry = Entry::<f32>::build(config, &parts)?;
        texts.iter().map(|text| entry.embed((config, head.as_ref()), text, 0)).collect()
    }

    fn block(&self, index: usize, replace: Option<Replace<'_>>) -> Result<Box<dyn CheckpointBlock + '_>> {
        Ok(Box::new(Block::new(self.config(), index, &self.parts().replacing(replace), &self.parts())?))
    }

    #[cfg(feature = "cuda")]
    fn gpu_block(
        &self,
        context: &LayerContext,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock<DeviceBuffer> + '_>> {
        gpu_block((context, self.config()), index, &self.parts().replacing(replace), &self.parts())
    }
}

impl CheckpointBlock for Block<'_> {
    fn inputs(&self) -> &[BlockInput] {
        &self.inputs
    }

    fn steps(&self) -> usize {
        Role::of(self.config).len()
    }

    fn step_of(&self, index: usize) -> usize {
        self.places.get(index).map_or(index, |(step, _)| *step)
    }

    fn free_features(&self, index: usize) -> Option<&FreeFeatures> {
        let (step, _) = self.places.get(index).filter(|(_, part)| part.is_none())?;
        self.free.get(*step)?.as_ref()
    }

    fn input(&self, step: usize, x: &mut Vec<f32>, between: Option<Vec<f32>>) -> Result<Vec<f32>> {
        Ok(self.layer.input(self.config, self.role(step), x, between.unwrap_or_default()))
    }

    fn part(&self, index: usize, x: &Vec<f32>, input: &Vec<f32>) -> Result<Option<InputPart>> {
        let width = self.config.width;
        if let Some((latents, own)) = self.latent(index) {
            let tokens = (0..x.len() / width).collect();
            let part = latents.input(self.config, own, input);
            return Ok(part.map(|(x, features)| InputPart { x, features, tokens }));
        }
        let Some((experts, expert, role)) = self.expert(index) else { return Ok(None) };
        let is_up = role == Role::Up;
        let read = if is_up { input } else { &self.layer.feed_forward_input(x) };
        let routed = experts.route(read, x.len() / width)?;
        let places = experts.places(&routed);
        let (Some(own), Some((place, hidden))) = (routed.get(expert), places.get(expert)) else { return Ok(None) };
        let tokens = own.iter().map(|(token, _)| *token).collect();
        Ok(Some(match is_up {
            true => InputPart { x: rows(input, width, own), features: width, tokens },
            false => InputPart { x: input[place.clone()].to_vec(), features: *hidden, tokens },
        }))
    }

    fn routed_at(&self, index: usize) -> Option<usize> {
        let routed = if self.latent(index).is_some() { Role::Qkv } else { self.expert(index).map(|_| Role::Up)? };
        Role::of(self.config).iter().position(|role| *role == routed)
    }

    fn part_of(&self, index: usize, tokens: &[usize], x: &Vec<f32>) -> Result<Option<Vec<f32>>> {
        let width = self.config.width;
        if let Some(token) = tokens.iter().find(|token| **token >= x.len() / width) {
            let found = format!("{token} of {}", x.len() / width);
            return Err(Error::Setting { what: "a token of a text", found, expected: "one that is there" });
        }
        let routed: Routed = tokens.iter().map(|token| (*token, 1.0)).collect();
        if let Some((latents, own)) = self.latent(index) {
            let read = rows(&self.layer.input(self.config, Role::Qkv, x, vec![]), width, &routed);
            let read = self.layer.latents_of(self.config, &read)?;
            return Ok(latents.input(self.config, own, &read).map(|(x, _)| x));
        }
        let Some((experts, expert, role)) = self.expert(index) else { return Ok(None) };
        let read = rows(&self.layer.feed_forward_input(x), width, &routed);
        match role {
            Role::Up => Ok(Some(read)),
            _ => experts.hidden_of(self.config, expert, (&read, tokens.len())),
        }
    }

    fn step(&self, step: usize, input: &Vec<f32>, x: &mut Vec<f32>, shows_products: bool) -> Result<Stepped<Vec<f32>>> {
        let tokens = x.len() / self.config.width;
        let tables = Rotations::of(self.config).map(|rotations| rotations.tables(0..tokens, tokens));
        let mut cache = Cache::default();
        let seen = match self.config.attention.is_causal {
            true => Seen::Cache { cache: &mut cache, position: 0, rotary: tables.as_ref() },
            false => Seen::Sequences(&[tokens]),
        };
        let mut products = None;
        let mut keep = |found: &[f32]| products = Some(found.to_vec());
        let outputs: Option<Outputs<'_>> = if shows_products { Some(&mut keep) } else { None };
        let next = self.layer.step(self.config, self.role(step), input, x, seen, outputs)?;
        Ok(Stepped { next: Some(next).filter(|next| !next.is_empty()), products })
    }
}
