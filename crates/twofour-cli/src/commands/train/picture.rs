//! `report.svg`: losses, flip rates, and kept mass over the steps.

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use twofour_nn::report::{LayerMetrics, StepMetrics};

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 460;
const INK: RGBColor = RGBColor(0x22, 0x2B, 0x33);
const FAINT: RGBColor = RGBColor(0xD8, 0xDD, 0xE2);
const TRAINING: RGBColor = RGBColor(0x8A, 0x97, 0xA6);
const VALIDATION: RGBColor = RGBColor(0xD9, 0x5F, 0x1E);
const FONT: &str = "Helvetica, Arial, sans-serif";

type Area<'a, 'b> = DrawingArea<SVGBackend<'a>, Shift>;

/// A line of a chart.
struct Curve {
    points: Vec<(f64, f64)>,
    color: RGBColor,
    width: u32,
}

/// Draws the run; `layers` are the names of its 2:4 layers in the model's order.
pub(super) fn draw(title: &str, layers: &[&str], steps: &[StepMetrics]) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let has_layers = steps.iter().any(|step| !step.layers.is_empty());
        if has_layers {
            let (left, right) = root.split_horizontally(560);
            losses(&left, title, steps)?;
            let panels = right.split_evenly((1, 2));
            by_layer(&panels[0], "flip rate by layer", (layers, steps), |layer| layer.flip_rate)?;
            by_layer(&panels[1], "kept share of magnitude", (layers, steps), |layer| layer.kept)?;
        } else {
            losses(&root, title, steps)?;
        }
        root.present().map_err(fault)?;
    }
    Ok(svg)
}

fn fault(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing the picture: {error}")
}

fn text(size: u32, color: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color).pos(Pos::new(HPos::Left, VPos::Center))
}

fn losses(area: &Area<'_, '_>, title: &str, steps: &[StepMetrics]) -> Result<()> {
    let of = |value: fn(&StepMetrics) -> Option<f64>| -> Vec<(f64, f64)> {
        steps.iter().filter_map(|step| Some((step.step as f64, value(step)?))).collect()
    };
    let validation = of(|step| step.val_loss);
    let curves = [
        Curve { points: smooth(&of(|step| step.loss)), color: TRAINING, width: 3 },
        Curve { points: validation.clone(), color: VALIDATION, width: 3 },
    ];
    chart(area, title, "loss, nats", &curves)?;
    area.draw(&Rectangle::new([(360, 88), (386, 92)], TRAINING.filled())).map_err(fault)?;
    area.draw(&Text::new("training", (396, 90), text(16, INK))).map_err(fault)?;
    if let Some((_, last)) = validation.last() {
        area.draw(&Rectangle::new([(360, 114), (386, 118)], VALIDATION.filled())).map_err(fault)?;
        area.draw(&Text::new(format!("validation, {last:.3}"), (396, 116), text(16, INK))).map_err(fault)?;
    }
    Ok(())
}

/// One line for each layer, from the first in grey blue to the last in orange.
fn by_layer(
    area: &Area<'_, '_>,
    title: &str,
    (layers, steps): (&[&str], &[StepMetrics]),
    value: impl Fn(&LayerMetrics) -> Option<f64>,
) -> Result<()> {
    let curve = |(i, name): (usize, &&str)| {
        let points = steps.iter().filter_map(|step| Some((step.step as f64, value(step.layers.get(*name)?)?)));
        let color = between(i as f64 / layers.len().saturating_sub(1).max(1) as f64);
        Curve { points: points.collect(), color, width: 2 }
    };
    let curves: Vec<Curve> = layers.iter().enumerate().map(curve).collect();
    chart(area, title, "", &curves)?;
    let ends = [(layers.first(), TRAINING, 46), (layers.last().filter(|_| layers.len() > 1), VALIDATION, 62)];
    for (name, color, y) in ends {
        if let Some(name) = name {
            area.draw(&Text::new((*name).to_owned(), (20, y), text(13, color))).map_err(fault)?;
        }
    }
    Ok(())
}

/// The color at a share of the way from that of training to that of validation.
fn between(share: f64) -> RGBColor {
    let mix = |a: u8, b: u8| (f64::from(a) + share * (f64::from(b) - f64::from(a))) as u8;
    RGBColor(mix(TRAINING.0, VALIDATION.0), mix(TRAINING.1, VALIDATION.1), mix(TRAINING.2, VALIDATION.2))
}

fn chart(area: &Area<'_, '_>, title: &str, unit: &str, curves: &[Curve]) -> Result<()> {
    let points = || curves.iter().flat_map(|curve| &curve.points).filter(|(_, y)| y.is_finite());
    let last = points().fold(1.0, |most: f64, (x, _)| most.max(*x));
    let (least, most) = points().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), (_, y)| (l.min(*y), m.max(*y)));
    let (least, most) = if least < most {
        (least, most)
    } else if least.is_finite() {
        (least - 0.5, least + 0.5)
    } else {
        (0.0, 1.0)
    };
    let room = 0.06 * (most - least);
    let mut chart = ChartBuilder::on(area)
        .margin(16)
        .margin_top(72)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last, (least - room).max(if least >= 0.0 { 0.0 } else { least - room })..most + room)
        .map_err(fault)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(5)
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT)
        .x_desc("step")
        .y_desc(unit)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| match most - least {
            range if range < 0.2 => format!("{y:.3}"),
            range if range < 2.0 => format!("{y:.2}"),
            _ => format!("{y:.1}"),
        })
        .label_style((FONT, 15, &INK))
        .axis_desc_style((FONT, 15, &INK))
        .draw()
        .map_err(fault)?;
    for Curve { points, color, width } in curves {
        let points = points.iter().copied().filter(|(_, y)| y.is_finite());
        chart.draw_series(LineSeries::new(points, color.stroke_width(*width))).map_err(fault)?;
    }
    area.draw(&Text::new(title.to_owned(), (20, 28), text(18, INK))).map_err(fault)
}

/// The mean over a window around each point: single batches are noisy.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = points.len() / 40;
    (0..points.len())
        .map(|i| {
            let window = &points[i.saturating_sub(reach)..(i + reach + 1).min(points.len())];
            (points[i].0, window.iter().map(|(_, y)| y).sum::<f64>() / window.len() as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn step(step: u64) -> StepMetrics {
        let layer = LayerMetrics { flip_rate: Some(0.1 / (step + 1) as f64), kept: Some(0.7), level: None };
        StepMetrics {
            step,
            loss: (step != 3).then_some(5.0 / (step + 1) as f64),
            learning_rate: 1e-3,
            gradient_norm: None,
            skipped: step == 3,
            flip_rate: 0.1,
            observed_flip_rate: None,
            decay: None,
            val_loss: step.is_multiple_of(5).then_some(4.0),
            val_accuracy: None,
            layers: BTreeMap::from([("a".to_owned(), layer), ("b".to_owned(), layer)]),
            tokens_per_s: 1.0,
        }
    }

    #[test]
    fn runs_of_any_length_are_drawn() {
        for count in [0, 1, 2, 100] {
            let steps: Vec<_> = (0..count).map(step).collect();
            let svg = draw("fst", &["b", "a"], &steps).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            assert!(!svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn smoothing_keeps_a_constant_and_the_length() {
        assert_eq!(smooth(&vec![(0.0, 2.0); 100]), vec![(0.0, 2.0); 100]);
        assert!(smooth(&[]).is_empty());
    }
}
