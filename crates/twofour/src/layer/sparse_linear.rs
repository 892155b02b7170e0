//! The layer that trains a 2:4 weight.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    Accumulate, Activation, InputGradient, MaskRule, SparseLinearSettings, WeightGradient,
    activation::{activate, elements, expect_length},
    gradient, remask,
};
use crate::{
    Arithmetic, Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern, Result, estimate,
    kernel::{Epilogue, KernelElement, SparseWeight},
};

/// A trainable 2:4 linear layer, `y = activation(x · (mask ⊙ W)ᵀ + bias)`, for activations of `T`: f32, bf16 or f16.
///
/// `W`, the dense master weight, belongs to the user and may be of another type, such as f32. The layer holds the mask
/// and the packed weight, which change when the user says so: [`SparseLinear::remask`] once per optimizer step, or
/// [`SparseLinear::repack`] on steps that keep the mask. Forward passes and gradients change nothing but the seed.
///
/// Where a method that packs returns an error, mask and packed weight are unspecified until one succeeds.
#[derive(Debug)]
pub struct SparseLinear<T: KernelElement> {
    settings: SparseLinearSettings,
    mask: Mask,
    packed: SparseWeight<T>,
    transposed: Option<SparseWeight<T>>,
    /// The scale of the soft threshold.
    scale: Option<f32>,
    flips: u64,
    seed: AtomicU64,
}

impl<T: KernelElement> Clone for SparseLinear<T> {
    fn clone(&self) -> Self {
        SparseLinear {
            settings: self.settings,
            mask: self.mask.clone(),
            packed: self.packed.clone(),
            transposed: self.transposed.clone(),
            scale: self.scale,
            flips: self.flips,
            seed: AtomicU64::new(self.seed.load(Relaxed)),
        }
    }
}

/// What a forward pass adds to the product, and what it stores besides the output.
#[derive(Debug)]
pub struct Forward<'a, T> {
    /// One value per output feature.
    pub bias: Option<&'a [f32]>,
    /// The activation.
    pub activation: Activation,
    /// Where the pre-activation goes, `[tokens, out_features]`, which [`super::activation_gradient`] requires. The
    /// activation is then applied to what is stored, rounded to `T`.
    pub pre_activation: Option<&'a mut [T]>,
}

impl<T> Default for Forward<'_, T> {
    /// The product itself.
    fn default() -> Self {
        Forward { bias: None, activation: Activation::Identity, pre_activation: None }
    }
}

impl<T: KernelElement> SparseLinear<T> {
    /// Chooses the mask of a master weight `[out_features, in_features]` and packs what it keeps. With
    /// [`MaskRule::Given`] the mask is that of the master's nonzeros until [`SparseLinear::set_mask`] sets another.
    ///
    /// # Errors
    /// [`Error::NotTransposable`] for settings that contradict each other, [`Error::TooManyKept`] where nonzeros that
    /// are to be the mask are not 2:4, [`Error::NotANumber`] with the place of the first NaN; with
    /// [`MaskRule::SoftThreshold`] [`Error::Infinite`] with that of the first infinity.
    pub fn new<M: Element>(master: MatrixRef<'_, M>, settings: SparseLinearSettings) -> Result<Self> {
        settings.check()?;
        let (rows, cols) = (master.rows(), master.cols());
        let blank = |rows, cols| -> Result<SparseWeight<T>> {
            let (values, meta) = crate::compressed::lengths(rows, cols)?;
            SparseWeight::pack(Compressed::from_trusted_parts(rows, cols, vec![T::ZERO; values], vec![0; meta]))
        };
        let scale = match settings.rule {
            MaskRule::SoftThreshold => Some(estimate::soft_threshold_scale(master)?),
            _ => None,
        };
        let transposed = match settings.input_gradient {
            InputGradient::PackedTranspose => Some(blank(cols, rows)?),
            InputGradient::Automatic => None,
        };
        let (packed, mask) = (blank(rows, cols)?, Mask::empty(rows, cols));
        let mut layer = Self { settings, mask, packed, transposed, scale, flips: 0, seed: AtomicU64::new(0) };
        match settings.rule {
            MaskRule::Given => layer.set_mask(master, Mask::of_nonzeros(master))?,
            _ => layer.remask(master)?,
        };
        // There was no mask before.
        layer.flips = 0;
        Ok(layer)
    }

    /// Chooses the mask of the master weight as it is now and packs what it keeps, in one pass; returns how many mask
    /// elements changed. To be called once per optimizer step. With [`MaskRule::Given`] the mask stays, as in
    /// [`SparseLinear::repack`].
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::NotANumber`] and [`Error::Infinite`] as in [`SparseLinear::new`].
    pub fn remask<M: Element>(&mut self, master: MatrixRef<'_, M>) -> Result<u64> {
        self.pack(master, self.settings.rule)
    }

    /// Packs the master weight's present values under the mask as it is. With [`MaskRule::SoftThreshold`], whose mask
    /// and values are one, this is [`SparseLinear::remask`].
    ///
    /// # Errors
    /// [`Error::Shape`]; with the soft threshold those of [`SparseLinear::remask`].
    pub fn repack<M: Element>(&mut self, master: MatrixRef<'_, M>) -> Result<()> {
        let flips = self.flips;
        match self.settings.rule {
            MaskRule::SoftThreshold => self.pack(master, MaskRule::SoftThreshold)?,
            _ => {
                self.pack(master, MaskRule::Given)?;
                self.flips = flips;
                flips
            }
        };
        Ok(())
    }

    /// Sets the mask, packs what it keeps of the master weight, and returns how many mask elements changed: for
    /// [`MaskRule::Given`], and for any rule when training is resumed.
    ///
    /// # Errors
    /// [`Error::Shape`]; [`Error::TooManyKept`] where the mask is not 2:4 along rows, or not along columns where the
    /// transpose is packed. The layer is then as it was.
    pub fn set_mask<M: Element>(&mut self, master: MatrixRef<'_, M>, mask: Mask) -> Result<u64> {
        self.check_mask(&mask)?;
        if (master.rows(), master.cols()) != (mask.rows(), mask.cols()) {
            let (expected, found) = ((mask.rows(), mask.cols()), (master.rows(), master.cols()));
            return Err(Error::Shape { what: "the master weight", expected, found });
        }
        let flips = mask.flips(&self.mask)?;
        self.mask = mask;
        self.repack(master)?;
        self.flips = flips;
        Ok(flips)
    }

    /// An error unless [`SparseLinear::set_mask`] takes the mask.
    ///
    /// # Errors
    /// Those of [`SparseLinear::set_mask`].
    pub fn check_mask(&self, mask: &Mask) -> Result<()> {
        self.mask.expect_shape("the mask", mask.rows(), mask.cols())?;
        mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
        if self.transposed.is_some() {
            mask.verify(Pattern::TWO_FOUR, Axis::Column)?;
        }
        Ok(())
    }

    fn pack<M: Element>(&mut self, master: MatrixRef<'_, M>, rule: MaskRule) -> Result<u64> {
        let scale = self.scale.unwrap_or(1.0);
        let transposed = self.transposed.as_mut().map(SparseWeight::view_mut);
        self.flips = remask(master, rule, scale, &mut self.mask, self.packed.view_mut(), transposed)?;
        Ok(self.flips)
    }

    /// `y = activation(x · Wᵀ + bias)` with the packed weight. Products accumulate in f32.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit.
    pub fn forward(&self, x: &[T], tokens: usize, forward: Forward<'_, T>, y: &mut [T]) -> Result<()> {
        let Forward { bias, activation, pre_activation } = forward;
        match pre_activation {
            None => self.packed.linear(x, tokens, Epilogue { bias, activation }, y),
            Some(pre) => {
                expect_length("the output", elements(tokens, self.out_features())?, y.len())?;
                self.packed.linear(x, tokens, Epilogue { bias, activation: Activation::Identity }, pre)?;
                activate(activation, pre, y)
            }
        }
    }

    /// `dx = dy · W` with the packed weight, for the gradient `dy` of the pre-activation. Products accumulate in f32.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        match &self.transposed {
            Some(transposed) => transposed.linear(dy, tokens, Epilogue::default(), dx),
            None => self.packed.input_gradient(dy, tokens, dx),
        }
    }

    /// The weight gradient that the settings ask for, `dyᵀ · x`, for the gradient `dy` of the pre-activation. With an
    /// MVUE each call takes a seed of its own ([`SparseLinear::set_seed`]).
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit; with an MVUE those of [`super::gradient_estimate`].
    pub fn weight_gradient<G: Arithmetic>(
        &self,
        dy: &[T],
        x: &[T],
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut [G],
    ) -> Result<()> {
        let dims = (tokens, self.out_features(), self.in_features());
        match self.settings.weight_gradient {
            WeightGradient::Dense => gradient::weight_gradient((dy, x), dims, accumulate, dw),
            WeightGradient::Masked => gradient::masked_weight_gradient((dy, x), tokens, &self.mask, accumulate, dw),
            sampled @ (WeightGradient::Mvue | WeightGradient::MvueApproximate) => {
                gradient::expect_operands(dy, x, dims, dw)?;
                let seed = self.seed.fetch_add(1, Relaxed);
                let Some(estimator) = sampled.estimator(seed) else { return Ok(()) };
                let estimate = gradient::gradient_estimate(dy, tokens, self.out_features(), estimator)?;
                gradient::estimated_weight_gradient(estimate, x, accumulate, dw)
            }
        }
    }

    /// The bias gradient: the sums of the columns of `dy`, in f32.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit.
    pub fn bias_gradient<G: Arithmetic>(
        &self,
        dy: &[T],
        tokens: usize,
        accumulate: Accumulate,
        db: &mut [G],
    ) -> Result<()> {
        expect_length("the bias gradient", self.out_features(), db.len())?;
        gradient::bias_gradient(dy, tokens, accumulate, db)
    }

    /// Number of output features.
    pub fn out_features(&self) -> usize {
        self.mask.rows()
    }

    /// Number of input features.
    pub fn in_features(&self) -> usize {
        self.mask.cols()
    }

    /// The settings.
    pub fn settings(&self) -> SparseLinearSettings {
        self.settings
    }

    /// The mask, `[out_features, in_features]`.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// How many mask elements the last change of the mask flipped; 0 before there was one.
    pub fn flips(&self) -> u64 {
        self.flips
    }

    /// The same as a share of all elements (flip rate; FST, Hu et al., ICML 2024).
    pub fn flip_rate(&self) -> f64 {
        let elements = self.mask.rows() as f64 * self.mask.cols() as f64;
        if elements == 0.0 { 0.0 } else { self.flips as f64 / elements }
    }

    /// The packed weight in canonical form, as a copy.
    pub fn packed(&self) -> Compressed<T> {
        self.packed.to_compressed()
    }

    /// The packed transpose in canonical form, as a copy, where there is one.
    pub fn packed_transpose(&self) -> Option<Compressed<T>> {
        self.transposed.as_ref().map(SparseWeight::to_compressed)
    }

    /// Bytes of the packed weight and of its packed transpose, where there is one: values and metadata.
    pub fn bytes(&self) -> usize {
        self.packed.bytes() + self.transposed.as_ref().map_or(0, SparseWeight::bytes)
    }

    /// The frozen scale of [`MaskRule::SoftThreshold`].
    pub fn scale(&self) -> Option<f32> {
        self.scale
    }

    /// Replaces the scale of [`MaskRule::SoftThreshold`], when training is resumed; it takes effect at the next
    /// [`SparseLinear::remask`]. Other rules have none.
    pub fn set_scale(&mut self, scale: f32) {
        if self.scale.is_some() {
            self.scale = Some(scale);
        }
    }

    /// The seed that the next weight gradient by MVUE takes; each takes one and leaves the next higher.
    pub fn seed(&self) -> u64 {
        self.seed.load(Relaxed)
    }

    /// Sets the seed of the next weight gradient by MVUE: 0 for a new layer. Layers that must not draw the same numbers
    /// need seeds that are far apart.
    pub fn set_seed(&self, seed: u64) {
        self.seed.store(seed, Relaxed);
    }
}
