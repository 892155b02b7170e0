//! What a conversion did.

use super::{Item, StoredDType};

/// What a conversion did with each tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Report<C> {
    /// Every tensor and compressed weight of the input, in file order.
    pub tensors: Vec<Converted<C>>,
}

impl<C> Report<C> {
    /// Bytes of the tensors in the input.
    pub fn bytes_before(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes_before).sum()
    }

    /// Bytes of the tensors in the output.
    pub fn bytes_after(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes_after).sum()
    }

    /// The tensors that were changed, and how.
    pub fn changed(&self) -> impl Iterator<Item = (&Converted<C>, &C)> {
        self.tensors.iter().filter_map(|tensor| match &tensor.outcome {
            Outcome::Changed(change) => Some((tensor, change)),
            Outcome::Copied(_) => None,
        })
    }
}

/// What became of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted<C> {
    /// Its name.
    pub name: String,
    /// The type of its elements in the input: safetensors' name, or `I4`.
    pub dtype: &'static str,
    /// Its shape, dense.
    pub shape: Vec<usize>,
    /// Bytes in the input.
    pub bytes_before: usize,
    /// Bytes in the output.
    pub bytes_after: usize,
    /// What was done.
    pub outcome: Outcome<C>,
}

impl<C> Converted<C> {
    pub(super) fn new(item: Item<'_>, bytes_before: usize, bytes_after: usize, outcome: Outcome<C>) -> Self {
        let (name, dtype, shape) = (item.name().to_owned(), item.dtype(), item.shape());
        Converted { name, dtype, shape, bytes_before, bytes_after, outcome }
    }

    /// The dtype of its elements in the input, where safetensors has it.
    pub fn stored(&self) -> Option<StoredDType> {
        StoredDType::from_name(self.dtype)
    }
}

/// What a conversion did with a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome<C> {
    /// It was changed, so.
    Changed(C),
    /// It was copied.
    Copied(Kept),
}

/// Why a tensor was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// It was not chosen.
    NotChosen,
    /// It is no matrix with elements of a dtype that twofour knows.
    NotAMatrix,
    /// It is stored compressed already.
    Compressed,
    /// It is stored dense already.
    Dense,
    /// It holds integers already.
    Integers,
    /// It is not 2:4 along its rows.
    NotSparse {
        /// Groups with more than two non-zeros.
        violations: usize,
    },
}
