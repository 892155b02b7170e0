//! What a file will hold: a safetensors header comes before the data, so all of it is planned before the first byte.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use super::{CompressedInfo, Part, Stack, StoredDType, reader::is_dense_int8};
use crate::{Error, Result};

/// A tensor that a file will hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Its name.
    pub name: String,
    /// The dtype of its elements.
    pub dtype: StoredDType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
}

impl PlannedTensor {
    /// A tensor of that name, dtype and shape.
    pub fn new(name: impl Into<String>, dtype: impl Into<StoredDType>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype: dtype.into(), shape: shape.into() }
    }
}

/// The tensors and compressed weights that a file will hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    tensors: Vec<PlannedTensor>,
    weights: Vec<CompressedInfo>,
    /// Those of the tensors that are written matrix by matrix.
    stacks: Vec<Stack>,
    /// Tensors whose matrices the file will hold instead.
    apart: Vec<Stack>,
}

impl Plan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor that is stored as it is.
    pub fn tensor(&mut self, tensor: PlannedTensor) -> &mut Self {
        self.tensors.push(tensor);
        self
    }

    /// Adds a compressed weight: its parts as tensors, and its entry in the manifest.
    pub fn compressed(&mut self, weight: CompressedInfo) -> &mut Self {
        for (part, dtype, shape) in weight.parts() {
            self.tensors.push(PlannedTensor { name: part.key(&weight.name), dtype, shape });
        }
        self.weights.push(weight);
        self
    }

    /// All tensors, parts of compressed weights among them, in the order of adding.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    /// The compressed weights, in the order of adding.
    pub fn weights(&self) -> &[CompressedInfo] {
        &self.weights
    }

    /// The same with one tensor in the place of all matrices of a stack, where they are plain and of one dtype.
    pub(super) fn restacked(mut self, stacks: &[Stack]) -> Self {
        for stack in stacks {
            let names: HashSet<String> = (0..stack.count()).map(|number| stack.matrix(number)).collect();
            let own: Vec<&PlannedTensor> = self.tensors.iter().filter(|tensor| names.contains(&tensor.name)).collect();
            let dtype = own.first().map(|tensor| tensor.dtype).filter(|dtype| dtype.bits() % 8 == 0);
            let is_like =
                |tensor: &&PlannedTensor| Some(tensor.dtype) == dtype && *tensor.shape == stack.matrix_shape();
            match dtype {
                Some(dtype) if own.len() == names.len() && own.iter().all(is_like) => {
                    self.tensors.retain(|tensor| !names.contains(&tensor.name));
                    self.tensors.push(PlannedTensor::new(&stack.name, dtype, stack.shape));
                    self.stacks.push(stack.clone());
                }
                _ if !own.is_empty() || self.weights.iter().any(|weight| names.contains(&weight.name)) => {
                    self.apart.push(stack.clone());
                }
                _ => {}
            }
        }
        self
    }

    /// The stack that a planned tensor is written as.
    pub(super) fn stack(&self, name: &str) -> Option<&Stack> {
        self.stacks.iter().find(|stack| stack.name == name)
    }

    /// The stacks whose matrices the file will hold.
    pub(super) fn apart(&self) -> &[Stack] {
        &self.apart
    }

    /// Whether the file will hold weights that are no plain tensors: compressed ones, or dense 8-bit integers with
    /// scales.
    pub(super) fn is_packed(&self) -> bool {
        let scales: HashMap<&str, &PlannedTensor> = self.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let is_int8 = |tensor: &PlannedTensor| {
            scales
                .get(Part::Scales.key(&tensor.name).as_str())
                .is_some_and(|scales| is_dense_int8((tensor.dtype, &tensor.shape), (scales.dtype, &scales.shape)))
        };
        !self.weights.is_empty() || self.tensors.iter().any(|t| t.dtype == StoredDType::I8 && is_int8(t))
    }

    /// Bytes of each tensor, in the order of adding; `path` is only named in errors.
    pub(super) fn check(&self, path: &Path) -> Result<Vec<usize>> {
        let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
        let mut names = HashSet::new();
        let mut total = 0usize;
        let mut sizes = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let PlannedTensor { name, dtype, shape } = tensor;
            if name == super::header::METADATA {
                return Err(fault(format!("no tensor may be named `{name}`")));
            }
            if !names.insert(name.as_str()) {
                return Err(fault(format!("two tensors would be named `{name}`; rename or leave out one of them")));
            }
            let bytes = dtype
                .bytes(shape)
                .filter(|bytes| total.checked_add(*bytes).is_some())
                .ok_or_else(|| fault(format!("tensor `{name}`: {dtype} of shape {shape:?} cannot be stored")))?;
            total += bytes;
            sizes.push(bytes);
        }
        for weight in &self.weights {
            if names.contains(weight.name.as_str()) {
                return Err(fault(format!("weight `{}` would be stored both compressed and dense", weight.name)));
            }
        }
        Ok(sizes)
    }
}

impl From<Vec<PlannedTensor>> for Plan {
    fn from(tensors: Vec<PlannedTensor>) -> Self {
        Plan { tensors, ..Plan::default() }
    }
}
