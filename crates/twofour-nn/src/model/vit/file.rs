//! Reading a vision transformer's file.

use std::path::Path;

use twofour::file::Reader;

use super::{Vit, VitConfig};
use crate::{
    Result,
    engine::Engine,
    model::file::{VIT_KEY, values},
};

impl<E: Engine> Vit<E> {
    /// Reads a model that [`Transformer::save`](crate::model::Transformer::save) wrote, as a dense model: compressed
    /// weights are decompressed into masters whose pruned elements are zero.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(engine: &E, path: impl AsRef<Path>) -> Result<Self> {
        let reader = Reader::open(path)?;
        let fault = |reason: String| twofour::Error::Format { path: reader.path().to_owned(), reason };
        let Some(text) = reader.metadata().get(VIT_KEY) else {
            let reason = format!("its metadata has no `{VIT_KEY}`, so it is no vision transformer of this program");
            return Err(fault(reason).into());
        };
        let config: VitConfig =
            serde_json::from_str(text).map_err(|error| fault(format!("metadata `{VIT_KEY}`: {error}")))?;
        config.validate()?;
        if config.layers > reader.tensors().count() {
            let reason =
                format!("metadata `{VIT_KEY}` speaks of {} layers, more than the file has tensors", config.layers);
            return Err(fault(reason).into());
        }
        Vit::build(engine, &config, |name, shape| values(&reader, name, shape))
    }
}
