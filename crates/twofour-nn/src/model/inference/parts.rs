//! Where the parts of a model come from.

use twofour::kernel::KernelElement;

use super::{
    linear::{Linear, LinearPart},
    weight::Weight,
};
use crate::{Error, Result};

/// Where the parts of a model come from, by the names that [`Gpt`](crate::model::Gpt) has for them.
pub(crate) trait Parts<T: KernelElement> {
    /// The values of a norm's parameter, `[len]`.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>>;

    /// A table of embeddings, `[rows, width]`.
    fn table(&self, name: &str, shape: [usize; 2]) -> Result<Vec<T>>;

    /// The embedding, `[vocabulary, table_width]`: dense.
    fn embedding(&self, shape: [usize; 2]) -> Result<Weight<T>> {
        self.table("embedding.weight", shape).map(Weight::Dense)
    }

    /// The parts of a linear layer `[outputs, inputs]`, whose output features follow each other; `name` is without
    /// `.weight`.
    fn linear_parts(&self, name: &str, shape: (usize, usize)) -> Result<Vec<LinearPart<T>>>;

    /// A linear layer `[outputs, inputs]`, packed for the CPU. Errors name it.
    fn linear(&self, name: &str, shape: (usize, usize)) -> Result<Linear<T>> {
        self.linear_parts(name, shape).and_then(Linear::new).map_err(|error| naming(error, name))
    }
}

/// An error of a linear layer of that name, which it names.
pub(crate) fn naming(error: Error, name: &str) -> Error {
    match error {
        named @ (Error::InLayer { .. } | Error::Checkpoint(_)) => named,
        other => other.in_layer(name),
    }
}
