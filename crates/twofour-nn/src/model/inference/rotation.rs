//! The rotations of queries and keys of a model.

use std::ops::Range;

use crate::{
    cpu::rope::Table,
    model::config::{Positions, TransformerConfig},
};

/// The frequencies of a model's rotations.
#[derive(Debug)]
pub(crate) struct Rotations {
    all: Vec<f64>,
    /// Those of layers with a window, where they are others.
    windowed: Option<Vec<f64>>,
}

/// Cosines and sines of positions.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) all: Table,
    pub(crate) windowed: Option<Table>,
}

impl Rotations {
    /// The rotations of a model; none where positions are learned.
    pub(crate) fn of(config: &TransformerConfig) -> Option<Self> {
        let Positions::Rotary(rope) = config.positions else { return None };
        let windowed = config.attention.local_rope.map(|rope| rope.frequencies(config.rotated()));
        Some(Rotations { all: rope.frequencies(config.rotated()), windowed })
    }

    /// The tables of these positions.
    pub(crate) fn tables(&self, positions: Range<usize>) -> Tables {
        let windowed = self.windowed.as_ref().map(|frequencies| Table::of(positions.clone(), frequencies));
        Tables { all: Table::of(positions, &self.all), windowed }
    }
}

impl Tables {
    /// The table of a layer.
    pub(crate) fn of_layer(&self, config: &TransformerConfig, layer: usize) -> &Table {
        self.windowed.as_ref().filter(|_| config.window(layer).is_some()).unwrap_or(&self.all)
    }
}
