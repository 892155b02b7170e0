//! `twofour check`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    Axis, Element, MatrixRef, Pattern,
    file::{CompressedInfo, Reader, TensorInfo},
    role::Layout,
    select::Sparsity,
    verify::{self, Census, Conformance, Place, Violation},
};

use super::{
    next,
    tensor::{OnMatrix, on_compressed, on_matrices},
};
use crate::{
    exit::Verdict,
    hub,
    present::{
        Screen, escape,
        layers::by_layer,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    selection::SelectionOptions,
    tightest::{Tightest, tightest},
};

/// Check whether a model's weights have a pattern, and say where they do not
///
/// For every tensor: the tightest N:M pattern found along rows and along columns, density, violations with their
/// positions, and how many elements are -0.0, NaN or infinite. Layers of one kind that are alike share a row; with -v
/// each tensor has its own. Compressed weights are checked for every rule of their format too.
///
/// The exit code is 0 only if no selected tensor violates the pattern.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour check pruned.safetensors && echo fine
  twofour check pruned.safetensors --axis both     along rows and along columns
  twofour check pruned/ --pattern block:64x64@0.8
  twofour check --json pruned.safetensors | \\
      jq '.tensors[] | select(.obeys | not)'

Without --include the selected tensors are those that `prune` would prune. Found patterns have groups of 2, 4, 8, 16 \
or 32.")]
pub(crate) struct Check {
    /// The model: a .safetensors file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face
    /// hub
    file: PathBuf,

    #[command(flatten)]
    selection: SelectionOptions,

    /// The pattern to check: N:M, V:N:M, block:RxC@SHARE, rows@SHARE, columns@SHARE, unstructured@SHARE or
    /// unstructured-rows@SHARE
    ///
    /// SHARE is what must be zero at least, rounded down to whole blocks, rows, columns or elements. Where too few
    /// blocks, rows or columns are zero, those of the fewest nonzeros are listed, as many as are missing.
    #[arg(long, default_value_t = Sparsity::Groups(Pattern::TWO_FOUR), value_name = "PATTERN")]
    pattern: Sparsity,

    /// The axis along which groups run
    #[arg(long, value_enum, default_value_t)]
    axis: Wanted,

    /// How many violations to list for each tensor and axis
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    places: usize,
}

/// The axis along which a pattern is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Wanted {
    /// Along the axis that the layer sums: rows of [out, in], columns of GPT-2's [in, out]; of a convolution the rows
    /// of [out, positions * in]
    #[default]
    Reduction,
    /// Along stored rows, or rows of a convolution's matrix
    Row,
    /// Along stored columns, or columns of a convolution's matrix
    Column,
    /// Along both: transposable
    Both,
}

impl Wanted {
    /// Returns the stored axes along which a weight is judged.
    fn axes(self, layout: Layout) -> &'static [Axis] {
        match (self, layout) {
            (Wanted::Row, _) | (Wanted::Reduction, Layout::OutIn | Layout::Convolution) => &[Axis::Row],
            (Wanted::Column, _) | (Wanted::Reduction, Layout::InOut) => &[Axis::Column],
            (Wanted::Both, _) => &[Axis::Row, Axis::Column],
        }
    }
}

#[derive(Debug, Serialize)]
struct Answer {
    path: String,
    pattern: String,
    axis: &'static str,
    obeys: bool,
    tensors: Vec<TensorAnswer>,
    skipped: Vec<SkippedAnswer>,
}

#[derive(Debug, Serialize)]
struct TensorAnswer {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    compressed: bool,
    /// The axis along which the layer sums: its products run along rows of `[out, in]`, along columns of `[in, out]`.
    /// Axes of a convolution are those of its matrix `[out, positions * in]`.
    reduction: &'static str,
    #[serde(skip)]
    layout: Layout,
    obeys: bool,
    /// Obeys along both axes.
    transposable: bool,
    density: f64,
    negative_zeros: usize,
    nans: usize,
    infinities: usize,
    rows: AxisAnswer,
    columns: AxisAnswer,
}

#[derive(Debug, Serialize)]
struct AxisAnswer {
    /// The tightest pattern found; null where there is none.
    found: Option<String>,
    obeys: bool,
    /// Groups, blocks, rows or columns, whatever the pattern counts.
    groups: usize,
    violation_count: usize,
    violations: Vec<PlaceAnswer>,
    #[serde(skip)]
    places: Vec<(Option<usize>, Violation)>,
}

#[derive(Debug, Default, Serialize)]
struct PlaceAnswer {
    /// The expert, in a tensor that holds several.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<usize>,
    /// Row or column.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<usize>,
    /// Of a block its first row and column.
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<usize>,
    /// Of V:N:M columns with nonzeros, where the place is a block.
    nonzeros: usize,
    allowed: usize,
}

impl From<&Violation> for PlaceAnswer {
    fn from(violation: &Violation) -> Self {
        let Violation { place, nonzeros, allowed } = *violation;
        let all = PlaceAnswer { nonzeros, allowed, ..PlaceAnswer::default() };
        match place {
            Place::Group { line, group, .. } => PlaceAnswer { line: Some(line), group: Some(group), ..all },
            Place::Line { line, .. } => PlaceAnswer { line: Some(line), ..all },
            Place::Vector { row, col, .. } | Place::Block { row, col } => {
                PlaceAnswer { row: Some(row), column: Some(col), ..all }
            }
            Place::Matrix => all,
        }
    }
}

#[derive(Debug, Serialize)]
struct SkippedAnswer {
    name: String,
    reason: String,
}

/// The elements of one matrix, checked.
struct Findings {
    rows: (Conformance, Tightest),
    columns: (Conformance, Tightest),
    census: Census,
}

#[derive(Clone, Copy)]
struct Look {
    pattern: Sparsity,
    places: usize,
}

impl OnMatrix for Look {
    type Output = twofour::Result<Findings>;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> twofour::Result<Findings> {
        let along = |axis| {
            let found = verify::conformance(matrix, self.pattern, axis, self.places)?;
            Ok::<_, twofour::Error>((found, tightest(matrix, axis)))
        };
        let census = verify::census(matrix.data());
        Ok(Findings { rows: along(Axis::Row)?, columns: along(Axis::Column)?, census })
    }
}

enum Stored<'a> {
    Plain(&'a TensorInfo),
    Compressed(&'a CompressedInfo),
}

impl Check {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let globs = self.selection.globs()?;
        let given = self.file.clone();
        self.file = hub::locate(&self.file, screen)?;
        let reader = Reader::open(&self.file)?;
        let selection = globs.of_model(&reader)?;

        let (mut chosen, mut skipped) = (Vec::new(), Vec::new());
        let mut skip = |name: &str, reason: String| skipped.push(SkippedAnswer { name: name.to_owned(), reason });
        for t in reader.plain_tensors() {
            match selection.of(&t.name, t.dtype, &t.shape) {
                Ok(layout) => chosen.push((Stored::Plain(t), layout, t.bytes)),
                Err(reason) => skip(&t.name, reason.to_string()),
            }
        }
        for w in reader.compressed_weights() {
            match selection.of(&w.name, w.format.dense().into(), &[w.rows, w.cols]) {
                Ok(layout) => chosen.push((Stored::Compressed(w), layout, w.bytes())),
                Err(reason) => skip(&w.name, reason.to_string()),
            }
        }
        if chosen.is_empty() {
            bail!(
                "{}: nothing to check, no tensor is a weight matrix; choose some with --include",
                self.file.display()
            );
        }

        let total = chosen.iter().map(|(.., bytes)| *bytes as u64).sum();
        let mut progress = screen.progress();
        let (mut tensors, mut done) = (Vec::with_capacity(chosen.len()), 0);
        for (stored, layout, bytes) in &chosen {
            tensors.extend(self.look(&reader, stored, *layout)?);
            done += *bytes as u64;
            progress.bytes("checking", done, total);
        }
        drop(progress);

        let answer = Answer {
            path: reader.path().display().to_string(),
            pattern: self.pattern.to_string(),
            axis: match self.axis {
                Wanted::Reduction => "reduction",
                Wanted::Row => "row",
                Wanted::Column => "column",
                Wanted::Both => "both",
            },
            obeys: tensors.iter().all(|t| t.obeys),
            tensors,
            skipped,
        };
        self.tell(screen, &answer)?;
        screen.next(&self.next(&given, &answer))?;
        screen.json(&answer)?;
        Ok(if answer.obeys { Verdict::Yes } else { Verdict::No })
    }

    /// Returns the checks of a tensor's elements, or `None` for a dtype that twofour does not support.
    fn look(&self, reader: &Reader, stored: &Stored<'_>, layout: Layout) -> Result<Option<TensorAnswer>> {
        let code = Look { pattern: self.pattern, places: self.places };
        let (name, dtype, shape, found) = match *stored {
            Stored::Plain(t) => (
                &t.name,
                t.dtype.name(),
                t.shape.clone(),
                on_matrices(reader, t, code)?.into_iter().collect::<Result<_, _>>()?,
            ),
            Stored::Compressed(w) => {
                (&w.name, w.format.name(), vec![w.rows, w.cols], vec![on_compressed(reader, w, code)??])
            }
        };
        tracing::info!(tensor = %name, "checked");
        if found.is_empty() {
            return Ok(None);
        }
        let total = |of: fn(&Census) -> usize| found.iter().map(|findings| of(&findings.census)).sum::<usize>();
        let density = total(|census| census.nonzeros) as f64 / total(|census| census.elements).max(1) as f64;
        let (negative_zeros, nans) = (total(|census| census.negative_zeros), total(|census| census.nans));
        let infinities = total(|census| census.infinities);
        let is_stack = shape.len() > 2 && layout != Layout::Convolution;
        let (rows, columns): (Vec<_>, Vec<_>) = found.into_iter().map(|own| (own.rows, own.columns)).unzip();
        let [rows, columns] = [rows, columns].map(|along| axis_answer(&along, is_stack, self.places));
        let along = |axis| if axis == Axis::Row { rows.obeys } else { columns.obeys };
        let obeys = self.axis.axes(layout).iter().all(|axis| along(*axis));
        Ok(Some(TensorAnswer {
            name: name.clone(),
            dtype,
            shape,
            compressed: matches!(stored, Stored::Compressed(_)),
            reduction: if layout == Layout::InOut { "column" } else { "row" },
            layout,
            obeys,
            transposable: rows.obeys && columns.obeys,
            density,
            negative_zeros,
            nans,
            infinities,
            rows,
            columns,
        }))
    }

    fn tell(&self, screen: &mut Screen, answer: &Answer) -> Result<()> {
        let obeys = format!("{}?", self.pattern);
        let columns = |t: &TensorAnswer| t.columns.obeys || self.axis.axes(t.layout).contains(&Axis::Column);
        let has_columns = screen.is_detailed() || answer.tensors.iter().any(columns);
        let mut table = Table::new([
            (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
            ("dtype", Align::Left),
            ("shape", Align::Right),
            ("density", Align::Right),
            ("rows", Align::Left),
            ("columns", Align::Left),
            ("-0.0", Align::Right),
            (obeys.as_str(), Align::Left),
        ]);
        let found = |a: &AxisAnswer| a.found.clone().unwrap_or_else(|| "dense".to_owned());
        let common = |row: &[&TensorAnswer], axis: fn(&TensorAnswer) -> &AxisAnswer| {
            let first = found(axis(row[0]));
            if row.iter().all(|t| found(axis(t)) == first) { first } else { "varies".to_owned() }
        };
        let alike = |t: &TensorAnswer| (t.dtype, t.shape.clone(), t.obeys, t.layout);
        let groups = by_layer(&answer.tensors, screen.is_detailed(), |t| (&t.name, alike(t)));
        for (label, row) in &groups {
            let t = row[0];
            let negative_zeros: usize = row.iter().map(|t| t.negative_zeros).sum();
            table.row([
                label.clone(),
                t.dtype.to_owned(),
                units::shape(&t.shape),
                units::percent(row.iter().map(|t| t.density).sum::<f64>() / row.len() as f64),
                common(row, |t| &t.rows),
                if has_columns { common(row, |t| &t.columns) } else { String::new() },
                if negative_zeros > 0 { units::count(negative_zeros) } else { String::new() },
                self.verdict(t),
            ]);
        }
        screen.line(table)?;
        let lines = if has_columns { "rows, columns" } else { "rows" };
        screen.note(&format!("density: the share of nonzeros; {lines}: the tightest N:M pattern found along them"))?;
        for (_, row) in groups.iter().filter(|(_, row)| !row[0].obeys) {
            self.tell_violations(screen, row[0])?;
            if row.len() > 1 {
                screen.line(format!("  and so {} like it; -v shows each", units::plural(row.len() - 1, "tensor")))?;
            }
        }
        for t in &answer.tensors {
            if t.nans + t.infinities > 0 {
                screen.warn(format!(
                    "{}: {} NaN, {} infinite",
                    escape::line(&t.name),
                    units::count(t.nans),
                    units::count(t.infinities)
                ));
            }
        }
        let obeying = answer.tensors.iter().filter(|t| t.obeys).count();
        screen.line(format!(
            "\n{obeying} of {} {} {}{}{}",
            units::plural(answer.tensors.len(), "tensor"),
            if obeying == 1 { "is" } else { "are" },
            self.pattern,
            self.lines(),
            if answer.skipped.is_empty() {
                String::new()
            } else {
                format!("; {} not selected", units::plural(answer.skipped.len(), "tensor"))
            }
        ))
    }

    fn verdict(&self, t: &TensorAnswer) -> String {
        let verdict = if t.obeys { paint(style::GOOD, "yes") } else { paint(style::BAD, "no") };
        match (self.axis, t.layout) {
            (Wanted::Reduction, Layout::InOut) => format!("{verdict}, along columns: stored [in, out]"),
            _ => verdict,
        }
    }

    /// The axis, in words.
    fn lines(&self) -> &'static str {
        match self.axis {
            Wanted::Reduction if !matches!(self.pattern, Sparsity::Groups(_)) => "",
            Wanted::Reduction => " along the axis that kernels need",
            Wanted::Row => " along rows",
            Wanted::Column => " along columns",
            Wanted::Both => " along rows and columns",
        }
    }

    /// What a person may do next: compress what is 2:4, run what is compressed, prune the rest.
    fn next(&self, given: &Path, answer: &Answer) -> Vec<String> {
        match answer.obeys {
            true if answer.tensors.iter().all(|t| t.compressed) => next::run(&self.file, None),
            _ if self.pattern != Pattern::TWO_FOUR.into() || self.axis == Wanted::Column => vec![],
            // Of weights stored as [in, out] nothing is compressed, and a model of convolutions alone is not run.
            true if answer.tensors.iter().any(|t| t.layout == Layout::InOut) => next::run(&self.file, None),
            true if answer.tensors.iter().all(|t| t.layout == Layout::Convolution) => vec![],
            true => vec![next::compress(given)],
            false => vec![next::prune(given)],
        }
    }

    fn tell_violations(&self, screen: &mut Screen, t: &TensorAnswer) -> Result<()> {
        for axis in self.axis.axes(t.layout) {
            let (line, found) = match axis {
                Axis::Row => ("row", &t.rows),
                Axis::Column => ("column", &t.columns),
            };
            if found.obeys {
                continue;
            }
            let (name, count, parts) = (escape::line(&t.name), found.violation_count, found.groups);
            let (count, parts, pattern) = (units::count(count), units::count(parts), self.pattern);
            screen.line(match pattern {
                Sparsity::Groups(_) => format!("\n{name}: {count} of {parts} groups along {line}s break {pattern}"),
                Sparsity::Vectors { .. } => {
                    format!("\n{name}: {count} of {parts} blocks along {line}s break {pattern}")
                }
                Sparsity::EachRow(_) => format!("\n{name}: {count} of {parts} {line}s break {pattern}"),
                Sparsity::Tensor(_) => format!("\n{name}: not {pattern}"),
                _ => format!(
                    "\n{name}: {count} more of {parts} must be zero for {pattern}; those of fewest nonzeros are"
                ),
            })?;
            for (expert, place) in &found.places {
                let expert = expert.map_or(String::new(), |expert| format!("expert {expert}, "));
                screen.line(format!("  {expert}{place}"))?;
            }
            if found.violation_count > found.violations.len() {
                screen.line("  ...")?;
            }
        }
        Ok(())
    }
}

/// What is found along an axis of a matrix, or of all the matrices of a stack.
fn axis_answer(found: &[(Conformance, Tightest)], is_stack: bool, places: usize) -> AxisAnswer {
    let of_matrix = |(index, (conformance, _)): (usize, &'_ (Conformance, Tightest))| {
        let expert = is_stack.then_some(index);
        conformance.violations.iter().map(|place| (expert, *place)).collect::<Vec<_>>()
    };
    let tightest = found.iter().map(|(_, tightest)| *tightest).reduce(Tightest::join);
    let listed: Vec<_> = found.iter().enumerate().flat_map(of_matrix).take(places).collect();
    AxisAnswer {
        found: tightest.and_then(Tightest::text),
        obeys: found.iter().all(|(conformance, _)| conformance.obeys()),
        groups: found.iter().map(|(conformance, _)| conformance.parts).sum(),
        violation_count: found.iter().map(|(conformance, _)| conformance.violation_count).sum(),
        violations: listed.iter().map(|(expert, place)| PlaceAnswer { expert: *expert, ..place.into() }).collect(),
        places: listed,
    }
}
