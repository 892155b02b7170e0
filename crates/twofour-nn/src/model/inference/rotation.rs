//! The rotations of queries and keys of a model.

use std::ops::Range;

use crate::{
    cpu::rope::Table,
    model::config::{Positions, Rope, TransformerConfig},
};

/// The rotations of a model.
#[derive(Debug)]
pub(crate) struct Rotations {
    all: Rope,
    /// The rotation of layers with a window, where it differs.
    windowed: Option<Rope>,
    /// Elements of a head that are rotated.
    rotated: usize,
}

/// Cosines and sines of positions.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) all: Table,
    pub(crate) windowed: Option<Table>,
}

impl Rotations {
    /// The rotations of a model; none where nothing is rotated.
    pub(crate) fn of(config: &TransformerConfig) -> Option<Self> {
        let Positions::Rotary(all) = config.positions.clone() else { return None };
        Some(Rotations { all, windowed: config.attention.local_rope.clone(), rotated: config.rotated() })
    }

    /// The tables of these positions in a text of so many tokens.
    pub(crate) fn tables(&self, positions: Range<usize>, tokens: usize) -> Tables {
        let table = |rope: &Rope| {
            let frequencies = rope.frequencies_in(self.rotated, tokens);
            Table::of(positions.clone(), &frequencies).times(rope.factor())
        };
        Tables { all: table(&self.all), windowed: self.windowed.as_ref().map(table) }
    }

    /// Whether a text of so many tokens is rotated by other angles than shorter ones.
    pub(crate) fn is_stretched(&self, tokens: usize) -> bool {
        [Some(&self.all), self.windowed.as_ref()].into_iter().flatten().any(|rope| rope.is_stretched(tokens))
    }
}

impl Tables {
    /// The table of a layer.
    pub(crate) fn of_layer(&self, config: &TransformerConfig, layer: usize) -> &Table {
        self.windowed.as_ref().filter(|_| config.window(layer).is_some()).unwrap_or(&self.all)
    }
}
