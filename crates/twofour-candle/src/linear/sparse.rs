//! The trainable 2:4 layer on candle's tensors: a dense master weight, and the [`layer::SparseLinear`] that computes.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Tensor;
use twofour::layer::{self, InputGradient, MaskRule, SparseLinearSettings, WeightGradient};
use twofour::{Arithmetic, Compressed, Element, Mask, MatrixRef};

use super::{
    LinearOperand,
    float::{Float, expect_cpu, for_float, with_elements},
    operand::bias_values,
    weight::{Stored, Weight, for_layer},
};
use crate::{Error, Result};

/// What a training forward pass does with the mask and the packed weight before it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// The first forward pass and every `k`-th after it chooses the mask anew; all others pack the present values of the master.
    Every(NonZeroU64),
    /// Every forward pass packs the present values; the mask changes only when [`SparseLinear::refresh_mask`] is called.
    OnRequest,
    /// Nothing: mask and values change only when [`SparseLinear::refresh_mask`] or [`SparseLinear::repack`] is called, once per
    /// optimizer step, and all micro-steps of a step use the same packed weight.
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
    /// Which product computes the input gradient. On a CPU the packed rows serve both products, and a packed transpose has to be
    /// won back: `cargo bench --bench training` measures both.
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
/// `W`, the dense master weight, is a tensor (usually of a `Var`) that the optimizer updates and that the layer never changes.
/// Mask, packed weight and products are those of [`twofour::layer::SparseLinear`]. f32, bf16 and f16, on the CPU.
///
/// In [`Mode::Train`] a forward pass chooses the mask and packs the master's values in one pass, as [`Refresh`] says. In
/// [`Mode::Evaluate`] nothing is packed after the first forward pass: after changing the master weight in that mode, call
/// [`SparseLinear::set_mode`] again.
///
/// A clone shares the master, the mask and the count of forward passes.
#[derive(Debug, Clone)]
pub struct SparseLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    settings: SparseSettings,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    /// Mask and packed weight; shared with forward passes that wait for their backward pass.
    layer: Weight,
    /// Whether the packed values are known to be the master's.
    is_current: bool,
    forwards: u64,
    flip_rate: Option<f64>,
}

/// A mask that was saved and fits its layer.
#[derive(Debug)]
pub(super) struct Saved {
    mask: Mask,
    forwards: u64,
}

impl SparseLinear {
    /// A layer over a master weight `[out, in]` and a bias `[out]`, which it shares with whoever else holds them.
    ///
    /// # Errors
    /// A weight that is not on the CPU, not f32, bf16 or f16, not a matrix; a bias that does not fit; a NaN in the master; a
    /// packed transpose without a transposable mask.
    pub fn new(weight: Tensor, bias: Option<Tensor>, settings: SparseSettings) -> Result<Self> {
        check_parameters(&weight, bias.as_ref())?;
        let layer = for_float!("the weight", weight.dtype(), T => with_master::<T, _>(&weight, |matrix| {
            Ok(T::wrap(Arc::new(layer::SparseLinear::new(matrix, settings.of_layer())?)))
        }))?;
        let state = State { mode: Mode::Train, layer, is_current: false, forwards: 0, flip_rate: None };
        Ok(SparseLinear { weight, bias, settings, state: Arc::new(Mutex::new(state)) })
    }

    /// The dense master.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// How the layer trains.
    pub fn settings(&self) -> SparseSettings {
        self.settings
    }

    /// The present mask, `[out, in]`.
    pub fn mask(&self) -> Arc<Mask> {
        let state = self.state();
        let mask = for_layer!(&state.layer, layer => layer.mask().clone(), _ => Mask::empty(0, 0));
        Arc::new(mask)
    }

    /// How many training forward passes there were.
    pub fn forwards(&self) -> u64 {
        self.state().forwards
    }

    /// The share of mask elements that the last refresh changed; `None` before the first.
    pub fn flip_rate(&self) -> Option<f64> {
        self.state().flip_rate
    }

    /// Bytes of the packed weight: values and metadata.
    pub fn packed_bytes(&self) -> usize {
        self.state().layer.bytes()
    }

    /// The weight that products see, dense: what the present mask keeps of the present master weight, with its pruned
    /// elements zero. Detached.
    ///
    /// # Errors
    /// candle's own.
    pub fn effective_weight(&self) -> Result<Tensor> {
        for_float!("the weight", self.weight.dtype(), T => {
            let kept = self.current::<T>()?.to_dense();
            Ok(Tensor::from_vec(kept, self.weight.shape(), self.weight.device())?)
        })
    }

    /// The same, compressed, its values rounded to `B`.
    ///
    /// # Errors
    /// candle's own.
    pub fn compressed_weight<B: Arithmetic>(&self) -> Result<Compressed<B>> {
        for_float!("the weight", self.weight.dtype(), T => {
            let kept = self.current::<T>()?.to_dense();
            let values: Vec<B> = kept.iter().map(|v| B::from_f32(Element::to_f32(*v))).collect();
            let (rows, cols) = self.weight.dims2()?;
            Ok(Compressed::from_masked(MatrixRef::new(rows, cols, &values)?, &self.mask())?)
        })
    }

    /// Says whether the forward passes to come count as training.
    pub fn set_mode(&self, mode: Mode) {
        let mut state = self.state();
        state.mode = mode;
        state.is_current = false;
    }

    /// Chooses the mask anew from the master as it is now and packs what it keeps; returns the flip rate.
    ///
    /// # Errors
    /// A NaN in the master, with its place.
    pub fn refresh_mask(&self) -> Result<f64> {
        for_float!("the weight", self.weight.dtype(), T => {
            with_master::<T, _>(&self.weight, |matrix| self.state().remask(matrix))
        })
    }

    /// Packs the master's present values under the mask as it is.
    ///
    /// # Errors
    /// candle's own; with [`MaskRule::SoftThreshold`] a NaN or an infinity in the master, with its place.
    pub fn repack(&self) -> Result<()> {
        for_float!("the weight", self.weight.dtype(), T => {
            with_master::<T, _>(&self.weight, |matrix| self.state().repack(matrix))
        })
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
        for_layer!(&self.state().layer, layer => layer.check_mask(&mask)?, _ => ());
        Ok(Saved { mask, forwards })
    }

    /// Puts back what was checked for this layer.
    pub(super) fn put_back(&self, saved: Saved) -> Result<()> {
        let Saved { mask, forwards } = saved;
        for_float!("the weight", self.weight.dtype(), T => with_master::<T, _>(&self.weight, |matrix| {
            let mut state = self.state();
            if let Some(layer) = T::layer_mut(&mut state.layer) {
                Arc::make_mut(layer).set_mask(matrix, mask)?;
            }
            state.is_current = false;
            state.forwards = forwards;
            state.flip_rate = None;
            Ok(())
        }))
    }

    /// What the present mask keeps of the master as it is now: shared with nobody.
    fn current<T: Stored>(&self) -> Result<Compressed<T>> {
        let state = self.state();
        // The layer's dtype does not change, so there is one.
        let Some(mut layer) = T::layer(&state.layer).cloned() else {
            return Err(Error::DType {
                what: "the weight",
                found: self.weight.dtype(),
                expected: format!("{:?}", <T as candle_core::WithDType>::DTYPE),
            });
        };
        drop(state);
        with_master::<T, _>(&self.weight, |matrix| {
            layer.repack(matrix)?;
            Ok(layer.packed())
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the state half-changed in a way that the next repack does not mend.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The layer's products for one forward pass and its backward pass. In [`Mode::Train`] this is a forward pass: it may
    /// refresh the mask.
    pub(super) fn operand(&self) -> Result<LinearOperand> {
        let (out_features, in_features) = self.weight.dims2()?;
        let product = for_float!("the weight", self.weight.dtype(), T => {
            with_master::<T, _>(&self.weight, |matrix| {
                let mut state = self.state();
                match (state.mode, self.settings.refresh) {
                    (Mode::Evaluate, _) => {
                        if !state.is_current && self.settings.refresh != Refresh::ByCaller {
                            state.repack(matrix)?;
                        }
                        state.is_current = true;
                    }
                    (Mode::Train, refresh) => {
                        match refresh {
                            Refresh::Every(k) if state.forwards % k == 0 => {
                                state.remask(matrix)?;
                            }
                            Refresh::Every(_) | Refresh::OnRequest => state.repack(matrix)?,
                            Refresh::ByCaller => {}
                        }
                        state.forwards += 1;
                        // The optimizer's step will follow.
                        state.is_current = false;
                    }
                }
                Ok(state.layer.clone())
            })
        })?;
        Ok(LinearOperand {
            product,
            bias_values: bias_values(self.bias.as_ref())?,
            out_features,
            in_features,
            weight: Some(self.weight.clone()),
            bias: self.bias.clone(),
        })
    }
}

impl State {
    fn remask<T: Stored>(&mut self, master: MatrixRef<'_, T>) -> Result<f64> {
        // The layer's dtype does not change, so there is one.
        let Some(layer) = T::layer_mut(&mut self.layer) else { return Ok(0.0) };
        // In place unless an earlier forward pass still waits for its backward pass.
        let layer = Arc::make_mut(layer);
        layer.remask(master)?;
        self.flip_rate = Some(layer.flip_rate());
        Ok(layer.flip_rate())
    }

    fn repack<T: Stored>(&mut self, master: MatrixRef<'_, T>) -> Result<()> {
        if let Some(layer) = T::layer_mut(&mut self.layer) {
            Arc::make_mut(layer).repack(master)?;
        }
        Ok(())
    }
}

fn with_master<T: Float, R>(weight: &Tensor, f: impl FnOnce(MatrixRef<'_, T>) -> Result<R>) -> Result<R> {
    let (rows, cols) = weight.dims2()?;
    with_elements::<T, _>("the weight", weight, |data| f(MatrixRef::new(rows, cols, data)?))
}

/// An error unless the tensors can be the weight and the bias of a linear layer on the CPU.
pub(super) fn check_parameters(weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    expect_cpu("the weight", weight)?;
    let &[rows, _] = weight.dims() else {
        let found = weight.dims().to_vec();
        return Err(Error::Shape { what: "the weight", found, expected: "[out, in]".to_owned() });
    };
    if let Some(bias) = bias {
        expect_cpu("the bias", bias)?;
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
