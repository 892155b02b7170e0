//! The model: construction, forward pass, loss and gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::Module;
use twofour::kernel::Activation;

use super::{Config, VOCABULARY};
use crate::{
    Result,
    block::{AttentionBlock, FeedForwardBlock, Gradients, LayerNorm},
    linear::{AnyLinear, HasLinears},
    ops::{self, rope::Table},
    random::Stream,
};

/// A byte-level GPT.
///
/// Training goes through the block operators of [`crate::block`]: call [`Gpt::backward`] on the loss, not
/// `loss.backward()`. Linear layers may be dense, sparse or (for inference) compressed, see [`HasLinears`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use twofour_candle::gpt::{Config, Gpt};
/// let config = Config { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
/// let model = Gpt::new(&config, 0, &Device::Cpu)?;
/// let bytes = Tensor::new(b"two of four".as_slice(), &Device::Cpu)?.unsqueeze(0)?;
/// assert_eq!(model.forward(&bytes)?.dims(), [1, 11, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Gpt {
    config: Config,
    pub(super) embedding: Var,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: LayerNorm,
    pub(super) head: AnyLinear,
    gradients: Gradients,
}

/// One layer of a [`Gpt`].
#[derive(Debug, Clone)]
pub struct Layer {
    /// Attention.
    pub attention: AttentionBlock,
    /// Feed-forward.
    pub feed_forward: FeedForwardBlock,
}

impl Gpt {
    /// Standard deviation of the initial weights.
    const INITIAL_DEVIATION: f64 = 0.02;

    /// A model with random weights that depend on `config` and `seed` alone.
    ///
    /// Weights are normal with deviation 0.02; those that end a block (`attn.out`, `mlp.down`) are divided by the root of
    /// the number of blocks, as in GPT-2 (Radford et al., 2019). Biases are zero, gains one.
    ///
    /// # Errors
    /// A configuration that [`Config::validate`] refuses; a device other than the CPU, which the blocks need.
    pub fn new(config: &Config, seed: u64, device: &Device) -> Result<Self> {
        let ending = 1.0 / ((2 * config.layers) as f64).sqrt();
        Self::build(config, |name, shape| {
            let deviation = match name {
                _ if name.ends_with("attn.out.weight") || name.ends_with("mlp.down.weight") => {
                    Self::INITIAL_DEVIATION * ending
                }
                _ => Self::INITIAL_DEVIATION,
            };
            let count: usize = shape.iter().product();
            let values: Vec<f32> = if name.ends_with("bias") {
                vec![0.0; count]
            } else if name.ends_with("norm.weight") {
                vec![1.0; count]
            } else {
                let stream = Stream::new(seed, name);
                (0..count as u64).map(|i| (stream.normal(i) * deviation) as f32).collect()
            };
            Ok(Var::from_vec(values, shape, device)?)
        })
    }

    /// A dense model whose parameters are what `parameter(name, shape)` returns.
    pub(super) fn build(config: &Config, parameter: impl Fn(&str, &[usize]) -> Result<Var>) -> Result<Self> {
        let linear = |name: &str, out: usize, inputs: usize| -> Result<AnyLinear> {
            let weight = parameter(&format!("{name}.weight"), &[out, inputs])?;
            let bias = match name {
                "head" => None,
                _ => Some(parameter(&format!("{name}.bias"), &[out])?.into_inner()),
            };
            Ok(AnyLinear::from(candle_nn::Linear::new(weight.into_inner(), bias)))
        };
        Self::assemble(config, &parameter, linear)
    }

    /// A model whose linear layers are what `linear(name, out, in)` returns, and its other parameters `parameter(name,
    /// shape)`.
    pub(super) fn assemble(
        config: &Config,
        parameter: impl Fn(&str, &[usize]) -> Result<Var>,
        linear: impl Fn(&str, usize, usize) -> Result<AnyLinear>,
    ) -> Result<Self> {
        config.validate()?;
        let Config { width, feed_forward, heads, context, .. } = *config;
        let norm = |name: &str| -> Result<LayerNorm> {
            let gain = parameter(&format!("{name}.weight"), &[width])?;
            Ok(LayerNorm::from_parameters(gain, parameter(&format!("{name}.bias"), &[width])?)?)
        };
        let rotary = Arc::new(Table::new(context, width / heads / 2));
        let layers = (0..config.layers)
            .map(|layer| {
                let at = |part: &str| format!("blocks.{layer}.{part}");
                let qkv = linear(&at("attn.qkv"), 3 * width, width)?;
                let out = linear(&at("attn.out"), width, width)?;
                let attention = AttentionBlock::with_rotary(norm(&at("attn.norm"))?, qkv, out, heads, rotary.clone())?;
                let feed_forward = FeedForwardBlock {
                    norm: norm(&at("mlp.norm"))?,
                    up: linear(&at("mlp.up"), feed_forward, width)?,
                    down: linear(&at("mlp.down"), width, feed_forward)?,
                    activation: Activation::Gelu,
                };
                Ok(Layer { attention, feed_forward })
            })
            .collect::<Result<_>>()?;
        Ok(Gpt {
            config: *config,
            embedding: parameter("embedding.weight", &[VOCABULARY, width])?,
            layers,
            norm: norm("norm")?,
            head: linear("head", VOCABULARY, width)?,
            gradients: Gradients::new(),
        })
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Where the blocks leave their parameters' gradients.
    pub fn gradients(&self) -> &Gradients {
        &self.gradients
    }

    /// Scores of the next byte after each position: `bytes: [batch, positions]` of u32 gives `[batch, positions, 256]`.
    ///
    /// # Errors
    /// A sequence longer than the context, bytes above 255, or tensors of another shape or dtype.
    pub fn forward(&self, bytes: &Tensor) -> Result<Tensor> {
        let (batch, positions) = bytes.dims2()?;
        let ids = bytes.to_dtype(DType::U32)?.flatten_all()?;
        let mut x = self.embedding.index_select(&ids, 0)?.reshape((batch, positions, self.config.width))?;
        for layer in &self.layers {
            x = layer.attention.forward(&x, &self.gradients)?;
            x = layer.feed_forward.forward(&x, &self.gradients)?;
        }
        Ok(self.head.forward(&self.norm.forward(&x)?)?)
    }

    /// Mean cross-entropy, in nats a byte, of predicting `targets` from `bytes`; both `[batch, positions]` of u32.
    ///
    /// # Errors
    /// As [`Gpt::forward`], and where the two shapes differ.
    pub fn loss(&self, bytes: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok(ops::cross_entropy(&self.forward(bytes)?, targets)?)
    }

    /// The gradients of `loss` for every trainable variable.
    ///
    /// # Errors
    /// Those of the backward pass; compressed layers cannot be trained through.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        Ok(self.gradients.backward(loss)?)
    }

    /// Every trainable variable with its name, in a fixed order: of a sparse layer its dense master, of a compressed one
    /// nothing.
    ///
    /// # Errors
    /// Those of reading the linear layers.
    pub fn variables(&self) -> Result<Vec<(String, Var)>> {
        let mut all = vec![("embedding.weight".to_owned(), self.embedding.clone())];
        let add_norm = |all: &mut Vec<_>, name: &str, norm: &LayerNorm| {
            all.push((format!("{name}.weight"), norm.gain().clone()));
            all.push((format!("{name}.bias"), norm.bias().clone()));
        };
        for (index, layer) in self.layers.iter().enumerate() {
            add_norm(&mut all, &format!("blocks.{index}.attn.norm"), &layer.attention.norm);
            add_norm(&mut all, &format!("blocks.{index}.mlp.norm"), &layer.feed_forward.norm);
        }
        add_norm(&mut all, "norm", &self.norm);
        for (name, linear) in self.linears() {
            for (part, tensor) in [("weight", linear.weight()), ("bias", linear.bias())] {
                if let Some(tensor) = tensor {
                    // A clone of the variable that the tensor is.
                    all.push((format!("{name}.{part}"), Var::from_tensor(tensor)?));
                }
            }
        }
        Ok(all)
    }

    /// The linear layers by name, in the order of computation.
    pub fn linears(&self) -> Vec<(String, &AnyLinear)> {
        let mut all = vec![];
        for (index, Layer { attention, feed_forward }) in self.layers.iter().enumerate() {
            all.push((format!("blocks.{index}.attn.qkv"), &attention.qkv));
            all.push((format!("blocks.{index}.attn.out"), &attention.out));
            all.push((format!("blocks.{index}.mlp.up"), &feed_forward.up));
            all.push((format!("blocks.{index}.mlp.down"), &feed_forward.down));
        }
        all.push(("head".to_owned(), &self.head));
        all
    }
}

impl HasLinears for Gpt {
    fn visit_linears(&mut self, f: &mut dyn FnMut(&str, &mut AnyLinear) -> Result<()>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let Layer { attention, feed_forward } = layer;
            f(&format!("blocks.{index}.attn.qkv"), &mut attention.qkv)?;
            f(&format!("blocks.{index}.attn.out"), &mut attention.out)?;
            f(&format!("blocks.{index}.mlp.up"), &mut feed_forward.up)?;
            f(&format!("blocks.{index}.mlp.down"), &mut feed_forward.down)?;
        }
        f("head", &mut self.head)
    }
}
