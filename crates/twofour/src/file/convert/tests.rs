//! Whole models, converted there and back.

use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use proptest::prelude::*;

use super::super::{tests::run, *};
use crate::{Axis, DataType, Element, Error, F8E4M3, F8E5M2, Mask, MatrixRef, Pattern, Selector, select};

/// A tensor as bytes.
#[derive(Debug, Clone, PartialEq)]
struct Tensor {
    dtype: StoredDType,
    shape: Vec<usize>,
    data: Vec<u8>,
}

type Model = BTreeMap<String, Tensor>;

fn tensor<T: StoredElement>(shape: &[usize], elements: &[T]) -> Tensor {
    Tensor { dtype: T::STORED, shape: shape.to_vec(), data: bytemuck::cast_slice(elements).to_vec() }
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("config".to_owned(), "{\"a\":1}".to_owned())])
}

fn save(path: &Path, model: &Model) {
    let plan: Vec<_> = model.iter().map(|(n, t)| PlannedTensor::new(n, t.dtype, t.shape.as_slice())).collect();
    let mut writer = Writer::create(path, Overwrite::Yes, plan, metadata()).unwrap();
    for (name, tensor) in model {
        writer.write(name, &tensor.data).unwrap();
    }
    writer.finish().unwrap();
}

/// Saves a model as shards with an index, every tensor in the shard that `shard_of` says.
fn save_sharded(directory: &Path, model: &Model, shard_of: impl Fn(&str) -> usize) -> PathBuf {
    fs::create_dir_all(directory).unwrap();
    let mut shards: BTreeMap<String, Model> = BTreeMap::new();
    for (name, tensor) in model {
        let file = format!("model-{:05}-of-00002.safetensors", shard_of(name));
        shards.entry(file).or_default().insert(name.clone(), tensor.clone());
    }
    let mut index = Index { metadata: Default::default(), weight_map: BTreeMap::new() };
    index.metadata.insert("note".to_owned(), "kept".into());
    for (file, part) in shards {
        save(&directory.join(&file), &part);
        index.weight_map.extend(part.into_keys().map(|name| (name, file.clone())));
    }
    let path = directory.join("model.safetensors.index.json");
    fs::write(&path, index.to_json()).unwrap();
    path
}

fn load(path: &Path) -> Model {
    let reader = Reader::open(path).unwrap();
    let read = |t: &TensorInfo| Tensor {
        dtype: t.dtype,
        shape: t.shape.clone(),
        data: reader.tensor(&t.name).unwrap().bytes().unwrap().into_owned(),
    };
    reader.tensors().map(|t| (t.name.clone(), read(t))).collect()
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A matrix of random bits with no NaN, pruned; -0.0 only where `negative_zeros` allows.
fn sparse<T: Element>(rows: usize, cols: usize, bits: &[u8], negative_zeros: bool) -> Tensor {
    let mut data: Vec<T> = bytemuck::allocation::pod_collect_to_vec(&bits[..rows * cols * size_of::<T>()]);
    for v in &mut data {
        if v.to_f32().is_nan() {
            *v = T::ZERO;
        }
    }
    let matrix = MatrixRef::new(rows, cols, &data).unwrap();
    let mut data = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap().apply(matrix).unwrap();
    for v in &mut data {
        if !negative_zeros && v.is_negative_zero() {
            *v = T::ZERO;
        }
    }
    tensor(&[rows, cols], &data)
}

fn model_strategy() -> impl Strategy<Value = Model> {
    let one = (0usize..5, 0usize..40, 0usize..8).prop_flat_map(|(rows, cols, kind)| {
        proptest::collection::vec(any::<u8>(), rows * cols * 8).prop_map(move |bits| match kind {
            0 => sparse::<f32>(rows, cols, &bits, false),
            1 => sparse::<f16>(rows, cols, &bits, false),
            2 => sparse::<bf16>(rows, cols, &bits, false),
            3 => sparse::<i8>(rows, cols, &bits, false),
            4 => sparse::<F8E4M3>(rows, cols, &bits, false),
            5 => sparse::<F8E5M2>(rows, cols, &bits, false),
            6 => Tensor { dtype: StoredDType::I64, shape: vec![rows, cols], data: bits },
            _ => Tensor { dtype: StoredDType::F32, shape: vec![rows, 2, cols], data: bits },
        })
    });
    proptest::collection::btree_map("[a-z.\u{e9}\"\\\\]{1,12}", one, 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn compressing_and_decompressing_gives_back_every_bit(model in model_strategy(), sharded in any::<bool>()) {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let input = if sharded && !model.is_empty() {
            save_sharded(&at("in"), &model, |name| 1 + name.len() % 2)
        } else {
            save(&at("in.st"), &model);
            at("in.st")
        };
        let mut seen = Vec::new();
        let convert = Convert::open(&input).unwrap().progress(|p| {
            seen.push((p.phase, p.bytes_done, p.bytes_total));
            ControlFlow::Continue(())
        });
        let report = convert.run(at("small"), Compress::default()).unwrap();
        prop_assert!(report.changed().all(|(_, made)| made.negative_zeros == 0));
        prop_assert_eq!(report.tensors.len(), model.len());
        prop_assert_eq!(seen.len(), 2 * model.len());
        prop_assert!(seen.is_sorted_by_key(|s| (s.0 == Phase::Writing, s.1)));
        prop_assert!(seen.last().is_none_or(|s| s.1 == s.2));
        let small = Reader::open(at("small")).unwrap();
        for t in &report.tensors {
            let compressed = matches!(t.outcome, Outcome::Changed(MadeCompressed { pruned: None, .. }));
            prop_assert_eq!(compressed, t.stored().unwrap().element().is_some() && t.shape.len() == 2 && t.shape.iter().all(|&d| d > 0));
            prop_assert_eq!(compressed, small.compressed_info(&t.name).is_ok());
            if compressed {
                prop_assert_eq!(small.compressed_info(&t.name).unwrap().bytes(), t.bytes_after);
            }
        }
        // What is compressed already is left alone.
        run(at("small"), at("again"), Overwrite::No, Compress::default()).unwrap();
        prop_assert_eq!(load(&at("again")), load(&at("small")));

        let back = run(at("again"), at("back"), Overwrite::No, Decompress).unwrap();
        prop_assert_eq!(back.changed().count(), small.compressed_weights().count());
        prop_assert_eq!(load(&at("back")), model.clone());
        let back = Reader::open(at("back")).unwrap();
        if !model.is_empty() {
            prop_assert_eq!(back.metadata(), &metadata());
        }
        if let Some((_, index)) = back.index() {
            prop_assert_eq!(&index.metadata["note"], "kept");
            prop_assert_eq!(&index.metadata["total_size"], model.values().map(|t| t.data.len()).sum::<usize>());
        }
    }
}

#[test]
fn negative_zeros_are_counted_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let mut model = Model::from([
        ("w".to_owned(), tensor(&[1, 6], &[1.0f32, -0.0, 0.0, 2.0, -0.0, 3.0])),
        ("norm".to_owned(), tensor(&[2], &[-0.0f32, 1.0])),
    ]);
    save(&at("in"), &model);
    let report = run(at("in"), at("small"), Overwrite::No, Compress::default()).unwrap();
    assert_eq!(report.changed().map(|(_, made)| made.negative_zeros).sum::<usize>(), 2);
    run(at("small"), at("back"), Overwrite::No, Decompress).unwrap();
    model.insert("w".to_owned(), tensor(&[1, 6], &[1.0f32, 0.0, 0.0, 2.0, 0.0, 3.0]));
    assert_eq!(load(&at("back")), model);

    let strict = Compress { negative_zeros: NegativeZeros::Refuse, ..Default::default() };
    let error = run(at("in"), at("strict"), Overwrite::No, strict).unwrap_err().to_string();
    assert!(error.contains("tensor `w`: 2 elements are -0.0"), "{error}");
    assert!(!at("strict").exists());
}

#[test]
fn dense_weights_are_refused_kept_or_pruned() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let w = [1.0f32, 2.0, 0.0, 0.0, 1.0, -2.0, 3.0, 0.0];
    save(&at("in"), &Model::from([("w".to_owned(), tensor(&[2, 4], &w))]));
    let with = |not_sparse| Compress { not_sparse, ..Default::default() };
    let error = run(at("in"), at("out"), Overwrite::No, with(NotSparse::Error));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("in: tensor `w`: row 1, group 0: 3 non-zeros where 2:4 allows 2"), "{error}");
    assert_eq!(entries(directory.path()), ["in"]);

    let columns: Vec<f32> = (0..32).map(|i| if i / 8 < 2 { 1.0 } else { 0.0 }).collect();
    save(&at("columns"), &Model::from([("c".to_owned(), tensor(&[4, 8], &columns))]));
    let error = run(at("columns"), at("out"), Overwrite::No, with(NotSparse::Error)).unwrap_err();
    assert!(error.to_string().contains("tensor `c`: is 2:4 along columns"), "{error}");
    fs::remove_file(at("columns")).unwrap();

    let kept = run(at("in"), at("kept"), Overwrite::No, with(NotSparse::KeepDense)).unwrap();
    assert_eq!(kept.tensors[0].outcome, Outcome::Copied(Kept::NotSparse { violations: 1 }));
    assert_eq!(load(&at("kept")), load(&at("in")));

    let pruned = run(at("in"), at("pruned"), Overwrite::No, with(NotSparse::Prune)).unwrap();
    let Outcome::Changed(MadeCompressed { pruned: Some((kept_l1, kept_l2)), negative_zeros: 0 }) =
        pruned.tensors[0].outcome
    else {
        panic!("{:?}", pruned.tensors[0].outcome)
    };
    assert_eq!((kept_l1, kept_l2), (8.0 / 9.0, 18.0 / 19.0));
    let dense = Reader::open(at("pruned")).unwrap().compressed::<f32>("w").unwrap().to_dense();
    assert_eq!(dense, [1.0, 2.0, 0.0, 0.0, 0.0, -2.0, 3.0, 0.0]);

    let chosen = Compress { which: &|t| t.name != "w", ..Default::default() };
    let report = run(at("in"), at("none"), Overwrite::No, chosen).unwrap();
    assert_eq!(report.tensors[0].outcome, Outcome::Copied(Kept::NotChosen));
}

#[test]
fn pruning_writes_what_the_mask_says() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let w: Vec<f32> = (0..40).map(|i| ((i * 37) % 41) as f32 - 20.0).collect();
    let model = Model::from([
        ("embed".to_owned(), tensor(&[5, 8], &w)),
        ("up".to_owned(), tensor(&[5, 8], &w)),
        ("down".to_owned(), tensor(&[5, 8], &w)),
        ("gate".to_owned(), tensor(&[5, 8], &w)),
        ("norm".to_owned(), tensor(&[40], &w)),
    ]);
    save_sharded(&at("in"), &model, |name| if name == "up" { 1 } else { 2 });
    let pattern: Pattern = "1:4".parse().unwrap();
    let report = run(
        at("in"),
        at("out"),
        Overwrite::No,
        Prune::new(|t| match t.name.as_str() {
            "up" => Some(Selector::TWO_FOUR),
            "down" => Some(Selector::Magnitude { pattern, axis: Axis::Column }),
            "gate" => Some(Selector::Transposable(select::Transposable::Optimal)),
            _ => None,
        }),
    )
    .unwrap();
    let out = load(&at("out"));
    let matrix = MatrixRef::new(5, 8, &w).unwrap();
    let magnitude = |pattern, axis| select::magnitude(matrix, pattern, axis).unwrap();
    for (name, mask) in [
        ("up", magnitude(Pattern::TWO_FOUR, Axis::Row)),
        ("down", magnitude(pattern, Axis::Column)),
        ("gate", select::transposable(matrix, select::Transposable::Optimal).unwrap()),
    ] {
        assert_eq!(out[name], tensor(&[5, 8], &mask.apply(matrix).unwrap()));
        let t = report.tensors.iter().find(|t| t.name == name).unwrap();
        let Outcome::Changed(Pruned { density, kept_l1, .. }) = t.outcome else { panic!("{t:?}") };
        assert_eq!((density, kept_l1), (mask.density(), mask.kept_l1(matrix).unwrap()));
        assert!(Mask::of_nonzeros(matrix).count() > mask.count());
    }
    let outcome = |name: &str| report.tensors.iter().find(|t| t.name == name).unwrap().outcome;
    assert_eq!(
        (outcome("embed"), outcome("norm")),
        (Outcome::Copied(Kept::NotChosen), Outcome::Copied(Kept::NotAMatrix))
    );
    assert_eq!((&out["embed"], &out["norm"]), (&model["embed"], &model["norm"]));
}

#[test]
fn what_is_not_finite_is_found_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (bad, expected) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "infinite")] {
        let mut w = vec![1.0f32; 24];
        w[17] = bad;
        // The bad tensor comes last, in the second shard.
        let model =
            Model::from([("a".to_owned(), tensor(&[3, 8], &[1.0f32; 24])), ("z".to_owned(), tensor(&[3, 8], &w))]);
        save_sharded(&at("in"), &model, |name| if name == "a" { 1 } else { 2 });
        let all = Some(Selector::TWO_FOUR);
        let mut writing = false;
        let progress = |p: Progress<'_>| {
            writing |= p.phase == Phase::Writing;
            ControlFlow::Continue(())
        };
        let convert = Convert::open(at("in")).unwrap().progress(progress);
        let error = convert.run(at("out"), Prune::new(|_| all)).unwrap_err().to_string();
        assert!(
            error.contains("-00002.safetensors: tensor `z`: row 2, column 1: ") && error.contains(expected),
            "{error}"
        );
        assert!(!writing);
        let options = Compress { not_sparse: NotSparse::Prune, ..Default::default() };
        let error = run(at("in"), at("out"), Overwrite::No, options).unwrap_err().to_string();
        assert!(error.contains("tensor `z`: row 2, column 1: "), "{error}");
        assert_eq!(entries(directory.path()), ["in"]);
    }
}

#[test]
fn broken_sharded_models_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let input = directory.path().join("in");
    let model = Model::from([("a".to_owned(), tensor(&[2], &[1u8, 2])), ("b".to_owned(), tensor(&[1], &[3u8]))]);
    let index = save_sharded(&input, &model, |name| if name == "a" { 1 } else { 2 });
    let sound = fs::read_to_string(&index).unwrap();
    let refusal = |text: &str| {
        fs::write(&index, text).unwrap();
        Reader::open(&input).unwrap_err().to_string()
    };
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let extra = sound.replace("\"a\":", &format!("\"c\": \"{two}\", \"a\":"));
    assert!(
        refusal(&extra).contains("tensor `c` is placed in shard `model-00002-of-00002.safetensors`, which lacks it")
    );
    assert!(refusal(&sound.replace(one, two)).contains("tensor `a` is placed in shard"));
    assert!(refusal(&sound.replace(one, "../in/model-00001-of-00002.safetensors")).contains("not a plain file name"));
    fs::write(&index, &sound).unwrap();
    // A shard that holds a tensor which the index places elsewhere.
    save(&input.join(one), &model);
    assert!(refusal(&sound).contains("tensor `b` is in this shard, but the index"));
    fs::remove_file(input.join(one)).unwrap();
    let error = Reader::open(&input).unwrap_err();
    assert!(matches!(&error, Error::MissingShard { shard, .. } if shard.ends_with(one)), "{error}");
    // Without its index, as a conversion that was killed leaves it.
    save(&input.join(one), &Model::new());
    fs::remove_file(&index).unwrap();
    assert!(Reader::open(&input).unwrap_err().to_string().contains("if a conversion was interrupted"));
}

#[test]
fn outputs_in_the_wrong_place_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let model = Model::from([("w".to_owned(), tensor(&[1, 4], &[1.0f32, 0.0, 2.0, 0.0]))]);
    save(&at("one"), &model);
    save_sharded(&at("many"), &model, |_| 1);
    fs::create_dir(at("full")).unwrap();
    fs::write(at("full/readme"), "precious").unwrap();
    let before = entries(directory.path());
    let refusal = |input: &str, output: &str, overwrite| {
        let error = run(at(input), at(output), overwrite, Compress::default());
        error.unwrap_err().to_string()
    };
    for (input, output, overwrite, expected) in [
        ("one", "one", Overwrite::No, "already exists"),
        ("one", "full", Overwrite::Yes, "the input is a single file; name the file"),
        ("one", "absent/out", Overwrite::Yes, "absent: looking for the output's directory"),
        ("many", "absent/out", Overwrite::Yes, "absent: looking for the output's directory"),
        ("many", "out.safetensors", Overwrite::No, "the input is sharded; name a directory"),
        ("many", "one", Overwrite::Yes, "is a file, but the input is sharded"),
        ("many", "full", Overwrite::No, "already exists"),
        ("many", "many", Overwrite::Yes, "cannot be converted in place"),
        ("many", "many", Overwrite::No, "cannot be converted in place"),
        ("many", "full/../many/.", Overwrite::Yes, "cannot be converted in place"),
        ("absent", "out", Overwrite::No, "absent: opening"),
    ] {
        let message = refusal(input, output, overwrite);
        assert!(message.contains(expected), "{input} {output}: {message}");
    }
    assert_eq!(entries(directory.path()), before);

    // In place is fine for a single file, and so is a directory that may be written into.
    run(at("one"), at("one"), Overwrite::Yes, Compress::default()).unwrap();
    assert_eq!(Reader::open(at("one")).unwrap().compressed_weights().count(), 1);
    run(at("one"), at("one"), Overwrite::Yes, Decompress).unwrap();
    assert_eq!(load(&at("one")), model);
    for _ in 0..2 {
        run(at("many"), at("full"), Overwrite::Yes, Compress::default()).unwrap();
    }
    let packed = [
        "README-twofour.md",
        "readme",
        "twofour-model-00001-of-00002.safetensors",
        "twofour-model.safetensors.index.json",
    ];
    assert_eq!(entries(&at("full")), packed);
    // The same model in the other form makes place.
    run(at("full"), at("again"), Overwrite::No, Decompress).unwrap();
    assert_eq!(load(&at("again")), model);
    run(at("many"), at("full"), Overwrite::Yes, Prune::new(|_| None)).unwrap();
    assert_eq!(entries(&at("full")), ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "readme"]);
}

/// A directory that holds another model is no place for an output that would leave it there, and a pipe or a device is
/// none either.
#[test]
fn what_an_output_would_not_replace_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let model = Model::from([("w".to_owned(), tensor(&[1, 4], &[1.0f32, 0.0, 2.0, 0.0]))]);
    save(&at("one"), &model);
    save_sharded(&at("many"), &model, |_| 1);
    fs::create_dir(at("single")).unwrap();
    save(&at("single/model.safetensors"), &model);
    let refusal = |input: &str, output: &str| {
        let check = check_output(&Reader::open(at(input)).unwrap(), at(output), Overwrite::Yes).unwrap_err();
        let error = run(at(input), at(output), Overwrite::Yes, Compress::default()).unwrap_err();
        assert_eq!(check.to_string(), error.to_string());
        error.to_string()
    };
    for (output, held, input) in [
        ("indexed", "model.safetensors.index.json", "single"),
        ("five", "model-00005-of-00005.safetensors", "single"),
        ("five", "model-00005-of-00005.safetensors", "many"),
        ("whole", "model.safetensors", "many"),
    ] {
        fs::create_dir_all(at(output)).unwrap();
        fs::write(at(output).join(held), "another").unwrap();
        let message = refusal(input, output);
        assert!(message.contains(&format!("holds {held}, of another model")), "{input} {output}: {message}");
        assert_eq!(entries(&at(output)), [held]);
    }
    fs::write(at("five/a.safetensors"), "").unwrap();
    assert!(refusal("many", "five").contains("holds a.safetensors and 1 more"));
    assert!(refusal("one", "new/").contains("name the file to write"));
    #[cfg(unix)]
    {
        let socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert!(refusal("one", "socket").contains("no file but a device"));
        let created = Writer::create(at("socket"), Overwrite::Yes, Plan::new(), BTreeMap::new());
        assert!(created.unwrap_err().to_string().contains("no file but a device"));
        drop(socket);
        assert!(!fs::symlink_metadata(at("socket")).unwrap().is_file());
    }
}

#[test]
fn names_that_would_collide_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let w = tensor(&[1, 4], &[1.0f32, 0.0, 2.0, 0.0]);
    let model = Model::from([("w".to_owned(), w), ("w.meta".to_owned(), tensor(&[1], &[1u8]))]);
    save(&at("in"), &model);
    save_sharded(&at("sharded"), &model, |name| name.len());
    let before = entries(directory.path());
    for (input, expected) in
        [("in", "two tensors would be named `w.meta`"), ("sharded", "two shards would hold a tensor named `w.meta`")]
    {
        let error = run(at(input), at("out"), Overwrite::No, Compress::default());
        assert!(error.unwrap_err().to_string().contains(expected));
    }
    assert_eq!(entries(directory.path()), before);
}

#[test]
fn integers_with_scales_become_floats_and_those_of_other_conventions_stay() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let w = tensor(&[2, 4], &[1i8, 0, -2, 0, 0, 3, 0, 4]);
    let model = Model::from([
        ("w".to_owned(), w.clone()),
        ("w.scales".to_owned(), tensor(&[2], &[0.5f32, 0.25])),
        // Another convention's scales are ordinary tensors.
        ("v".to_owned(), w),
        ("v.scales".to_owned(), tensor(&[2, 1], &[0.5f32, 0.25])),
    ]);
    save(&at("in"), &model);
    run(at("in"), at("small"), Overwrite::No, Compress::default()).unwrap();
    let reader = Reader::open(at("small")).unwrap();
    assert_eq!(reader.scales("w").unwrap().unwrap(), [0.5, 0.25]);
    assert_eq!(reader.scales("v").unwrap(), None);
    let mut expected = model.clone();
    expected.insert("w".to_owned(), tensor(&[2, 4], &[0.5f32, 0.0, -1.0, 0.0, 0.0, 0.75, 0.0, 1.0]));
    expected.remove("w.scales");
    for input in ["small", "in"] {
        let report = run(at(input), at("back"), Overwrite::Yes, Decompress).unwrap();
        assert_eq!(load(&at("back")), expected, "{input}");
        let (weight, made) = report.changed().find(|(weight, _)| weight.name == "w").unwrap();
        assert_eq!((made.dtype, &weight.shape[..], weight.bytes_after), (DataType::F32, &[2, 4][..], 32));
    }
}

/// Breaking off after every tensor of either pass, with and without an output that is there already.
#[test]
fn breaking_off_leaves_everything_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let w = tensor(&[2, 4], &[1.0f32, 0.0, 2.0, 0.0, 0.0, -1.0, 0.0, 3.0]);
    let model = Model::from(["a", "b", "c"].map(|name| (name.to_owned(), w.clone())));
    save(&at("one"), &model);
    save_sharded(&at("many"), &model, |name| if name == "a" { 1 } else { 2 });
    for input in ["one", "many"] {
        run(at(input), at(&format!("{input}-small")), Overwrite::No, Compress::default()).unwrap();
    }
    save(&at("one-old"), &model);
    save_sharded(&at("many-old"), &model, |_| 1);
    fs::write(at("many-old/readme"), "precious").unwrap();
    let everything = || -> Vec<(PathBuf, Vec<u8>)> {
        let mut files = Vec::new();
        for name in entries(directory.path()) {
            match at(&name) {
                path if path.is_dir() => {
                    files.extend(entries(&path).iter().map(|n| (path.join(n), fs::read(path.join(n)).unwrap())))
                }
                path => files.push((path.clone(), fs::read(&path).unwrap())),
            }
        }
        files
    };
    let before = everything();
    let all = Some(Selector::TWO_FOUR);
    for input in ["one", "many"] {
        for (output, overwrite) in [("new".to_owned(), Overwrite::No), (format!("{input}-old"), Overwrite::Yes)] {
            for conversion in ["compress", "decompress", "prune"] {
                for calls in 1..=6 {
                    let mut left = calls;
                    let stop = |_: Progress<'_>| {
                        left -= 1;
                        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                    };
                    let (input, output) = (at(input), at(&output));
                    let from =
                        if conversion == "decompress" { format!("{}-small", input.display()).into() } else { input };
                    let convert = Convert::open(from).unwrap().overwrite(overwrite).progress(stop);
                    let outcome = match conversion {
                        "compress" => convert.run(output, Compress::default()).map(drop),
                        "decompress" => convert.run(output, Decompress).map(drop),
                        _ => convert.run(output, Prune::new(|_| all)).map(drop),
                    };
                    assert!(matches!(outcome, Err(Error::Interrupted)), "{conversion} after {calls}: {outcome:?}");
                    assert_eq!(left, 0);
                    assert!(everything() == before, "{conversion} after {calls}");
                }
            }
        }
    }
    assert!(!at("new").exists());
}
