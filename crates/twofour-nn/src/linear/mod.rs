//! A linear layer that is dense, 2:4 or masked, and can change from one to the other between any two steps.

mod forms;
mod masks;

use twofour::{
    Mask,
    layer::{Accumulate, MaskRule, SparseLinearSettings, WeightGradient},
    select::Transposable,
};

use crate::{
    Error, Result,
    engine::{
        AdamWStep, Engine, LayerRefresh, LinearShape, Nonlinearity, OptimizerStep, PrunedDecay, SparseActivation as _,
        SparseLayer as _,
    },
    parameter::Parameter,
};

use twofour_transformer::weight::Weight;
pub use twofour_transformer::{
    engine::SparsePrecision,
    weight::{LayerForm, Masking},
};

/// A linear layer, `y = x · Wᵀ + bias`.
///
/// The master weight is the same whether the layer is dense or 2:4, and so are its gradient's place and its moments. A
/// 2:4 layer computes with its packed weight, which [`Linear::refresh`] makes anew once after each optimizer step.
#[derive(Debug)]
pub struct Linear<E: Engine> {
    name: String,
    weight: Parameter<E>,
    bias: Option<Parameter<E>>,
    /// What it computes with.
    operand: Weight<E>,
    /// A mask of the weight that nothing computes with.
    observed: Option<E::SparseLinear>,
    out_features: usize,
    in_features: usize,
}

impl<E: Engine> Linear<E> {
    /// A dense layer of that name, without `.weight`.
    ///
    /// # Errors
    /// A weight that is not a matrix, or a bias that does not fit it.
    pub fn new(name: &str, weight: Parameter<E>, bias: Option<Parameter<E>>) -> Result<Self> {
        let &[out_features, in_features] = weight.shape() else {
            let found = format!("{:?}", weight.shape());
            return Err(Error::Setting { what: "the shape of a linear layer's weight", found, expected: "a matrix" });
        };
        if let Some(bias) = bias.as_ref().filter(|bias| bias.shape() != [out_features]) {
            let found = bias.shape().iter().product();
            return Err(Error::length("the bias of a linear layer", out_features, found).in_layer(name));
        }
        Ok(Linear {
            name: name.to_owned(),
            weight,
            bias,
            operand: Weight::Dense,
            observed: None,
            out_features,
            in_features,
        })
    }

    /// The full name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The weight; its master is dense whether or not the layer is 2:4.
    pub fn weight(&self) -> &Parameter<E> {
        &self.weight
    }

    pub(crate) fn weight_mut(&mut self) -> &mut Parameter<E> {
        &mut self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Parameter<E>> {
        self.bias.as_ref()
    }

    /// The 2:4 weight, if the layer is 2:4.
    pub fn sparse(&self) -> Option<&E::SparseLinear> {
        self.operand.sparse()
    }

    /// Number of output features.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The operand of dense GEMMs.
    fn dense_weight(&self) -> &E::Buffer {
        self.operand.operand(&self.weight)
    }

    fn shape(&self, tokens: usize) -> LinearShape {
        LinearShape { tokens, out_features: self.out_features, in_features: self.in_features }
    }

    /// The rule by which the input is pruned, where it is.
    pub fn prunes_input(&self) -> Option<Transposable> {
        match self.operand {
            Weight::InputPruned(rule) => Some(rule),
            _ => None,
        }
    }

    /// Selects the mask that these settings would have, now and after every step of a trainer, without computing with
    /// it. The soft threshold's is that of the largest magnitudes.
    ///
    /// # Errors
    /// Those of [`Linear::make_sparse`].
    pub fn observe(&mut self, engine: &E, settings: SparseLinearSettings) -> Result<()> {
        let rule = match settings.rule {
            MaskRule::SoftThreshold => MaskRule::Magnitude,
            rule => rule,
        };
        let settings = SparseLinearSettings { rule, weight_gradient: WeightGradient::Dense, ..settings };
        let shape = (self.out_features, self.in_features);
        let observed = engine.sparse_linear(self.weight.master(), shape, settings, SparsePrecision::Activations);
        self.observed = Some(observed.map_err(|error| error.in_layer(&self.name))?);
        Ok(())
    }

    /// The mask of [`Linear::observe`], with what it would pack.
    pub fn observed(&self) -> Option<&E::SparseLinear> {
        self.observed.as_ref()
    }

    /// Drops what is made of the weight alone: the 3:4 form and the observed mask.
    pub(crate) fn forget(&mut self) {
        if let Weight::ThreeOfFour(_) = self.operand {
            self.operand = Weight::Dense;
        }
        self.observed = None;
    }

    /// Packs the master weight after it has changed, under a new mask or the present one; applies the mask of a masked
    /// layer; nothing for a dense one.
    ///
    /// # Errors
    /// [`Error::InLayer`] with that of [`SparseLayer::remask`](crate::engine::SparseLayer::remask).
    pub fn refresh(&mut self, engine: &E, selects_mask: bool) -> Result<()> {
        let outcome = self.operand.refresh(engine, (&mut self.weight, self.in_features), selects_mask);
        Ok(outcome.map_err(|error| error.in_layer(&self.name))?)
    }

    /// What an update that the guard may have skipped changes beside the weight: the layer's own mask and packed
    /// weight, unless `selects_mask` is `None`, and the observed mask. A 3:4 or masked weight is pruned at once.
    pub(crate) fn refreshes(
        &mut self,
        engine: &E,
        selects_mask: Option<bool>,
    ) -> Result<impl Iterator<Item = LayerRefresh<'_, E::Buffer, E::SparseLinear>>> {
        let Linear { name, weight, operand, observed, in_features, .. } = self;
        let name = &**name;
        if selects_mask.is_some() && operand.sparse().is_none() {
            // What a skipped step left as it was is pruned to the same.
            operand.refresh(engine, (weight, *in_features), false).map_err(|error| error.in_layer(name))?;
        }
        let master = weight.master();
        let own = match operand {
            Weight::Sparse(sparse) => Some(sparse).zip(selects_mask),
            _ => None,
        };
        let observed = observed.as_mut().map(|observed| (observed, true));
        let refresh = move |(layer, selects_mask)| LayerRefresh { name, layer, master, selects_mask };
        Ok(own.into_iter().chain(observed).map(refresh))
    }

    /// Restores mask, scale and seed of a 2:4 layer that was saved; nothing for a dense layer.
    pub(crate) fn restore(&mut self, mask: Mask, scale: Option<f32>, seed: u64) -> Result<()> {
        let Weight::Sparse(sparse) = &mut self.operand else { return Ok(()) };
        let restore = || -> Result<()> {
            if let Some(scale) = scale {
                sparse.set_scale(scale)?;
            }
            sparse.set_mask(self.weight.master(), mask)?;
            Ok(sparse.set_seed(seed)?)
        };
        restore().map_err(|error| error.in_layer(&self.name))
    }

    /// Adds to the seed of MVUE weight gradients; nothing for a dense layer.
    pub(crate) fn move_seed(&mut self, by: u64) -> Result<()> {
        let Weight::Sparse(sparse) = &mut self.operand else { return Ok(()) };
        if by == 0 {
            return Ok(());
        }
        let seed = sparse.seed()?.wrapping_add(by);
        Ok(sparse.set_seed(seed).map_err(|error| error.in_layer(&self.name))?)
    }

    /// `y = x · Wᵀ + bias`.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn forward(&self, engine: &E, x: &E::Buffer, tokens: usize, y: &mut E::Buffer) -> Result<()> {
        let bias = self.bias.as_ref().map(Parameter::compute);
        match self.sparse() {
            Some(sparse) => sparse.forward(x, tokens, bias, y)?,
            None => engine.linear(self.shape(tokens), x, self.dense_weight(), bias, y)?,
        }
        Ok(())
    }

    /// Writes or adds the gradients of weight and bias.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn parameter_gradients(
        &mut self,
        engine: &E,
        dy: &E::Buffer,
        x: &E::Buffer,
        tokens: usize,
        accumulate: Accumulate,
    ) -> Result<()> {
        self.weight_gradient(engine, dy, x, tokens, accumulate)?;
        self.bias_gradient(engine, dy, accumulate)
    }

    fn bias_gradient(&mut self, engine: &E, dy: &E::Buffer, accumulate: Accumulate) -> Result<()> {
        match &mut self.bias {
            Some(bias) => Ok(bias.record(accumulate, |db, accumulate| engine.bias_gradient(dy, accumulate, db))?),
            None => Ok(()),
        }
    }

    fn weight_gradient(
        &mut self,
        engine: &E,
        dy: &E::Buffer,
        x: &E::Buffer,
        tokens: usize,
        accumulate: Accumulate,
    ) -> Result<()> {
        let shape = self.shape(tokens);
        self.weight.record(accumulate, |dw, accumulate| -> Result<()> {
            match &self.operand {
                Weight::Sparse(sparse) => sparse.weight_gradient(dy, x, tokens, accumulate, dw)?,
                Weight::Masked(masked) => {
                    engine.weight_gradient(shape, dy, x, accumulate, dw)?;
                    masked.mask_gradient(engine, dw)?;
                }
                _ => engine.weight_gradient(shape, dy, x, accumulate, dw)?,
            }
            Ok(())
        })
    }

    /// Turns the gradient of an activation of the layer's output into that of the output, `dy ← dy · function'(y)`,
    /// and writes or adds the gradients of weight and bias.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn gradients_through(
        &mut self,
        engine: &E,
        (function, y): (Nonlinearity, &E::Buffer),
        dy: &mut E::Buffer,
        (x, tokens): (&E::Buffer, usize),
        accumulate: Accumulate,
    ) -> Result<()> {
        match self.bias.as_mut().filter(|bias| bias.gradient().is_some()) {
            Some(bias) => bias.record(accumulate, |db, accumulate| {
                engine.activation_gradient(function.into(), y, dy, Some((accumulate, db)))
            })?,
            None => engine.activation_gradient(function.into(), y, dy, None)?,
        }
        self.weight_gradient(engine, dy, x, tokens, accumulate)
    }

    /// [`Linear::forward`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn forward_packed(&self, x: &E::PackedActivation, tokens: usize, y: &mut E::Buffer) -> Result<()> {
        let bias = self.bias.as_ref().map(Parameter::compute);
        Ok(x.linear(self.shape(tokens), self.dense_weight(), bias, y)?)
    }

    /// [`Linear::parameter_gradients`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn packed_parameter_gradients(
        &mut self,
        engine: &E,
        dy: &E::Buffer,
        x: &E::PackedActivation,
        tokens: usize,
        accumulate: Accumulate,
    ) -> Result<()> {
        let shape = self.shape(tokens);
        let weight = |dw: &mut E::Buffer, accumulate| x.weight_gradient(shape, dy, accumulate, dw);
        self.weight.record(accumulate, weight)?;
        self.bias_gradient(engine, dy, accumulate)
    }

    /// `dx = dy · W`.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn input_gradient(&self, engine: &E, dy: &E::Buffer, tokens: usize, dx: &mut E::Buffer) -> Result<()> {
        match self.sparse() {
            Some(sparse) => sparse.input_gradient(dy, tokens, dx)?,
            None => engine.input_gradient(self.shape(tokens), dy, self.dense_weight(), dx)?,
        }
        Ok(())
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        std::iter::once(&mut self.weight).chain(self.bias.as_mut())
    }

    /// An optimizer step of the weight, with the mask if the layer is 2:4, or with the observed one where pruned
    /// elements of a dense layer decay. Returns what [`StepOperations::step`] does.
    pub(crate) fn update_weight(&mut self, engine: &E, step: &OptimizerStep, guard: &E::StepGuard) -> Result<f64> {
        let mask = match step {
            OptimizerStep::AdamW(AdamWStep { pruned_decay: PrunedDecay::Moment { .. }, .. }) => self.observed.as_ref(),
            _ => self.operand.sparse(),
        };
        Ok(self.weight.update(engine, step, mask, guard)?)
    }
}
