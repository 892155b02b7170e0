//! `report.svg`: losses, flip rates, and kept mass over the steps.

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use twofour_nn::{
    linear::LayerForm,
    recipe::{RecipePlan, StagePlan},
    report::{LayerMetrics, StepMetrics},
    train::SparseBegin,
};

use crate::present::{layers::by_layer, shortened};

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 460;
const INK: RGBColor = RGBColor(0x22, 0x2B, 0x33);
const FAINT: RGBColor = RGBColor(0xD8, 0xDD, 0xE2);
const TRAINING: RGBColor = RGBColor(0x8A, 0x97, 0xA6);
const VALIDATION: RGBColor = RGBColor(0xD9, 0x5F, 0x1E);
/// Of the layers' curves, told apart by people with any color vision (Okabe and Ito, 2008).
const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x55, 0x55, 0x55),
];
const FONT: &str = "Helvetica, Arial, sans-serif";

type Area<'a, 'b> = DrawingArea<SVGBackend<'a>, Shift>;

/// A line of a chart.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    color: RGBColor,
    width: u32,
}

/// A step from which layers have another form.
#[derive(Debug, Clone, PartialEq)]
struct Mark {
    step: u64,
    what: String,
}

/// Draws a run that is done; `settled_at` is the step at which STEP's variances had settled.
pub(super) fn draw(title: &str, plan: &RecipePlan, settled_at: Option<u64>, steps: &[StepMetrics]) -> Result<String> {
    let of_masks = plan.layers.iter().filter(|layer| layer.sparse || layer.masked);
    let layers: Vec<&str> = of_masks.map(|layer| layer.name.as_str()).collect();
    picture(title, &layers, &marks(&plan.stages, plan.steps, settled_at), steps)
}

/// The steps at which layers become 2:4, masked or dense again.
fn marks(stages: &[StagePlan], steps: u64, settled_at: Option<u64>) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    let mut add = |step: u64, what: &str| {
        let mark = Mark { step, what: what.to_owned() };
        if step > 0 && step < steps && !marks.contains(&mark) {
            marks.push(mark);
        }
    };
    for stage in stages {
        let begin = match stage.begin {
            SparseBegin::Step(step) => Some(step),
            SparseBegin::Settled { .. } => settled_at,
        };
        let form = match stage.form {
            LayerForm::Masked => "masked",
            LayerForm::TwoOfFourInput => "2:4 inputs",
            _ => "2:4",
        };
        let Some(begin) = begin else { continue };
        match stage.two_of_four_from.filter(|from| *from > begin) {
            Some(from) => {
                add(begin, "3:4");
                add(from, form);
            }
            None => add(begin, form),
        }
        add(stage.end, "dense");
    }
    marks.sort_by_key(|mark| mark.step);
    marks
}

fn picture(title: &str, layers: &[&str], marks: &[Mark], steps: &[StepMetrics]) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let has_layers = steps.iter().any(|step| !step.layers.is_empty());
        if has_layers {
            let (left, right) = root.split_horizontally(560);
            losses(&left, title, marks, steps)?;
            let panels = right.split_evenly((1, 2));
            let flips = of_layers((layers, steps), |layer| layer.flip_rate);
            chart(&panels[0], "flips by layer, share of the mask", "", marks, &flips)?;
            let kept = of_layers((layers, steps), |layer| layer.kept);
            chart(&panels[1], "kept L1 by layer, share of |w|", "", marks, &kept)?;
        } else {
            losses(&root, title, marks, steps)?;
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

fn losses(area: &Area<'_, '_>, title: &str, marks: &[Mark], steps: &[StepMetrics]) -> Result<()> {
    let of = |value: fn(&StepMetrics) -> Option<f64>| -> Vec<(f64, f64)> {
        steps.iter().filter_map(|step| Some((step.step as f64, value(step)?))).collect()
    };
    let training = Curve {
        name: "training, mean of neighboring steps".to_owned(),
        points: smooth(&of(|step| step.loss)),
        color: TRAINING,
        width: 3,
    };
    let validation = of(|step| step.val_loss);
    let last = validation.last().map(|(_, last)| format!("validation, {last:.3} at the end"));
    let validation = last.map(|name| Curve { name, points: validation, color: VALIDATION, width: 3 });
    let curves: Vec<Curve> = [training].into_iter().chain(validation).collect();
    chart(area, title, "loss, nats", marks, &curves)
}

/// A curve for each layer, or, where these would be many, for each kind of layer the mean.
fn of_layers((layers, steps): (&[&str], &[StepMetrics]), value: impl Fn(&LayerMetrics) -> Option<f64>) -> Vec<Curve> {
    let mut groups = by_layer(layers, layers.len() <= COLORS.len(), |name| (*name, ()));
    if groups.len() > COLORS.len() {
        let rest: Vec<&&str> = groups.split_off(COLORS.len() - 1).into_iter().flat_map(|(_, group)| group).collect();
        groups.push((format!("other layers ({})", rest.len()), rest));
    }
    let mean = |step: &StepMetrics, group: &[&&str]| {
        let values: Vec<f64> = group.iter().filter_map(|name| value(step.layers.get(**name)?)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let curve = |((name, group), color): ((String, Vec<&&str>), RGBColor)| {
        let points = steps.iter().filter_map(|step| Some((step.step as f64, mean(step, &group)?))).collect();
        Curve { name, points, color, width: 2 }
    };
    groups.into_iter().zip(COLORS).map(curve).collect()
}

fn chart(area: &Area<'_, '_>, title: &str, unit: &str, marks: &[Mark], curves: &[Curve]) -> Result<()> {
    let legend = |row: usize| 50 + 15 * row as i32;
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
        .margin_top(legend(curves.len()).max(72))
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
    for Curve { points, color, width, .. } in curves {
        let points = points.iter().copied().filter(|(_, y)| y.is_finite());
        chart.draw_series(LineSeries::new(points, color.stroke_width(*width))).map_err(fault)?;
    }
    for (row, Mark { step, what }) in marks.iter().enumerate() {
        let x = (*step as f64).min(last);
        let [low, high] = [chart.y_range().start, chart.y_range().end];
        let line = PathElement::new(vec![(x, low), (x, high)], INK.mix(0.4));
        chart.plotting_area().draw(&line).map_err(fault)?;
        let label = format!("{what} from step {step}");
        // To the side that has room, one below the other.
        let (h, gap) = if x > 0.5 * last { (HPos::Right, -4) } else { (HPos::Left, 4) };
        let style = text(12, INK).pos(Pos::new(h, VPos::Center));
        let at = EmptyElement::at((x, high)) + Text::new(label, (gap, 8 + 14 * row as i32), style);
        chart.plotting_area().draw(&at).map_err(fault)?;
    }
    for (row, Curve { name, color, .. }) in curves.iter().enumerate() {
        let y = legend(row);
        area.draw(&Rectangle::new([(20, y - 2), (38, y + 1)], color.filled())).map_err(fault)?;
        area.draw(&Text::new(shortened(name, 42), (44, y), text(13, INK))).map_err(fault)?;
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
            let svg = picture("fst", &["b", "a"], &[], &steps).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            assert!(!svg.contains("NaN"), "{svg}");
        }
    }

    /// What the picture says, text by text.
    fn words(svg: &str) -> Vec<String> {
        let texts = svg.split("<text").skip(1).filter_map(|rest| rest.split_once('>')?.1.split("</text>").next());
        texts.map(|text| text.trim().to_owned()).collect()
    }

    #[test]
    fn every_curve_has_a_name_and_every_change_of_the_method_a_mark() {
        let steps: Vec<_> = (0..100).map(step).collect();
        let marks = [Mark { step: 20, what: "2:4".to_owned() }, Mark { step: 80, what: "dense".to_owned() }];
        let svg = picture("fst", &["b", "a"], &marks, &steps).unwrap();
        let words = words(&svg);
        let count = |text: &str| words.iter().filter(|word| *word == text).count();
        assert_eq!([count("a"), count("b")], [2, 2], "{words:?}");
        assert_eq!([count("2:4 from step 20"), count("dense from step 80")], [3, 3], "{words:?}");
        assert_eq!(count("validation, 4.000 at the end"), 1, "{words:?}");
        assert!(words.iter().any(|word| word.starts_with("training, ")), "{words:?}");
    }

    #[test]
    fn many_layers_are_drawn_by_kind() {
        let names: Vec<String> =
            (0..24).flat_map(|i| ["up", "down"].map(|end| format!("blocks.{i}.mlp.{end}"))).collect();
        let layers: Vec<&str> = names.iter().map(String::as_str).collect();
        let of = |_: &LayerMetrics| Some(1.0);
        let curves = of_layers((&layers, &[]), of);
        let labels: Vec<&str> = curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(labels, ["blocks.*.mlp.up (24)", "blocks.*.mlp.down (24)"]);
        let names: Vec<String> = (0..30).map(|i| format!("layer{i}.up")).collect();
        let layers: Vec<&str> = names.iter().map(String::as_str).collect();
        let curves = of_layers((&layers, &[]), of);
        assert_eq!((curves.len(), curves[6].name.as_str()), (7, "other layers (24)"));
    }

    #[test]
    fn changes_within_the_run_are_marked() {
        let stage = |begin, from, end| StagePlan {
            method: "ste",
            layers: vec![],
            begin,
            two_of_four_from: from,
            end,
            two_of_four_weights: true,
            form: LayerForm::TwoOfFour,
        };
        let told = |stages: &[StagePlan], settled| -> Vec<(u64, String)> {
            marks(stages, 100, settled).into_iter().map(|mark| (mark.step, mark.what)).collect()
        };
        assert_eq!(told(&[stage(SparseBegin::Step(0), None, 100)], None), []);
        let gradual = stage(SparseBegin::Step(10), Some(40), 90);
        let expected = [(10, "3:4"), (40, "2:4"), (90, "dense")].map(|(step, what)| (step, what.to_owned()));
        assert_eq!(told(&[gradual.clone(), gradual], None), expected);
        let settled = stage(SparseBegin::Settled { earliest: 5, latest: 50 }, None, 100);
        assert_eq!(told(std::slice::from_ref(&settled), None), []);
        assert_eq!(told(&[settled], Some(30)), [(30, "2:4".to_owned())]);
    }

    #[test]
    fn smoothing_keeps_a_constant_and_the_length() {
        assert_eq!(smooth(&vec![(0.0, 2.0); 100]), vec![(0.0, 2.0); 100]);
        assert!(smooth(&[]).is_empty());
    }
}
