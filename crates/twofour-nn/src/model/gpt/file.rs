//! Reading a decoder's file.

use std::path::Path;

use twofour::file::Reader;

use super::Gpt;
use crate::{
    Result,
    engine::Engine,
    model::file::{config_of, values},
};

impl<E: Engine> Gpt<E> {
    /// Reads a model that [`Gpt::save`] wrote, or that `twofour compress` made of one, as a dense model: compressed
    /// weights are decompressed into masters whose pruned elements are zero.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(engine: &E, path: impl AsRef<Path>) -> Result<Self> {
        Self::from_reader(engine, &Reader::open(path)?)
    }

    /// [`Gpt::load`], from a file that is open already.
    ///
    /// # Errors
    /// As for [`Gpt::load`].
    pub fn from_reader(engine: &E, reader: &Reader) -> Result<Self> {
        let config = config_of(reader)?;
        Gpt::build(engine, &config, |name, shape| values(reader, name, shape))
    }
}
