//! Int8 weights with a scale for each row. `gemm` has no such GEMM.

use std::rc::Rc;

use anyhow::Result;
use twofour::{
    Compressed, MatrixRef,
    kernel::{DenseWeightI8, SparseWeightI8},
};

use super::{Contender, Weights, float::random, own::Own};
use crate::measure::{
    memory::Rotation,
    random::Random,
    work::{Shape, Who},
};

/// A random int8 weight, pruned to 2:4 for the sparse kernel alone.
#[derive(Debug)]
pub(super) struct Int8Weights {
    inputs: usize,
    sparse: Rc<Rotation<SparseWeightI8>>,
    dense: Rc<Rotation<DenseWeightI8>>,
    dense_bytes: usize,
    sparse_bytes: usize,
}

impl Int8Weights {
    pub(super) fn new(shape: Shape) -> Result<Self> {
        let Shape { out, inputs } = shape;
        let mut random = Random::new();
        let weight: Vec<i8> = (0..out * inputs).map(|_| (random.bits() >> 56) as i8).collect();
        let scales: Vec<f32> = (0..out).map(|_| random.float().abs() / 127.0 + 1e-3).collect();
        let matrix = MatrixRef::new(out, inputs, &weight)?;
        let sparse = SparseWeightI8::with_scales(Compressed::from_pruned(matrix)?, scales.clone())?;
        let dense = DenseWeightI8::with_scales(matrix, scales)?;
        let (dense_bytes, sparse_bytes) = (dense.bytes(), sparse.bytes());
        Ok(Int8Weights {
            inputs,
            sparse: Rc::new(Rotation::new(sparse, sparse_bytes, Clone::clone)),
            dense: Rc::new(Rotation::new(dense, dense_bytes, Clone::clone)),
            dense_bytes,
            sparse_bytes,
        })
    }
}

impl Int8Weights {
    /// Returns the contenders, with a name for the 2:4 kernel.
    pub(super) fn with_sparse(&self, sparse: Who, tokens: usize) -> Vec<Box<dyn Contender>> {
        let x = Rc::new(random(tokens * self.inputs));
        vec![
            Box::new(Own::new(self.sparse.clone(), x.clone(), tokens).named(sparse)),
            Box::new(Own::new(self.dense.clone(), x, tokens)),
        ]
    }
}

impl Weights for Int8Weights {
    fn contenders(&self, tokens: usize) -> Result<Vec<Box<dyn Contender>>> {
        Ok(self.with_sparse(Who::Sparse, tokens))
    }

    fn dense_bytes(&self) -> usize {
        self.dense_bytes
    }

    fn sparse_bytes(&self) -> usize {
        self.sparse_bytes
    }
}
