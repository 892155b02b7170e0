//! The heat map of a grid: a self-contained SVG with a panel for each data type and contender.
//!
//! Panels of a data type stand beside each other and share the names of their rows. Cells of one color are one path: a
//! cell costs a few bytes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use twofour_cli::present::units;

use super::{
    cells::{Against, Cell, Group, Summary, cells, dtypes},
    color::Step,
    layers::GridEpilogue,
    record::GridRecord,
};

/// Sizes in pixels.
const CELL: [usize; 2] = [33, 15];
const MARGIN: usize = 16;
const NAMES: usize = 372;
const GAP: usize = 20;
const HEADING: usize = 38;
const CAPTION: usize = 18;

/// Characters of a row's name that fit.
const NAME_CHARACTERS: usize = 54;

const PANELS: [(Against, &str); 2] =
    [(Against::Dense, "over dense (cuBLASLt)"), (Against::CusparseLt, "over cuSPARSELt")];

/// Draws a record.
pub(in crate::suites) fn heat_map(record: &GridRecord) -> String {
    let cells = cells(&record.rows);
    let bands: Vec<Band<'_>> = dtypes(&cells).into_iter().map(|dtype| Band::new(dtype, &cells)).collect();
    let top = 92;
    let width = bands.iter().map(Band::width).max().unwrap_or(0).max(1180);
    let height = top + bands.iter().map(Band::height).sum::<usize>() + MARGIN;
    let mut svg = Svg::new(width, height);
    let gemm = match record.epilogue {
        GridEpilogue::None => "2:4 GEMM",
        GridEpilogue::Bias => "2:4 GEMM with a bias",
        GridEpilogue::BiasGelu => "2:4 GEMM with a bias and GELU",
        GridEpilogue::Scales => "2:4 GEMM with scales and a bias",
    };
    svg.text(MARGIN, 30, "h", &format!("{gemm} by layer and number of tokens: speedup on {}", record.machine.gpu));
    let libraries = &record.libraries;
    let caption = format!(
        "Median device time from a cold L2, the library's by twofour's, each with its fastest kernel. cuBLASLt {}, \
         cuSPARSELt {}. \u{2013}: no kernel. Means \
         are geometric.",
        libraries.cublaslt, libraries.cusparselt
    );
    svg.text(MARGIN, 50, "t", &caption);
    legend(&mut svg, MARGIN, 62);
    let mut y = top;
    for band in &bands {
        band.draw(&mut svg, y);
        y += band.height();
    }
    svg.finish()
}

/// The color scale, with the speedups at its ends, at its center and halfway.
fn legend(svg: &mut Svg, x: usize, y: usize) {
    svg.text(x, y + 11, "t", "slower");
    for (place, step) in Step::all().enumerate() {
        let x = x + 42 + place * 25;
        svg.cell(step, x, y, 25);
        if place % 5 == 0 {
            svg.figure(step, x + 12, y + 11, &format!("{:.2}", step.speedup()));
        }
    }
    svg.text(x + 42 + Step::all().count() * 25 + 6, y + 11, "t", "faster");
}

/// The weights of a group in one data type, the largest first.
struct GroupRows<'a> {
    group: Group,
    /// Output and input features, and the layers that have the weight.
    weights: Vec<([usize; 2], &'a [String])>,
}

/// The panels of a data type.
struct Band<'a> {
    dtype: &'a str,
    tokens: Vec<usize>,
    groups: Vec<GroupRows<'a>>,
    cells: Vec<&'a Cell<'a>>,
}

impl<'a> Band<'a> {
    fn new(dtype: &'a str, cells: &'a [Cell<'a>]) -> Self {
        let cells: Vec<&Cell<'_>> = cells.iter().filter(|cell| cell.dtype == dtype).collect();
        let tokens: BTreeSet<usize> = cells.iter().map(|cell| cell.shape[0]).collect();
        let rows = |group: Group| {
            let of_group = cells.iter().filter(|cell| cell.group() == group);
            let weights: BTreeMap<[usize; 2], &[String]> = of_group.map(|cell| (cell.weight(), cell.layers)).collect();
            let mut weights: Vec<_> = weights.into_iter().collect();
            weights.sort_by_key(|([out, inputs], _)| std::cmp::Reverse((out.saturating_mul(*inputs), *out)));
            GroupRows { group, weights }
        };
        let groups = Group::ALL.into_iter().map(rows).filter(|rows| !rows.weights.is_empty()).collect();
        Self { dtype, tokens: tokens.into_iter().collect(), groups, cells }
    }

    fn panel_width(&self) -> usize {
        (self.tokens.len() * CELL[0]).max(360)
    }

    fn width(&self) -> usize {
        2 * MARGIN + NAMES + 2 * self.panel_width() + GAP
    }

    fn height(&self) -> usize {
        HEADING + self.groups.iter().map(|rows| CAPTION + rows.weights.len() * CELL[1]).sum::<usize>() + MARGIN
    }

    fn draw(&self, svg: &mut Svg, top: usize) {
        let left = |panel: usize| MARGIN + NAMES + panel * (self.panel_width() + GAP);
        svg.text(MARGIN, top + 16, "b", self.dtype);
        svg.text(MARGIN, top + 32, "t", "weight [out, in] and layers; columns: tokens");
        for (panel, (_, title)) in PANELS.into_iter().enumerate() {
            svg.text(left(panel), top + 16, "b", &format!("{}, {title}", self.dtype));
            for (column, tokens) in self.tokens.iter().enumerate() {
                svg.text(left(panel) + column * CELL[0] + CELL[0] / 2, top + 32, "n", &tokens.to_string());
            }
        }
        let by_place: BTreeMap<([usize; 2], usize), &Cell<'_>> =
            self.cells.iter().map(|cell| ((cell.weight(), cell.shape[0]), *cell)).collect();
        let mut y = top + HEADING;
        for rows in &self.groups {
            svg.text(MARGIN, y + 13, "g", rows.group.name());
            for (panel, (against, _)) in PANELS.into_iter().enumerate() {
                let of_group = self.cells.iter().copied().filter(|cell| cell.group() == rows.group);
                svg.text(left(panel), y + 13, "g", &caption(Summary::of(of_group, against)));
            }
            y += CAPTION;
            for (weight, layers) in &rows.weights {
                svg.text(MARGIN, y + 11, "t", &name(*weight, layers));
                for (panel, (against, _)) in PANELS.into_iter().enumerate() {
                    for (column, tokens) in self.tokens.iter().enumerate() {
                        let x = left(panel) + column * CELL[0];
                        match by_place.get(&(*weight, *tokens)).map(|cell| cell.speedup(against)) {
                            Some(Some(speedup)) => {
                                let step = Step::of(speedup);
                                svg.cell(step, x, y, CELL[0]);
                                svg.figure(step, x + CELL[0] / 2, y + 11, &figure(speedup));
                            }
                            Some(None) => svg.text(x + CELL[0] / 2, y + 11, "n", "\u{2013}"),
                            // Not measured.
                            None => {}
                        }
                    }
                }
                y += CELL[1];
            }
        }
    }
}

/// A group's least speedup with its place, and the mean.
fn caption(summary: Option<Summary>) -> String {
    let Some(Summary { count, worst, worst_shape: [tokens, inputs, out], mean }) = summary else {
        return "no kernel".to_owned();
    };
    let tokens = units::plural(tokens, "token");
    format!("worst {worst:.2} ([{out}, {inputs}], {tokens}), mean {mean:.2} of {count}")
}

/// Three digits or so.
fn figure(speedup: f64) -> String {
    match speedup {
        10.0.. => format!("{speedup:.0}"),
        _ => format!("{speedup:.2}"),
    }
}

/// A weight and its layers, cut to what fits.
fn name([out, inputs]: [usize; 2], layers: &[String]) -> String {
    let mut name = format!("[{out}, {inputs}]");
    if !layers.is_empty() {
        let _ = write!(name, "  {}", layers.join("; "));
    }
    if name.chars().count() > NAME_CHARACTERS {
        name = name.chars().take(NAME_CHARACTERS - 1).chain(['\u{2026}']).collect();
    }
    name
}

/// An SVG in the making.
struct Svg {
    width: usize,
    height: usize,
    /// By color: the rectangles.
    cells: BTreeMap<Step, String>,
    /// Text on dark and on light cells.
    figures: [String; 2],
    text: String,
}

impl Svg {
    fn new(width: usize, height: usize) -> Self {
        Self { width, height, cells: BTreeMap::new(), figures: Default::default(), text: String::new() }
    }

    /// A rectangle, a pixel smaller than its place.
    fn cell(&mut self, step: Step, x: usize, y: usize, width: usize) {
        let (w, h) = (width - 1, CELL[1] - 1);
        let _ = write!(self.cells.entry(step).or_default(), "M{x} {y}h{w}v{h}h-{w}z");
    }

    /// A figure on a cell.
    fn figure(&mut self, step: Step, x: usize, y: usize, text: &str) {
        let _ = write!(self.figures[usize::from(step.is_dark())], "<text x=\"{x}\" y=\"{y}\">{}</text>", escape(text));
    }

    fn text(&mut self, x: usize, y: usize, class: &str, text: &str) {
        let _ = writeln!(self.text, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escape(text));
    }

    fn finish(self) -> String {
        let Self { width, height, cells, figures: [light, dark], text } = self;
        let mut style = String::from(
            ".p{fill:#fff}\
             text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;\
             font-size:11px;fill:#1f2328}\
             .h{font-size:18px;font-weight:600}.b{font-size:13px;font-weight:600}.g{font-weight:600}\
             .n{font-size:10px;text-anchor:middle;fill:#59636e}\
             .l text,.d text{font-size:10px;text-anchor:middle}.l text{fill:#000}.d text{fill:#fff}",
        );
        for step in cells.keys() {
            let _ = write!(style, ".{}{{fill:{}}}", step.class(), step.fill());
        }
        style.push_str(
            "@media (prefers-color-scheme:dark){.p{fill:#0d1117}text{fill:#e6edf3}.n{fill:#9198a1}\
             .l text{fill:#000}.d text{fill:#fff}}",
        );
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" role=\"img\">\n\
             <style>{style}</style>\n<rect class=\"p\" width=\"{width}\" height=\"{height}\"/>\n"
        );
        for (step, path) in &cells {
            let _ = writeln!(svg, "<path class=\"{}\" d=\"{path}\"/>", step.class());
        }
        let _ = writeln!(svg, "<g class=\"l\">{light}</g>\n<g class=\"d\">{dark}</g>");
        svg.push_str(&text);
        svg.push_str("</svg>\n");
        svg
    }
}

/// Text of an XML document; characters that XML does not have become U+FFFD.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            c if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') => escaped.push('\u{FFFD}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_and_escaped() {
        let layers = ["GPT-2 medium down".to_owned(), "BERT-L down".to_owned(), "ViT-L down".to_owned()];
        let cut = name([1024, 4096], &layers);
        assert!(cut.starts_with("[1024, 4096]  GPT-2 medium down; BERT-L down;") && cut.ends_with('\u{2026}'), "{cut}");
        assert_eq!(cut.chars().count(), NAME_CHARACTERS);
        assert_eq!(name([5, 7], &[]), "[5, 7]");
        assert_eq!(escape("a<b>&\"\u{1}\u{1b}\n\u{e9}"), "a&lt;b&gt;&amp;&quot;\u{fffd}\u{fffd} \u{e9}");
    }

    #[test]
    fn figures_fit_their_cells() {
        assert_eq!([0.0512, 1.0, 9.994, 10.2, 123.4].map(figure), ["0.05", "1.00", "9.99", "10", "123"]);
    }
}
