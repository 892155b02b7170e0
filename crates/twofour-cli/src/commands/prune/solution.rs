//! What calibrated pruning found, with adjusted weights on disk until they are written.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use half::f16;
use twofour::{
    Axis, Compressed, Mask, MatrixRef,
    file::{PrunedWeight, Quantization, QuantizedWeight, Reorder, TensorInfo},
    int4::Int4,
    int8::Int8,
    solve::LowRank,
};

use super::store::{Place, Store};

/// What became of the weights that calibration reached, by name.
#[derive(Debug)]
pub(super) struct Solutions {
    weights: HashMap<String, Solution>,
    /// The orders that tensors are to have, by name: pruned weights, and what goes before them.
    orders: HashMap<String, Reorder>,
    /// Adjusted weights.
    store: Store,
    /// Tokens that the model ran on.
    pub(super) tokens: usize,
    /// Texts that it ran on.
    pub(super) texts: usize,
    /// Of each block that was tuned, the mean error of a token before and after.
    pub(super) tuned: Vec<[f64; 2]>,
}

/// What became of a weight.
#[derive(Debug)]
pub(super) struct Solution {
    /// In the stored orientation.
    pub(super) mask: Mask,
    pub(super) axis: Axis,
    pub(super) adjusted: Option<Adjusted>,
    /// What is added to it.
    pub(super) low_rank: Option<StoredFactors>,
    /// With what is added.
    pub(super) relative_error: f64,
}

impl Solutions {
    pub(super) fn new(
        weights: HashMap<String, Solution>,
        orders: HashMap<String, Reorder>,
        store: Store,
        (texts, tokens): (usize, usize),
    ) -> Self {
        Solutions { weights, orders, store, tokens, texts, tuned: vec![] }
    }

    /// The orders that tensors are to have before they are pruned, by name.
    pub(super) fn orders(&self) -> &HashMap<String, Reorder> {
        &self.orders
    }

    /// Whether no weight was pruned.
    pub(super) fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    /// The axis along which a weight's pattern holds, if it was pruned.
    pub(super) fn axis(&self, name: &str) -> Option<Axis> {
        self.weights.get(name).map(|solution| solution.axis)
    }

    /// `‖(W - Ŵ)·X‖² / ‖W·X‖²` of a weight on some of the calibration's tokens.
    pub(super) fn relative_error(&self, name: &str) -> Option<f64> {
        self.weights.get(name).map(|solution| solution.relative_error)
    }

    /// The weights beside which there is a low-rank part, in order, with its rank and the layer's outputs and inputs.
    pub(super) fn low_rank_shapes(&self) -> BTreeMap<&str, [usize; 3]> {
        let low_rank = self.weights.iter().filter_map(|(name, own)| Some((name, own.low_rank.as_ref()?)));
        low_rank.map(|(name, factors)| (name.as_str(), factors.shape)).collect()
    }

    /// Adds the low-rank part beside a weight to it, in its stored orientation.
    pub(super) fn add_low_rank(&self, name: &str, weight: &mut [f32]) -> twofour::Result<()> {
        match self.weights.get(name) {
            Some(Solution { low_rank: Some(factors), axis, .. }) => factors.add_to(&self.store, *axis, weight),
            _ => Ok(()),
        }
    }

    /// Whether weights with a low-rank part are stored as `[in_features, out_features]`.
    pub(super) fn low_rank_is_transposed(&self) -> bool {
        self.weights.values().any(|solution| solution.low_rank.is_some() && solution.axis == Axis::Column)
    }

    /// The low-rank part beside a weight.
    pub(super) fn low_rank(&self, name: &str) -> twofour::Result<Option<LowRank>> {
        let factors = self.weights.get(name).and_then(|solution| solution.low_rank.as_ref());
        factors.map(|factors| factors.read(&self.store)).transpose()
    }

    fn solution(&self, tensor: &TensorInfo) -> twofour::Result<&Solution> {
        self.weights.get(&tensor.name).ok_or_else(|| twofour::Error::NoParameter { name: tensor.name.clone() })
    }

    /// What a weight was pruned to.
    pub(super) fn pruned(&self, tensor: &TensorInfo) -> twofour::Result<PrunedWeight> {
        let solution = self.solution(tensor)?;
        let mask = solution.mask.clone();
        match &solution.adjusted {
            None => Ok(PrunedWeight::Mask(mask)),
            Some(adjusted) => Ok(PrunedWeight::Adjusted { weight: adjusted.values(&self.store)?, mask }),
        }
    }

    /// What a weight was pruned and quantized to.
    pub(super) fn quantized(&self, tensor: &TensorInfo) -> twofour::Result<QuantizedWeight> {
        match &self.solution(tensor)?.adjusted {
            Some(Adjusted::Integers(integers)) => integers.read(&self.store),
            _ => Err(twofour::Error::NoParameter { name: tensor.name.clone() }),
        }
    }
}

/// The factors of a low-rank part on disk: little-endian f32.
#[derive(Debug)]
pub(super) struct StoredFactors {
    /// Rank, outputs and inputs.
    shape: [usize; 3],
    left: Place,
    right: Place,
}

impl StoredFactors {
    /// Stores the factors of a weight of so many outputs and inputs.
    pub(super) fn new(store: &Store, [outputs, inputs]: [usize; 2], factors: &LowRank) -> Result<Self> {
        let [left, right] = [factors.left(), factors.right()].map(|factor| store.write(bytemuck::cast_slice(factor)));
        Ok(StoredFactors { shape: [factors.rank(), outputs, inputs], left: left?, right: right? })
    }

    fn read(&self, store: &Store) -> twofour::Result<LowRank> {
        let [rank, outputs, inputs] = self.shape;
        LowRank::new(outputs, inputs, rank, store.read(self.left)?, store.read(self.right)?)
    }

    /// Adds the product to a weight in its stored orientation.
    pub(super) fn add_to(&self, store: &Store, axis: Axis, weight: &mut [f32]) -> twofour::Result<()> {
        let [_, outputs, inputs] = self.shape;
        let product = self.read(store)?.product();
        let product = match axis {
            Axis::Row => product,
            Axis::Column => MatrixRef::new(outputs, inputs, &product)?.transposed(),
        };
        weight.iter_mut().zip(product).for_each(|(weight, product)| *weight += product);
        Ok(())
    }
}

/// An adjusted weight on disk, in its stored orientation.
#[derive(Debug)]
pub(super) enum Adjusted {
    /// Little-endian f32.
    Floats(Place),
    /// Integers with scales.
    Integers(StoredIntegers),
}

/// Where the parts of a weight of integers lie.
#[derive(Debug)]
pub(super) struct StoredIntegers {
    quantization: Quantization,
    shape: [usize; 2],
    /// i8.
    values: Place,
    /// Little-endian u32.
    meta: Place,
    /// Little-endian f32.
    scales: Place,
}

impl Adjusted {
    /// Stores a weight of floats.
    pub(super) fn floats(store: &Store, weight: &[f32]) -> Result<Self> {
        Ok(Adjusted::Floats(store.write(bytemuck::cast_slice(weight))?))
    }

    /// Stores a weight of integers.
    pub(super) fn integers(store: &Store, weight: &QuantizedWeight) -> Result<Self> {
        let (integers, scales) = match weight {
            QuantizedWeight::Int8(weight) => (weight.weight(), weight.scales().to_vec()),
            QuantizedWeight::Int4(weight) => {
                (weight.weight(), weight.scales().iter().map(|scale| scale.to_f32()).collect())
            }
        };
        Ok(Adjusted::Integers(StoredIntegers {
            quantization: weight.quantization(),
            shape: [integers.rows(), integers.cols()],
            values: store.write(bytemuck::cast_slice(integers.values()))?,
            meta: store.write(bytemuck::cast_slice(integers.meta()))?,
            scales: store.write(bytemuck::cast_slice(&scales))?,
        }))
    }

    /// The weight, dense.
    pub(super) fn values(&self, store: &Store) -> twofour::Result<Vec<f32>> {
        match self {
            Adjusted::Floats(place) => store.read(*place),
            Adjusted::Integers(integers) => Ok(integers.read(store)?.dequantize().to_dense()),
        }
    }
}

impl StoredIntegers {
    /// The weight with the integers nearest to `values`, under its mask and scales.
    pub(super) fn nearest_to(&self, store: &Store, values: &[f32]) -> Result<Adjusted> {
        Adjusted::integers(store, &self.read(store)?.nearest_to(values)?)
    }

    fn read(&self, store: &Store) -> twofour::Result<QuantizedWeight> {
        let ([rows, cols], values, meta) = (self.shape, store.read(self.values)?, store.read(self.meta)?);
        let scales: Vec<f32> = store.read(self.scales)?;
        let weight = Compressed::from_parts(rows, cols, values, meta)?;
        Ok(match self.quantization {
            Quantization::Int8(granularity) => QuantizedWeight::Int8(Int8::from_parts(weight, scales, granularity)?),
            Quantization::Int4(granularity) => {
                let scales = scales.into_iter().map(f16::from_f32).collect();
                QuantizedWeight::Int4(Int4::from_parts(weight, scales, granularity)?)
            }
        })
    }
}
