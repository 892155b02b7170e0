//! The results of `twofour advise`: totals, the verdict, and their text.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use twofour::speedup::{Interval, Verdict};

use super::timing::Timing;
use crate::weight_format::WeightFormat;
use crate::{
    measure::{Gpu, Machine, Shape, load_average},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
};

/// What was measured on.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Machinery {
    Cpu(Machine),
    Gpu(Gpu),
}

#[derive(Debug, Serialize)]
pub(super) struct Answer {
    pub(super) machine: Machinery,
    pub(super) dtype: WeightFormat,
    /// Why that was measured.
    pub(super) dtype_reason: String,
    pub(super) shapes: Vec<ShapeAnswer>,
    pub(super) totals: Vec<Total>,
    pub(super) verdict: String,
}

#[derive(Debug, Serialize)]
pub(super) struct ShapeAnswer {
    pub(super) out: usize,
    #[serde(rename = "in")]
    pub(super) inputs: usize,
    /// Layers of this shape in the model.
    pub(super) layers: usize,
    pub(super) timings: Vec<Timing>,
}

/// All layers together.
#[derive(Debug, Serialize)]
pub(super) struct Total {
    tokens: usize,
    dense_us: f64,
    sparse_us: f64,
    dense_bytes: usize,
    sparse_bytes: usize,
    /// Null where the machine is too noisy.
    speed_up: Option<f64>,
    /// Of the shapes' intervals, each with its share of the time of 2:4: as if all of them erred to the same side, so
    /// wider rather than narrower.
    interval: Interval,
    verdict: Verdict,
}

impl Total {
    /// Of all shapes at the `which`-th number of tokens.
    pub(super) fn of(shapes: &[ShapeAnswer], which: usize) -> Self {
        let all = || shapes.iter().map(|shape| (shape.layers as f64, &shape.timings[which]));
        let sum = |of: &dyn Fn(&Timing) -> f64| all().map(|(layers, timing)| layers * of(timing)).sum::<f64>();
        let sparse_us = sum(&|t| t.sparse_us);
        let mean = |of: &dyn Fn(Interval) -> f64| sum(&|t| t.sparse_us * of(t.interval)) / sparse_us;
        let interval = Interval { median: mean(&|i| i.median), low: mean(&|i| i.low), high: mean(&|i| i.high) };
        // A shape's interval may be narrow because it was capped: what could not be said of the shapes cannot be said
        // of their sum.
        let noisy = sum(&|t| if t.verdict == Verdict::TooNoisy { t.sparse_us } else { 0.0 });
        let verdict = if noisy > sparse_us / 2.0 { Verdict::TooNoisy } else { Verdict::of(interval) };
        Total {
            tokens: all().map(|(_, timing)| timing.tokens).next().unwrap_or(0),
            dense_us: sum(&|t| t.dense_us),
            sparse_us,
            dense_bytes: shapes.iter().map(|s| s.layers * s.timings[which].dense_bytes).sum(),
            sparse_bytes: shapes.iter().map(|s| s.layers * s.timings[which].sparse_bytes).sum(),
            speed_up: (verdict != Verdict::TooNoisy).then_some(interval.median),
            interval,
            verdict,
        }
    }
}

/// Returns the verdict in a sentence.
pub(super) fn verdict(totals: &[Total]) -> String {
    let list = |wanted: Verdict| {
        let hits = totals.iter().filter(|t| t.verdict == wanted);
        let figure = |t: &Total| match t.speed_up {
            Some(speed_up) if !t.interval.is_range() => units::factor(speed_up),
            _ => range(t.interval),
        };
        hits.map(|t| format!("{} for {}", figure(t), units::plural(t.tokens, "token"))).collect::<Vec<_>>().join(", ")
    };
    let parts = [
        ("2:4 is faster here", Verdict::Faster),
        ("as fast as dense", Verdict::AsFast),
        ("slower than dense", Verdict::Slower),
        ("this machine is too noisy to tell", Verdict::TooNoisy),
    ];
    let parts = parts.map(|(what, finding)| (what, list(finding)));
    let told = parts.iter().filter(|(_, hits)| !hits.is_empty()).map(|(what, hits)| format!("{what}: {hits}"));
    told.collect::<Vec<_>>().join("; ")
}

/// `1.52-1.61x`.
fn range(interval: Interval) -> String {
    format!("{:.2}-{}", interval.low, units::factor(interval.high))
}

impl Answer {
    /// Prints the results.
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        screen.line(match &self.machine {
            Machinery::Cpu(Machine { cpu, threads, engine, .. }) => {
                format!("{cpu}, {}, engine {engine}", units::plural(*threads, "thread"))
            }
            Machinery::Gpu(Gpu { gpu, architecture, .. }) => format!("{gpu}, {architecture}"),
        })?;
        screen.line(format!("measured in {}: {}\n", self.dtype, self.dtype_reason))?;
        screen.line(self.table())?;
        screen.note(
            "speedup: time of the fastest dense baseline by that of 2:4; 99 %: its confidence interval. Linear layers \
             only, random \
             values; what pruning costs is another question (twofour quickstart, twofour prune --eval)",
        )?;
        if let Some(total) = self.totals.first() {
            let [dense, sparse] = [total.dense_bytes, total.sparse_bytes].map(|bytes| units::bytes(bytes as u64));
            screen.line(format!("\nWeights of these layers: {dense} dense, {sparse} 2:4"))?;
        }
        screen.line(&self.verdict)?;
        for remark in self.remarks() {
            screen.line(paint(style::WARNING, remark))?;
        }
        Ok(())
    }

    /// Whether 2:4 is faster for any number of tokens.
    pub(super) fn is_faster(&self) -> bool {
        self.totals.iter().any(|total| total.verdict == Verdict::Faster)
    }

    fn table(&self) -> Table {
        let mut table = Table::new([
            ("shape", Align::Right),
            ("layers", Align::Right),
            ("tokens", Align::Right),
            ("dense", Align::Right),
            ("2:4", Align::Right),
            ("speedup", Align::Right),
            ("99 %", Align::Right),
            ("", Align::Left),
        ]);
        let us = |us: f64| units::time(Duration::from_secs_f64(us * 1e-6));
        let mut row =
            |names: [String; 2], tokens, times: [f64; 2], (interval, finding): (Interval, Verdict), remark: &str| {
                let (style, told) = match finding {
                    Verdict::Faster => (style::GOOD, None),
                    Verdict::Slower => (style::BAD, None),
                    Verdict::AsFast => (anstyle::Style::new(), None),
                    Verdict::TooNoisy => (style::WARNING, Some("too noisy")),
                };
                let figure = || if interval.is_range() { range(interval) } else { units::factor(interval.median) };
                let told = told.map_or_else(figure, str::to_owned);
                let [shape, layers] = names;
                let first = [shape, layers, units::count(tokens), us(times[0]), us(times[1])];
                table.row([&first[..], &[paint(style, told), range(interval), remark.to_owned()]].concat());
            };
        for shape in &self.shapes {
            for t in &shape.timings {
                let name = Shape { out: shape.out, inputs: shape.inputs }.to_string();
                let remark = match (t.capped, t.dense_is_far()) {
                    (true, _) => "[limit]",
                    (_, true) => "[dense]",
                    _ => "",
                };
                let times = [t.dense_us, t.sparse_us];
                row([name, shape.layers.to_string()], t.tokens, times, (t.interval, t.verdict), remark);
            }
        }
        let layers: usize = self.shapes.iter().map(|s| s.layers).sum();
        if layers > 1 {
            for t in &self.totals {
                let times = [t.dense_us, t.sparse_us];
                row(["all".to_owned(), layers.to_string()], t.tokens, times, (t.interval, t.verdict), "");
            }
        }
        table
    }

    /// Notes that explain the figures.
    fn remarks(&self) -> Vec<String> {
        let timings = || self.shapes.iter().flat_map(|shape| &shape.timings);
        let mut remarks = Vec::new();
        if timings().any(|t| t.verdict == Verdict::TooNoisy)
            || self.totals.iter().any(|t| t.verdict == Verdict::TooNoisy)
        {
            let load = match (&self.machine, load_average()) {
                (Machinery::Cpu(machine), Some(load)) => {
                    let has = units::plural(machine.hardware_threads, "hardware thread");
                    format!(" (load average {load:.1} on {has})")
                }
                _ => String::new(),
            };
            remarks.push(format!(
                "Too noisy: the runs contradict each other{load}. Close other programs and run this again, or measure \
                 longer with --budget."
            ));
        }
        let most = timings().filter(|t| t.capped).map(|t| t.measured_speed_up).fold(0.0, f64::max);
        if most > 0.0 {
            remarks.push(format!(
                "[limit]: up to {} was measured. At one token a GEMM reads the weight once, so 2:4 can gain what it \
                 saves in bytes and no more; \
                 the rest is noise or a slow dense baseline, and is not reported.",
                units::factor(most)
            ));
        }
        let least = timings().filter(|t| t.dense_is_far()).filter_map(|t| t.dense_share_of_limit).reduce(f64::min);
        if let Some(least) = least {
            remarks.push(format!(
                "[dense]: the dense baseline is far from its own limit (down to {:.0} % of what read bandwidth and \
                 arithmetic allow here); \
                 a better dense library would gain less from 2:4.",
                least * 100.0
            ));
        }
        remarks
    }
}

#[cfg(test)]
mod tests {
    use super::super::timing::Side;
    use super::*;

    fn interval(median: f64, low: f64, high: f64) -> Interval {
        Interval { median, low, high }
    }

    fn timing(tokens: usize, of: Interval, us: f64, least_us: Option<f64>) -> Timing {
        let side = |us, bytes| Side { us, contender: "somebody".to_owned(), bytes };
        Timing::new(tokens, [side(us * of.median, 16), side(us, 9)], of, &[], least_us)
    }

    fn shape(layers: usize, timing: Timing) -> ShapeAnswer {
        ShapeAnswer { out: 1, inputs: 1, layers, timings: vec![timing] }
    }

    #[test]
    fn a_total_weighs_shapes_by_their_time() {
        let fast = || timing(16, interval(1.5, 1.4, 1.6), 10.0, None);
        let slow = || timing(16, interval(0.9, 0.88, 0.92), 30.0, None);
        let total = Total::of(&[shape(3, fast()), shape(1, slow())], 0);
        assert_eq!((total.dense_us, total.sparse_us), (72.0, 60.0));
        let speed_up = total.speed_up.unwrap();
        assert!((speed_up - 1.2).abs() < 1e-9 && (total.interval.low - 1.14).abs() < 1e-9, "{total:?}");
        assert_eq!(total.verdict, Verdict::Faster);
        // What is unknown of most of the time is unknown of the sum, however the cap narrows it.
        let noisy = timing(1, interval(4.0, 1.7, 6.0), 30.0, None);
        let total = Total::of(&[shape(1, noisy), shape(1, timing(1, interval(1.7, 1.69, 1.71), 10.0, None))], 0);
        assert_eq!((total.speed_up, total.verdict), (None, Verdict::TooNoisy));
    }

    #[test]
    fn the_verdict_says_which_way() {
        let total = |tokens, of| Total::of(&[shape(1, timing(tokens, of, 10.0, None))], 0);
        let totals = [
            total(1, interval(1.7, 1.68, 1.72)),
            total(16, interval(1.01, 0.99, 1.03)),
            total(64, interval(1.2, 0.6, 1.9)),
            total(512, interval(0.8, 0.78, 0.82)),
        ];
        assert_eq!(
            verdict(&totals),
            "2:4 is faster here: 1.70x for 1 token; as fast as dense: 1.01x for 16 tokens; \
             slower than dense: 0.80x for 512 tokens; this machine is too noisy to tell: 0.60-1.90x for 64 tokens"
        );
    }
}
