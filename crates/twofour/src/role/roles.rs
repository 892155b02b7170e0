//! The rules.

use std::collections::{HashMap, HashSet};

use super::{
    Kernel, Layout, Role,
    layout::Layouts,
    name::{self, Modules, Place},
    stacked::{Stacks, is_stacked},
};

/// What is known of a model before its tensors are told apart one by one.
#[derive(Debug, Clone, Default)]
pub struct Roles {
    /// Whether it has repeated layers.
    has_layers: bool,
    /// Elements of each `*.bias`, by the name of its module.
    biases: HashMap<String, usize>,
    /// The number of experts in each module that has some, where it is known.
    experts: HashMap<String, usize>,
    /// The first dimensions of the tensors of three dimensions in each module.
    stacks: HashMap<String, HashSet<usize>>,
    /// The shape of the largest table outside of the repeated layers: that of the tokens.
    tokens: Option<[usize; 2]>,
    /// Modules with a decay.
    decays: HashSet<String>,
    layouts: Layouts,
    stacked: Stacks,
}

impl Roles {
    /// Looks at names and shapes. `names_conv1d` is set for a model type whose layers are transformers' `Conv1D`; it
    /// counts where no bias tells how weights are stored.
    ///
    /// ```
    /// use twofour::role::{Layout, Role, Roles};
    /// let tensors: [(&str, &[usize]); 5] = [
    ///     ("wte.weight", &[50257, 768]),
    ///     ("h.0.mlp.c_fc.weight", &[768, 3072]),
    ///     ("h.0.mlp.c_fc.bias", &[3072]),
    ///     ("h.0.attn.c_proj.weight", &[768, 768]),
    ///     ("h.0.attn.c_proj.bias", &[768]),
    /// ];
    /// let roles = Roles::new(tensors, false);
    /// assert_eq!(roles.of("wte.weight", &[50257, 768]), Role::Embedding);
    /// assert_eq!(roles.of("h.0.attn.c_proj.weight", &[768, 768]), Role::Linear);
    /// assert_eq!(roles.layout("h.0.attn.c_proj.weight", &[768, 768]), Some(Layout::InOut));
    /// ```
    pub fn new<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>, names_conv1d: bool) -> Self {
        let tensors: Vec<(&str, &[usize])> = tensors.into_iter().collect();
        let mut roles = Roles { layouts: Layouts::new(names_conv1d), ..Roles::default() };
        let mut numbers: HashMap<String, HashSet<&str>> = HashMap::new();
        for (name, shape) in &tensors {
            roles.has_layers |= name::is_in_a_layer(name);
            let parts: Vec<&str> = name.split('.').collect();
            if let (Some(module), [elements]) = (name.strip_suffix(".bias"), shape) {
                roles.biases.insert(module.to_owned(), *elements);
            }
            if let Some((&last, module)) = parts.split_last()
                && DECAYS.contains(&last)
            {
                roles.decays.insert(module.join("."));
            }
            if let [stacked, _, _] = shape {
                let around = parts.len().saturating_sub(if parts.last() == Some(&"weight") { 2 } else { 1 });
                roles.stacks.entry(parts[..around].join(".")).or_default().insert(*stacked);
            }
            if let Some(i) = parts.iter().position(|part| part.contains("expert")) {
                let around = parts[..i].join(".");
                let count = roles.experts.entry(around.clone()).or_default();
                if let [stacked, _, _] = shape {
                    *count = *stacked;
                }
                if let Some(number) = parts.get(i + 1).filter(|part| name::is_number(part)) {
                    numbers.entry(around).or_default().insert(number);
                }
            }
        }
        for (around, numbers) in numbers {
            roles.experts.insert(around, numbers.len());
        }
        for (name, shape) in &tensors {
            if let (Some(modules), &[rows, cols]) = (Modules::of_weight(name), *shape) {
                let is_table = modules.place() == Place::Outside && by_name(&modules) == Some(Role::Embedding);
                if is_table && roles.tokens.is_none_or(|[most, _]| most < rows) {
                    roles.tokens = Some([rows, cols]);
                }
                roles.layouts.add(&modules, roles.bias_of(name), [rows, cols]);
            }
        }
        roles.stacked = Stacks::of(&tensors, roles.tokens.map(|[_, width]| width));
        roles
    }

    /// How a weight of that name and shape is stored, if it is a linear layer's or a convolution's, or each matrix of
    /// [`Role::StackedExperts`]; `None` for a shape that these do not have, for a transposed convolution, and where
    /// neither biases nor shapes tell it of experts.
    ///
    /// ```
    /// use twofour::role::{Layout, Role, Roles};
    /// let tensors: [(&str, &[usize]); 3] = [
    ///     ("layers.0.mlp.router.weight", &[8, 64]),
    ///     ("layers.0.mlp.experts.gate_up_proj", &[8, 64, 192]),
    ///     ("layers.0.mlp.experts.down_proj", &[8, 96, 64]),
    /// ];
    /// let roles = Roles::new(tensors, false);
    /// assert_eq!(roles.of("layers.0.mlp.experts.down_proj", &[8, 96, 64]), Role::StackedExperts);
    /// assert_eq!(roles.layout("layers.0.mlp.experts.down_proj", &[8, 96, 64]), Some(Layout::InOut));
    /// ```
    pub fn layout(&self, name: &str, shape: &[usize]) -> Option<Layout> {
        let &[rows, cols] = shape else {
            return match Kernel::of_weight(name, shape) {
                Some(_) => (!self.is_transposed(name, shape)).then_some(Layout::Convolution),
                None if is_stacked(name, shape) => self.stacked.layout(name),
                None => None,
            };
        };
        let Some(modules) = Modules::of_weight(name) else { return Some(Layout::OutIn) };
        Some(self.layouts.of(&modules, self.bias_of(name), [rows, cols]))
    }

    /// Whether the bias tells that a convolution's weight is `[in_channels, out_channels, *kernel]`.
    fn is_transposed(&self, name: &str, shape: &[usize]) -> bool {
        let &[first, second, ..] = shape else { return false };
        first != second && self.bias_of(name) == Some(second)
    }

    /// What a tensor of the model is for.
    pub fn of(&self, name: &str, shape: &[usize]) -> Role {
        let Some(modules) = Modules::of_weight(name) else {
            return if is_stacked(name, shape) { Role::StackedExperts } else { Role::Parameter };
        };
        let &[rows, cols] = shape else {
            return match shape {
                [_] if is_norm(modules.last()) => Role::Norm,
                _ if is_stacked(name, shape) => Role::StackedExperts,
                _ => self.of_convolution(&modules, name, shape),
            };
        };
        if modules.iter().any(|part| part.starts_with("lora_")) {
            return Role::Adapter;
        }
        if self.is_router(&modules, rows) {
            return Role::Router;
        }
        if is_norm(modules.last()) || (is_norm(modules.parent()) && ["scale", "shift"].contains(&modules.last())) {
            return Role::Norm;
        }
        let has_bias = self.bias_of(name).is_some();
        if !has_bias && is_table(modules.last()) {
            return Role::Embedding;
        }
        let is_inside = matches!(modules.place(), Place::Inside(_));
        match (is_inside, by_name(&modules)) {
            (true, _) if self.is_recurrent(&modules) => Role::Recurrence,
            (true, _) if self.has_single_output(name, shape) => Role::SingleOutput,
            (true, _) => Role::Linear,
            (false, Some(role)) => role,
            (false, None) if self.has_layers && self.tokens == Some([rows, cols]) => Role::Head,
            (false, None) if self.has_layers => Role::Outside,
            (false, None) => Role::Linear,
        }
    }

    fn of_convolution(&self, modules: &Modules<'_>, name: &str, shape: &[usize]) -> Role {
        let Some(kernel) = Kernel::of_weight(name, shape) else { return Role::NotAMatrix };
        if modules.iter().any(|part| part.starts_with("lora_")) {
            return Role::Adapter;
        }
        if is_norm(modules.last()) {
            return Role::Norm;
        }
        if self.is_transposed(name, shape) || modules.iter().any(upsamples) {
            return Role::Upsampling;
        }
        match (matches!(modules.place(), Place::Inside(_)), by_name(modules)) {
            (false, Some(role)) => role,
            (false, None) if self.has_layers => Role::Outside,
            _ if !kernel.in_channels().is_multiple_of(4) => Role::FewChannels,
            _ if kernel.rows() == 1 => Role::SingleOutput,
            _ => Role::Convolution,
        }
    }

    fn has_single_output(&self, name: &str, shape: &[usize]) -> bool {
        let &[rows, cols] = shape else { return false };
        self.layout(name, shape).is_some_and(|layout| layout.features([rows, cols])[0] == 1)
    }

    fn bias_of(&self, weight: &str) -> Option<usize> {
        self.biases.get(weight.strip_suffix(".weight")?).copied()
    }

    fn is_router(&self, modules: &Modules<'_>, rows: usize) -> bool {
        let is_gate_of_experts = |part: &str| part.contains("expert") && part.ends_with("gate");
        if modules.iter().any(|part| part.contains("router") || is_gate_of_experts(part)) {
            return true;
        }
        modules.with_prefixes().any(|(around, part)| {
            let experts = self.experts.get(&around).copied();
            let scores_experts =
                part == modules.last() && rows > 1 && experts == Some(rows) && !part.contains("expert");
            let is_stacked = || self.stacks.get(&around).is_some_and(|counts| counts.contains(&rows));
            let holds_experts = || experts.is_some() || around.ends_with("moe") || is_stacked();
            scores_experts || (["gate", "gating"].contains(&part) && holds_experts())
        })
    }

    fn is_recurrent(&self, modules: &Modules<'_>) -> bool {
        let around = modules.with_prefixes().last().map(|(around, _)| around).unwrap_or_default();
        let last = modules.last();
        EXPONENTIATED.contains(&last) || (OF_DECAYS.contains(&last) && self.decays.contains(&around))
    }
}

/// Parameters of a recurrence that are exponentiated.
const DECAYS: [&str; 3] = ["A_log", "A", "dt_bias"];

/// Linear layers beside them that compute step size, decay, or what is written to the state.
const OF_DECAYS: [&str; 11] = [
    "x_proj",
    "dt_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "a_proj",
    "b_proj",
    "ba_proj",
    "f_proj",
    "f_a_proj",
    "f_b_proj",
];

/// Gates of xLSTM, exponentiated themselves.
const EXPONENTIATED: [&str; 2] = ["igate_preact", "fgate_preact"];

fn is_norm(module: &str) -> bool {
    let module = module.to_ascii_lowercase();
    module.contains("norm")
        || module == "ln"
        || module == "bn"
        || module.starts_with("ln_")
        || module.starts_with("bn_")
}

/// Whether a module without a bias is a table by its name.
fn is_table(module: &str) -> bool {
    let module = module.to_ascii_lowercase();
    module.contains("emb") || module.contains("codebook") || module.ends_with("bias") || module.ends_with("_token")
}

/// Whether a module makes its input larger, as transposed convolutions do.
fn upsamples(module: &str) -> bool {
    const PARTS: [&str; 6] = ["transpos", "deconv", "upconv", "upsampl", "upscal", "resize"];
    let module = module.to_ascii_lowercase();
    module.trim_end_matches(|c: char| c.is_ascii_digit()) == "conv_t" || PARTS.iter().any(|part| module.contains(part))
}

/// Embeddings and heads outside of the repeated layers.
fn by_name(modules: &Modules<'_>) -> Option<Role> {
    const TABLES: [&str; 4] = ["wte", "wpe", "shared", "positions"];
    const HEADS: [&str; 9] =
        ["head", "lm_head", "output", "output_projection", "classifier", "qa_outputs", "score", "proj_out", "logits"];
    // What lies between the last layer and the scores of tokens: BERT's, RoBERTa's and DistilBERT's.
    const WITHIN: [&str; 4] = ["lm_head", "predictions", "vocab_transform", "classifier"];
    let parts: Vec<String> = modules.iter().map(str::to_ascii_lowercase).collect();
    if parts.iter().any(|part| part.contains("embed") || TABLES.contains(&part.as_str())) {
        return Some(Role::Embedding);
    }
    let is_head = HEADS.contains(&modules.last()) || parts.iter().any(|part| WITHIN.contains(&part.as_str()));
    is_head.then_some(Role::Head)
}
