//! Which axis of a stored weight is the reduction axis.

use std::collections::HashMap;

use super::name::{Modules, Place};
use crate::Axis;

/// How the weight of a linear layer or a convolution is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// `[out_features, in_features]`, as PyTorch's `Linear`: products sum along rows.
    #[default]
    OutIn,
    /// `[in_features, out_features]`, as transformers' `Conv1D` of GPT-2: products sum along columns.
    InOut,
    /// `[out_channels, in_channels, *kernel]`: products sum along the rows of the matrix that is a
    /// [`Kernel`](super::Kernel)'s, and axes are those of that matrix.
    Convolution,
}

impl Layout {
    /// The axis along which products sum, and along which the groups of a pattern have to run.
    pub fn reduction(self) -> Axis {
        match self {
            Layout::OutIn | Layout::Convolution => Axis::Row,
            Layout::InOut => Axis::Column,
        }
    }

    /// Output and input features of a stored matrix, or of the matrix of a convolution.
    pub fn features(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Layout::OutIn | Layout::Convolution => [rows, cols],
            Layout::InOut => [cols, rows],
        }
    }
}

/// The layout that a bias of so many elements tells; none for a square weight.
fn told(bias: Option<usize>, [rows, cols]: [usize; 2]) -> Option<Layout> {
    match bias {
        _ if rows == cols => None,
        Some(outputs) if outputs == rows => Some(Layout::OutIn),
        Some(outputs) if outputs == cols => Some(Layout::InOut),
        _ => None,
    }
}

/// What the weights that tell their layout say, by name of module and by layer.
#[derive(Debug, Clone, Default)]
pub(super) struct Layouts {
    by_module: HashMap<String, Votes>,
    by_layer: HashMap<String, Votes>,
    names_conv1d: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Votes {
    out_in: usize,
    in_out: usize,
}

impl Votes {
    fn add(&mut self, layout: Layout) {
        match layout {
            Layout::OutIn | Layout::Convolution => self.out_in += 1,
            Layout::InOut => self.in_out += 1,
        }
    }

    /// The layout that all agree on.
    fn unanimous(self) -> Option<Layout> {
        match (self.out_in, self.in_out) {
            (1.., 0) => Some(Layout::OutIn),
            (0, 1..) => Some(Layout::InOut),
            _ => None,
        }
    }
}

/// Modules of blocks of `Conv1D`.
const CONV1D: [&str; 4] = ["c_attn", "q_attn", "c_fc", "c_proj"];

impl Layouts {
    pub(super) fn new(names_conv1d: bool) -> Self {
        Layouts { names_conv1d, ..Layouts::default() }
    }

    /// Counts a weight and the number of elements of its bias.
    pub(super) fn add(&mut self, modules: &Modules<'_>, bias: Option<usize>, shape: [usize; 2]) {
        let Some(layout) = told(bias, shape) else { return };
        self.by_module.entry(modules.last().to_owned()).or_default().add(layout);
        if let Place::Inside(count) = modules.place() {
            self.by_layer.entry(modules.prefix(count)).or_default().add(layout);
        }
    }

    pub(super) fn of(&self, modules: &Modules<'_>, bias: Option<usize>, shape: [usize; 2]) -> Layout {
        let agreed = |votes: Option<&Votes>| votes.and_then(|votes| votes.unanimous());
        let layer = || match modules.place() {
            Place::Inside(count) => agreed(self.by_layer.get(&modules.prefix(count))),
            Place::Outside => None,
        };
        let configured = || self.names_conv1d.then_some(Layout::InOut);
        let is_conv1d = || CONV1D.contains(&modules.last());
        told(bias, shape)
            .or_else(|| agreed(self.by_module.get(modules.last())))
            .or_else(|| is_conv1d().then(|| layer().or_else(configured))?)
            .unwrap_or_default()
    }
}
