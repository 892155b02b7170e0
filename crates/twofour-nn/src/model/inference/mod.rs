//! Inference: weights packed for the CPU kernels, and a key-value cache.

mod layers;
mod session;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, ops::ControlFlow, path::Path};

use twofour::{file::Reader, kernel::KernelElement};

use self::layers::{Layer, Linear, Norm};
pub use self::session::Session;
use super::{Gpt, GptConfig, Sampling, VOCABULARY, file};
use crate::{Error, Result, cpu::rope::Table, engine::Engine, linear};

/// A [`Gpt`]'s weights packed for the CPU kernels in `T`: dense layers for the dense kernel, 2:4 and compressed ones for
/// the 2:4 kernel. A copy: training the model further does not change it.
///
/// GEMMs run in `T`; the residual stream, the norms, attention and the cache are f32.
///
/// ```
/// use std::ops::ControlFlow;
/// use twofour_nn::{engine::cpu::CpuEngine, model::{Gpt, GptConfig, Inference, Sampling}};
/// let config = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
/// let model = Gpt::new(&CpuEngine, &config, 0)?;
/// let mut text = vec![];
/// Inference::<f32>::new(&CpuEngine, &model)?.generate(b"two of ", 20, Sampling::default(), |byte| {
///     text.push(byte);
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(text.len(), 20);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Inference<T: KernelElement> {
    config: GptConfig,
    embedding: Vec<f32>,
    layers: Vec<Layer<T>>,
    norm: Norm,
    head: Linear<T>,
    rotary: Table,
    /// Squared ReLU takes the place of GELU.
    has_squared_relu: bool,
}

impl<T: KernelElement> Inference<T> {
    /// Packs the present weights of a model, which may be on any engine.
    ///
    /// # Errors
    /// Those of reading and packing the weights.
    pub fn new<E: Engine>(engine: &E, model: &Gpt<E>) -> Result<Self> {
        let parameters: HashMap<&str, _> =
            model.parameters().into_iter().map(|parameter| (parameter.name(), parameter)).collect();
        let linears: HashMap<&str, &linear::Linear<E>> =
            model.linears().map(|linear| (linear.name(), linear)).collect();
        let absent = |name: &str| Error::Setting {
            what: "a part of the model",
            found: format!("no `{name}`"),
            expected: "a model with all its parts",
        };
        Self::build(
            model.config(),
            |name, _| engine.read(parameters.get(name).ok_or_else(|| absent(name))?.master()),
            |name, _, _| Linear::new(engine, linears.get(name).ok_or_else(|| absent(name))?),
            model.has_squared_relu(),
        )
    }

    /// Reads a model that [`Gpt::save`] wrote, or that `twofour compress` made of one. Compressed weights stay compressed, in the
    /// data type of the file: f32, f16, bf16, or i8 with scales; int4 is dequantized to f32.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_reader(&Reader::open(path)?)
    }

    /// [`Inference::load`], from a file that is open already.
    ///
    /// # Errors
    /// As for [`Inference::load`].
    pub fn from_reader(reader: &Reader) -> Result<Self> {
        Self::build(
            &file::config_of(reader)?,
            |name, shape| file::values(reader, name, shape),
            |name, outputs, inputs| Linear::from_file(reader, name, (outputs, inputs)),
            file::has_squared_relu(reader)?,
        )
    }

    fn build(
        config: &GptConfig,
        values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>,
        linear: impl Fn(&str, usize, usize) -> Result<Linear<T>>,
        has_squared_relu: bool,
    ) -> Result<Self> {
        let GptConfig { width, feed_forward, heads, context, .. } = *config;
        let norm = |name: &str| -> Result<Norm> {
            let of = |part: &str| values(&format!("{name}.{part}"), &[width]);
            Ok(Norm::new(of("weight")?, of("bias")?))
        };
        let linear = |name: &str, outputs: usize, inputs: usize| {
            linear(name, outputs, inputs).map_err(|error| match error {
                named @ Error::InLayer { .. } => named,
                other => other.in_layer(name),
            })
        };
        let layers = (0..config.layers)
            .map(|layer| {
                let at = |part: &str| format!("blocks.{layer}.{part}");
                Ok(Layer {
                    attention_norm: norm(&at("attn.norm"))?,
                    qkv: linear(&at("attn.qkv"), 3 * width, width)?,
                    out: linear(&at("attn.out"), width, width)?,
                    feed_forward_norm: norm(&at("mlp.norm"))?,
                    up: linear(&at("mlp.up"), feed_forward, width)?,
                    down: linear(&at("mlp.down"), width, feed_forward)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Inference {
            config: *config,
            embedding: values("embedding.weight", &[VOCABULARY, width])?,
            layers,
            norm: norm("norm")?,
            head: linear("head", VOCABULARY, width)?,
            rotary: Table::new(context, width / heads / 2),
            has_squared_relu,
        })
    }

    /// The model's sizes.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Bytes of the linear layers' weights in memory: values, and metadata where they are 2:4; without biases.
    pub fn weight_bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum::<usize>() + self.head.bytes()
    }

    /// Begins a sequence.
    #[must_use]
    pub fn session(&self) -> Session<'_, T> {
        Session::new(self)
    }

    /// Continues `prompt` by up to `count` bytes, calling `f` with each; `f` may stop it.
    ///
    /// Where the context is full, the session begins anew with the later half of what it held, so the text may be of any
    /// length. An empty prompt is taken for a line break.
    ///
    /// # Errors
    /// [`Error::Setting`] for a bad temperature; those of the products.
    pub fn generate(
        &self,
        prompt: &[u8],
        count: usize,
        sampling: Sampling,
        mut f: impl FnMut(u8) -> ControlFlow<()>,
    ) -> Result<()> {
        sampling.validate()?;
        let context = self.config.context;
        let mut text = if prompt.is_empty() { b"\n".to_vec() } else { prompt.to_vec() };
        let mut session = self.session();
        let mut unread = text.len().saturating_sub(context);
        for index in 0..count {
            if session.remaining() < text.len() - unread {
                session = self.session();
                unread = text.len() - (context / 2).max(1);
            }
            let mut logits = session.feed(&text[unread..])?;
            unread = text.len();
            let byte = sampling.choose(&mut logits, index as u64);
            text.push(byte);
            if f(byte).is_break() {
                break;
            }
        }
        Ok(())
    }
}
