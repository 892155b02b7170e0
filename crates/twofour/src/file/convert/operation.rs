//! What a conversion does with the pieces of a model.

use serde_json::Value;

use super::{CompressedInfo, Kept, Plan, PlannedTensor, Reader, TensorInfo, Writer, pieces};
use crate::Result;

/// A piece of a model that is converted.
#[derive(Debug, Clone, Copy)]
pub enum Item<'a> {
    /// A tensor that is no part of a compressed weight.
    Plain(&'a TensorInfo),
    /// A compressed weight.
    Compressed(&'a CompressedInfo),
}

impl<'a> Item<'a> {
    /// Its name.
    pub fn name(&self) -> &'a str {
        match self {
            Item::Plain(tensor) => &tensor.name,
            Item::Compressed(weight) => &weight.name,
        }
    }

    /// The bytes that it takes in the input.
    pub fn bytes(&self) -> usize {
        match self {
            Item::Plain(tensor) => tensor.bytes,
            Item::Compressed(weight) => weight.bytes(),
        }
    }

    /// The type of its elements: safetensors' name, or `I4`.
    pub fn dtype(&self) -> &'static str {
        match self {
            Item::Plain(tensor) => tensor.dtype.name(),
            Item::Compressed(weight) => weight.format.name(),
        }
    }

    /// Its shape, dense.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Item::Plain(tensor) => tensor.shape.clone(),
            Item::Compressed(weight) => vec![weight.rows, weight.cols],
        }
    }

    /// Plans the piece as it is.
    pub(super) fn plan_copy(&self, plan: &mut Plan) {
        match self {
            Item::Plain(t) => plan.tensor(PlannedTensor::new(&t.name, t.dtype, t.shape.as_slice())),
            Item::Compressed(weight) => plan.compressed((*weight).clone()),
        };
    }

    /// Copies the piece byte for byte.
    pub(super) fn write_copy(&self, reader: &Reader, writer: &mut Writer) -> Result<()> {
        match self {
            Item::Plain(t) => pieces::copy(reader, writer, &t.name),
            Item::Compressed(weight) => weight
                .parts()
                .into_iter()
                .try_for_each(|(part, ..)| pieces::copy(reader, writer, &part.key(&weight.name))),
        }
    }
}

/// What becomes of a piece.
#[derive(Debug, Clone, PartialEq)]
pub enum Planned<P> {
    /// It is changed; the plan says to what, and this is what the operation remembers of it.
    Change(P),
    /// It is copied.
    Copy(Kept),
    /// It is written with the piece of that name.
    PartOf(String),
}

/// A kind of conversion: what it does with one piece at a time. [`Convert::run`](super::Convert::run) asks for every
/// piece twice, so that an error in the input is found before the first byte is written.
pub trait Operation {
    /// What is remembered of a piece that will be changed.
    type Plan;
    /// What was done with a piece that was changed.
    type Change;

    /// Checks a piece. Where it will be changed, what it becomes is added to the plan.
    ///
    /// # Errors
    /// For a piece that cannot be changed as asked.
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<Self::Plan>>;

    /// Writes what was planned for a piece.
    ///
    /// # Errors
    /// Those of reading and writing, and of what can only be found now.
    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        planned: Self::Plan,
        writer: &mut Writer,
    ) -> Result<Self::Change>;

    /// The `quantization_config` of the output's `config.json`, where it is that of another tool. Asked for when all
    /// pieces are planned.
    ///
    /// # Errors
    /// Where the pieces together cannot be described.
    fn configuration(&self, _reader: &Reader) -> Result<Option<Value>> {
        Ok(None)
    }
}
