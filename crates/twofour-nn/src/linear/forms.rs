//! What a linear layer computes with, and how that changes.

use twofour::{layer::SparseLinearSettings, select::Transposable};

use super::{LayerForm, Linear, Weight};
use crate::{
    Result,
    engine::{Engine, Kept, Kind, SparseLayer as _, SparsePrecision},
};

impl<E: Engine> Linear<E> {
    /// Makes the layer 2:4, with the mask of the master weight as it is. `seed` is that of MVUE weight gradients.
    ///
    /// # Errors
    /// [`Error::InLayer`](crate::Error::InLayer) with what
    /// [`LinearOperations::sparse_linear`](crate::engine::LinearOperations::sparse_linear) refuses; the layer is then
    /// as it was.
    pub fn make_sparse(&mut self, engine: &E, settings: SparseLinearSettings, seed: u64) -> Result<()> {
        self.make_sparse_in(engine, settings, SparsePrecision::Activations, seed)
    }

    /// [`Linear::make_sparse`] with GEMMs of a precision.
    ///
    /// # Errors
    /// Those of [`Linear::make_sparse`]; a device that is too old for the precision.
    pub fn make_sparse_in(
        &mut self,
        engine: &E,
        settings: SparseLinearSettings,
        precision: SparsePrecision,
        seed: u64,
    ) -> Result<()> {
        // First, so that the packed weight takes the memory of the dense copy.
        self.weight.drop_copy();
        let make = || -> Result<E::SparseLinear> {
            let (master, shape) = (self.weight.master(), (self.out_features, self.in_features));
            let mut sparse = engine.sparse_linear(master, shape, settings, precision)?;
            sparse.set_seed(seed)?;
            Ok(sparse)
        };
        match make() {
            Ok(sparse) => {
                self.operand = Weight::Sparse(sparse);
                Ok(())
            }
            Err(error) => {
                if self.operand.reads_copy() {
                    self.weight.add_copy(engine)?;
                }
                Err(error.in_layer(&self.name))
            }
        }
    }

    /// Makes the layer dense over its master weight, with pruned elements as they are.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn make_dense(&mut self, engine: &E) -> Result<()> {
        self.weight.add_copy(engine)?;
        self.operand = Weight::Dense;
        Ok(())
    }

    /// Makes the weight dense and prunes the input to 2:4 at each pass
    /// ([`LinearOperations::pack_squared_relu`](crate::engine::LinearOperations::pack_squared_relu)): for the second
    /// layer of a feed-forward block with squared ReLU, which asks the layer.
    ///
    /// # Errors
    /// Those of [`Linear::make_dense`].
    pub fn make_input_sparse(&mut self, engine: &E, rule: Transposable) -> Result<()> {
        self.make_dense(engine)?;
        self.operand = Weight::InputPruned(rule);
        Ok(())
    }

    /// Makes the layer 3:4: every group of four weights keeps its three largest magnitudes, anew at every
    /// [`Linear::refresh`], in dense GEMMs.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn make_three_of_four(&mut self, engine: &E) -> Result<()> {
        let mut kept = engine.zeros(Kind::Compute, self.out_features * self.in_features)?;
        engine.prune(Kept::OfFour(3), self.weight.master(), self.in_features, &mut kept)?;
        self.operand = Weight::ThreeOfFour(kept);
        // The optimizer's copy of the whole weight is not computed with.
        self.weight.drop_copy();
        Ok(())
    }

    /// What the layer computes with.
    pub fn form(&self) -> LayerForm {
        self.operand.form()
    }
}
