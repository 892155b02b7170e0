//! Checkpoints of the sources' families with other sizes and weights.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::TempDir;
use twofour::file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer};

/// Elements of a head: fewer the GPU's kernels do not have.
pub(crate) const HEAD: usize = 32;

/// A checkpoint of `TWOFOUR_CHECKPOINTS`, which a machine without the sources sets, or of the sources.
pub(crate) fn directory(name: &str) -> PathBuf {
    let of_sources = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints");
    std::env::var_os("TWOFOUR_CHECKPOINTS").map_or_else(of_sources, PathBuf::from).join(name)
}

/// The shape of a decoder's tensor of that name where heads have [`HEAD`] elements, of its shape in the sources.
pub(crate) fn with_wide_heads(config: &Value, name: &str, shape: &[usize]) -> Vec<usize> {
    let heads = |key: &str| config[key].as_u64().unwrap_or(0) as usize * HEAD;
    let mut shape = shape.to_vec();
    match name {
        _ if name.contains("q_proj") => shape[0] = heads("num_attention_heads"),
        _ if name.contains("k_proj") || name.contains("v_proj") => shape[0] = heads("num_key_value_heads"),
        _ if name.contains("o_proj") && shape.len() == 2 => shape[1] = heads("num_attention_heads"),
        _ if name.contains("q_norm") || name.contains("k_norm") => shape[0] = HEAD,
        _ => {}
    }
    shape
}

/// The value of an element of the tensor of that number: of vectors around 0.8, of others around 0.
pub(crate) fn scattered(index: usize, shape: &[usize], at: usize) -> f32 {
    let (mean, deviation) = if shape.len() == 1 { (0.8, 0.3) } else { (0.0, 0.2) };
    mean + deviation * ((at * 7919 + index * 104_729) as f32 * 0.618).sin()
}

/// The shape of a tensor and its values.
pub(crate) type Shaped = (Vec<usize>, Vec<f32>);

/// The checkpoint of a family in f32, with another configuration, and tensors of other shapes and values: `tensor` is
/// called with the configuration and each tensor's number, name and shape.
pub(crate) fn rewritten(
    family: &str,
    change: impl Fn(&mut Value),
    tensor: impl Fn(&Value, usize, &str, &[usize]) -> Shaped,
) -> TempDir {
    let (from, folder) = (directory(family), tempfile::tempdir().unwrap());
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(from.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let reader = Reader::open(&from).unwrap();
    let of = |(index, info): (usize, &twofour::file::TensorInfo)| {
        (info.name.clone(), tensor(&config, index, &info.name, &info.shape))
    };
    let tensors: Vec<(String, Shaped)> = reader.tensors().enumerate().map(of).collect();
    let plan = |(name, (shape, _)): &(String, Shaped)| PlannedTensor::new(name, StoredDType::F32, shape.clone());
    let path = folder.path().join("model.safetensors");
    let planned: Vec<PlannedTensor> = tensors.iter().map(plan).collect();
    let mut writer = Writer::create(path, Overwrite::No, planned, BTreeMap::new()).unwrap();
    for (name, (_, values)) in &tensors {
        writer.write_elements(name, values).unwrap();
    }
    writer.finish().unwrap();
    folder
}
