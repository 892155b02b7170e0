//! Which tensors of a checkpoint hold which part of a model.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use twofour::file::{Reader, StoredDType};

use crate::model::{
    CheckpointError,
    config::{ImageInput, TransformerConfig},
};

/// Where the parts of a model lie, by the names that the model has for them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layout {
    /// Linear layers, by their name without `.weight`.
    pub(crate) linears: BTreeMap<String, StoredLinear>,
    /// Everything else: norms' parameters and tables, by their full name.
    pub(crate) tensors: BTreeMap<String, StoredTensor>,
    /// For linear layers whose outputs are stored in another order than the model's, by their stored names: output `i`
    /// of the model is the stored one of number `order[i]`.
    pub(crate) orders: BTreeMap<String, Arc<Vec<usize>>>,
    /// For linear layers whose biases are rows of one tensor, by their stored names.
    pub(crate) bias_rows: BTreeMap<String, BiasRow>,
    /// Tensors of one value that no file stores, by the names that the model has for them: lengths and values.
    pub(crate) constants: BTreeMap<String, (usize, f32)>,
    /// Extra tensors are ignored whose names end so.
    pub(crate) ignored: Vec<&'static str>,
    /// Extra tensors are ignored whose names begin so.
    pub(crate) ignored_beginnings: Vec<Cow<'static, str>>,
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

/// A bias that is a row of a tensor `[rows, outputs]`.
#[derive(Debug, Clone)]
pub(crate) struct BiasRow {
    pub(crate) tensor: String,
    pub(crate) rows: usize,
    pub(crate) row: usize,
}

/// A tensor with the shape that the configuration requires.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// What is added to the stored values: Gemma stores the gains of norms less one.
    pub(crate) added: f32,
    /// What the sum is multiplied by: Granite divides the scores of tokens, which the norm before the head can do.
    pub(crate) factor: f32,
    /// Elements in front of the model's: OPT's positions begin with two that no token has.
    pub(crate) skipped: usize,
}

impl StoredLinear {
    /// The shape of a part as it is stored.
    pub(crate) fn stored_shape(&self, outputs: usize) -> [usize; 2] {
        if self.is_transposed { [self.inputs, outputs] } else { [outputs, self.inputs] }
    }
}

/// The order of queries, keys and values that are stored in groups, each the queries of some heads and the keys and
/// values that they share.
pub(in crate::model) fn by_head(groups: usize, queries: usize, head_dim: usize) -> Vec<usize> {
    let part = |first: usize, heads: usize| {
        let group = move |group: usize| (group * (queries + 2) + first) * head_dim;
        (0..groups).flat_map(move |own| group(own)..group(own) + heads * head_dim)
    };
    part(0, queries).chain(part(queries, 1)).chain(part(queries + 1, 1)).collect()
}

impl Layout {
    /// Adds a tensor.
    pub(in crate::model) fn tensor(
        &mut self,
        ours: impl Into<String>,
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
    ) {
        let stored = StoredTensor { name: name.into(), shape: shape.into(), added: 0.0, factor: 1.0, skipped: 0 };
        self.tensors.insert(ours.into(), stored);
    }

    /// Adds learned positions behind so many rows that no token has.
    pub(in crate::model) fn positions(&mut self, name: String, [positions, width]: [usize; 2], skipped: usize) {
        let shape = vec![positions.saturating_add(skipped), width];
        let stored = StoredTensor { name, shape, added: 0.0, factor: 1.0, skipped: skipped * width };
        self.tensors.insert("positions.weight".to_owned(), stored);
    }

    /// Adds the gain of a norm, to whose stored values a number is added.
    pub(in crate::model) fn gain(&mut self, ours: String, theirs: String, width: usize, added: f32) {
        let stored =
            StoredTensor { name: format!("{theirs}.weight"), shape: vec![width], added, factor: 1.0, skipped: 0 };
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

    /// Adds the gain of a layer norm whose bias is nowhere: it is zero.
    pub(in crate::model) fn norm_without_bias(&mut self, ours: &str, theirs: &str, width: usize) {
        self.gain(ours.to_owned(), theirs.to_owned(), width, 0.0);
        self.constants.insert(format!("{ours}.bias"), (width, 0.0));
    }

    /// Adds the embedding of patches, a convolution.
    pub(in crate::model) fn patches(&mut self, width: usize, input: &ImageInput, theirs: &str) {
        let ImageInput { channels, patch, .. } = *input;
        self.tensor("patch.weight", format!("{theirs}.weight"), [width, channels, patch, patch]);
        self.tensor("patch.bias", format!("{theirs}.bias"), [width]);
    }

    /// Adds the table of tokens and the head of a decoder, which may be the same; `head` is the name of its weight.
    pub(in crate::model) fn vocabulary(&mut self, config: &TransformerConfig, embedding: &str, head: &'static str) {
        let vocabulary = config.vocabulary();
        let own = if config.is_tied() { embedding } else { head.trim_end_matches(".weight") };
        self.parts("head", vec![(own.to_owned(), vocabulary)], config.table_width(), false);
        match config.is_tied() {
            true => self.ignored.push(head),
            false => self.tensor("embedding.weight", format!("{embedding}.weight"), [vocabulary, config.table_width()]),
        }
    }

    /// Adds a linear layer that is stored as parts, `[outputs, inputs]` each.
    pub(in crate::model) fn parts(
        &mut self,
        ours: impl Into<String>,
        parts: Vec<(String, usize)>,
        inputs: usize,
        has_bias: bool,
    ) {
        self.linear(ours, StoredLinear { parts, inputs, has_bias, is_transposed: false });
    }

    /// Rows of a linear layer's weight, or elements of its bias, as the model has them.
    pub(in crate::model) fn ordered<T: Copy>(&self, name: &str, stored: Vec<T>, inputs: usize) -> Vec<T> {
        match self.orders.get(name) {
            Some(order) => order.iter().flat_map(|row| &stored[row * inputs..][..inputs]).copied().collect(),
            None => stored,
        }
    }

    /// Rows of a linear layer's weight, or elements of its bias, as the file has them.
    pub(in crate::model) fn as_stored<T: Copy>(&self, name: &str, ours: &[T], inputs: usize) -> Vec<T> {
        let mut stored = ours.to_vec();
        for (row, to) in ours.chunks_exact(inputs).zip(self.orders.get(name).into_iter().flat_map(|order| order.iter()))
        {
            stored[to * inputs..][..inputs].copy_from_slice(row);
        }
        stored
    }

    /// Adds a linear layer of one weight with a bias.
    pub(in crate::model) fn one_linear(
        &mut self,
        ours: impl Into<String>,
        theirs: impl Into<String>,
        (outputs, inputs): (usize, usize),
    ) {
        self.parts(ours, vec![(theirs.into(), outputs)], inputs, true);
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
                if let Some(BiasRow { tensor, rows, .. }) = self.bias_rows.get(name) {
                    expect(tensor.clone(), &[*rows, *outputs])?;
                } else if linear.has_bias {
                    expect(format!("{name}.bias"), &[*outputs])?;
                }
            }
        }
        let plain = reader.plain_tensors().map(|tensor| &tensor.name);
        let stored = plain.chain(reader.compressed_weights().map(|weight| &weight.name));
        let is_ignored = |name: &String| {
            self.ignored.iter().any(|ending| name.ends_with(ending))
                || self.ignored_beginnings.iter().any(|beginning| name.starts_with(&**beginning))
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
