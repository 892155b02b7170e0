//! The errors of layers, block by block, as a heat map.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::layer::Layer;
use crate::present::units;

const CELL: (i32, i32) = (64, 18);
const LEFT: i32 = 44;
const TOP: i32 = 52;
const BETWEEN: i32 = 28;
const FONT: &str = "Helvetica, Arial, sans-serif";
const INK: RGBColor = RGBColor(0x22, 0x2B, 0x33);

/// The numbers in a name, and what it is without them: the block, and the kind of layer.
fn parts(name: &str) -> (Vec<usize>, String) {
    let numbers = name.split('.').filter_map(|part| part.parse().ok()).collect();
    let kind: Vec<&str> = name.split('.').filter(|part| part.parse::<usize>().is_err() && *part != "weight").collect();
    (numbers, kind.last().copied().unwrap_or_default().to_owned())
}

/// Draws a panel for each method: rows are blocks, columns kinds of layers; darker is a larger error.
pub(super) fn draw(methods: &[&str], layers: &[Layer]) -> Result<String> {
    let mut blocks: Vec<Vec<usize>> = vec![];
    let mut kinds: Vec<String> = vec![];
    for layer in layers {
        let (block, kind) = parts(&layer.name);
        if !blocks.contains(&block) {
            blocks.push(block);
        }
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let every = || layers.iter().flat_map(|layer| layer.errors.iter().copied()).filter(|error| *error > 0.0);
    let (low, high) = (every().fold(f64::INFINITY, f64::min).ln(), every().fold(0.0, f64::max).ln());
    let panel = kinds.len() as i32 * CELL.0 + BETWEEN;
    let size = (LEFT + panel * methods.len() as i32, TOP + blocks.len() as i32 * CELL.1 + 24);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (size.0 as u32, size.1 as u32)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let write = |text: String, size: u32, color: RGBColor, at: (i32, i32), h: HPos| {
            let style = (FONT, size).into_font().color(&color).pos(Pos::new(h, VPos::Center));
            root.draw(&Text::new(text, at, style)).map_err(fault)
        };
        for (row, block) in blocks.iter().enumerate() {
            let number = block.iter().map(ToString::to_string).collect::<Vec<_>>().join(".");
            write(number, 11, INK, (LEFT - 8, TOP + row as i32 * CELL.1 + CELL.1 / 2), HPos::Right)?;
        }
        for (number, method) in methods.iter().enumerate() {
            let left = LEFT + number as i32 * panel;
            write(format!("{method}: change of outputs"), 13, INK, (left, 14), HPos::Left)?;
            for (column, kind) in kinds.iter().enumerate() {
                let middle = left + column as i32 * CELL.0 + CELL.0 / 2;
                write(kind.clone(), 10, INK, (middle, TOP - 12), HPos::Center)?;
            }
            for layer in layers {
                let (block, kind) = parts(&layer.name);
                let Some(row) = blocks.iter().position(|own| *own == block) else { continue };
                let Some(column) = kinds.iter().position(|own| *own == kind) else { continue };
                let error = layer.errors.get(number).copied().unwrap_or(0.0);
                let depth = if high > low && error > 0.0 { (error.ln() - low) / (high - low) } else { 0.0 };
                let (x, y) = (left + column as i32 * CELL.0, TOP + row as i32 * CELL.1);
                let cell = Rectangle::new([(x, y), (x + CELL.0 - 1, y + CELL.1 - 1)], shade(depth).filled());
                root.draw(&cell).map_err(fault)?;
                let color = if depth > 0.6 { WHITE } else { INK };
                write(units::percent(error), 10, color, (x + CELL.0 / 2, y + CELL.1 / 2), HPos::Center)?;
            }
        }
        root.present().map_err(fault)?;
    }
    Ok(svg)
}

/// From white to dark orange.
fn shade(depth: f64) -> RGBColor {
    let between = |from: f64, to: f64| (from + (to - from) * depth.clamp(0.0, 1.0)) as u8;
    RGBColor(between(255.0, 0xA0 as f64), between(250.0, 0x3A as f64), between(245.0, 0x05 as f64))
}

fn fault(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing the picture: {error}")
}

#[cfg(test)]
mod tests {
    use twofour::file::StoredDType;

    use super::*;

    #[test]
    fn every_layer_has_a_cell_for_each_method() {
        let layer = |name: &str, errors: [f64; 2]| Layer {
            name: name.to_owned(),
            shape: [4, 4],
            dtype: StoredDType::F32,
            errors: errors.to_vec(),
            perplexity: None,
        };
        let layers = [
            layer("model.layers.0.mlp.up_proj.weight", [0.5, 0.25]),
            layer("model.layers.0.mlp.down_proj.weight", [0.0, 0.125]),
            layer("model.layers.11.mlp.up_proj.weight", [0.75, 0.3]),
        ];
        let svg = draw(&["magnitude", "alps+refit"], &layers).unwrap();
        // The ground, and six cells.
        assert_eq!(svg.matches("<rect").count(), 7);
        for text in ["magnitude", "alps+refit", "up_proj", "down_proj", "11", "75.0", "12.5"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        let same = [layer("a.0.b.weight", [0.0, 0.0])];
        assert!(!draw(&["magnitude", "x"], &same).unwrap().contains("NaN"));
    }
}
