//! What a linear layer computes with.

mod masked;

pub use masked::{MaskedWeight, Masking};
use twofour::select::Transposable;

use crate::{
    Result,
    engine::{Engine, Kept, SparseLayer as _},
    parameter::Parameter,
};

/// What a linear layer computes with, made of its master weight.
#[derive(Debug)]
pub enum Weight<E: Engine> {
    /// The weight itself.
    Dense,
    /// The packed 2:4 weight.
    Sparse(E::SparseLinear),
    /// Three of every four, in dense GEMMs.
    ThreeOfFour(E::Buffer),
    /// What a mask of any pattern keeps, in dense GEMMs.
    Masked(MaskedWeight<E>),
    /// The weight itself, with an input that is pruned by the rule.
    InputPruned(Transposable),
}

/// What a linear layer computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerForm {
    /// The dense weight.
    Dense,
    /// The weight whose groups of four keep their three largest magnitudes (3:4), in a dense GEMM: the stage of gradual
    /// pruning between dense and 2:4.
    ThreeOfFour,
    /// The 2:4 weight.
    TwoOfFour,
    /// The weight under a mask of any pattern, in a dense GEMM.
    Masked,
    /// The dense weight, with an input that is pruned to 2:4 at each pass.
    TwoOfFourInput,
}

impl<E: Engine> Weight<E> {
    /// Its form.
    pub fn form(&self) -> LayerForm {
        match self {
            Weight::Dense => LayerForm::Dense,
            Weight::Sparse(_) => LayerForm::TwoOfFour,
            Weight::ThreeOfFour(_) => LayerForm::ThreeOfFour,
            Weight::Masked(_) => LayerForm::Masked,
            Weight::InputPruned(_) => LayerForm::TwoOfFourInput,
        }
    }

    /// The packed weight.
    pub fn sparse(&self) -> Option<&E::SparseLinear> {
        match self {
            Weight::Sparse(sparse) => Some(sparse),
            _ => None,
        }
    }

    /// The operand of dense GEMMs that is not the parameter itself.
    fn apart(&self) -> Option<&E::Buffer> {
        match self {
            Weight::ThreeOfFour(kept) => Some(kept),
            Weight::Masked(masked) => masked.operand(),
            Weight::Dense | Weight::Sparse(_) | Weight::InputPruned(_) => None,
        }
    }

    /// The operand of dense GEMMs.
    pub fn operand<'a>(&'a self, parameter: &'a Parameter<E>) -> &'a E::Buffer {
        self.apart().unwrap_or_else(|| parameter.compute())
    }

    /// Whether it computes with the parameter's copy in the compute type.
    pub fn reads_copy(&self) -> bool {
        self.sparse().is_none() && self.apart().is_none()
    }

    /// Makes it anew of a parameter that has changed; a packed weight under a new mask or the present one.
    ///
    /// # Errors
    /// A NaN in the master weight; those of the engine.
    pub fn refresh(
        &mut self,
        engine: &E,
        (parameter, cols): (&mut Parameter<E>, usize),
        selects_mask: bool,
    ) -> Result<()> {
        match self {
            Weight::Sparse(sparse) if selects_mask => sparse.remask(parameter.master()),
            Weight::Sparse(sparse) => sparse.repack(parameter.master()),
            Weight::ThreeOfFour(kept) => engine.prune(Kept::OfFour(3), parameter.master(), cols, kept),
            Weight::Masked(masked) => masked.refresh(engine, parameter),
            Weight::Dense | Weight::InputPruned(_) => Ok(()),
        }
    }
}
