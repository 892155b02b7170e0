//! Weights as other tools store them: read as this library's own, and written so.
//!
//! A format is an implementation of [`PeerFormat`] and its line in [`FORMATS`]. [`translate`] finds the weights of all
//! formats among the tensors of a model; [`Export`] writes some of the formats.

mod bitmask;
mod cutlass;
mod export;
mod marlin;
mod naive;
mod packed;
mod scales;
mod tensors;
mod translated;

use std::fmt;

use super::{CompressedInfo, Part, PlannedTensor};
use crate::{Compressed, Element, Result, int4::Int4, int8::Int8};

pub use export::{Export, ExportFormat, Exported};
pub use translated::Translation;
pub(super) use translated::translate;

use self::tensors::Parts;

/// A format in which another tool stores weights.
trait PeerFormat: fmt::Debug + Sync {
    /// The name by which its tool knows it.
    fn name(&self) -> &'static str;

    /// The ends of the names of a weight's tensors, behind the name of its module and a dot. Where all are there, the
    /// weight is of this format.
    fn required(&self) -> &'static [&'static str];

    /// The ends of the names of tensors that a weight may have besides.
    fn optional(&self) -> &'static [&'static str] {
        &[]
    }

    /// The name of the weight of a module.
    fn weight(&self, module: &str) -> String {
        format!("{module}.weight")
    }

    /// Whether tensors of these names are of this format.
    fn is_format_of(&self, parts: &Parts<'_>) -> bool {
        let _ = parts;
        true
    }

    /// The weight as this library has it.
    ///
    /// # Errors
    /// For tensors that contradict each other, and for what this library has no form for.
    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded>;
}

/// Every format that is read. A format whose tensors are among those of another one comes behind that.
const FORMATS: [&dyn PeerFormat; 7] = [
    &bitmask::SparseBitmask,
    &bitmask::Bitmask,
    &marlin::Marlin24,
    &marlin::GptqMarlin24,
    &packed::PackQuantized,
    &naive::Naive,
    &cutlass::Cutlass,
];

/// The scales of activations, which tools that quantize these once for all inputs store.
const ACTIVATIONS: [&str; 2] = ["input_scale", "input_zero_point"];

/// What a weight of another tool is here.
#[derive(Debug, Clone, PartialEq)]
enum Form {
    Compressed(CompressedInfo),
    Dense(PlannedTensor),
}

impl Form {
    /// The tensors that a file of this library has for it.
    fn tensors(&self) -> Vec<PlannedTensor> {
        match self {
            Form::Dense(tensor) => vec![tensor.clone()],
            Form::Compressed(weight) => {
                let parts = weight.parts().into_iter();
                parts.map(|(part, dtype, shape)| PlannedTensor::new(part.key(&weight.name), dtype, shape)).collect()
            }
        }
    }
}

/// A weight of another tool, as this library has it: its form, and the bytes of the tensors of that.
#[derive(Debug)]
struct Decoded {
    form: Form,
    bytes: Vec<Vec<u8>>,
}

impl Decoded {
    fn compressed<T: Element>(name: String, weight: &Compressed<T>) -> Result<Self> {
        let info = CompressedInfo::new(name, T::DTYPE, weight.rows(), weight.cols())?;
        Ok(Decoded { form: Form::Compressed(info), bytes: vec![bytes(weight.values()), bytes(weight.meta())] })
    }

    fn int4(name: String, weight: &Int4) -> Result<Self> {
        let integers = weight.weight();
        let info = CompressedInfo::int4(name, weight.granularity(), integers.rows(), integers.cols())?;
        let bytes = vec![weight.packed_values(), bytes(integers.meta()), bytes(weight.scales())];
        Ok(Decoded { form: Form::Compressed(info), bytes })
    }

    fn int8(name: String, weight: &Int8) -> Result<Self> {
        let integers = weight.weight();
        let info = CompressedInfo::int8(name, weight.granularity(), integers.rows(), integers.cols())?;
        let is_f32 = info.parts().iter().any(|(part, dtype, _)| *part == Part::Scales && dtype.bits() == 32);
        let scales = match is_f32 {
            true => bytes(weight.scales()),
            false => bytes(&weight.scales().iter().map(|scale| half::f16::from_f32(*scale)).collect::<Vec<_>>()),
        };
        let bytes = vec![bytes(integers.values()), bytes(integers.meta()), scales];
        Ok(Decoded { form: Form::Compressed(info), bytes })
    }

    fn dense<T: Element>(name: String, [rows, cols]: [usize; 2], elements: &[T]) -> Self {
        let tensor = PlannedTensor::new(name, T::DTYPE, [rows, cols]);
        Decoded { form: Form::Dense(tensor), bytes: vec![bytes(elements)] }
    }
}

/// The bytes of elements.
fn bytes<T: bytemuck::Pod>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

#[cfg(test)]
mod tests;
