//! Weights of a floating-point dtype.

use std::rc::Rc;

use anyhow::Result;
use twofour::{
    Compressed, MatrixRef,
    kernel::{DenseWeight, KernelElement, SparseWeight},
};

use super::{
    Contender, Weights,
    gemm::Gemm,
    own::{Own, OwnWeight},
};
use crate::measure::{
    memory::Rotation,
    random::Random,
    work::{Shape, Who},
};

/// A random weight of `T`, pruned to 2:4 for the sparse kernel alone.
#[derive(Debug)]
pub(super) struct FloatWeights<T: KernelElement> {
    shape: Shape,
    sparse: Rc<Rotation<SparseWeight<T>>>,
    dense: Rc<Rotation<DenseWeight<T>>>,
    dense_bytes: usize,
    sparse_bytes: usize,
}

impl<T: KernelElement> FloatWeights<T> {
    pub(super) fn new(shape: Shape) -> Result<Self> {
        let Shape { out, inputs } = shape;
        let weight: Vec<T> = random(out * inputs);
        let matrix = MatrixRef::new(out, inputs, &weight)?;
        let sparse = SparseWeight::pack(Compressed::from_pruned(matrix)?)?;
        let dense = DenseWeight::pack(matrix)?;
        let (dense_bytes, sparse_bytes) = (dense.bytes(), sparse.bytes());
        Ok(FloatWeights {
            shape,
            sparse: Rc::new(Rotation::new(sparse, sparse_bytes, Clone::clone)),
            dense: Rc::new(Rotation::new(dense, dense_bytes, Clone::clone)),
            dense_bytes,
            sparse_bytes,
        })
    }
}

impl<T: KernelElement> Weights for FloatWeights<T>
where
    SparseWeight<T>: OwnWeight<Activation = T>,
    DenseWeight<T>: OwnWeight<Activation = T>,
{
    fn contenders(&self, tokens: usize) -> Result<Vec<Box<dyn Contender>>> {
        let x: Rc<Vec<T>> = Rc::new(random(tokens * self.shape.inputs));
        let mut contenders: Vec<Box<dyn Contender>> = vec![
            Box::new(Own::new(self.sparse.clone(), x.clone(), tokens)),
            Box::new(Own::new(self.dense.clone(), x.clone(), tokens)),
        ];
        if let Some(gemm) = Gemm::new(self.dense.clone(), x, tokens) {
            contenders.push(Box::new(gemm));
        }
        Ok(contenders)
    }

    fn dense_bytes(&self) -> usize {
        self.dense_bytes
    }

    fn sparse_bytes(&self) -> usize {
        self.sparse_bytes
    }
}

/// Returns the 2:4 kernel in f32, to be measured beside a GEMM of another dtype.
pub(super) fn single(shape: Shape, tokens: usize) -> Result<Own<SparseWeight<f32>>> {
    let weight = random::<f32>(shape.out * shape.inputs);
    let matrix = MatrixRef::new(shape.out, shape.inputs, &weight)?;
    let sparse = SparseWeight::pack(Compressed::from_pruned(matrix)?)?;
    let bytes = sparse.bytes();
    let weights = Rc::new(Rotation::new(sparse, bytes, Clone::clone));
    Ok(Own::new(weights, Rc::new(random(tokens * shape.inputs)), tokens).named(Who::SparseF32))
}

pub(super) fn random<T: KernelElement>(count: usize) -> Vec<T> {
    let mut random = Random::new();
    (0..count).map(|_| T::from_f32(random.float())).collect()
}
