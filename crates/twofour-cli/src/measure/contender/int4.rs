//! Int4 weights with a scale for every 128 columns, beside int8 ones: 2:4 and dense.

use std::rc::Rc;

use anyhow::Result;
use half::f16;
use twofour::{
    Compressed, MatrixRef,
    int4::{Granularity, Int4},
    kernel::SparseWeightInt4,
};

use super::{Contender, Weights, float::random, int8::Int8Weights, own::Own};
use crate::measure::{
    memory::Rotation,
    random::Random,
    work::{Shape, Who},
};

/// A random int4 weight, pruned to 2:4, and int8 weights of the same shape.
#[derive(Debug)]
pub(super) struct Int4Weights {
    inputs: usize,
    sparse: Rc<Rotation<SparseWeightInt4>>,
    sparse_bytes: usize,
    int8: Int8Weights,
}

/// Returns a random int4 weight `[out, inputs]` in canonical form, with a scale for every 128 columns.
///
/// # Errors
/// Those of [`Int4::from_parts`].
pub fn random_int4(random: &mut Random, out: usize, inputs: usize) -> Result<Int4> {
    let granularity = Granularity::Group;
    let weight: Vec<i8> = (0..out * inputs).map(|_| (random.bits() >> 56) as i8 >> 4).collect();
    let scales =
        (0..out * granularity.scales_per_row(inputs)).map(|_| f16::from_f32(random.float().abs() / 7.0 + 1e-3));
    Ok(Int4::from_parts(
        Compressed::from_pruned(MatrixRef::new(out, inputs, &weight)?)?,
        scales.collect(),
        granularity,
    )?)
}

impl Int4Weights {
    pub(super) fn new(shape: Shape) -> Result<Self> {
        let Shape { out, inputs } = shape;
        let sparse = SparseWeightInt4::of(&random_int4(&mut Random::new(), out, inputs)?)?;
        let sparse_bytes = sparse.bytes();
        let sparse = Rc::new(Rotation::new(sparse, sparse_bytes, Clone::clone));
        Ok(Int4Weights { inputs, sparse, sparse_bytes, int8: Int8Weights::new(shape)? })
    }
}

impl Weights for Int4Weights {
    fn contenders(&self, tokens: usize) -> Result<Vec<Box<dyn Contender>>> {
        let x = Rc::new(random(tokens * self.inputs));
        let mut contenders: Vec<Box<dyn Contender>> = vec![Box::new(Own::new(self.sparse.clone(), x, tokens))];
        contenders.extend(self.int8.with_sparse(Who::SparseI8, tokens));
        Ok(contenders)
    }

    fn dense_bytes(&self) -> usize {
        self.int8.dense_bytes()
    }

    fn sparse_bytes(&self) -> usize {
        self.sparse_bytes
    }
}
