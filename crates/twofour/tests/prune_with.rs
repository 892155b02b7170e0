//! Whole models pruned by a function, and directories with all that lies beside the weights.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use twofour::{
    Axis, Error, Mask, MatrixRef, Pattern, Selector,
    criterion::{self, Magnitude},
    file::{
        Convert, Kept, Outcome, Overwrite, PlannedTensor, Prune, PruneWith, Pruned, PrunedWeight, Reader, Report,
        StoredDType, TensorInfo, Writer,
    },
    select::Sparsity,
};

const TWO_FOUR: (Sparsity, Axis) = (Sparsity::Groups(Pattern::TWO_FOUR), Axis::Row);

fn value(i: usize) -> f32 {
    ((i * 37 % 101) as f32 - 50.0) / 32.0
}

/// A file with a weight in each of three dtypes and a bias.
fn save(path: &Path) {
    let plan = vec![
        PlannedTensor::new("a.weight", StoredDType::F32, [6, 8]),
        PlannedTensor::new("b.weight", StoredDType::F16, [4, 12]),
        PlannedTensor::new("c.weight", StoredDType::BF16, [4, 4]),
        PlannedTensor::new("a.bias", StoredDType::F32, [6]),
    ];
    let mut writer = Writer::create(path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write_elements("a.weight", &(0..48).map(value).collect::<Vec<_>>()).unwrap();
    writer.write_elements("b.weight", &(0..48).map(|i| f16::from_f32(value(i))).collect::<Vec<_>>()).unwrap();
    writer.write_elements("c.weight", &(0..16).map(|i| bf16::from_f32(value(i))).collect::<Vec<_>>()).unwrap();
    writer.write_elements("a.bias", &[1.0f32; 6]).unwrap();
    writer.finish().unwrap();
}

fn by_magnitude(weight: MatrixRef<'_, f32>) -> Mask {
    criterion::mask(weight, &Magnitude::default(), TWO_FOUR.0).unwrap()
}

type Pruner<'a> = &'a mut dyn FnMut(&TensorInfo, MatrixRef<'_, f32>) -> twofour::Result<PrunedWeight>;

fn prune(input: &Path, output: &Path, pruner: Pruner<'_>) -> twofour::Result<Report<Pruned>> {
    let choose = |tensor: &TensorInfo| tensor.name.ends_with("weight").then_some(TWO_FOUR);
    Convert::open(input)?.run(output, PruneWith::new(choose, pruner))
}

#[test]
fn a_functions_masks_are_those_of_the_selector() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    save(&at("in.safetensors"));
    let choose = |tensor: &TensorInfo| tensor.name.ends_with("weight").then_some(Selector::TWO_FOUR);
    let convert = Convert::open(at("in.safetensors")).unwrap();
    convert.run(at("selector.safetensors"), Prune::new(choose)).unwrap();
    let mut seen = Vec::new();
    let report = prune(&at("in.safetensors"), &at("function.safetensors"), &mut |tensor, weight| {
        seen.push(tensor.name.clone());
        Ok(PrunedWeight::Mask(by_magnitude(weight)))
    });
    assert_eq!(fs::read(at("selector.safetensors")).unwrap(), fs::read(at("function.safetensors")).unwrap());
    seen.sort();
    assert_eq!(seen, ["a.weight", "b.weight", "c.weight"]);
    for tensor in report.unwrap().tensors {
        match tensor.outcome {
            Outcome::Changed(Pruned { density, adjusted, .. }) => assert!(density == 0.5 && !adjusted),
            Outcome::Copied(Kept::NotAMatrix) => assert_eq!(tensor.name, "a.bias"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn adjusted_weights_are_rounded_to_their_dtype() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    save(&at("in.safetensors"));
    let adjusted = |weight: MatrixRef<'_, f32>| {
        let mask = by_magnitude(weight);
        let doubled: Vec<f32> = mask.apply(weight).unwrap().iter().map(|w| w * 1.001).collect();
        PrunedWeight::Adjusted { weight: doubled, mask }
    };
    prune(&at("in.safetensors"), &at("out.safetensors"), &mut |_, weight| Ok(adjusted(weight))).unwrap();
    let reader = Reader::open(at("out.safetensors")).unwrap();
    let stored = reader.tensor("c.weight").unwrap().to_vec::<bf16>().unwrap();
    let dense: Vec<f32> = (0..16).map(|i| bf16::from_f32(value(i)).to_f32()).collect();
    let PrunedWeight::Adjusted { weight, .. } = adjusted(MatrixRef::new(4, 4, &dense).unwrap()) else { panic!() };
    assert_eq!(stored, weight.iter().map(|w| bf16::from_f32(*w)).collect::<Vec<_>>());
}

#[test]
fn what_a_function_returns_is_verified_before_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    save(&at("in.safetensors"));
    let of = |change: &dyn Fn(&mut Vec<f32>, &mut Mask)| {
        let error = prune(&at("in.safetensors"), &at("out.safetensors"), &mut |tensor, matrix| {
            let mut mask = by_magnitude(matrix);
            let mut weight = mask.apply(matrix)?;
            if tensor.name == "b.weight" {
                change(&mut weight, &mut mask);
            }
            Ok(PrunedWeight::Adjusted { weight, mask })
        });
        let error = error.unwrap_err();
        assert!(!at("out.safetensors").exists());
        assert!(error.to_string().contains("b.weight"), "{error}");
        let Error::InFile { source, .. } = error else { panic!("{error}") };
        let Error::InTensor { source, .. } = *source else { panic!("{source}") };
        *source
    };
    assert!(matches!(of(&|_, mask| *mask = Mask::full(4, 12)), Error::TooManyKept { line: 0, group: 0, kept: 4, .. }));
    assert!(matches!(
        of(&|weight, mask| {
            weight.truncate(44);
            *mask = Mask::empty(4, 11)
        }),
        Error::Shape { .. }
    ));
    assert!(matches!(of(&|weight, _| weight.truncate(3)), Error::Length { .. }));
    let pruned = |mask: &Mask| (0..12).find(|col| !mask.is_kept(1, *col)).unwrap();
    let kept = |mask: &Mask| (0..12).find(|col| mask.is_kept(1, *col)).unwrap();
    assert!(matches!(of(&|weight, mask| weight[12 + pruned(mask)] = 1.0), Error::NotPruned { row: 1, .. }));
    assert!(matches!(of(&|weight, mask| weight[12 + kept(mask)] = f32::NAN), Error::NotANumber { row: 1, .. }));
    // Beyond f16.
    assert!(matches!(of(&|weight, mask| weight[12 + kept(mask)] = 1e6), Error::Infinite { row: 1, .. }));
    // The function's own error, and nothing is left.
    let error =
        prune(&at("in.safetensors"), &at("out.safetensors"), &mut |_, _| Err(Error::NoTokens { what: "norms" }));
    assert!(error.unwrap_err().to_string().contains("no token"));
    let names: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["in.safetensors"]);
}

/// A directory as on the hub.
fn model(directory: &Path, sharded: bool) -> PathBuf {
    let model = directory.join("model");
    fs::create_dir_all(model.join("1_Pooling/deep")).unwrap();
    fs::create_dir_all(model.join("onnx")).unwrap();
    fs::create_dir_all(model.join(".git")).unwrap();
    for (name, text) in [
        ("config.json", "{\"model_type\": \"llama\"}"),
        ("tokenizer.json", "{}"),
        ("README.md", "text"),
        ("1_Pooling/config.json", "pooling"),
        ("1_Pooling/deep/notes.txt", "deep"),
        ("pytorch_model.bin", "weights of another format"),
        ("onnx/model.onnx", "weights of another format"),
        (".git/HEAD", "hidden"),
    ] {
        fs::write(model.join(name), text).unwrap();
    }
    if sharded {
        save(&model.join("model-00001-of-00001.safetensors"));
        let entries = ["a.weight", "b.weight", "c.weight", "a.bias"]
            .map(|name| format!("\"{name}\": \"model-00001-of-00001.safetensors\""));
        let index = format!("{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}", entries.join(", "));
        fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    } else {
        save(&model.join("model.safetensors"));
    }
    model
}

fn tree(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() {
            names.push(format!("{name}/"));
            names.extend(tree(&entry.path()).into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            names.push(name);
        }
    }
    names.sort();
    names
}

#[test]
fn a_directory_gives_a_directory_with_all_but_other_weights() {
    for sharded in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let model = model(directory.path(), sharded);
        let out = directory.path().join("out");
        let mut pruner = |_: &TensorInfo, weight: MatrixRef<'_, f32>| Ok(PrunedWeight::Mask(by_magnitude(weight)));
        prune(&model, &out, &mut pruner).unwrap();
        let mut expected = vec![
            "1_Pooling/",
            "1_Pooling/config.json",
            "1_Pooling/deep/",
            "1_Pooling/deep/notes.txt",
            "README.md",
            "config.json",
        ];
        expected.extend(match sharded {
            true => ["model-00001-of-00001.safetensors", "model.safetensors.index.json"].as_slice(),
            false => &["model.safetensors"],
        });
        expected.push("tokenizer.json");
        assert_eq!(tree(&out), expected);
        assert_eq!(fs::read(out.join("config.json")).unwrap(), fs::read(model.join("config.json")).unwrap());
        let reader = Reader::open(&out).unwrap();
        let a = reader.tensor("a.weight").unwrap().to_vec::<f32>().unwrap();
        assert!(Mask::of_nonzeros(MatrixRef::new(6, 8, &a).unwrap()).verify(Pattern::TWO_FOUR, Axis::Row).is_ok());

        // Not over what is there, nor over itself, unless asked for; inside itself is fine.
        assert!(matches!(prune(&model, &out, &mut pruner), Err(Error::Exists { .. })));
        let error = prune(&model, &model, &mut pruner).unwrap_err().to_string();
        assert!(error.contains("own directory"), "{error}");
        let inside = model.join("pruned");
        prune(&model, &inside, &mut pruner).unwrap();
        assert_eq!(tree(&inside), expected);

        // A failure leaves nothing, not even directories.
        let failed = directory.path().join("failed");
        let mut failing = |_: &TensorInfo, _: MatrixRef<'_, f32>| Err(Error::NoTokens { what: "norms" });
        assert!(prune(&model, &failed, &mut failing).is_err());
        assert!(!failed.exists());
        // One file alone where the output is named so.
        let file = directory.path().join("alone.safetensors");
        assert_eq!(prune(&model, &file, &mut pruner).is_ok(), !sharded);
    }
}
