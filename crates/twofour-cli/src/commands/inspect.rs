//! `twofour inspect`.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::{
    file::{MANIFEST_KEY, Reader},
    role::{Layout, Roles},
};

use super::next;
use crate::{
    exit::Verdict,
    hub,
    present::{
        Screen, escape,
        layers::by_layer,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
};

/// Show what a model file holds
///
/// Tensors with dtype, shape and size; compressed weights as the dense ones they stand for; metadata. Only headers are
/// read. Layers of one kind share a row, with the sum of their sizes; with -v each tensor has its own.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour inspect model.safetensors
  twofour inspect --json model/ | jq '.tensors[].name'")]
pub(crate) struct Inspect {
    /// The model: a .safetensors file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face
    /// hub
    file: PathBuf,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    path: String,
    files: Vec<String>,
    bytes: usize,
    tensors: Vec<TensorAnswer<'a>>,
    metadata: BTreeMap<&'a str, &'a str>,
}

#[derive(Debug, Serialize)]
struct TensorAnswer<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
    compressed: bool,
    /// What the tensor is for, as commands that choose tensors see it.
    role: String,
    /// Whether it is the weight of a linear layer that is stored as `[in_features, out_features]`.
    in_out: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    /// Columns that share a scale, where there are scales for groups of columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    group_size: Option<usize>,
    /// Bytes of the dense tensor that a compressed weight stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    dense_bytes: Option<usize>,
}

impl Inspect {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let given = self.file.clone();
        self.file = hub::locate(&self.file, screen)?;
        let reader = Reader::open(&self.file)?;
        let roles = Roles::of_model(&reader)?;
        let is_in_out = |name: &str, shape: &[usize]| {
            roles.of(name, shape).is_worth_pruning() && roles.layout(name, shape) == Some(Layout::InOut)
        };
        let plain = reader.plain_tensors().map(|t| TensorAnswer {
            name: &t.name,
            dtype: t.dtype.name(),
            shape: t.shape.clone(),
            bytes: t.bytes,
            compressed: false,
            role: roles.of(&t.name, &t.shape).to_string(),
            in_out: is_in_out(&t.name, &t.shape),
            pattern: None,
            group_size: None,
            dense_bytes: None,
        });
        let compressed = reader.compressed_weights().map(|w| TensorAnswer {
            name: &w.name,
            dtype: w.format.name(),
            shape: vec![w.rows, w.cols],
            bytes: w.bytes(),
            compressed: true,
            role: roles.of(&w.name, &[w.rows, w.cols]).to_string(),
            in_out: is_in_out(&w.name, &[w.rows, w.cols]),
            pattern: Some(w.pattern.to_string()),
            group_size: w.format.group_size(),
            dense_bytes: Some(w.dense_bytes()),
        });
        let tensors: Vec<_> = plain.chain(compressed).collect();
        let answer = Answer {
            path: reader.path().display().to_string(),
            files: reader.shards().iter().map(|s| s.path().display().to_string()).collect(),
            bytes: tensors.iter().map(|t| t.bytes).sum(),
            tensors,
            metadata: reader.metadata().iter().map(|(k, v)| (k.as_str(), v.as_str())).collect(),
        };
        tell(screen, &answer)?;
        if answer.tensors.iter().any(|t| t.compressed) {
            screen.next(&next::run(&self.file, None))?;
        } else {
            screen.next(&[next::check(&given)])?;
        }
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }
}

fn tell(screen: &mut Screen, answer: &Answer<'_>) -> Result<()> {
    let mut table = Table::new([
        (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Right),
        ("size", Align::Right),
        ("", Align::Left),
    ]);
    let alike = |t: &TensorAnswer<'_>| (t.dtype, t.shape.clone(), t.pattern.clone(), t.group_size);
    for (label, row) in by_layer(&answer.tensors, screen.is_detailed(), |t| (t.name, alike(t))) {
        let t = row[0];
        let sum = |of: fn(&TensorAnswer<'_>) -> usize| row.iter().map(|t| of(t)).sum::<usize>();
        let note = match &t.pattern {
            Some(pattern) => {
                let dense = sum(|t| t.dense_bytes.unwrap_or(0));
                let groups = t.group_size.map_or(String::new(), |columns| format!(", scales for {columns} columns"));
                format!("{pattern} compressed{groups}, {} dense", units::bytes(dense as u64))
            }
            _ if t.in_out => "stored [in, out]".to_owned(),
            _ => String::new(),
        };
        table.row([
            label,
            t.dtype.to_owned(),
            units::shape(&t.shape),
            units::bytes(sum(|t| t.bytes) as u64),
            paint(style::FAINT, note),
        ]);
    }
    screen.line(table)?;
    if answer.tensors.iter().any(|t| t.compressed) {
        screen.note(
            "compressed: kept values, and 4 bits of metadata for every four weights, which say where the kept two \
             stand",
        )?;
    }
    let compressed = answer.tensors.iter().filter(|t| t.compressed).count();
    screen.line(format!(
        "\n{} in {}, {}{}",
        units::plural(answer.tensors.len(), "tensor"),
        units::plural(answer.files.len(), "file"),
        units::bytes(answer.bytes as u64),
        if compressed > 0 { format!(", {compressed} of them compressed") } else { String::new() }
    ))?;
    for (name, value) in answer.metadata.iter().filter(|(name, _)| **name != MANIFEST_KEY) {
        screen.line(escape::line(&format!("{} {value}", paint(style::FAINT, format!("{name}:")))))?;
    }
    Ok(())
}
