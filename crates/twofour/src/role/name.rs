//! The dotted names of tensors.

/// The modules that a weight lies in, outermost first, without the `weight` itself.
#[derive(Debug, Clone)]
pub(super) struct Modules<'a> {
    parts: Vec<&'a str>,
}

/// Where a module lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In a repeated layer; so many parts of the name lead to that layer.
    Inside(usize),
    /// In none.
    Outside,
}

impl<'a> Modules<'a> {
    /// The modules of a tensor named `weight` or `*.weight`.
    pub(super) fn of_weight(name: &'a str) -> Option<Self> {
        match name.strip_suffix("weight")? {
            "" => Some(Modules { parts: Vec::new() }),
            modules => Some(Modules { parts: modules.strip_suffix('.')?.split('.').collect() }),
        }
    }

    /// The module that holds the weight.
    pub(super) fn last(&self) -> &'a str {
        self.parts.last().copied().unwrap_or_default()
    }

    /// The module around the last.
    pub(super) fn parent(&self) -> &'a str {
        self.parts.iter().rev().nth(1).copied().unwrap_or_default()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'a str> {
        self.parts.iter().copied()
    }

    /// Every module with the dotted name of what is around it.
    pub(super) fn with_prefixes(&self) -> impl Iterator<Item = (String, &'a str)> {
        self.parts.iter().enumerate().map(|(i, part)| (self.parts[..i].join("."), *part))
    }

    /// The dotted name of the first `count` modules.
    pub(super) fn prefix(&self, count: usize) -> String {
        self.parts[..count.min(self.parts.len())].join(".")
    }

    /// Where the weight lies.
    pub(super) fn place(&self) -> Place {
        place(&self.parts)
    }
}

/// Words in the name of a list of modules that are no layers of the model's body.
const LISTS_AT_THE_ENDS: [&str; 8] = ["embed", "head", "classif", "predict", "confidence", "merger", "proj", "mlps"];

/// Where the module of those parts lies. A layer that is repeated has a number after the name of its list, or at the
/// end of its own name, and holds a module with a name.
fn place(parts: &[&str]) -> Place {
    for (i, part) in parts.iter().enumerate() {
        let list = match is_number(part) {
            true if i > 0 => parts[i - 1],
            false if is_numbered_layer(part) => part,
            _ => continue,
        };
        if !parts[i + 1..].iter().any(|part| !is_number(part)) {
            return Place::Outside;
        }
        if !is_number(list) {
            let list = list.to_ascii_lowercase();
            let is_at_an_end = LISTS_AT_THE_ENDS.iter().any(|word| list.contains(word));
            return if is_at_an_end { Place::Outside } else { Place::Inside(i + 1) };
        }
    }
    Place::Outside
}

/// Whether a tensor of that name, of whatever kind, lies in a repeated layer.
pub(super) fn is_in_a_layer(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    parts.split_last().is_some_and(|(_, modules)| matches!(place(modules), Place::Inside(_)))
}

/// Whether the part is an index.
pub(super) fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())
}

/// Whether the part is a layer with its number, as in `encoder_layer_3` or `layer1`.
fn is_numbered_layer(part: &str) -> bool {
    let name = part.trim_end_matches(|c: char| c.is_ascii_digit());
    let kind = name.trim_end_matches('_');
    name.len() < part.len() && ["layer", "layers", "block", "blocks"].iter().any(|end| kind.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_layers_are_numbered_and_hold_modules_with_names() {
        for (name, expected) in [
            ("model.layers.0.self_attn.q_proj.weight", Place::Inside(3)),
            ("roberta_prelayernorm.encoder.layer.11.output.dense.weight", Place::Inside(4)),
            ("encoder.blocks.0.1.attention.q_head.weight", Place::Inside(3)),
            ("encoder.layers.encoder_layer_0.mlp.3.weight", Place::Inside(3)),
            ("layer1.0.conv1.weight", Place::Inside(1)),
            ("0.auto_model.encoder.layer.2.output.dense.weight", Place::Inside(5)),
            // Sequential modules, heads and what reads patches.
            ("classifier.1.weight", Place::Outside),
            ("bbox_embed.0.layers.1.weight", Place::Outside),
            ("visual.merger.mlp.0.weight", Place::Outside),
            ("deepstack_merger_list.1.linear_fc1.weight", Place::Outside),
            ("mlp.layers.0.weight", Place::Outside),
            ("0.auto_model.pooler.dense.weight", Place::Outside),
            ("head.weight", Place::Outside),
            ("weight", Place::Outside),
        ] {
            assert_eq!(Modules::of_weight(name).unwrap().place(), expected, "{name}");
        }
        assert!(Modules::of_weight("a.qweight").is_none() && Modules::of_weight("a.bias").is_none());
    }
}
