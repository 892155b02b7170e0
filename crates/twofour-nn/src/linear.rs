//! A linear layer that is dense or 2:4, and can change from one to the other between any two steps.

use twofour::{
    Mask,
    layer::{Accumulate, SparseLinearSettings},
};

use crate::{
    Error, Result,
    engine::{AdamWStep, Engine, LinearShape, SparseLayer as _},
    parameter::Parameter,
};

/// A linear layer, `y = x · Wᵀ + bias`.
///
/// The master weight is the same whether the layer is dense or 2:4, and so are its gradient's place and its moments. A 2:4 layer computes with its packed
/// weight, which [`Linear::refresh`] makes anew once after each optimizer step.
#[derive(Debug)]
pub struct Linear<E: Engine> {
    name: String,
    weight: Parameter<E>,
    bias: Option<Parameter<E>>,
    sparse: Option<E::SparseLinear>,
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
            return Err(
                Error::Length { what: "the bias of a linear layer", expected: out_features, found }.in_layer(name)
            );
        }
        Ok(Linear { name: name.to_owned(), weight, bias, sparse: None, out_features, in_features })
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
        self.sparse.as_ref()
    }

    /// Number of output features.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    fn shape(&self, tokens: usize) -> LinearShape {
        LinearShape { tokens, out_features: self.out_features, in_features: self.in_features }
    }

    /// Makes the layer 2:4, with the mask of the master weight as it is. `seed` is that of MVUE weight gradients.
    ///
    /// # Errors
    /// [`Error::InLayer`] with what [`Engine::sparse_linear`] refuses; the layer is then as it was.
    pub fn make_sparse(&mut self, engine: &E, settings: SparseLinearSettings, seed: u64) -> Result<()> {
        let mut make = || -> Result<()> {
            let shape = (self.out_features, self.in_features);
            let mut sparse = engine.sparse_linear(self.weight.master(), shape, settings)?;
            sparse.set_seed(seed)?;
            self.sparse = Some(sparse);
            self.weight.drop_copy();
            Ok(())
        };
        make().map_err(|error| error.in_layer(&self.name))
    }

    /// Makes the layer dense over its master weight, with pruned elements as they are.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn make_dense(&mut self, engine: &E) -> Result<()> {
        self.weight.add_copy(engine)?;
        self.sparse = None;
        Ok(())
    }

    /// Packs the master weight after it has changed, under a new mask or the present one; nothing for a dense layer.
    ///
    /// # Errors
    /// [`Error::InLayer`] with that of [`SparseLayer::remask`](crate::engine::SparseLayer::remask).
    pub fn refresh(&mut self, selects_mask: bool) -> Result<()> {
        let Some(sparse) = &mut self.sparse else { return Ok(()) };
        let master = self.weight.master();
        let outcome = if selects_mask { sparse.remask(master) } else { sparse.repack(master) };
        outcome.map_err(|error| error.in_layer(&self.name))
    }

    /// Restores mask, scale and seed of a 2:4 layer that was saved; nothing for a dense layer.
    pub(crate) fn restore(&mut self, mask: Mask, scale: Option<f32>, seed: u64) -> Result<()> {
        let Some(sparse) = &mut self.sparse else { return Ok(()) };
        let restore = || -> Result<()> {
            if let Some(scale) = scale {
                sparse.set_scale(scale)?;
            }
            sparse.set_mask(self.weight.master(), mask)?;
            sparse.set_seed(seed)
        };
        restore().map_err(|error| error.in_layer(&self.name))
    }

    /// `y = x · Wᵀ + bias`.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn forward(&self, engine: &E, x: &E::Buffer, tokens: usize, y: &mut E::Buffer) -> Result<()> {
        let bias = self.bias.as_ref().map(Parameter::compute);
        match &self.sparse {
            Some(sparse) => sparse.forward(x, tokens, bias, y),
            None => engine.linear(self.shape(tokens), x, self.weight.compute(), bias, y),
        }
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
        let shape = self.shape(tokens);
        self.weight.record(accumulate, |dw, accumulate| match &self.sparse {
            Some(sparse) => sparse.weight_gradient(dy, x, tokens, accumulate, dw),
            None => engine.weight_gradient(shape, dy, x, accumulate, dw),
        })?;
        match &mut self.bias {
            Some(bias) => bias.record(accumulate, |db, accumulate| engine.bias_gradient(dy, accumulate, db)),
            None => Ok(()),
        }
    }

    /// `dx = dy · W`.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn input_gradient(&self, engine: &E, dy: &E::Buffer, tokens: usize, dx: &mut E::Buffer) -> Result<()> {
        match &self.sparse {
            Some(sparse) => sparse.input_gradient(dy, tokens, dx),
            None => engine.input_gradient(self.shape(tokens), dy, self.weight.compute(), dx),
        }
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        std::iter::once(&mut self.weight).chain(self.bias.as_mut())
    }

    /// An optimizer step of the weight, with the mask if the layer is 2:4. Returns what [`Engine::adamw`] does.
    pub(crate) fn update_weight(&mut self, engine: &E, step: &AdamWStep) -> Result<f64> {
        self.weight.update(engine, step, self.sparse.as_ref())
    }

    /// An optimizer step of the bias.
    pub(crate) fn update_bias(&mut self, engine: &E, step: &AdamWStep) -> Result<()> {
        match &mut self.bias {
            Some(bias) => bias.update(engine, step, None).map(|_| ()),
            None => Ok(()),
        }
    }
}
