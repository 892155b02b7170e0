//! Which tensors of a model commands choose, along which axis, and what they say of the others.

use std::{collections::BTreeMap, fs, path::Path};

use crate::support::{self, Floats, random, run, write};
use safetensors::SafeTensors;

/// Writes a model's directory.
fn model(at: &Path, config: &str, tensors: &[(&str, &[usize])]) {
    fs::create_dir(at).unwrap();
    fs::write(at.join("config.json"), config).unwrap();
    let tensors: Vec<(&str, Floats)> = tensors.iter().map(|(name, shape)| (*name, random(shape))).collect();
    write(&at.join("model.safetensors"), &tensors);
}

/// Prunes a directory `in` to `out` and returns what became of each tensor: the axis of the groups, or why there are
/// none.
fn pruned(at: &Path, options: &[&str]) -> BTreeMap<String, String> {
    let ran = run(at, &[&["prune", "in", "-o", "out", "--force", "--json"], options].concat()).good().json();
    let outcome = |t: &serde_json::Value| t["axis"].as_str().or(t["reason"].as_str()).unwrap().to_owned();
    let tensors = ran["tensors"].as_array().unwrap().iter();
    tensors.map(|t| (t["name"].as_str().unwrap().to_owned(), outcome(t))).collect()
}

/// A matrix of the output, row by row.
fn matrix(at: &Path, name: &str) -> Vec<Vec<f32>> {
    let bytes = fs::read(at.join("out/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    let values: Vec<f32> = view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    values.chunks(*view.shape().last().unwrap()).map(<[f32]>::to_vec).collect()
}

fn is_two_of_four(mut lines: impl Iterator<Item = Vec<f32>>) -> bool {
    lines.all(|line| line.chunks(4).all(|group| group.iter().filter(|value| **value != 0.0).count() <= 2))
}

const GPT2: &[(&str, &[usize])] = &[
    ("transformer.wte.weight", &[64, 16]),
    ("transformer.wpe.weight", &[32, 16]),
    ("transformer.h.0.attn.c_attn.weight", &[16, 48]),
    ("transformer.h.0.attn.c_attn.bias", &[48]),
    ("transformer.h.0.attn.c_proj.weight", &[16, 16]),
    ("transformer.h.0.attn.c_proj.bias", &[16]),
    ("transformer.h.0.mlp.c_fc.weight", &[16, 64]),
    ("transformer.h.0.mlp.c_fc.bias", &[64]),
    ("transformer.h.0.mlp.c_proj.weight", &[64, 16]),
    ("transformer.h.0.mlp.c_proj.bias", &[16]),
    ("score.weight", &[4, 16]),
];

#[test]
fn weights_stored_as_in_out_are_pruned_along_their_columns_and_every_command_says_so() {
    // The configuration is not needed: biases tell.
    for config in [r#"{"model_type": "gpt2"}"#, "{}"] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        model(&at.join("in"), config, GPT2);
        let outcome = pruned(at, &[]);
        for module in ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"] {
            let name = format!("transformer.h.0.{module}.weight");
            assert_eq!(outcome[&name], "column", "{outcome:?}");
            let rows = matrix(at, &name);
            let columns = (0..rows[0].len()).map(|c| rows.iter().map(|row| row[c]).collect());
            assert!(is_two_of_four(columns) && !is_two_of_four(rows.clone().into_iter()), "{name}");
        }
        assert_eq!(outcome["transformer.wte.weight"], "embedding");
        assert_eq!(outcome["score.weight"], "output head");

        let checked = in_one_line(&run(at, &["check", "out"]).good().stdout);
        assert!(checked.contains("yes, along columns: stored [in, out]"), "{checked}");
        let checked = run(at, &["check", "out", "--json"]).good().json();
        assert!(checked["tensors"].as_array().unwrap().iter().all(|t| t["reduction"] == "column"), "{checked}");
        assert_eq!(run(at, &["check", "out", "--axis", "row"]).code, Some(1));
        let seen = in_one_line(&run(at, &["inspect", "out"]).good().stdout);
        assert_eq!(seen.matches("stored [in, out]").count(), 4, "{seen}");
        let measure = ["advise", "in", "--tokens", "1", "--budget", "0.001", "--threads", "1", "--json"];
        let advised = run(at, &measure).json();
        let shapes = advised["shapes"].as_array().unwrap().iter().map(|s| (s["out"].as_u64(), s["in"].as_u64()));
        let expected = [(16, 16), (16, 64), (48, 16), (64, 16)].map(|(out, inputs)| (Some(out), Some(inputs)));
        assert!(shapes.eq(expected), "{advised}");

        for command in
            [&["compress", "out"][..], &["compress", "in", "--prune"], &["quantize", "out", "--dtype", "int8"]]
        {
            let message = run(at, &[command, &["-o", "small"]].concat()).bad(1);
            assert!(
                message.contains("4 weights of linear layers are stored as [in_features, out_features]"),
                "{message}"
            );
            assert!(!at.join("small").exists());
        }
    }
}

/// A table's text without the line breaks that its width asks for.
fn in_one_line(table: &str) -> String {
    table.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_layer_stored_in_out_among_others_is_left_dense_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let mut tensors = GPT2.to_vec();
    tensors.push(("encoder.layers.0.fc1.weight", &[64, 16]));
    model(&at.join("in"), "{}", &tensors);
    assert_eq!(pruned(at, &[])["encoder.layers.0.fc1.weight"], "row");
    for command in [&["compress"][..], &["quantize", "--dtype", "int8"]] {
        let ran = in_one_line(&run(at, &[command, &["out", "-o", "small", "--force"]].concat()).good().stdout);
        assert!(ran.contains("stored as [in, out]"), "{ran}");
    }
    run(at, &["check", "small"]).good();
}

#[test]
fn routers_of_experts_stay_and_gates_of_feed_forward_layers_are_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    model(
        &at.join("in"),
        r#"{"model_type": "some_moe"}"#,
        &[
            ("model.layers.0.mlp.gate.weight", &[32, 16]),
            ("model.layers.0.mlp.up.weight", &[32, 16]),
            ("model.layers.1.mlp.gate.weight", &[8, 16]),
            ("model.layers.1.mlp.experts.0.gate_proj.weight", &[32, 16]),
            ("model.layers.1.mlp.experts.1.gate_proj.weight", &[32, 16]),
            ("model.layers.1.mlp.shared_expert_gate.weight", &[1, 16]),
            ("model.layers.2.block_sparse_moe.gate.weight", &[8, 16]),
            ("model.layers.2.block_sparse_moe.experts.gate_up_proj", &[8, 32, 16]),
            ("model.layers.3.mlp.router.classifier.weight", &[8, 16]),
            ("model.layers.4.ffn.gate.wg.weight", &[2, 16]),
            ("model.layers.4.ffn.experts.0.w1.weight", &[32, 16]),
            ("model.layers.5.moe.scorer.weight", &[3, 16]),
            ("model.layers.5.moe.experts.0.w1.weight", &[32, 16]),
            ("model.layers.5.moe.experts.1.w1.weight", &[32, 16]),
            ("model.layers.5.moe.experts.2.w1.weight", &[32, 16]),
        ],
    );
    let outcome = pruned(at, &[]);
    for (name, outcome) in outcome {
        let expected = match name.as_str() {
            "model.layers.0.mlp.gate.weight" | "model.layers.0.mlp.up.weight" => "row",
            name if name.contains("experts.") => "row",
            _ => "router of experts",
        };
        assert_eq!(outcome, expected, "{name}");
    }
}

#[test]
fn what_lies_outside_of_repeated_layers_stays_and_a_word_in_the_name_of_a_model_decides_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    model(
        &at.join("in"),
        "{}",
        &[
            ("roberta_prelayernorm.encoder.layer.0.attention.self.query.weight", &[16, 16]),
            ("roberta_prelayernorm.encoder.layer.0.attention.output.dense.weight", &[16, 16]),
            ("roberta_prelayernorm.encoder.layer.0.SelfAttention.relative_attention_bias.weight", &[32, 4]),
            ("roberta_prelayernorm.pooler.dense.weight", &[16, 16]),
            ("embedding_model.layers.0.head_mlp.fc1.weight", &[16, 16]),
            ("classifier.dense.weight", &[16, 16]),
            ("multi_modal_projector.linear_1.weight", &[16, 16]),
            ("mask_decoder.iou_token.weight", &[1, 16]),
            ("backbone.layers.0.mixer.A_log", &[16]),
            ("backbone.layers.0.mixer.dt_proj.weight", &[16, 4]),
            ("backbone.layers.0.mixer.in_proj.weight", &[16, 16]),
            ("quantizer.quantizers.0.codebook.weight", &[16, 16]),
        ],
    );
    let outcome = pruned(at, &[]);
    let rows: Vec<&String> = outcome.iter().filter(|(_, outcome)| *outcome == "row").map(|(name, _)| name).collect();
    assert_eq!(
        rows,
        [
            "backbone.layers.0.mixer.in_proj.weight",
            "embedding_model.layers.0.head_mlp.fc1.weight",
            "roberta_prelayernorm.encoder.layer.0.attention.output.dense.weight",
            "roberta_prelayernorm.encoder.layer.0.attention.self.query.weight",
        ]
    );
    assert_eq!(outcome["roberta_prelayernorm.pooler.dense.weight"], "outside the repeated layers");
    assert_eq!(outcome["multi_modal_projector.linear_1.weight"], "outside the repeated layers");
    assert_eq!(outcome["classifier.dense.weight"], "output head");
    assert_eq!(outcome["backbone.layers.0.mixer.dt_proj.weight"], "sets the decay of a recurrent state");
    // Who names a tensor gets it.
    assert_eq!(pruned(at, &["--include", "*pooler*"])["roberta_prelayernorm.pooler.dense.weight"], "row");
    // Other commands choose the same.
    let checked = run(at, &["check", "in", "--json"]).json();
    assert_eq!(checked["tensors"].as_array().unwrap().len(), 4, "{checked}");
}

#[test]
fn a_configuration_that_is_no_json_is_named() {
    let dir = tempfile::tempdir().unwrap();
    model(&dir.path().join("in"), "{", &[("layers.0.up.weight", &[16, 16])]);
    for command in [&["prune", "-o", "out"][..], &["check"], &["inspect"], &["advise"]] {
        let message = run(dir.path(), &[command, &["in"]].concat()).bad(1);
        assert!(message.contains("config.json: the model's configuration is no JSON"), "{message}");
    }
}

/// Writes a directory with one tensor of a type, filled with zeros.
fn of_type(at: &Path, name: &str, dtype: safetensors::Dtype, bytes: usize) {
    fs::create_dir(at).unwrap();
    let data = vec![0; 16 * 16 * bytes];
    let view = safetensors::tensor::TensorView::new(dtype, vec![16, 16], &data).unwrap();
    fs::write(at.join("model.safetensors"), safetensors::serialize([(name, view)], None).unwrap()).unwrap();
}

#[test]
fn weights_that_no_command_can_take_are_named_with_what_to_do() {
    use safetensors::Dtype::{F32, F64, I32};
    for (name, dtype, bytes, expected) in [
        ("model.layers.0.mlp.up_proj.qweight", I32, 4, "another tool packed the weights"),
        ("model.layers.0.mlp.up_proj.weight_packed", I32, 4, "another tool packed the weights"),
        ("base_model.model.layers.0.mlp.up_proj.lora_A.weight", F32, 4, "merge it into its model"),
        ("model.layers.0.mlp.up_proj.weight", F64, 8, "is F64, which cannot be pruned"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        of_type(&dir.path().join("in"), name, dtype, bytes);
        let commands: [&[&str]; 5] = [
            &["prune", "-o", "out"],
            &["compress", "-o", "out"],
            &["quantize", "-o", "out", "--dtype", "int8"],
            &["check"],
            &["advise"],
        ];
        for command in commands {
            let message = run(dir.path(), &[command, &["in"]].concat()).bad(1);
            assert!(message.contains(expected), "{command:?}: {message}");
        }
        assert!(!dir.path().join("out").exists());
        run(dir.path(), &["inspect", "in"]).good();
    }
}

#[test]
fn packed_weights_of_which_the_configuration_says_nothing_are_named_where_a_model_would_run() {
    let fixture = support::fixture("llama");
    for (name, dtype) in [
        ("model.layers.0.self_attn.q_proj.qweight", safetensors::Dtype::I32),
        ("model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4", safetensors::Dtype::U8),
    ] {
        let dir = tempfile::tempdir().unwrap();
        of_type(&dir.path().join("in"), name, dtype, dtype.bitsize() / 8);
        let mut config = support::read_json(fixture.join("config.json"));
        config["num_hidden_layers"] = 1.into();
        fs::write(dir.path().join("in/config.json"), config.to_string()).unwrap();
        fs::copy(fixture.join("tokenizer.json"), dir.path().join("in/tokenizer.json")).unwrap();
        fs::write(dir.path().join("text.txt"), "two of every four").unwrap();
        for command in [&["eval", "in", "--text", "text.txt"][..], &["generate", "in"]] {
            let message = run(dir.path(), command).bad(1);
            assert!(message.contains(name) && message.contains("GPTQ") && message.contains("unquantized"), "{message}");
        }
    }
}

#[test]
fn a_model_without_linear_layers_is_not_pruned_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [("bn1.weight", random(&[8])), ("bn1.bias", random(&[8]))];
    write(&dir.path().join("norms.safetensors"), &tensors);
    let message = run(dir.path(), &["prune", "norms.safetensors", "-o", "out.safetensors"]).bad(1);
    assert!(message.contains("no tensor is a matrix") && message.contains("convolution"), "{message}");
    assert_eq!(support::names(dir.path()), ["norms.safetensors"]);
}

#[test]
fn convolutions_keep_the_two_largest_of_four_input_channels_at_each_position_of_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let shapes: [(&str, &[usize]); 7] = [
        ("stages.0.layers.0.conv.weight", &[6, 8, 3, 2]),
        ("stages.0.layers.0.wide.weight", &[3, 4, 5]),
        ("stages.0.layers.0.cube.weight", &[2, 4, 2, 2, 2]),
        ("stages.0.layers.0.depthwise.weight", &[8, 1, 3, 3]),
        ("stages.0.layers.0.upsample.weight", &[8, 8, 2, 2]),
        ("stages.0.layers.0.experts.weight", &[4, 8, 4]),
        ("stem.weight", &[8, 4, 3, 3]),
    ];
    model(&at.join("in"), "{}", &shapes);
    let outcome = pruned(at, &[]);
    assert_eq!(outcome[shapes[3].0], "a convolution whose input channels are no multiple of 4");
    assert_eq!(outcome[shapes[4].0], "a convolution that upsamples, perhaps a transposed one");
    assert_eq!((&*outcome[shapes[5].0], &*outcome[shapes[6].0]), (SQUARE, EDGE));
    let [before, after] = ["in", "out"].map(|model| fs::read(at.join(model).join("model.safetensors")).unwrap());
    let [before, after] = [&before, &after].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let values = |file: &SafeTensors<'_>, name: &str| -> Vec<f32> {
        let view = file.tensor(name).unwrap();
        view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    for (name, shape) in &shapes[..3] {
        assert_eq!(outcome[*name], "row");
        let (dense, sparse) = (values(&before, name), values(&after, name));
        let positions: usize = shape[2..].iter().product();
        for (dense, sparse) in dense.chunks(4 * positions).zip(sparse.chunks(4 * positions)) {
            for position in 0..positions {
                let group = [0, 1, 2, 3].map(|channel| channel * positions + position);
                let mut largest = group;
                largest.sort_by(|a, b| dense[*b].abs().total_cmp(&dense[*a].abs()));
                for index in group {
                    let expected = if largest[..2].contains(&index) { dense[index] } else { 0.0 };
                    assert_eq!(sparse[index], expected, "{name}");
                }
            }
        }
    }
    for name in outcome.keys().filter(|name| outcome[*name] != "row") {
        assert_eq!(values(&before, name), values(&after, name), "{name}");
    }
    let checked = run(at, &["check", "out", "--json"]).good().json();
    assert_eq!(checked["tensors"].as_array().unwrap().len(), 3, "{checked}");
    assert_eq!(run(at, &["check", "in"]).code, Some(1));
    // Compressed weights are matrices.
    let message = run(at, &["compress", "out", "-o", "small"]).bad(1);
    assert!(message.contains("convolutions are not stored compressed"), "{message}");
    assert!(!at.join("small").exists());
    // Stacked matrices are never taken for a kernel, and few channels are pruned where they are asked for.
    let asked = pruned(at, &["--include", "*experts*", "--include", "*.depthwise.*"]);
    assert_eq!(asked[shapes[5].0], SQUARE);
    assert_eq!(asked[shapes[3].0], "row");
}

const SQUARE: &str = "experts in one 3-D tensor, [out, in] or [in, out]: nothing tells which";
const EDGE: &str = "outside the repeated layers";

#[test]
fn a_tokenizer_whose_library_panics_is_an_error_of_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    support::copy(support::fixture("gpt2"), at);
    let mut tokenizer = support::read_json(at.join("tokenizer.json"));
    tokenizer["pre_tokenizer"] = serde_json::json!({"type": "FixedLength", "length": 0});
    fs::write(at.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let message = run(at, &["generate", ".", "--prompt", "two of four"]).bad(1);
    assert!(message.contains("parts contradict each other") && message.lines().count() == 1, "{message}");
}

#[test]
fn a_tokenizer_that_is_not_there_or_is_a_pointer_is_named_with_what_to_do() {
    let fixture = support::fixture("llama");
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for name in support::names(&fixture).iter().filter(|name| !name.starts_with("tokenizer")) {
        fs::copy(fixture.join(name), at.join(name)).unwrap();
    }
    fs::write(at.join("text.txt"), "two of every four").unwrap();
    fs::write(at.join("tokenizer.model"), "x").unwrap();
    let eval = || run(at, &["eval", ".", "--text", "text.txt"]).bad(1);
    let message = eval();
    assert!(
        message.contains("only tokenizer.model of SentencePiece is") && message.contains("AutoTokenizer"),
        "{message}"
    );
    fs::write(at.join("tokenizer.json"), "version https://git-lfs.github.com/spec/v1\noid sha256:ab\n").unwrap();
    let message = eval();
    assert!(message.contains("tokenizer.json: is a pointer of git lfs"), "{message}");
}

/// Experts of a layer as gpt-oss stores them, with inputs that are no whole groups, and as most others do.
#[test]
fn stacked_experts_are_pruned_and_checked_along_what_they_sum_and_compressed_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let [in_out, out_in] = ["model.layers.0.mlp.experts", "model.layers.1.block_sparse_moe"];
    let [up, down] = ["gate_up_proj", "down_proj"].map(|part| format!("{in_out}.{part}"));
    let [input, output] = ["input_linear", "output_linear"].map(|part| format!("{out_in}.{part}.weight"));
    model(
        &at.join("in"),
        "{}",
        &[
            ("model.layers.0.mlp.router.weight", &[3, 10]),
            (&up, &[3, 10, 24]),
            (&format!("{up}_bias"), &[3, 24]),
            (&down, &[3, 12, 10]),
            ("model.layers.0.self_attn.q_proj.weight", &[16, 10]),
            ("model.layers.1.block_sparse_moe.router.layer.weight", &[3, 10]),
            (&input, &[3, 24, 10]),
            (&output, &[3, 10, 12]),
            ("model.layers.2.mlp.experts.square", &[3, 12, 12]),
            ("model.layers.3.conv.weight", &[8, 1, 3]),
        ],
    );
    let outcome = pruned(at, &[]);
    for (name, rows) in [(&up, 10), (&down, 12)] {
        assert_eq!(outcome[name], "column");
        let stored = matrix(at, name);
        for expert in stored.chunks(rows) {
            assert!(is_two_of_four((0..expert[0].len()).map(|c| expert.iter().map(|row| row[c]).collect())));
        }
        // Of a group two are left, of the last two inputs both.
        let kept = stored.iter().flatten().filter(|value| **value != 0.0).count();
        assert_eq!(kept, 3 * rows.div_ceil(4) * 2 * stored[0].len(), "{name}");
        assert!(!is_two_of_four(stored.into_iter()));
    }
    for name in [&input, &output] {
        assert_eq!(outcome[name], "row");
        assert!(is_two_of_four(matrix(at, name).into_iter()));
    }
    assert_eq!(outcome["model.layers.0.mlp.router.weight"], "router of experts");
    assert_eq!(outcome["model.layers.3.conv.weight"], "a convolution whose input channels are no multiple of 4");
    let square = "experts in one 3-D tensor, [out, in] or [in, out]: nothing tells which";
    assert_eq!(outcome["model.layers.2.mlp.experts.square"], square);
    let checked = run(at, &["check", "out", "--json"]).good().json();
    assert_eq!(checked["tensors"].as_array().unwrap().len(), 5, "{checked}");
    let dense = run(at, &["check", "in", "--json"]).json();
    let of = |tensor: &serde_json::Value| tensor["name"] == up.as_str();
    let places = &dense["tensors"].as_array().unwrap().iter().find(|tensor| of(tensor)).unwrap()["columns"];
    let violations = places["violations"].as_array().unwrap();
    assert!(violations.len() == 3 && violations[0]["expert"] == 0 && places["groups"] == 3 * 3 * 24, "{places}");
    assert!(run(at, &["check", "in", "-v"]).stdout.contains("expert 0, "));

    let answer = run(at, &["compress", "out", "-o", "small", "--json"]).good().json();
    let notes = answer["tensors"].as_array().unwrap().iter().map(|t| (t["name"].as_str(), t["note"].as_str()));
    let notes: BTreeMap<_, _> = notes.collect();
    let of_experts = notes.iter().filter(|(name, note)| {
        let is_expert = |name: &&str| name.contains("experts.") || name.contains("_linear");
        name.as_ref().is_some_and(is_expert) && **note == Some("compressed")
    });
    assert_eq!(of_experts.count(), 4 * 3, "{notes:?}");
    assert_eq!(notes[&Some("model.layers.2.mlp.experts.square")], Some(format!("dense: {square}").as_str()));
    run(at, &["check", "small"]).good();
    run(at, &["decompress", "small", "-o", "again"]).good();
    let [pruned, again] = ["out", "again"].map(|of| fs::read(at.join(of).join("model.safetensors")).unwrap());
    assert!(pruned == again);
    assert_eq!(notes[&Some("model.layers.0.self_attn.q_proj.weight")], Some("compressed"));
    // The library's function chooses the same.
    let library = at.join("library");
    twofour::file::prune(at.join("in"), &library, twofour::Selector::TWO_FOUR).unwrap();
    let [ours, theirs] = [library, at.join("out")].map(|of| fs::read(of.join("model.safetensors")).unwrap());
    assert!(ours == theirs);
}
