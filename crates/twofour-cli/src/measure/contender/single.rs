//! The 2:4 kernel in f32, beside one of a smaller dtype, to show what the smaller dtype gains.

use std::rc::Rc;

use anyhow::Result;
use twofour::{Compressed, MatrixRef, kernel::SparseWeight};

use super::{Contender, float::random, own::Own};
use crate::measure::{
    memory::Rotation,
    work::{Shape, Who},
};

/// This project's 2:4 kernel in f32, measured beside a GEMM of another dtype.
#[derive(Debug)]
pub(super) struct Single(Own<SparseWeight<f32>>);

impl Single {
    /// Returns a random weight of a shape and its activations.
    pub(super) fn new(shape: Shape, tokens: usize) -> Result<Self> {
        let weight = random::<f32>(shape.out * shape.inputs);
        let matrix = MatrixRef::new(shape.out, shape.inputs, &weight)?;
        let sparse = SparseWeight::pack(Compressed::from_pruned(matrix)?)?;
        let bytes = sparse.bytes();
        let weights = Rc::new(Rotation::new(sparse, bytes, Clone::clone));
        Ok(Single(Own::new(weights, Rc::new(random(tokens * shape.inputs)), tokens)))
    }
}

impl Contender for Single {
    fn who(&self) -> Who {
        Who::SparseF32
    }

    fn weight_bytes(&self) -> usize {
        self.0.weight_bytes()
    }

    fn multiply(&mut self) -> Result<()> {
        self.0.multiply()
    }

    fn product(&self) -> Result<Vec<f32>> {
        self.0.product()
    }
}
