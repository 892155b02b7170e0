//! Tensors by kind of layer, for tables that would repeat a row for every block.

/// Groups tensors of one kind of layer that are alike, in the order of the first of each group; every tensor is its own
/// group where `detailed` is set. `key` returns the name and what else must be equal. The label is the name of a single
/// tensor, else the kind with the number of tensors.
pub(crate) fn by_layer<'a, T, K: PartialEq>(
    tensors: &'a [T],
    detailed: bool,
    key: impl Fn(&'a T) -> (&'a str, K),
) -> Vec<(String, Vec<&'a T>)> {
    let mut groups: Vec<(String, K, Vec<&T>)> = Vec::new();
    for tensor in tensors {
        let (name, rest) = key(tensor);
        let kind = if detailed { name.to_owned() } else { kind(name) };
        match groups.iter_mut().find(|(other, own, _)| *other == kind && *own == rest) {
            Some((.., group)) => group.push(tensor),
            None => groups.push((kind, rest, vec![tensor])),
        }
    }
    let labelled = |(kind, _, group): (String, K, Vec<&'a T>)| {
        let label = if group.len() == 1 { key(group[0]).0.to_owned() } else { format!("{kind} ({})", group.len()) };
        (label, group)
    };
    groups.into_iter().map(labelled).collect()
}

/// The name with every part that is a number as `*`: the same for one layer of every block.
fn kind(name: &str) -> String {
    let part = |part: &str| {
        let is_number = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if is_number { "*".to_owned() } else { part.to_owned() }
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_blocks_go_together_unless_they_differ() {
        let tensors =
            [("h.0.up", 1), ("h.0.down", 1), ("h.1.up", 1), ("h.1.down", 2), ("h.2.up", 1), ("head", 1), ("h.x.up", 1)];
        let labels = |detailed| -> Vec<String> {
            by_layer(&tensors, detailed, |t| (t.0, t.1)).into_iter().map(|(label, _)| label).collect()
        };
        assert_eq!(labels(false), ["h.*.up (3)", "h.0.down", "h.1.down", "head", "h.x.up"]);
        assert_eq!(labels(true), tensors.map(|t| t.0));
    }
}
