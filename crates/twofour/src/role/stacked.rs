//! Experts of a layer in one tensor of three dimensions: how the matrices in it are stored.

use std::collections::HashMap;

use super::Layout;

/// How each tensor of experts is stored, by name, where something tells it.
///
/// A bias of each expert tells it: it has as many elements as the layer has outputs. Else the two tensors of a module
/// tell it together, since the one of them writes as many features as the other reads. Else the width of the hidden
/// states does, which is that of the router beside the experts, or of the table of tokens. Where one of a module's
/// tensors is square, it is stored as the others are.
#[derive(Debug, Clone, Default)]
pub(super) struct Stacks(HashMap<String, Layout>);

/// A tensor `[experts, rows, cols]`.
#[derive(Debug, Clone, Copy)]
struct Stack<'a> {
    name: &'a str,
    rows: usize,
    cols: usize,
    /// The width of the hidden states, where it is known.
    width: Option<usize>,
    /// Elements of each expert's bias.
    bias: Option<usize>,
}

/// Words in the name of a layer that writes hidden states; the others read them.
const WRITES: [&str; 5] = ["down", "w2", "fc2", "output", "wo"];

/// Words in the name of what belongs to weights and is none.
const NO_WEIGHTS: [&str; 5] = ["bias", "scale", "zero", "norm", "blocks"];

/// The name of the module or parameter that holds the weights.
fn parameter(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Whether a tensor holds the weights of several experts.
pub(super) fn is_stacked(name: &str, shape: &[usize]) -> bool {
    let last = parameter(name).rsplit('.').next().unwrap_or_default();
    shape.len() == 3 && around(name).is_some() && !NO_WEIGHTS.iter().any(|word| last.contains(word))
}

/// The dotted name of the modules around those of experts.
fn around(name: &str) -> Option<&str> {
    let mut end = 0;
    for part in name.split('.') {
        let begin = end;
        end += part.len() + 1;
        if part.contains("expert") {
            return Some(&name[..begin]);
        }
        if part.contains("moe") && !name[end.min(name.len())..].contains("expert") {
            return name.get(..end);
        }
    }
    None
}

impl Stacks {
    /// Those of a model's tensors; `tokens` is the width of the table of tokens.
    pub(super) fn of(tensors: &[(&str, &[usize])], tokens: Option<usize>) -> Self {
        let mut modules: HashMap<&str, Vec<Stack<'_>>> = HashMap::new();
        let shapes: HashMap<&str, &[usize]> = tensors.iter().copied().collect();
        // The widths that routers read, by the module around them and the number of experts.
        let mut routers: HashMap<(&str, usize), Option<usize>> = HashMap::new();
        for (name, shape) in tensors {
            if let (&[experts, width], Some(module)) = (*shape, name.strip_suffix(".weight")) {
                for (at, _) in module.match_indices('.') {
                    let known = routers.entry((&name[..=at], experts)).or_insert(Some(width));
                    *known = known.filter(|known| *known == width);
                }
            }
        }
        for (name, shape) in tensors {
            let (&[experts, rows, cols], true) = (*shape, is_stacked(name, shape)) else { continue };
            let of_bias = |ending: &str| match shapes.get(format!("{}{ending}", parameter(name)).as_str()) {
                Some(&&[count, outputs]) if count == experts => Some(outputs),
                _ => None,
            };
            let width = around(name).and_then(|around| routers.get(&(around, experts)).copied().flatten()).or(tokens);
            let bias = of_bias("_bias").or_else(|| of_bias(".bias"));
            let module = parameter(name).rsplit_once('.').map_or("", |(module, _)| module);
            modules.entry(module).or_default().push(Stack { name, rows, cols, width, bias });
        }
        let mut layouts = HashMap::new();
        for stacks in modules.into_values() {
            let told: Vec<Layout> = stacks.iter().filter_map(|stack| stack.told(&stacks)).collect();
            if let Some(first) = told.first().filter(|first| told.iter().all(|layout| layout == *first)) {
                layouts.extend(stacks.iter().map(|stack| (stack.name.to_owned(), *first)));
            }
        }
        Stacks(layouts)
    }

    /// How a tensor's matrices are stored.
    pub(super) fn layout(&self, name: &str) -> Option<Layout> {
        self.0.get(name).copied()
    }
}

impl Stack<'_> {
    fn writes(&self) -> bool {
        let last = parameter(self.name).rsplit('.').next().unwrap_or_default();
        WRITES.iter().any(|word| last.contains(word))
    }

    /// The layout that one of two answers tells.
    fn one_of(out_in: bool, in_out: bool) -> Option<Layout> {
        match (out_in, in_out) {
            (true, false) => Some(Layout::OutIn),
            (false, true) => Some(Layout::InOut),
            _ => None,
        }
    }

    fn told(&self, module: &[Self]) -> Option<Layout> {
        let Stack { rows, cols, .. } = *self;
        let by_bias = || self.bias.and_then(|outputs| Self::one_of(outputs == rows, outputs == cols));
        let by_pair = || {
            let other = module.iter().find(|other| other.writes() != self.writes())?;
            let (reads, writes) = if self.writes() { (other, self) } else { (self, other) };
            // The gate may stand beside the other half.
            let feeds = |outputs: usize, inputs: usize| outputs == inputs || outputs == 2 * inputs;
            Self::one_of(
                reads.cols == writes.rows && feeds(reads.rows, writes.cols),
                reads.rows == writes.cols && feeds(reads.cols, writes.rows),
            )
        };
        let by_width = || {
            let width = self.width?;
            let (of_out_in, of_in_out) = if self.writes() { (rows, cols) } else { (cols, rows) };
            Self::one_of(of_out_in == width, of_in_out == width)
        };
        by_bias().or_else(by_pair).or_else(by_width)
    }
}
