//! The rules of [`twofour::role`] against the weights of every model type of transformers:
//! `fixtures/transformers/tensors.py` wrote their names, shapes and modules.

use std::collections::{BTreeMap, BTreeSet};

use twofour::role::{Layout, Role, Roles};

/// Kinds of modules, as in the fixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Linear,
    Conv1D,
    Embedding,
    Router,
    Other,
}

struct Tensor {
    name: String,
    kind: Kind,
    shape: Vec<usize>,
    has_bias: bool,
}

/// The model types that are alike, and their tensors.
struct Model<'a> {
    types: &'a str,
    tensors: Vec<Tensor>,
}

fn models() -> Vec<Model<'static>> {
    let mut models: Vec<Model<'static>> = Vec::new();
    let (mut above, mut same): (Vec<String>, Vec<usize>) = (Vec::new(), Vec::new());
    for line in include_str!("fixtures/transformers/tensors.txt").lines().filter(|line| !line.starts_with('#')) {
        if let Some(types) = line.strip_prefix("@ ") {
            models.push(Model { types, tensors: Vec::new() });
            above.clear();
            continue;
        }
        let digits = line.bytes().take_while(u8::is_ascii_digit).count();
        let (name, what) = line[digits..].split_once(' ').unwrap();
        above.truncate(line[..digits].parse().unwrap());
        above.extend(name.split('.').map(|part| part.replace('N', "3").replace("expert_3", "expert_0")));
        let (what, has_bias) = what.strip_suffix('+').map_or((what, false), |what| (what, true));
        let kind = match &what[..1] {
            "L" => Kind::Linear,
            "T" => Kind::Conv1D,
            "E" => Kind::Embedding,
            "R" => Kind::Router,
            _ => Kind::Other,
        };
        if &what[1..] != "=" {
            same = what[1..].split('x').map(|dim| dim.parse().unwrap()).collect();
        }
        let name = above.join(".");
        let name = name.strip_suffix('!').map_or_else(|| format!("{name}.weight"), str::to_owned);
        let tensor = Tensor { name, kind, shape: same.clone(), has_bias };
        models.last_mut().unwrap().tensors.push(tensor);
    }
    models
}

impl Model<'_> {
    /// The rules for this model, from names and shapes alone.
    fn roles(&self) -> Roles {
        let biases: Vec<(String, [usize; 1])> = self
            .tensors
            .iter()
            .filter(|tensor| tensor.has_bias)
            .map(|tensor| {
                let outputs = tensor.shape[usize::from(tensor.kind == Kind::Conv1D)];
                (tensor.name.replace("weight", "bias"), [outputs])
            })
            .collect();
        let biases = biases.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
        Roles::new(self.tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).chain(biases), false)
    }
}

/// Whether the name's modules have a number that a named module follows.
fn is_in_a_list(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    let number = parts.iter().position(|part| *part == "3");
    number.is_some_and(|i| i > 0 && parts[i..parts.len() - 1].iter().any(|part| *part != "3"))
}

/// Every tensor with its role, by what is said of it.
fn each(mut check: impl FnMut(&Model<'_>, &Roles, &Tensor, Role)) {
    for model in models() {
        let roles = model.roles();
        for tensor in &model.tensors {
            check(&model, &roles, tensor, roles.of(&tensor.name, &tensor.shape));
        }
    }
}

#[test]
fn the_fixture_holds_most_model_types() {
    let models = models();
    let types = models.iter().map(|model| model.types.split(' ').count()).sum::<usize>();
    assert!(types > 600, "{types} model types");
    for known in ["llama", "gpt2", "mixtral", "t5", "bert", "qwen3_moe", "deepseek_v3", "mamba", "llava", "sam"] {
        assert!(models.iter().any(|model| model.types.split(' ').any(|own| own == known)), "{known}");
    }
}

#[test]
fn tables_routers_heads_and_other_parameters_are_left_out() {
    let mut wrong = BTreeSet::new();
    each(|model, _, tensor, role| {
        let is_kept = match tensor.kind {
            Kind::Embedding | Kind::Other | Kind::Router => true,
            Kind::Linear | Kind::Conv1D => {
                tensor.name.contains("router")
                    || tensor.name.ends_with("shared_expert_gate.weight")
                    || !is_in_a_list(&tensor.name)
            }
        };
        if is_kept && role == Role::Linear {
            wrong.insert(format!("{}: {} {:?}", model.types, tensor.name, tensor.kind));
        }
        if tensor.kind == Kind::Router && tensor.name.ends_with(".weight") && role != Role::Router {
            wrong.insert(format!("{}: {} is no router but {role}", model.types, tensor.name));
        }
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Linear layers in lists that stay dense, by role: the names of their modules, or of the lists.
const DENSE: [(Role, &[&str]); 6] = [
    (Role::Router, &["gate", "router", "modality_router", "shared_expert_gate"]),
    (
        Role::Recurrence,
        &[
            "a_proj",
            "b_proj",
            "dt_proj",
            "f_a_proj",
            "f_b_proj",
            "f_proj",
            "in_proj_a",
            "in_proj_b",
            "in_proj_ba",
            "x_proj",
            "fgate_preact",
            "igate_preact",
        ],
    ),
    (Role::SingleOutput, &["matchability"]),
    (Role::Embedding, &["bbox_embed", "enc_out_bbox_embed", "timestep_embeddings", "time_embed", "mask_embedder"]),
    (Role::Head, &["output_hypernetworks_mlps"]),
    (
        Role::Outside,
        &[
            "output_hypernetworks_mlps",
            "deepstack_mergers",
            "deepstack_merger_list",
            "merger_list",
            "mlp",
            "linear_projections",
            "token_confidence",
            "readout_projects",
            "decoder_bbox_head",
        ],
    ),
];

#[test]
fn linear_layers_of_repeated_layers_are_pruned_but_for_those_that_are_named_here() {
    let mut wrong: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    each(|model, _, tensor, role| {
        let is_layer = matches!(tensor.kind, Kind::Linear | Kind::Conv1D) && tensor.name.ends_with(".weight");
        if !is_layer || !is_in_a_list(&tensor.name) || role == Role::Linear {
            return;
        }
        let modules = DENSE.iter().find(|(own, _)| *own == role).map_or(&[][..], |(_, modules)| modules);
        let parts: Vec<&str> = tensor.name.split('.').collect();
        if !modules.iter().any(|module| parts.contains(module)) {
            let module = parts[parts.len() - 2].to_owned();
            wrong.entry(format!("{role}: {module}")).or_default().insert(format!("{}: {}", model.types, tensor.name));
        }
    });
    let shown: Vec<String> =
        wrong.iter().map(|(what, names)| format!("{what} ({}) {:?}", names.len(), names.first())).collect();
    assert!(wrong.is_empty(), "{shown:#?}");
}

#[test]
fn weights_of_conv1d_are_stored_in_out_and_those_of_linear_layers_out_in() {
    let mut wrong = BTreeSet::new();
    each(|model, roles, tensor, _| {
        if tensor.shape.len() != 2 {
            return;
        }
        let expected = match tensor.kind {
            Kind::Linear => Layout::OutIn,
            Kind::Conv1D => Layout::InOut,
            _ => return,
        };
        if roles.layout(&tensor.name, &tensor.shape) != Some(expected) {
            wrong.insert(format!("{}: {} {:?}", model.types, tensor.name, tensor.shape));
        }
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_has_the_shape_of_the_table_of_tokens_is_a_head_whatever_its_name() {
    let tensors: [(&str, &[usize]); 6] = [
        ("model.embed_positions.weight", &[32, 16]),
        ("model.embed_tokens.weight", &[96, 16]),
        ("model.layers.0.mlp.up.weight", &[96, 16]),
        ("model.vocabulary_out.weight", &[96, 16]),
        ("codes.0.weight", &[96, 16]),
        ("model.projector.weight", &[32, 16]),
    ];
    let roles = Roles::new(tensors, false);
    let found = tensors.map(|(name, shape)| roles.of(name, shape));
    assert_eq!(found, [Role::Embedding, Role::Embedding, Role::Linear, Role::Head, Role::Head, Role::Outside]);
}

/// Model types of transformers whose stacked experts are `[in, out]`: `is_transposed=True` in their modelling files.
const TRANSPOSED: [&str; 6] = ["aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter"];

#[test]
fn stacked_experts_are_stored_as_their_model_computes_with_them() {
    let (mut wrong, mut untold, mut right) = (BTreeSet::new(), BTreeSet::new(), 0);
    each(|model, roles, tensor, role| {
        if role != Role::StackedExperts {
            return;
        }
        let is_transposed = model.types.split(' ').any(|own| TRANSPOSED.contains(&own));
        let expected = if is_transposed { Layout::InOut } else { Layout::OutIn };
        match roles.layout(&tensor.name, &tensor.shape) {
            Some(found) if found == expected => right += 1,
            Some(_) => _ = wrong.insert(format!("{}: {} {:?}", model.types, tensor.name, tensor.shape)),
            None => _ = untold.insert(format!("{}: {}", model.types, tensor.name)),
        }
    });
    assert!(wrong.is_empty() && right > 120, "{right}, {wrong:#?}");
    // Two square matrices: nothing is guessed.
    let jetmoe = ["input_linear", "output_linear"];
    let jetmoe = jetmoe.map(|name| format!("jetmoe: model.layers.3.self_attention.experts.{name}.weight"));
    assert!(untold.iter().eq(jetmoe.iter()), "{untold:#?}");
}

#[test]
fn biases_and_scales_of_stacked_experts_are_no_experts() {
    let tensors: [(&str, &[usize]); 5] = [
        ("layers.0.mlp.experts.gate_up_proj", &[4, 16, 48]),
        ("layers.0.mlp.experts.gate_up_proj_bias", &[4, 48]),
        ("layers.0.mlp.experts.gate_up_proj_scale", &[4, 1, 48]),
        ("layers.0.mlp.experts.down_proj_weight_scale_inv", &[4, 2, 3]),
        ("layers.0.conv.weight", &[16, 16, 3]),
    ];
    let roles = Roles::new(tensors, false);
    assert_eq!(roles.layout(tensors[0].0, tensors[0].1), Some(Layout::InOut));
    let found = tensors.map(|(name, shape)| roles.of(name, shape));
    let others = [Role::Parameter; 3];
    assert_eq!((found[0], &found[1..4], found[4]), (Role::StackedExperts, &others[..], Role::Convolution));
}

#[test]
fn convolutions_of_models_are_pruned_but_for_depthwise_ones_those_outside_of_layers_and_transposed_ones() {
    type Case<'a> = (&'a str, &'a [usize], Option<usize>, Role, Option<Layout>);
    let cases: [Case<'_>; 13] = [
        // ResNet, CvT, Conformer, EnCodec.
        ("encoder.stages.0.layers.0.layer.0.convolution", &[64, 64, 3, 3], None, Role::Convolution, CONVOLUTION),
        ("encoder.stages.0.layers.0.shortcut.convolution", &[256, 64, 1, 1], None, Role::Convolution, CONVOLUTION),
        ("encoder.layers.0.conv.pointwise_conv1", &[2048, 1024, 1], Some(2048), Role::Convolution, CONVOLUTION),
        ("encoder.layers.0.conv.depthwise_conv", &[1024, 1, 9], Some(1024), Role::FewChannels, CONVOLUTION),
        ("vision.blocks.0.conv3d", &[8, 4, 3, 3, 3], None, Role::Convolution, CONVOLUTION),
        ("decoder.layers.3.conv", &[1024, 512, 16], Some(512), Role::Upsampling, None),
        ("decoder.block.0.conv_t1", &[64, 64, 16], Some(64), Role::Upsampling, CONVOLUTION),
        ("neck.feature_upsample.images.0.layers.0", &[64, 64, 2, 2], None, Role::Upsampling, CONVOLUTION),
        // What reads patches or sound, and what lies outside of the layers.
        ("embeddings.patch_embeddings.projection", &[768, 4, 16, 16], Some(768), Role::Embedding, CONVOLUTION),
        ("encoder.conv2", &[384, 384, 3], Some(384), Role::Outside, CONVOLUTION),
        // Stacks of matrices.
        ("layers.0.block_sparse_moe.input_linear", &[8, 64, 32], None, Role::StackedExperts, None),
        ("layers.0.codebooks_head", &[31, 1024, 2051], None, Role::NotAMatrix, None),
        ("layers.0.grn", &[1, 1, 1, 384], None, Role::FewChannels, CONVOLUTION),
    ];
    let biases: Vec<_> = cases.iter().map(|(name, ..)| format!("{name}.bias")).collect();
    let biases: Vec<_> = cases.iter().zip(&biases).filter_map(|(case, name)| Some((name, [case.2?]))).collect();
    let weights: Vec<_> = cases.iter().map(|(name, ..)| format!("{name}.weight")).collect();
    let tensors = weights.iter().zip(&cases).map(|(name, case)| (name.as_str(), case.1));
    let roles = Roles::new(tensors.chain(biases.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))), false);
    for ((_, shape, _, role, layout), name) in cases.iter().zip(&weights) {
        assert_eq!((roles.of(name, shape), roles.layout(name, shape)), (*role, *layout), "{name}");
    }
    let plain: [(&str, &[usize]); 2] = [("features.0.weight", &[64, 3, 3, 3]), ("features.3.weight", &[64, 64, 3, 3])];
    let roles = Roles::new(plain, false);
    assert_eq!(plain.map(|(name, shape)| roles.of(name, shape)), [Role::FewChannels, Role::Convolution]);
}

const CONVOLUTION: Option<Layout> = Some(Layout::Convolution);
