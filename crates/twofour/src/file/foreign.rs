//! What is there instead of a model in safetensors, and what to do with it.

use std::{fs, path::Path};

/// Identifies a file that is neither safetensors nor JSON by its first bytes, of which 512 are enough, and says what to
/// do with it.
///
/// ```
/// let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
/// assert!(twofour::file::what_else(pointer).is_some_and(|what| what.contains("git lfs pull")));
/// assert_eq!(twofour::file::what_else(br#"{"model_type": "llama"}"#), None);
/// ```
pub fn what_else(bytes: &[u8]) -> Option<&'static str> {
    const KINDS: &[(&[u8], &str)] = &[
        (
            b"version https://git-lfs",
            "a pointer of git lfs, not the file itself; run `git lfs pull` in its repository, or download the file \
             again",
        ),
        (b"PK\x03\x04", "a zip archive, as torch.save writes; name it as the model"),
        (b"GGUF", "a GGUF file, as llama.cpp has them; name it as the model"),
        (b"\x89HDF", "an HDF5 file, as TensorFlow saves weights; save the model with safetensors"),
        (b"\x1f\x8b", "a gzip archive; unpack it"),
        (b"\x80\x02", "a pickle, as torch.save wrote before version 1.6; load it with PyTorch, and save it again"),
        (b"\x80\x04", "a pickle; load it with Python, and save its tensors with safetensors"),
        (b"<?xml", "an XML page, as servers send in place of a file that they refuse; download it again"),
    ];
    if bytes.is_empty() {
        return Some("empty; download or copy it again");
    }
    let found = KINDS.iter().find(|(start, _)| bytes.starts_with(start)).map(|(_, what)| *what);
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(512)]).trim_start().to_ascii_lowercase();
    let is_page = text.starts_with("<!doctype html") || text.starts_with("<html");
    found.or(is_page.then_some("a web page, as servers send in place of a file that they refuse; download it again"))
}

/// Files of weights that are no safetensors: the end of their names, what they are, and what to do.
const FORMATS: &[(&str, &str)] = &[
    (".bin", TORCH),
    (".pt", TORCH),
    (".pth", TORCH),
    (".ckpt", TORCH),
    (".gguf", "weights in GGUF, as llama.cpp has them; name the file itself"),
    (".onnx", "an ONNX graph; start from the checkpoint that it was exported from"),
    (".h5", "weights of TensorFlow; load the model with transformers from_tf=True, and write it with save_pretrained"),
    (".msgpack", "weights of Flax; load the model with transformers from_flax=True, and write it with save_pretrained"),
    (".npz", "arrays of numpy; write them with safetensors.numpy.save_file"),
    (".nemo", "a checkpoint of NeMo; export it for transformers"),
];

const TORCH: &str = "weights of PyTorch; name the file itself";

/// Returns what a directory without safetensors holds, with what to do.
pub(super) fn instead(directory: &Path) -> String {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let holds = |name: &str| names.iter().any(|own| own == name);
    const NO_WEIGHTS: [&str; 4] = ["training_args.bin", "optimizer.bin", "scheduler.bin", "random_states_0.bin"];
    let weights = |end: &str| {
        names.iter().find(|name| {
            name.ends_with(end)
                && name.len() > end.len()
                && !NO_WEIGHTS.contains(&name.as_str())
                && !name.ends_with(".index.json")
        })
    };
    let found = FORMATS.iter().find_map(|(end, what)| weights(end).map(|name| (name, *what)));
    if holds("adapter_config.json") {
        return "the directory holds an adapter of peft (adapter_config.json), which changes the weights of a model, \
                and no model; merge it into its model, as peft's merge_and_unload does"
            .to_owned();
    }
    match found {
        Some((name, what)) => {
            format!("the directory holds no .safetensors file, but {}: {what}", super::unique::quoted(name))
        }
        None if names.is_empty() => "the directory is empty and holds no .safetensors file".to_owned(),
        None if holds("config.json") || holds("tokenizer.json") => {
            "the directory holds no .safetensors file: configuration or tokenizer are there, the weights are not; \
             download or copy them too"
                .to_owned()
        }
        None => "the directory holds no .safetensors file".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Reader;

    #[test]
    fn a_file_of_another_kind_is_named_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 2200119864\n";
        let cases: [(&[u8], &str); 8] = [
            (lfs, "git lfs pull"),
            (b"PK\x03\x04 and more of an archive", "torch.save"),
            (b"GGUF\x03\0\0\0\0\0\0\0\0\0", "llama.cpp"),
            (b"\n<!DOCTYPE html><title>401</title>", "a web page"),
            (b"<html><body>", "a web page"),
            (b"\x80\x02}q\0(X\x05\0\0\0", "a pickle"),
            (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "gzip"),
            (b"", "empty; download"),
        ];
        for (bytes, expected) in cases {
            fs::write(&path, bytes).unwrap();
            for place in [path.as_path(), directory.path()] {
                let message = Reader::open(place).unwrap_err().to_string();
                assert!(message.contains("model.safetensors: is ") && message.contains(expected), "{message}");
            }
            let index = directory.path().join("other.safetensors.index.json");
            fs::write(&index, bytes).unwrap();
            let message = Reader::open(&index).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            fs::remove_file(&index).unwrap();
        }
    }

    #[test]
    fn a_directory_of_other_weights_says_what_it_holds() {
        for (names, expected) in [
            (&["config.json", "rng_state.bin"][..], "`rng_state.bin`: weights of PyTorch"),
            (&["pytorch_model-00001-of-00002.bin"], "weights of PyTorch; name the file itself"),
            (&["training_args.bin", "config.json"], "the weights are not"),
            (&["model.gguf"], "`model.gguf`: weights in GGUF"),
            (&["epoch=3.ckpt"], "weights of PyTorch"),
            (&["model.pt"], "weights of PyTorch"),
            (&["model.onnx"], "an ONNX graph"),
            (&["tf_model.h5"], "TensorFlow"),
            (&["flax_model.msgpack"], "Flax"),
            (&["adapter_config.json", "adapter_model.bin"], "adapter of peft"),
            (&["config.json"], "the weights are not"),
            (&[], "is empty"),
            (&["notes.txt"], "no .safetensors file"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            for name in names {
                fs::write(directory.path().join(name), "x").unwrap();
            }
            let message = Reader::open(directory.path()).unwrap_err().to_string();
            assert!(message.contains(expected), "{names:?}: {message}");
        }
    }
}
