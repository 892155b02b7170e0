//! The trainable 2:4 layer: a dense master, a mask, and the packed weight that computes.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Tensor;
use twofour::{Axis, Mask, MatrixRef, Pattern, select, select::Transposable};

use super::{
    LinearOperand,
    float::{Float, expect_cpu, for_float, with_elements},
    operand::bias_values,
    weight::{Packed, Stored, Weight},
};
use crate::{Error, Result};

/// How the mask is chosen from the dense master.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MaskRule {
    /// The two largest magnitudes of each group of four along a row; ties to the lower index.
    #[default]
    Magnitude,
    /// 2:4 along rows and along columns at once, chosen tile by tile.
    Transposable(Transposable),
}

/// What the input gradient `dy·W` is multiplied through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InputGradient {
    /// The packed rows of the weight, whatever the mask.
    #[default]
    PackedRows,
    /// A packed transpose, kept beside the packed rows and packed anew at every forward pass. Needs a
    /// [`MaskRule::Transposable`]. Made for engines that cannot multiply by packed columns; on a CPU the rows serve both
    /// products, and packing twice has to be won back: `cargo bench --bench training` measures both here.
    PackedTranspose,
}

/// When a training forward pass chooses the mask anew. Its values follow the master at every forward pass in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// At the first forward pass and at every `k`-th after it.
    Every(NonZeroU64),
    /// Only when [`SparseLinear::refresh_mask`] is called.
    OnRequest,
}

impl Default for Refresh {
    fn default() -> Self {
        Refresh::Every(NonZeroU64::MIN)
    }
}

/// What the weight gradient is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightGradient {
    /// Dense, to kept and pruned elements alike, so that pruned ones can grow back (straight-through estimator).
    #[default]
    StraightThrough,
    /// Zero where the mask keeps nothing.
    Masked,
}

/// Whether forward passes count as training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Forward passes advance the schedule of [`Refresh`].
    #[default]
    Train,
    /// The mask stays as it is.
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
    /// What the input gradient is multiplied through.
    pub input_gradient: InputGradient,
}

impl SparseSettings {
    /// The mask of the transpose, where it is to be packed.
    fn transposed(&self, mask: &Mask) -> Option<Mask> {
        (self.input_gradient == InputGradient::PackedTranspose).then(|| mask.transposed())
    }
}

/// A trainable 2:4 linear layer, `y = x·(mask ⊙ W)ᵀ + bias`.
///
/// `W`, the dense master, is a tensor (usually of a `Var`) that the optimizer updates and that the layer never changes. The
/// forward product and the input gradient run through the packed 2:4 weight; the weight gradient is dense and goes
/// straight to the master. f32, bf16 and f16, on the CPU.
///
/// Every forward pass packs the master's present values: the layer is never stale, but a pass over few tokens pays for it.
/// To generate text, compress the layer first ([`AnyLinear::compressed`](super::AnyLinear::compressed)).
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
    mask: Arc<Mask>,
    /// The mask of the transpose, where that is packed too.
    transposed: Option<Mask>,
    packed: Weight,
    forwards: u64,
    flip_rate: Option<f64>,
}

/// A mask that was saved and fits its layer.
#[derive(Debug)]
pub(super) struct Saved {
    mask: Mask,
    transposed: Option<Mask>,
    forwards: u64,
}

impl SparseLinear {
    /// A layer over a master `[out, in]` and a bias `[out]`, which it shares with whoever else holds them.
    ///
    /// # Errors
    /// A weight that is not on the CPU, not f32, bf16 or f16, not a matrix; a bias that does not fit; a NaN in the master; a
    /// packed transpose without a transposable mask.
    pub fn new(weight: Tensor, bias: Option<Tensor>, settings: SparseSettings) -> Result<Self> {
        check_parameters(&weight, bias.as_ref())?;
        if settings.input_gradient == InputGradient::PackedTranspose && settings.rule == MaskRule::Magnitude {
            return Err(Error::Setting {
                what: "the input gradient through a packed transpose",
                found: "a mask that is 2:4 along rows only".to_owned(),
                expected: "a transposable mask",
            });
        }
        let state = for_float!("the weight", weight.dtype(), T => with_master::<T, _>(&weight, |matrix| {
            let mask = choose(settings.rule, matrix)?;
            let transposed = settings.transposed(&mask);
            let packed = T::wrap(Arc::new(Packed::new(matrix, &mask, transposed.as_ref())?));
            let mask = Arc::new(mask);
            Ok(State { mode: Mode::Train, mask, transposed, packed, forwards: 0, flip_rate: None })
        }))?;
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
        self.state().mask.clone()
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
        self.state().packed.bytes()
    }

    /// The master with its pruned elements zero, under the present mask; detached.
    ///
    /// # Errors
    /// candle's own.
    pub fn effective_weight(&self) -> Result<Tensor> {
        for_float!("the weight", self.weight.dtype(), T => {
            let kept = self.pruned::<T, _>(|matrix, mask| Ok(mask.apply(matrix)?))?;
            Ok(Tensor::from_vec(kept, self.weight.shape(), self.weight.device())?)
        })
    }

    /// Says whether the forward passes to come count as training.
    pub fn set_mode(&self, mode: Mode) {
        self.state().mode = mode;
    }

    /// Chooses the mask anew from the master as it is now; returns the flip rate.
    ///
    /// # Errors
    /// A NaN in the master, with its place.
    pub fn refresh_mask(&self) -> Result<f64> {
        for_float!("the weight", self.weight.dtype(), T => {
            with_master::<T, _>(&self.weight, |matrix| self.state().refresh(&self.settings, matrix))
        })
    }

    /// Puts back a mask and the count of forward passes that were saved.
    ///
    /// # Errors
    /// A mask of another shape, or one that is not 2:4 along rows (and along columns, where the transpose is packed).
    pub fn restore(&self, mask: Mask, forwards: u64) -> Result<()> {
        self.put_back(self.check_saved(mask, forwards)?);
        Ok(())
    }

    /// What [`SparseLinear::restore`] puts back, if it may; changes nothing.
    pub(super) fn check_saved(&self, mask: Mask, forwards: u64) -> Result<Saved> {
        let (rows, cols) = self.weight.dims2()?;
        if (mask.rows(), mask.cols()) != (rows, cols) {
            let found = vec![mask.rows(), mask.cols()];
            return Err(Error::Shape { what: "the mask", found, expected: format!("[{rows}, {cols}]") });
        }
        mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
        let transposed = self.settings.transposed(&mask);
        if let Some(transposed) = &transposed {
            transposed.verify(Pattern::TWO_FOUR, Axis::Row)?;
        }
        Ok(Saved { mask, transposed, forwards })
    }

    /// Puts back what was checked for this layer.
    pub(super) fn put_back(&self, saved: Saved) {
        let mut state = self.state();
        state.transposed = saved.transposed;
        state.mask = Arc::new(saved.mask);
        state.forwards = saved.forwards;
        state.flip_rate = None;
    }

    /// What the mask keeps of the master as it is now, packed: shared with nobody.
    pub(super) fn pruned<T: Float, R>(&self, f: impl FnOnce(MatrixRef<'_, T>, &Mask) -> Result<R>) -> Result<R> {
        let mask = self.mask();
        let weight = self.weight.to_dtype(<T as candle_core::WithDType>::DTYPE)?;
        with_master::<T, _>(&weight, |matrix| f(matrix, &mask))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the state half-changed in a way that the next repack does not mend.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The layer's products for one forward pass and its backward pass. In [`Mode::Train`] this is a forward pass: it may
    /// refresh the mask.
    pub(super) fn operand(&self) -> Result<LinearOperand> {
        let (out_features, in_features) = self.weight.dims2()?;
        let (product, mask) = for_float!("the weight", self.weight.dtype(), T => {
            with_master::<T, _>(&self.weight, |matrix| {
                let mut state = self.state();
                if state.mode == Mode::Train {
                    if let Refresh::Every(k) = self.settings.refresh && state.forwards % k == 0 {
                        state.refresh(&self.settings, matrix)?;
                    }
                    state.forwards += 1;
                }
                state.repack(matrix)?;
                Ok((state.packed.clone(), state.mask.clone()))
            })
        })?;
        Ok(LinearOperand {
            product,
            bias_values: bias_values(self.bias.as_ref())?,
            keep: (self.settings.weight_gradient == WeightGradient::Masked).then_some(mask),
            out_features,
            in_features,
            weight: Some(self.weight.clone()),
            bias: self.bias.clone(),
        })
    }
}

impl State {
    fn refresh<T: Float>(&mut self, settings: &SparseSettings, master: MatrixRef<'_, T>) -> Result<f64> {
        let mask = choose(settings.rule, master)?;
        let rate = mask.flip_rate(&self.mask)?;
        self.transposed = settings.transposed(&mask);
        self.mask = Arc::new(mask);
        self.flip_rate = Some(rate);
        Ok(rate)
    }

    /// Packs the master's present values, in place unless an earlier forward pass still waits for its backward.
    fn repack<T: Stored>(&mut self, master: MatrixRef<'_, T>) -> Result<()> {
        match T::packed_mut(&mut self.packed) {
            Some(packed) => Arc::make_mut(packed).repack(master, &self.mask, self.transposed.as_ref())?,
            // The layer's dtype does not change, so this arm is for a `Weight` of a kind that `new` never makes.
            None => self.packed = T::wrap(Arc::new(Packed::new(master, &self.mask, self.transposed.as_ref())?)),
        }
        Ok(())
    }
}

fn choose<T: Float>(rule: MaskRule, master: MatrixRef<'_, T>) -> Result<Mask> {
    Ok(match rule {
        MaskRule::Magnitude => select::magnitude(master, Pattern::TWO_FOUR, Axis::Row)?,
        MaskRule::Transposable(rule) => select::transposable(master, rule)?,
    })
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
