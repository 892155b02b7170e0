//! `report.svg`: the loss curves, and bars for size and speed.

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Losses, Report};
use crate::present::units;

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 460;
const INK: RGBColor = RGBColor(0x22, 0x2B, 0x33);
const FAINT: RGBColor = RGBColor(0xD8, 0xDD, 0xE2);
const DENSE: RGBColor = RGBColor(0x8A, 0x97, 0xA6);
const SPARSE: RGBColor = RGBColor(0xD9, 0x5F, 0x1E);
const FONT: &str = "Helvetica, Arial, sans-serif";

type Area<'a, 'b> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the report.
pub(crate) fn draw(report: &Report, losses: &Losses) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let (left, right) = root.split_horizontally(560);
        curves(&left, report, losses)?;
        let panels = right.margin(0, 0, 10, 20).split_evenly((1, 3));
        let size = [report.dense.weight_bytes as f64, report.sparse.weight_bytes as f64];
        let decode = [report.dense.decode_tokens_per_s, report.sparse.decode_tokens_per_s];
        let prefill = [report.dense.prefill_tokens_per_s, report.sparse.prefill_tokens_per_s];
        let rate = |value: f64| units::count(value.round() as usize);
        bars(&panels[0], "weights, bf16", size, &units::factor_of(report.size_ratio(), "smaller", "larger"), |v| {
            units::bytes(v as u64)
        })?;
        bars(
            &panels[1],
            "decode, f32, bytes/s",
            decode,
            &units::factor_of(report.decode_ratio(), "faster", "slower"),
            rate,
        )?;
        bars(
            &panels[2],
            "prefill, f32, bytes/s",
            prefill,
            &units::factor_of(report.prefill_ratio(), "faster", "slower"),
            rate,
        )?;
        root.present().map_err(fault)?;
    }
    Ok(svg)
}

fn fault(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing the picture: {error}")
}

fn text(size: u32, color: RGBColor, h: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color).pos(Pos::new(h, VPos::Center))
}

fn curves(area: &Area<'_, '_>, report: &Report, losses: &Losses) -> Result<()> {
    let lines = [(&losses.dense, DENSE), (&losses.sparse, SPARSE)].map(|(values, color)| (smooth(values), color));
    let all = || lines.iter().flat_map(|(line, _)| line).copied().filter(|l| l.is_finite());
    let top = all().fold(1.0f32, f32::max);
    let bottom = all().fold(top, f32::min);
    let steps = losses.dense.len().max(losses.sparse.len()).max(2);
    let floor = (bottom - 0.1 * (top - bottom)).max(0.0);
    let mut chart = ChartBuilder::on(area)
        .margin(20)
        .margin_top(56)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0f32..(steps - 1) as f32, floor..top * 1.02)
        .map_err(fault)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT)
        .x_desc("step")
        .y_desc("training loss, nats a byte")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.1}"))
        .label_style((FONT, 15, &INK))
        .axis_desc_style((FONT, 15, &INK))
        .draw()
        .map_err(fault)?;
    // About one point for each pixel.
    let apart = steps.div_ceil(WIDTH as usize / 2);
    for (line, color) in lines {
        let points = line.into_iter().enumerate().step_by(apart).map(|(x, y)| (x as f32, y));
        chart.draw_series(LineSeries::new(points, color.stroke_width(3))).map_err(fault)?;
    }
    let heading = text(20, INK, HPos::Left);
    area.draw(&Text::new("The same model, dense and 2:4", (20, 28), heading)).map_err(fault)?;
    let legend = [("dense", DENSE, report.dense.val_loss), ("2:4", SPARSE, report.sparse.val_loss)];
    for (i, (name, color, val_loss)) in legend.into_iter().enumerate() {
        let (x, y) = (300, 86 + 26 * i as i32);
        area.draw(&Rectangle::new([(x, y - 2), (x + 26, y + 2)], color.filled())).map_err(fault)?;
        let label = format!("{name}, {val_loss:.3} on unseen text");
        area.draw(&Text::new(label, (x + 36, y), text(16, INK, HPos::Left))).map_err(fault)?;
    }
    Ok(())
}

/// The mean over a window around each point: single batches are noisy.
fn smooth(values: &[f32]) -> Vec<f32> {
    let reach = values.len() / 20;
    (0..values.len())
        .map(|i| {
            let window = &values[i.saturating_sub(reach)..(i + reach + 1).min(values.len())];
            window.iter().sum::<f32>() / window.len() as f32
        })
        .collect()
}

fn bars(
    area: &Area<'_, '_>,
    title: &str,
    values: [f64; 2],
    verdict: &str,
    label: impl Fn(f64) -> String,
) -> Result<()> {
    let (width, height) = area.dim_in_pixel();
    let (width, height) = (width as i32, height as i32);
    let (top, bottom) = (110, height - 54);
    area.draw(&Text::new(title.to_owned(), (width / 2, 28), text(18, INK, HPos::Center))).map_err(fault)?;
    area.draw(&Text::new(verdict.to_owned(), (width / 2, 58), text(20, SPARSE, HPos::Center))).map_err(fault)?;
    let largest = values[0].max(values[1]);
    for (i, (value, (name, color))) in values.into_iter().zip([("dense", DENSE), ("2:4", SPARSE)]).enumerate() {
        // Closer to each other than to the next panel's bars.
        let middle = width / 2 + (2 * i as i32 - 1) * width / 5;
        let share = if largest > 0.0 { value / largest } else { 0.0 };
        let y = bottom - (f64::from(bottom - top) * share) as i32;
        area.draw(&Rectangle::new([(middle - 36, y), (middle + 36, bottom)], color.filled())).map_err(fault)?;
        area.draw(&Text::new(label(value), (middle, y - 14), text(15, INK, HPos::Center))).map_err(fault)?;
        area.draw(&Text::new(name, (middle, bottom + 18), text(16, INK, HPos::Center))).map_err(fault)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_keeps_a_constant_and_the_length() {
        assert_eq!(smooth(&[2.0; 100]), [2.0; 100]);
        assert_eq!(smooth(&[]), Vec::<f32>::new());
    }
}
