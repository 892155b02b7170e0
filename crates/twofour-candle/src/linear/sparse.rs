//! The trainable 2:4 layer on candle's tensors: a dense master weight, and the [`layer::SparseLinear`] that computes.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Tensor};
use twofour::layer::{InputGradient, MaskRule, SparseLinearSettings, WeightGradient};
use twofour::{Arithmetic, Compressed, Mask, MatrixRef};

use super::{LinearOperand, operand::bias_values, operator, trainable::Trainable};
use crate::float::{expect_cpu, expect_device, not_a_float, with_elements};
use crate::{Error, Result};

/// What a training forward pass does with the mask and the packed weight before it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// The first forward pass and every `k`-th after it chooses the mask anew; all others pack the present values of
    /// the master.
    Every(NonZeroU64),
    /// Every forward pass packs the present values; the mask changes only when [`SparseLinear::refresh_mask`] is
    /// called.
    OnRequest,
    /// Nothing: mask and values change only when [`SparseLinear::refresh_mask`] or [`SparseLinear::repack`] is called,
    /// once per optimizer step, and all micro-steps of a step use the same packed weight.
    ByCaller,
}

impl Default for Refresh {
    fn default() -> Self {
        Refresh::Every(NonZeroU64::MIN)
    }
}

/// Whether forward passes count as training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Forward passes advance the schedule of [`Refresh`].
    #[default]
    Train,
    /// The mask stays as it is, and the weight is packed once: at the first forward pass after
    /// [`SparseLinear::set_mode`] or after a training forward pass.
    Evaluate,
}

/// How a [`SparseLinear`] trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SparseSettings {
    /// How the mask is chosen.
    pub rule: MaskRule,
    /// When it is chosen anew.
    pub refresh: Refresh,
    /// What the weight gradient is.
    pub weight_gradient: WeightGradient,
    /// Which product computes the input gradient. On a CPU the packed rows serve both products, and a packed transpose
    /// has to be won back: `cargo bench --bench training` measures both.
    pub input_gradient: InputGradient,
}

impl SparseSettings {
    fn of_layer(self) -> SparseLinearSettings {
        let SparseSettings { rule, weight_gradient, input_gradient, .. } = self;
        SparseLinearSettings { rule, weight_gradient, input_gradient }
    }
}

/// A trainable 2:4 linear layer, `y = x·(mask ⊙ W)ᵀ + bias`.
///
/// `W`, the dense master weight, is a tensor (usually of a `Var`) that the optimizer updates and that the layer never
/// changes. Mask, packed weight and products are those of [`twofour::layer::SparseLinear`] on the CPU and, with the
/// feature `cuda`, of `twofour_cuda::layer::SparseLinear` for CUDA tensors, with the same masks to the bit.
///
/// | master on | dtype of the master | dtype of activations |
/// |---|---|---|
/// | the CPU | f32, bf16, f16 | the master's |
/// | a GPU | bf16, f16 | the master's |
/// | a GPU | f32 | bf16, or f16 by [`SparseLinear::with_activations`]; the weight gradient is f32 |
///
/// In [`Mode::Train`] a forward pass chooses the mask and packs the master's values in one pass, as [`Refresh`] says.
/// In [`Mode::Evaluate`] nothing is packed after the first forward pass: after changing the master weight in that mode,
/// call [`SparseLinear::set_mode`] again.
///
/// On a GPU forward passes and gradients wait for nothing. A NaN in the master is then not an error of the forward
/// pass, whose result is NaN: [`SparseLinear::check`] reports its place.
///
/// A clone shares the master, the mask and the count of forward passes.
#[derive(Debug, Clone)]
pub struct SparseLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    activations: DType,
    settings: SparseSettings,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    layer: Trainable,
    /// Whether the packed values are known to be the master's.
    is_current: bool,
    forwards: u64,
    /// Whether a mask was chosen after the first.
    has_flips: bool,
}

/// A mask that was saved and fits its layer.
#[derive(Debug)]
pub(super) struct Saved {
    mask: Mask,
    forwards: u64,
}

impl SparseLinear {
    /// A layer over a master weight `[out, in]` and a bias `[out]`, whose storage it shares with other holders of the
    /// tensors.
    ///
    /// # Errors
    /// A weight that is neither on the CPU nor, with the feature `cuda`, on a GPU, not f32, bf16 or f16, or not a
    /// matrix; a bias that does not fit; a NaN in the master; a packed transpose without a transposable mask.
    pub fn new(weight: Tensor, bias: Option<Tensor>, settings: SparseSettings) -> Result<Self> {
        let activations = match (weight.device(), weight.dtype()) {
            (Device::Cuda(_), DType::F32) => DType::BF16,
            (_, dtype) => dtype,
        };
        Self::with_activations(weight, bias, activations, settings)
    }

    /// A layer whose inputs and outputs are of another dtype than its master: on a GPU bf16 or f16 with an f32 master.
    ///
    /// # Errors
    /// Those of [`SparseLinear::new`]; [`Error::DType`] for other pairs of dtypes.
    pub fn with_activations(
        weight: Tensor,
        bias: Option<Tensor>,
        activations: DType,
        settings: SparseSettings,
    ) -> Result<Self> {
        check_parameters(&weight, bias.as_ref())?;
        let expected = match (weight.device(), weight.dtype()) {
            (Device::Cuda(_), DType::F32) => &[DType::BF16, DType::F16][..],
            (_, DType::F32) => &[DType::F32],
            (_, DType::BF16) => &[DType::BF16],
            (_, DType::F16) => &[DType::F16],
            (_, found) => return Err(not_a_float("the weight", found)),
        };
        if !expected.contains(&activations) {
            let expected = expected.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ");
            return Err(Error::DType { what: "the activations of a 2:4 layer", found: activations, expected });
        }
        let layer = Trainable::new(&weight, activations, settings.of_layer())?;
        let state = State { mode: Mode::Train, layer, is_current: false, forwards: 0, has_flips: false };
        Ok(SparseLinear { weight, bias, activations, settings, state: Arc::new(Mutex::new(state)) })
    }

    /// The dense master.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The dtype of inputs and outputs.
    pub fn activations(&self) -> DType {
        self.activations
    }

    /// How the layer trains.
    pub fn settings(&self) -> SparseSettings {
        self.settings
    }

    /// The present mask, `[out, in]`. On a GPU the call waits for it.
    ///
    /// # Errors
    /// The driver's.
    pub fn mask(&self) -> Result<Mask> {
        self.state().layer.mask()
    }

    /// How many training forward passes there were.
    pub fn forwards(&self) -> u64 {
        self.state().forwards
    }

    /// The share of mask elements that the last refresh changed; `None` before the first. On a GPU the call waits for
    /// it.
    ///
    /// # Errors
    /// The driver's.
    pub fn flip_rate(&self) -> Result<Option<f64>> {
        let state = self.state();
        state.has_flips.then(|| state.layer.flip_rate()).transpose()
    }

    /// Bytes of the packed weight, values and metadata; on a GPU of all that the layer holds there.
    pub fn packed_bytes(&self) -> usize {
        self.state().layer.bytes()
    }

    /// The weight that products see, dense: what the present mask keeps of the present master weight, with its pruned
    /// elements zero, on a GPU rounded to the activations' type. Detached.
    ///
    /// # Errors
    /// candle's own; the driver's.
    pub fn effective_weight(&self) -> Result<Tensor> {
        self.state().layer.kept(&self.weight)
    }

    /// The same, compressed, its values rounded to `B`.
    ///
    /// # Errors
    /// Those of [`SparseLinear::effective_weight`].
    pub fn compressed_weight<B: Arithmetic>(&self) -> Result<Compressed<B>> {
        let (kept, mask) = {
            let state = self.state();
            (state.layer.kept(&self.weight)?, state.layer.mask()?)
        };
        let kept = kept.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let (rows, cols) = kept.dims2()?;
        with_elements::<f32, _>("the weight", &kept, |kept| {
            let values: Vec<B> = kept.iter().map(|v| B::from_f32(*v)).collect();
            Ok(Compressed::from_masked(MatrixRef::new(rows, cols, &values)?, &mask)?)
        })
    }

    /// Says whether the forward passes to come count as training.
    pub fn set_mode(&self, mode: Mode) {
        let mut state = self.state();
        state.mode = mode;
        state.is_current = false;
    }

    /// Chooses the mask anew from the master as it is now and packs what it keeps; returns the flip rate, for which the
    /// call waits on a GPU.
    ///
    /// # Errors
    /// A NaN in the master, with its place.
    pub fn refresh_mask(&self) -> Result<f64> {
        let mut state = self.state();
        state.remask(&self.weight)?;
        state.layer.check()?;
        state.layer.flip_rate()
    }

    /// Packs the master's present values under the mask as it is.
    ///
    /// # Errors
    /// candle's own; on the CPU, with [`MaskRule::SoftThreshold`], a NaN or an infinity in the master, with its place.
    pub fn repack(&self) -> Result<()> {
        self.state().layer.repack(&self.weight)
    }

    /// Waits, and reports a NaN in the master that the present mask was chosen from, with its place; with
    /// [`MaskRule::SoftThreshold`] an infinity, too. On the CPU the forward pass has reported it.
    ///
    /// # Errors
    /// That NaN; the driver's.
    pub fn check(&self) -> Result<()> {
        self.state().layer.check()
    }

    /// Puts back a mask and the count of forward passes that were saved.
    ///
    /// # Errors
    /// A mask of another shape, or one that is not 2:4 along rows (and along columns, where the transpose is packed).
    pub fn restore(&self, mask: Mask, forwards: u64) -> Result<()> {
        self.put_back(self.check_saved(mask, forwards)?)
    }

    /// What [`SparseLinear::restore`] puts back, if it may; changes nothing.
    pub(super) fn check_saved(&self, mask: Mask, forwards: u64) -> Result<Saved> {
        let (rows, cols) = self.weight.dims2()?;
        if (mask.rows(), mask.cols()) != (rows, cols) {
            let found = vec![mask.rows(), mask.cols()];
            return Err(Error::Shape { what: "the mask", found, expected: format!("[{rows}, {cols}]") });
        }
        self.state().layer.check_mask(&mask)?;
        Ok(Saved { mask, forwards })
    }

    /// Puts back what was checked for this layer.
    pub(super) fn put_back(&self, saved: Saved) -> Result<()> {
        let Saved { mask, forwards } = saved;
        let mut state = self.state();
        state.layer.set_mask(&self.weight, mask)?;
        (state.is_current, state.forwards, state.has_flips) = (false, forwards, false);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the state half-changed in a way that the next repack does not mend.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The layer's products for one forward pass and its backward pass. In [`Mode::Train`] this is a forward pass: it
    /// may refresh the mask.
    pub(super) fn operand(&self) -> Result<LinearOperand> {
        expect_cpu("the weight of a layer inside another operator", &self.weight)?;
        let (out_features, in_features) = self.weight.dims2()?;
        let mut state = self.state();
        state.begin_forward(&self.weight, self.settings.refresh)?;
        let product = match &state.layer {
            Trainable::Host(weight) => weight.clone(),
            #[cfg(feature = "cuda")]
            Trainable::Cuda(_) => {
                let found = self.weight.device().location();
                return Err(Error::Device { what: "the weight of a layer inside another operator", found });
            }
        };
        Ok(LinearOperand {
            product,
            bias_values: bias_values(self.bias.as_ref())?,
            out_features,
            in_features,
            weight: Some(self.weight.clone()),
            bias: self.bias.clone(),
        })
    }

    /// `y = x·(mask ⊙ W)ᵀ + bias`, on candle's tape.
    pub(super) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.weight.device().is_cuda() {
            operator::expect_input(x, self.activations, self.weight.dim(1)?)?;
            let layer = {
                let mut state = self.state();
                state.begin_forward(&self.weight, self.settings.refresh)?;
                match &state.layer {
                    Trainable::Cuda(layer) => layer.clone(),
                    Trainable::Host(_) => return operator::apply(self.operand()?, x),
                }
            };
            return layer.apply(x, &self.weight, self.bias.as_ref());
        }
        operator::apply(self.operand()?, x)
    }
}

impl State {
    /// Does what a forward pass does before it multiplies.
    fn begin_forward(&mut self, master: &Tensor, refresh: Refresh) -> Result<()> {
        match (self.mode, refresh) {
            (Mode::Evaluate, _) => {
                if !self.is_current && refresh != Refresh::ByCaller {
                    self.layer.repack(master)?;
                    self.layer.publish()?;
                }
                self.is_current = true;
            }
            (Mode::Train, refresh) => {
                match refresh {
                    Refresh::Every(k) if self.forwards % k == 0 => self.remask(master)?,
                    Refresh::Every(_) | Refresh::OnRequest => self.layer.repack(master)?,
                    Refresh::ByCaller => {}
                }
                self.forwards += 1;
                // The optimizer's step will follow.
                self.is_current = false;
            }
        }
        Ok(())
    }

    fn remask(&mut self, master: &Tensor) -> Result<()> {
        self.layer.remask(master)?;
        self.has_flips = true;
        Ok(())
    }
}

/// An error unless the tensors can be the weight and the bias of a linear layer of this crate.
pub(super) fn check_parameters(weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    expect_device("the weight", weight)?;
    let &[rows, _] = weight.dims() else {
        let found = weight.dims().to_vec();
        return Err(Error::Shape { what: "the weight", found, expected: "[out, in]".to_owned() });
    };
    if let Some(bias) = bias {
        if !bias.device().same_device(weight.device()) {
            return Err(Error::Device { what: "the bias (the weight is elsewhere)", found: bias.device().location() });
        }
        if bias.dims() != [rows] {
            let found = bias.dims().to_vec();
            return Err(Error::Shape { what: "the bias", found, expected: format!("[{rows}]") });
        }
        if bias.dtype() != weight.dtype() {
            let expected = format!("{:?}, the weight's dtype,", weight.dtype());
            return Err(Error::DType { what: "the bias", found: bias.dtype(), expected });
        }
    }
    Ok(())
}
