//! Models that compressed-tensors wrote (`tests/fixtures/compressed_tensors_models.py`), beside what it decompresses
//! them to.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    super::{
        Compress, Convert, Decompress, NotSparse, Overwrite, PlannedTensor, Reader, StoredDType, Unchanged, Writer,
    },
    Export, ExportFormat,
};
use crate::{DataType, Element, Result, file::ValueFormat};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/compressed_tensors").join(name)
}

fn open(path: &Path) -> Reader {
    // Beside the model lies what it stands for.
    Reader::open(path.join("model.safetensors")).unwrap().translated().unwrap()
}

fn floats(reader: &Reader, name: &str) -> Vec<f32> {
    let view = reader.tensor(name).unwrap();
    fn widened<T: Element>(values: &[T]) -> Vec<f32> {
        values.iter().map(|v| v.to_f32()).collect()
    }
    match view.info.dtype {
        StoredDType::F32 => view.to_vec::<f32>().unwrap(),
        StoredDType::F16 => widened(&view.to_vec::<f16>().unwrap()),
        StoredDType::BF16 => widened(&view.to_vec::<bf16>().unwrap()),
        other => panic!("{other}"),
    }
}

/// The weight of a model's one quantized layer in f32, by decompressing the model.
fn decompressed(reader: Reader) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    Convert::new(reader).run(&out, Decompress).unwrap();
    floats(&Reader::open(out).unwrap(), "layer.weight")
}

/// Every fixture, and what its weight is here: the type of the values, and whether it is compressed.
const MODELS: [(&str, &str, bool); 20] = [
    ("bitmask-any", "BF16", false),
    ("bitmask-bf16", "BF16", true),
    ("bitmask-f16", "F16", true),
    ("bitmask-f32", "F32", true),
    ("pack-int4", "I4", true),
    ("pack-int4-group", "I4", true),
    ("pack-int4-group32", "BF16", true),
    ("pack-int4-dense", "BF16", false),
    ("pack-int8", "I8", true),
    ("pack-int8-group", "I8", true),
    ("marlin-int4", "I4", true),
    ("marlin-int4-group", "I4", true),
    ("marlin-int4-group-256", "I4", true),
    ("marlin-int8", "I8", true),
    ("int8", "I8", true),
    ("int8-bitmask", "I8", true),
    ("fp8", "BF16", true),
    ("fp8-tensor", "BF16", true),
    ("fp8-bitmask", "BF16", true),
    ("fp8-dense", "BF16", false),
];

#[test]
fn weights_are_those_that_compressed_tensors_decompresses_to() {
    for (name, dtype, is_compressed) in MODELS {
        let reader = open(&fixture(name));
        assert_eq!(reader.translation().weights.values().sum::<usize>(), 1, "{name}");
        match reader.compressed_info("layer.weight") {
            Ok(info) => assert_eq!((info.format.name(), true), (dtype, is_compressed), "{name}"),
            Err(_) => {
                let found = reader.tensor("layer.weight").unwrap().info.dtype.name();
                assert_eq!((found, false), (dtype, is_compressed), "{name}");
            }
        }
        assert!(reader.tensor("layer.bias").is_ok() && reader.tensor("layer.weight_scale").is_err(), "{name}");
        let expected = Reader::open(fixture(name).join("dense.safetensors")).unwrap();
        let dtype = expected.tensor("layer.weight").unwrap().info.dtype;
        let ours: Vec<f32> = decompressed(reader)
            .into_iter()
            .map(|value| match dtype {
                StoredDType::F16 => f16::from_f32(value).to_f32(),
                StoredDType::BF16 => bf16::from_f32(value).to_f32(),
                _ => value,
            })
            .collect();
        assert_eq!(ours, floats(&expected, "layer.weight"), "{name}");
    }
}

/// The names and bytes of a file's tensors.
fn tensors(path: &Path) -> BTreeMap<String, (StoredDType, Vec<usize>, Vec<u8>)> {
    let reader = Reader::open(path).unwrap();
    let bytes = |name: &str| reader.tensor(name).unwrap().bytes().unwrap().to_vec();
    let found = reader.tensors();
    found.map(|info| (info.name.clone(), (info.dtype, info.shape.clone(), bytes(&info.name)))).collect()
}

/// A directory of a fixture's model alone.
fn directory(folder: &Path, name: &str) -> PathBuf {
    let input = folder.join(name);
    fs::create_dir(&input).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), input.join(file)).unwrap();
    }
    input
}

fn export(input: &Path, out: &Path, format: ExportFormat) -> Result<()> {
    let reader = Reader::open(input)?.translated()?;
    let which = |tensor: &super::super::TensorInfo| tensor.name == "layer.weight";
    Convert::new(reader).overwrite(Overwrite::Yes).run(out, Export::new(format, &which)).map(drop)
}

#[test]
fn what_is_written_is_what_compressed_tensors_wrote() {
    let folder = tempfile::tempdir().unwrap();
    for (name, format) in [
        ("bitmask-bf16", ExportFormat::Sparse24Bitmask),
        ("bitmask-f16", ExportFormat::Sparse24Bitmask),
        ("bitmask-f32", ExportFormat::Sparse24Bitmask),
        ("pack-int4", ExportFormat::PackQuantized),
        ("pack-int4-group", ExportFormat::PackQuantized),
        ("pack-int8", ExportFormat::PackQuantized),
        ("pack-int8-group", ExportFormat::PackQuantized),
        ("int8", ExportFormat::IntQuantized),
        ("fp8", ExportFormat::FloatQuantized),
        ("fp8-dense", ExportFormat::FloatQuantized),
        ("marlin-int4", ExportFormat::Marlin24),
        ("marlin-int4-group", ExportFormat::Marlin24),
        ("marlin-int8", ExportFormat::Marlin24),
    ] {
        let input = directory(folder.path(), name);
        let out = folder.path().join("out");
        export(&input, &out, format).unwrap();
        let (mut theirs, mut ours) =
            (tensors(&input.join("model.safetensors")), tensors(&out.join("model.safetensors")));
        // Scales are bf16 there and exact in a wider type here.
        for found in [&mut theirs, &mut ours] {
            found.remove("layer.weight_scale");
        }
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name}");
        // Zeros have no sign here.
        if format == ExportFormat::FloatQuantized {
            let codes = theirs.get_mut("layer.weight").map(|(_, _, codes)| codes);
            codes.into_iter().flatten().filter(|code| **code == 0x80).for_each(|code| *code = 0);
        }
        for (key, theirs) in theirs {
            assert!(ours[&key] == theirs, "{name}, {key}");
        }
        // And the config.json says what theirs says.
        let config =
            |path: &Path| -> Value { serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap() };
        let (ours, theirs) = (config(&out), config(&input));
        let (ours, theirs) = (&ours["quantization_config"], &theirs["quantization_config"]);
        assert_eq!(ours["quant_method"], theirs["quant_method"]);
        if format == ExportFormat::Sparse24Bitmask {
            for field in ["format", "sparsity_structure", "targets"] {
                assert_eq!(ours["sparsity_config"][field], theirs["sparsity_config"][field], "{name}");
            }
            assert_eq!(ours["sparsity_config"]["ignore"], json!(["head", "lm_head"]));
        } else {
            assert!(ours.get("sparsity_config").is_none());
            assert_eq!(ours["format"], theirs["format"]);
            let weights = &theirs["config_groups"]["group_0"]["weights"];
            for (field, value) in ours["config_groups"]["group_0"]["weights"].as_object().unwrap() {
                assert_eq!(value, &weights[field], "{name}, {field}");
            }
        }
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_weight_comes_back_from_every_format_that_holds_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut written, mut rounded) = (0, 0);
    for (name, _, is_compressed) in MODELS {
        let input = directory(folder.path(), name);
        let canonical = folder.path().join("canonical.safetensors");
        Convert::new(open(&fixture(name))).overwrite(Overwrite::Yes).run(&canonical, Unchanged).unwrap();
        for format in ExportFormat::ALL {
            let out = folder.path().join(format!("{name}-{format}"));
            let answer = export(&input, &out, format);
            if format == ExportFormat::FloatQuantized {
                // It rounds: what it has written, it has rounded already.
                let Ok(()) = answer else { continue };
                let again = folder.path().join(format!("again of {name}"));
                let back = folder.path().join(format!("floats of {name}"));
                Convert::new(Reader::open(&out).unwrap().translated().unwrap()).run(&back, Decompress).unwrap();
                export(&back, &again, format).unwrap();
                let of = |out: &Path| tensors(&out.join("model.safetensors"))["layer.weight"].clone();
                assert!(of(&again) == of(&out), "{name}");
                rounded += 1;
                continue;
            }
            if !is_compressed {
                assert!(answer.unwrap_err().to_string().contains("weight"), "{name}");
                continue;
            }
            let Err(error) = answer else {
                written += 1;
                let back = Reader::open(out.join("model.safetensors")).unwrap().translated().unwrap();
                let before = Reader::open(&canonical).unwrap();
                let format_of = |reader: &Reader| reader.compressed_info("layer.weight").unwrap().format;
                assert_eq!(format_of(&back), format_of(&before), "{name} by {format}");
                assert_eq!(decompressed(back), decompressed(before), "{name} by {format}");
                continue;
            };
            assert!(!out.exists(), "{name} by {format}");
            let text = error.to_string();
            let reasons = [
                "quantize the model first",
                "it is in 4 bits",
                "has scales",
                "multiple of",
                "disagree",
                "does not hold all",
            ];
            assert!(reasons.iter().any(|reason| text.contains(reason)) && text.contains("layer.weight"), "{text}");
        }
    }
    assert_eq!((written, rounded), (28, 10));
}

#[test]
fn dense_integers_and_floats_of_eight_bits_are_written_with_a_scale_for_each_row() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("own");
    fs::create_dir(&input).unwrap();
    fs::write(input.join("config.json"), "{}").unwrap();
    let path = input.join("model.safetensors");
    let write = |plan: Vec<PlannedTensor>, parts: &[(&str, Vec<u8>)]| {
        let mut writer = Writer::create(&path, Overwrite::Yes, plan, BTreeMap::new()).unwrap();
        parts.iter().for_each(|(name, bytes)| writer.write(name, bytes).unwrap());
        writer.finish().unwrap();
    };
    let out = |name: &str| folder.path().join(name);
    let plan = vec![
        PlannedTensor::new("layer.weight", StoredDType::I8, [2, 4]),
        PlannedTensor::new("layer.weight.scales", StoredDType::F32, [2]),
    ];
    let (integers, scales) = (vec![1, 2, 3, 255, 4, 0, 6, 7], bytemuck::cast_slice(&[0.5f32, 0.25]).to_vec());
    write(plan, &[("layer.weight", integers.clone()), ("layer.weight.scales", scales.clone())]);
    export(&input, &out("int"), ExportFormat::IntQuantized).unwrap();
    let found = tensors(&out("int").join("model.safetensors"));
    assert_eq!(found["layer.weight"], (StoredDType::I8, vec![2, 4], integers));
    assert_eq!(found["layer.weight_scale"], (StoredDType::F32, vec![2, 1], scales));
    let refused = export(&input, &out("float"), ExportFormat::FloatQuantized).unwrap_err().to_string();
    assert!(refused.contains("layer.weight") && !out("float").exists(), "{refused}");

    let floats = [448.0f32, -1.0, 0.0, -0.0, 0.0, 0.0, 0.0, 0.0];
    let plan = vec![PlannedTensor::new("layer.weight", StoredDType::F32, [2, 4])];
    write(plan.clone(), &[("layer.weight", bytemuck::cast_slice(&floats).to_vec())]);
    export(&input, &out("float"), ExportFormat::FloatQuantized).unwrap();
    let found = tensors(&out("float").join("model.safetensors"));
    assert_eq!(found["layer.weight"].2, [0x7E, 0xB8, 0, 0, 0, 0, 0, 0]);
    assert_eq!(found["layer.weight_scale"].2, bytemuck::cast_slice::<f32, u8>(&[1.0, 1.0]));
    let config: Value = serde_json::from_slice(&fs::read(out("float").join("config.json")).unwrap()).unwrap();
    let group = &config["quantization_config"]["config_groups"]["group_0"];
    assert_eq!(
        (&group["weights"]["type"], &group["input_activations"]["strategy"]),
        (&json!("float"), &json!("token"))
    );
    let mut broken = floats;
    broken[5] = f32::NAN;
    write(plan, &[("layer.weight", bytemuck::cast_slice(&broken).to_vec())]);
    let refused = export(&input, &out("broken"), ExportFormat::FloatQuantized).unwrap_err().to_string();
    assert!(refused.contains("layer.weight") && refused.contains("row 1, column 1"), "{refused}");
}

#[test]
fn the_configuration_follows_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let input = directory(folder.path(), "fp8-bitmask");
    let config =
        |path: &Path| -> Value { serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap() };
    let convert = || Convert::new(Reader::open(&input).unwrap().translated().unwrap());
    let (dense, packed) = (folder.path().join("dense"), folder.path().join("packed"));
    convert().run(&dense, Decompress).unwrap();
    assert_eq!(config(&dense), json!({"model_type": "fixture"}));
    let compress = || Compress { not_sparse: NotSparse::KeepDense, ..Compress::default() };
    convert().run(&packed, compress()).unwrap();
    assert_eq!(config(&packed)["quantization_config"]["quant_method"], "twofour");
    let weight = Reader::open(&packed).unwrap().compressed::<bf16>("layer.weight").unwrap();
    assert_eq!((weight.rows(), weight.cols()), (8, 64));
}

/// A tensor of a made file: name, type, shape, bytes.
type Made<'a> = (&'a str, StoredDType, &'a [usize], Vec<u8>);

fn refusal(made: &[Made<'_>]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let plan: Vec<_> = made.iter().map(|(name, dtype, shape, _)| PlannedTensor::new(*name, *dtype, *shape)).collect();
    let mut writer = Writer::create(&path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    for (name, _, _, bytes) in made {
        writer.write(name, bytes).unwrap();
    }
    writer.finish().unwrap();
    match Reader::open(&path).unwrap().translated() {
        Err(error) => error.to_string(),
        Ok(reader) => format!("{:?}", reader.translation()),
    }
}

#[test]
fn what_no_format_allows_is_named_with_its_weight() {
    use StoredDType::{BF16, F8E4M3, F16, F32, I8, I16, I32, I64, U8};
    let sizes = |sizes: [i64; 2]| bytemuck::cast_slice(&sizes).to_vec();
    let integers = |values: &[i32]| bytemuck::cast_slice(values).to_vec();
    let one = |made: Vec<Made<'_>>, expected: &str| {
        let text = refusal(&made);
        assert!(text.contains(expected) && text.contains("m.weight"), "{expected}: {text}");
    };
    let bitmask = |shape: [i64; 2], bits: u8| {
        vec![
            ("m.compressed", BF16, &[1, 4][..], vec![0; 8]),
            ("m.bitmask", U8, &[1, 1][..], vec![bits]),
            ("m.shape", I64, &[2, 1][..], sizes(shape)),
        ]
    };
    one(bitmask([1, 8], 0b0111_0001), "3 non-zeros");
    one(bitmask([1, 8], 0b0011_0001), "expected 3 elements, found 4");
    one(bitmask([2, 8], 0b0011_0011), "bitmask bytes");
    one(bitmask([1 << 40, 1 << 40], 0), "more elements");
    one(bitmask([-1, 8], 0), "no shape of a matrix");
    let any = |bits: u8, offset: i64| {
        let mut made = bitmask([1, 8], bits);
        made.push(("m.row_offsets", I64, &[1][..], offset.to_le_bytes().to_vec()));
        made
    };
    assert!(refusal(&any(0b0001_0111, 0)).contains("sparse-bitmask"));
    one(any(0b0011_0111, 0), "column 5: it has no value");
    one(any(0b0000_0111, 0), "4 values, and 3 bits");
    one(any(0b0001_0111, 1), "row offset is not 0");
    one([bitmask([1, 8], 0x33), vec![("m.weight_scale", F32, &[1][..], vec![0; 4])]].concat(), "no type of eight bits");
    let pack = |shape: [i64; 2], scales: &'static [usize]| {
        vec![
            ("m.weight_packed", I32, &[1, 1][..], vec![0x88; 4]),
            ("m.weight_scale", F32, scales, [0, 0, 0x80, 0x3F].repeat(scales.iter().product())),
            ("m.weight_shape", I64, &[2][..], sizes(shape)),
        ]
    };
    one(pack([1, 12], &[1, 1]), "not that of [1, 12] in 4 or 8 bits");
    one(pack([1, 8], &[1, 3]), "do not divide [1, 8]");
    one(pack([1, 8], &[2, 1]), "do not divide");
    let with = |part: Made<'static>| [pack([1, 8], &[1, 2]), vec![part]].concat();
    one(with(("m.weight_zero_point", I32, &[1, 1], vec![0; 4])), "zero points");
    one(with(("m.weight_g_idx", I32, &[8], integers(&[0, 1, 0, 1, 0, 1, 0, 1]))), "act-order");
    assert!(
        refusal(&with(("m.weight_g_idx", I32, &[8], integers(&[0, 0, 0, 0, 1, 1, 1, 1])))).contains("pack-quantized")
    );
    let naive = |dtype, value: u8, scale: f32| {
        vec![
            ("m.weight", dtype, &[1, 4][..], vec![value, 0, 0, value]),
            ("m.weight_scale", F32, &[1, 1][..], scale.to_le_bytes().to_vec()),
        ]
    };
    one(naive(F8E4M3, 0x7F, 1.0), "row 0, column 0: NaN");
    one(naive(F8E4M3, 0x78, f32::MAX), "infinite");
    one(naive(I8, 1, f32::INFINITY), "scale 0");
    one([naive(I8, 1, 1.0), vec![("m.weight_zero_point", I8, &[1, 1][..], vec![3])]].concat(), "not all 0");
    let quiet = [naive(I8, 1, 1.0), vec![("m.input_scale", F32, &[1][..], vec![0; 4])]].concat();
    assert!(refusal(&quiet).contains("m.input_scale"), "{}", refusal(&quiet));
    let marlin = |packed: &'static [usize], meta: &'static [usize], scales: &'static [usize], code: u8| {
        let bytes = |shape: &[usize], size: usize| shape.iter().product::<usize>() * size;
        vec![
            ("m.B_24", I32, packed, vec![0; bytes(packed, 4)]),
            ("m.B_meta", I16, meta, vec![code; bytes(meta, 2)]),
            ("m.s", F16, scales, vec![0; bytes(scales, 2)]),
        ]
    };
    one(marlin(&[1, 128], &[1, 128], &[1, 64], 0), "metadata code 0x0");
    one(marlin(&[1, 128], &[1, 128], &[2, 64], 0x44), "2 scales of a row of 32 columns");
    one(marlin(&[1, 100], &[1, 128], &[1, 64], 0x44), "not those of one weight");
    one(marlin(&[1, 64], &[1, 64], &[1, 32], 0x44), "multiple of 64");
    assert!(refusal(&marlin(&[1, 128], &[1, 128], &[1, 64], 0x44)).contains("gptq-marlin-24"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn damaged_models_are_errors_or_sound_weights(
        model in 0usize..MODELS.len(),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = fs::read(fixture(MODELS[model].0).join("model.safetensors")).unwrap();
        for (place, value) in damage {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Ok(reader) = Reader::from_bytes("input", bytes).and_then(Reader::translated) {
            for info in reader.tensors() {
                let found = reader.tensor(&info.name).unwrap().bytes();
                prop_assert!(found.is_ok_and(|found| found.len() == info.bytes), "{info:?}");
            }
            for info in reader.compressed_weights() {
                let is_sound = match info.format {
                    ValueFormat::Int4(_) => reader.int4(&info.name).is_ok(),
                    ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => reader.int8(&info.name).is_ok(),
                    ValueFormat::Plain(DataType::F32) => reader.compressed::<f32>(&info.name).is_ok(),
                    ValueFormat::Plain(DataType::F16) => reader.compressed::<f16>(&info.name).is_ok(),
                    ValueFormat::Plain(DataType::BF16) => reader.compressed::<bf16>(&info.name).is_ok(),
                    _ => true,
                };
                prop_assert!(is_sound, "{info:?}");
            }
        }
    }
}
