//! Weights on disk: safetensors files, plain and compressed.
//!
//! A compressed weight `w` is stored as the tensors `w.values` and `w.meta` (and `w.scales` for scaled I8 and 4-bit
//! integers), with an entry in the file's metadata; anything else in the file is an ordinary tensor.
//! `docs/reference/format.md` is the specification.
//!
//! Experts in a tensor of three dimensions are compressed one by one ([`Reader::unstacked`]), and become that tensor
//! where they are dense again.
//!
//! A [`Convert`] writes a whole model anew by an [`Operation`]: [`Compress`], [`Decompress`], [`Prune`], [`PruneWith`],
//! [`PruneAndQuantize`], [`Quantize`], [`Merge`], [`Export`] or [`Unchanged`]; [`prune`](prune()) is the usual one in a
//! line. It looks at its input twice: first every tensor that is to change is checked and the output planned, then it
//! is written. So an error
//! in the input is found before the first byte is written, and memory holds some rows of a tensor for each thread,
//! however large the model; where a function of the caller's prunes, the tensor.
//!
//! A file that holds tensors is a [`Source`]: safetensors; GGUF of llama.cpp, whose tensors appear as transformers has
//! them, with the configuration and the tokenizer that its metadata tell; or a state dict that `torch.save` wrote, such
//! as `pytorch_model.bin`, of which no code is run; or arrays of numpy (`.npz`). Weights that another tool packed
//! appear as this library's behind [`Reader::translated`], and [`Export`] writes them so.
//!
//! Where the input is a directory, so is the output, with what else the model's directory holds ([`Beside`]). An output
//! that is named `*.safetensors` is that file alone. A directory of packed weights says that it is one: its files of
//! weights have names behind [`PACKED_PREFIX`], its `config.json` the `quant_method` `twofour`, and it has a
//! [`PACKED_README`]. Of weights that another tool quantized, as [`ConfiguredWeights`] tells, no packed directory is
//! made.
//!
//! Outputs appear complete or not at all. A single file gets its name when it is complete and on the disk. Of a
//! directory every file is complete and on the disk before the first gets its name, and the index gets its name last.
//! One process at a time writes to a directory ([`DirectoryLock`]); of one that is killed while files get their names,
//! the next one removes these.
//!
//! A killed process leaves nothing where the system has files without names (`O_TMPFILE`: Linux with ext4, XFS, Btrfs
//! or tmpfs). Elsewhere it leaves files named `.twofour-*.tmp`, which the next output in the same directory removes.
//!
//! Writing a single file over its own input is safe: the input stays readable, under no name, until it is no longer
//! needed. A sharded model cannot be converted in place, because its shards cannot be replaced in one step.
//!
//! After every tensor of either pass a conversion tells its caller how far it is ([`Convert::progress`]). A caller that
//! returns [`ControlFlow::Break`](std::ops::ControlFlow::Break) gets [`Error::Interrupted`](crate::Error::Interrupted),
//! and everything is as it was before.
//!
//! [`Reader`] validates what a file says of its tensors before use and reads tensors on demand. [`Writer`] leaves a
//! complete file or none.
//!
//! ```
//! use std::{collections::BTreeMap, ops::ControlFlow};
//! use twofour::{Selector, file::{Compress, Convert, Overwrite, PlannedTensor, Progress, Prune, Reader, StoredDType, Writer}};
//! let directory = tempfile::tempdir()?;
//! let at = |name: &str| directory.path().join(name);
//! let plan = vec![PlannedTensor::new("up.weight", StoredDType::F32, [1, 4])];
//! let mut writer = Writer::create(at("model.safetensors"), Overwrite::No, plan, BTreeMap::new())?;
//! writer.write_elements("up.weight", &[1.0f32, -3.0, 2.0, 0.5])?;
//! writer.finish()?;
//!
//! let watch = |p: Progress<'_>| {
//!     println!("{:?} {}: {} of {} bytes", p.phase, p.tensor, p.bytes_done, p.bytes_total);
//!     ControlFlow::Continue(())
//! };
//! let pruning = Prune::new(|_| Some(Selector::TWO_FOUR));
//! Convert::open(at("model.safetensors"))?.progress(watch).run(at("sparse.safetensors"), pruning)?;
//! Convert::open(at("sparse.safetensors"))?.progress(watch).run(at("small.safetensors"), Compress::default())?;
//! let weight = Reader::open(at("small.safetensors"))?.compressed::<f32>("up.weight")?;
//! assert_eq!(weight.values(), [-3.0, 2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(target_endian = "big")]
compile_error!("safetensors data is little-endian, and this module maps it as it is");

mod adapter;
mod archive;
mod bytes;
mod configuration;
mod convert;
mod directory_lock;
mod elements;
mod find;
mod foreign;
mod gguf;
mod header;
mod index;
#[cfg(test)]
mod int4_tests;
#[cfg(test)]
mod int8_tests;
mod manifest;
mod masked;
mod naming;
mod npz;
mod peer;
mod plan;
mod pytorch;
mod reader;
mod reordered;
mod roles;
mod safetensors;
mod source;
mod stacked;
mod stored;
mod temporary;
#[cfg(test)]
mod tests;
mod unique;
mod value_format;
mod writer;

pub use adapter::{Adapter, UpdateKind};
pub use bytes::FileBytes;
pub use configuration::ConfiguredWeights;
pub use convert::{
    Beside, Compress, Convert, Converted, Decompress, Item, Kept, LeftOut, MadeCompressed, MadeDense, Merge, Merged,
    NegativeZeros, NotSparse, Operation, Outcome, Phase, Planned, Progress, Prune, PruneAndQuantize, PruneWith, Pruned,
    PrunedWeight, Quantization, Quantize, Quantized, QuantizedWeight, Report, Unchanged, check_output, prune,
};
pub use directory_lock::DirectoryLock;
pub use elements::Elements;
pub use foreign::what_else;
pub use header::{Header, MAX_HEADER_BYTES, TensorInfo};
pub use index::Index;
pub use manifest::{CompressedInfo, FORMAT_VERSION, MANIFEST_KEY, Part};
pub use naming::{PACKED_PREFIX, PACKED_README};
pub use peer::{Export, ExportFormat, Exported, Translation};
pub use plan::{Plan, PlannedTensor};
pub use reader::{Reader, Shard, TensorView};
pub use reordered::Reorder;
pub use source::Source;
pub use stacked::{STACKS_KEY, Stack};
pub use stored::{StoredDType, StoredElement};
pub use temporary::{TEMP_PREFIX, TEMP_SUFFIX};
pub use value_format::ValueFormat;
pub use writer::{Overwrite, Writer, expect_replaceable, write_whole};
