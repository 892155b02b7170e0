//! This project's kernels.

use std::{fmt, rc::Rc};

use anyhow::Result;
use half::{bf16, f16};
use twofour::{
    Element, Result as KernelResult,
    kernel::{DenseWeight, DenseWeightI8, Epilogue, KernelElement, SparseWeight, SparseWeightI8, SparseWeightInt4},
};

use super::Contender;
use crate::measure::{memory::Rotation, work::Who};

/// A packed weight of any kind.
pub(super) trait OwnWeight: fmt::Debug {
    /// Data type of activations.
    type Activation: KernelElement;
    const WHO: Who;
    fn bytes(&self) -> usize;
    fn out_features(&self) -> usize;
    fn linear(&self, x: &[Self::Activation], tokens: usize, y: &mut [Self::Activation]) -> KernelResult<()>;
}

/// The methods that the kernels' types have in common.
macro_rules! own_weight {
    ($weight:ty, $activation:ty, $who:expr) => {
        impl OwnWeight for $weight {
            type Activation = $activation;
            const WHO: Who = $who;
            fn bytes(&self) -> usize {
                self.bytes()
            }
            fn out_features(&self) -> usize {
                self.out_features()
            }
            fn linear(&self, x: &[$activation], tokens: usize, y: &mut [$activation]) -> KernelResult<()> {
                self.linear(x, tokens, Epilogue::default(), y)
            }
        }
    };
}

own_weight!(SparseWeight<f32>, f32, Who::Sparse);
own_weight!(SparseWeight<bf16>, bf16, Who::Sparse);
own_weight!(SparseWeight<f16>, f16, Who::Sparse);
own_weight!(DenseWeight<f32>, f32, Who::Dense);
own_weight!(DenseWeight<bf16>, bf16, Who::Dense);
own_weight!(DenseWeight<f16>, f16, Who::Dense);
own_weight!(SparseWeightI8, f32, Who::Sparse);
own_weight!(SparseWeightInt4, f32, Who::Sparse);
own_weight!(DenseWeightI8, f32, Who::Dense);

/// A planned call of one of this project's kernels.
#[derive(Debug)]
pub(super) struct Own<W: OwnWeight> {
    who: Who,
    weights: Rc<Rotation<W>>,
    bytes: usize,
    x: Rc<Vec<W::Activation>>,
    tokens: usize,
    y: Vec<W::Activation>,
}

impl<W: OwnWeight> Own<W> {
    pub(super) fn new(weights: Rc<Rotation<W>>, x: Rc<Vec<W::Activation>>, tokens: usize) -> Self {
        let (bytes, out) = (weights.next().bytes(), weights.next().out_features());
        Own { who: W::WHO, weights, bytes, x, tokens, y: vec![W::Activation::ZERO; tokens * out] }
    }

    /// Returns the same under another name.
    pub(super) fn named(self, who: Who) -> Self {
        Own { who, ..self }
    }
}

impl<W: OwnWeight> Contender for Own<W> {
    fn who(&self) -> Who {
        self.who
    }

    fn weight_bytes(&self) -> usize {
        self.bytes
    }

    fn multiply(&mut self) -> Result<()> {
        Ok(self.weights.next().linear(&self.x, self.tokens, &mut self.y)?)
    }

    fn product(&self) -> Result<Vec<f32>> {
        Ok(self.y.iter().map(|y| y.to_f32()).collect())
    }
}
