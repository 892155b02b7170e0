//! Which tensors of a checkpoint hold which part of a model.

use std::collections::{BTreeMap, HashSet};

use twofour::file::{Reader, StoredDType};

use crate::model::{CheckpointError, config::ImageInput};

/// Where the parts of a model lie, by the names that the model has for them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layout {
    /// Linear layers, by their name without `.weight`.
    pub(crate) linears: BTreeMap<String, StoredLinear>,
    /// Everything else: norms' parameters and tables, by their full name.
    pub(crate) tensors: BTreeMap<String, StoredTensor>,
    /// Extra tensors are ignored whose names end so.
    pub(crate) ignored: Vec<&'static str>,
    /// Extra tensors are ignored whose names begin so.
    pub(crate) ignored_beginnings: Vec<&'static str>,
}

/// A linear layer: its output features are those of the parts, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct StoredLinear {
    /// Name without `.weight`, and output features.
    pub(crate) parts: Vec<(String, usize)>,
    /// Input features.
    pub(crate) inputs: usize,
    /// Whether the parts have biases.
    pub(crate) has_bias: bool,
    /// Whether the weight is stored as `[inputs, outputs]` (GPT-2's `Conv1D`).
    pub(crate) is_transposed: bool,
}

/// A tensor with the shape that the configuration requires.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// What is added to the stored values: Gemma stores the gains of norms less one.
    pub(crate) added: f32,
}

impl StoredLinear {
    /// The shape of a part as it is stored.
    pub(crate) fn stored_shape(&self, outputs: usize) -> [usize; 2] {
        if self.is_transposed { [self.inputs, outputs] } else { [outputs, self.inputs] }
    }
}

impl Layout {
    /// Adds a tensor.
    pub(in crate::model) fn tensor(
        &mut self,
        ours: impl Into<String>,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
    ) {
        self.tensors.insert(ours.into(), StoredTensor { name: name.into(), shape: shape.into(), added: 0.0 });
    }

    /// Adds the gain of a norm, to whose stored values a number is added.
    pub(in crate::model) fn gain(&mut self, ours: String, theirs: String, width: usize, added: f32) {
        let stored = StoredTensor { name: format!("{theirs}.weight"), shape: vec![width], added };
        self.tensors.insert(format!("{ours}.weight"), stored);
    }

    /// Adds a linear layer.
    pub(crate) fn linear(&mut self, ours: impl Into<String>, linear: StoredLinear) {
        self.linears.insert(ours.into(), linear);
    }

    /// Adds a norm's parameters, `[width]` each.
    pub(in crate::model) fn norm(&mut self, ours: &str, theirs: &str, width: usize) {
        for part in ["weight", "bias"] {
            self.tensor(format!("{ours}.{part}"), format!("{theirs}.{part}"), [width]);
        }
    }

    /// Adds the embedding of patches, a convolution.
    pub(in crate::model) fn patches(&mut self, width: usize, input: &ImageInput, theirs: &str) {
        let ImageInput { channels, patch, .. } = *input;
        self.tensor("patch.weight", format!("{theirs}.weight"), [width, channels, patch, patch]);
        self.tensor("patch.bias", format!("{theirs}.bias"), [width]);
    }

    /// Adds a linear layer of one weight with a bias.
    pub(in crate::model) fn one_linear(&mut self, ours: String, theirs: String, (outputs, inputs): (usize, usize)) {
        let parts = vec![(theirs, outputs)];
        self.linear(ours, StoredLinear { parts, inputs, has_bias: true, is_transposed: false });
    }

    /// Whether a parameter is stored, by the name that the model has for it.
    pub(crate) fn has(&self, ours: &str) -> bool {
        let of = |ending: &str| ours.strip_suffix(ending).and_then(|name| self.linears.get(name));
        let is_bias = of(".bias").is_some_and(|linear| linear.has_bias);
        self.tensors.contains_key(ours) || of(".weight").is_some() || is_bias
    }

    /// Checks that every tensor is there with its shape, and that there are no others but those that are ignored:
    /// buffers that older versions stored, and the
    /// head of a model whose head is its embedding.
    pub(crate) fn check(&self, reader: &Reader) -> Result<(), CheckpointError> {
        let mut known = HashSet::new();
        let path = || reader.path().to_owned();
        let not = |otherwise: CheckpointError| match reader.foreign_packed() {
            Some(tensor) => CheckpointError::ForeignTensor { path: path(), name: tensor.name.clone() },
            None => otherwise,
        };
        let mut expect = |name: String, expected: &[usize]| {
            let found = if let Ok(info) = reader.compressed_info(&name) {
                vec![info.rows, info.cols]
            } else if let Ok(view) = reader.tensor(&name) {
                view.info.shape.clone()
            } else {
                return Err(not(CheckpointError::MissingTensor { path: path(), name, expected: expected.to_vec() }));
            };
            if found != expected {
                return Err(not(CheckpointError::Shape { path: path(), name, expected: expected.to_vec(), found }));
            }
            known.insert(name);
            Ok(())
        };
        for tensor in self.tensors.values() {
            expect(tensor.name.clone(), &tensor.shape)?;
        }
        for linear in self.linears.values() {
            for (name, outputs) in &linear.parts {
                expect(format!("{name}.weight"), &linear.stored_shape(*outputs))?;
                if linear.has_bias {
                    expect(format!("{name}.bias"), &[*outputs])?;
                }
            }
        }
        let plain = reader.plain_tensors().map(|tensor| &tensor.name);
        let stored = plain.chain(reader.compressed_weights().map(|weight| &weight.name));
        let is_ignored = |name: &String| {
            self.ignored.iter().any(|ending| name.ends_with(ending))
                || self.ignored_beginnings.iter().any(|beginning| name.starts_with(beginning))
        };
        // The scales of a dense matrix of integers.
        let is_scales = |name: &String| {
            let of = name.strip_suffix(".scales").filter(|name| known.contains(*name));
            of.is_some_and(|name| reader.tensor(name).is_ok_and(|view| view.info.dtype == StoredDType::I8))
        };
        let is_extra = |name: &&String| !known.contains(*name) && !is_ignored(name) && !is_scales(name);
        match { stored }.find(is_extra) {
            None => Ok(()),
            Some(name) => Err(CheckpointError::ExtraTensor { path: reader.path().to_owned(), name: name.clone() }),
        }
    }
}
