//! Weights on disk: safetensors files, plain and compressed.
//!
//! A compressed weight `w` is stored as the tensors `w.values` and `w.meta` (and `w.scales` for scaled I8), with an entry
//! in the file's metadata; anything else in the file is an ordinary tensor. `docs/format.md` is the specification.
//!
//! [`Reader`] maps files into memory and believes nothing they say before it is checked. [`Writer`] leaves a complete file
//! or none.

#[cfg(target_endian = "big")]
compile_error!("safetensors data is little-endian, and this module maps it as it is");

mod header;
mod index;
mod manifest;
mod plan;
mod reader;
mod source;
mod stored;
#[cfg(test)]
mod tests;
mod unique;
mod writer;

pub use header::{Header, MAX_HEADER_BYTES, TensorInfo};
pub use index::Index;
pub use manifest::{CompressedInfo, FORMAT_VERSION, MANIFEST_KEY, Part};
pub use plan::{Plan, PlannedTensor};
pub use reader::{Reader, Shard, TensorView};
pub use stored::{StoredDType, StoredElement};
pub use writer::{Overwrite, TEMP_PREFIX, TEMP_SUFFIX, Writer};
