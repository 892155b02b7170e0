//! The results of `twofour advise`: figures with their spread, verdicts, and their text.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::format::WeightFormat;
use crate::{
    measure::{Interval, Machine, Pass, Shape, SpeedUp, cuda::Gpu, load_average, median, speed_up},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
};

/// Passes over each piece of work at least: the interval is that of at least so many.
pub(super) const LEAST_PASSES: usize = 3;

/// Passes at most: what is not known by then is too noisy.
pub(super) const MOST_PASSES: usize = 8;

/// An interval whose upper end is at most this many times the lower one needs no further pass.
const SETTLED: f64 = 1.1;

/// An interval still this wide after [`ENOUGH_PASSES`] will not become narrow enough.
const HOPELESS: f64 = 2.0;
const ENOUGH_PASSES: usize = 5;

/// An interval wider than this is no basis for a decision.
const TOO_WIDE: f64 = 1.2;

/// Differences smaller than this share are negligible to a user.
const SMALL: f64 = 0.05;

/// An interval within this share of 1 is called as fast as dense.
const EVEN: f64 = 0.1;

/// A dense contender below this share of its limit is remarked on.
const FAR: f64 = 0.7;

/// A dense contender cannot be above its limit: the measurement of a limit that says so by this much was disturbed.
const DISTURBED: f64 = 1.2;

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

/// The verdict on a speedup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Finding {
    Faster,
    /// A negligible difference.
    AsFast,
    Slower,
    /// No verdict: the machine is too noisy.
    TooNoisy,
}

impl Finding {
    /// Of a speedup as measured.
    fn of(interval: Interval) -> Self {
        let Interval { median, low, high } = interval;
        let width = interval.width();
        if width.is_nan() || width > TOO_WIDE {
            Finding::TooNoisy
        } else if low > 1.0 && median > 1.0 + SMALL {
            Finding::Faster
        } else if high < 1.0 && median < 1.0 - SMALL {
            Finding::Slower
        } else if low >= 1.0 - EVEN && high <= 1.0 + EVEN {
            Finding::AsFast
        } else {
            Finding::TooNoisy
        }
    }
}

/// One side of a comparison.
#[derive(Debug, Clone)]
pub(super) struct Side {
    /// Median time of a GEMM.
    pub(super) us: f64,
    pub(super) contender: String,
    /// Bytes of the weight.
    pub(super) bytes: usize,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Timing {
    pub(super) tokens: usize,
    /// Median time of the fastest dense GEMM.
    dense_us: f64,
    /// The library or kernel of that GEMM.
    dense_contender: String,
    /// Median time of the 2:4 GEMM.
    sparse_us: f64,
    /// The library or kernel of that GEMM.
    sparse_contender: String,
    dense_bytes: usize,
    /// Values and metadata.
    sparse_bytes: usize,
    /// Time of dense by that of 2:4, at one token at most `bandwidth_limit`; null where the machine is too noisy.
    pub(super) speed_up: Option<f64>,
    /// The speedup's 99 % confidence interval and median, likewise at most the limit at one token.
    interval: Interval,
    /// The median as it was measured.
    measured_speed_up: f64,
    /// Bytes of the dense weight divided by those of the 2:4 one: the speedup of a memory-bound GEMM.
    bandwidth_limit: f64,
    /// Whether more than the limit was measured at one token.
    capped: bool,
    /// The least time that this machine's read bandwidth and arithmetic allow for the dense GEMM, by the time it took; null at one token,
    /// and where it is above 1.2, so that the measurement of the limit was disturbed.
    dense_share_of_limit: Option<f64>,
    /// Passes, each in a process of its own on a CPU.
    passes: usize,
    /// Rounds of all passes.
    rounds: usize,
    verdict: Finding,
}

impl Timing {
    /// From the speedup that passes show. `least_us` is the least time the dense GEMM can take on this machine, where that is known.
    pub(super) fn new(
        tokens: usize,
        [dense, sparse]: [Side; 2],
        interval: Interval,
        passes: &[Pass],
        least_us: Option<f64>,
    ) -> Self {
        let bandwidth_limit = dense.bytes as f64 / sparse.bytes as f64;
        let verdict = Finding::of(interval);
        let capped = tokens == 1 && interval.median > bandwidth_limit;
        let shown = if tokens == 1 { interval.capped(bandwidth_limit) } else { interval };
        let share = least_us.map(|least| least / dense.us);
        Timing {
            tokens,
            dense_us: dense.us,
            dense_contender: dense.contender,
            sparse_us: sparse.us,
            sparse_contender: sparse.contender,
            dense_bytes: dense.bytes,
            sparse_bytes: sparse.bytes,
            speed_up: (verdict != Finding::TooNoisy).then_some(shown.median),
            interval: shown,
            measured_speed_up: interval.median,
            bandwidth_limit,
            capped,
            dense_share_of_limit: share.filter(|share| tokens > 1 && *share <= DISTURBED),
            passes: passes.len(),
            rounds: passes.iter().map(|pass| pass.sparse.len()).sum(),
            verdict,
        }
    }

    fn dense_is_far(&self) -> bool {
        self.dense_share_of_limit.is_some_and(|share| share < FAR)
    }
}

/// The speedup of passes, once there are enough of them and it is known well enough, or there may be no more of them.
pub(super) fn settled(passes: &[Pass]) -> Option<SpeedUp> {
    let enough = passes.len() >= LEAST_PASSES;
    let found = enough.then(|| speed_up(passes)).flatten()?;
    let width = found.interval.width();
    let is_hopeless = passes.len() >= ENOUGH_PASSES && width > HOPELESS;
    (width <= SETTLED || is_hopeless || passes.len() >= MOST_PASSES).then_some(found)
}

/// The medians of all rounds: of the dense contender of that number, and of 2:4.
pub(super) fn medians(passes: &[Pass], dense: usize) -> [f64; 2] {
    let all = |of: &dyn Fn(&Pass) -> Vec<f64>| median(&mut passes.iter().flat_map(of).collect::<Vec<_>>());
    [all(&|pass| pass.dense[dense].clone()), all(&|pass| pass.sparse.clone())]
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
    /// Of the shapes' intervals, each with its share of the time of 2:4: as if all of them erred to the same side, so wider rather than narrower.
    interval: Interval,
    verdict: Finding,
}

impl Total {
    /// Of all shapes at the `which`-th number of tokens.
    pub(super) fn of(shapes: &[ShapeAnswer], which: usize) -> Self {
        let all = || shapes.iter().map(|shape| (shape.layers as f64, &shape.timings[which]));
        let sum = |of: &dyn Fn(&Timing) -> f64| all().map(|(layers, timing)| layers * of(timing)).sum::<f64>();
        let sparse_us = sum(&|t| t.sparse_us);
        let mean = |of: &dyn Fn(Interval) -> f64| sum(&|t| t.sparse_us * of(t.interval)) / sparse_us;
        let interval = Interval { median: mean(&|i| i.median), low: mean(&|i| i.low), high: mean(&|i| i.high) };
        // A shape's interval may be narrow because it was capped: what could not be said of the shapes cannot be said of their sum.
        let noisy = sum(&|t| if t.verdict == Finding::TooNoisy { t.sparse_us } else { 0.0 });
        let verdict = if noisy > sparse_us / 2.0 { Finding::TooNoisy } else { Finding::of(interval) };
        Total {
            tokens: all().map(|(_, timing)| timing.tokens).next().unwrap_or(0),
            dense_us: sum(&|t| t.dense_us),
            sparse_us,
            dense_bytes: shapes.iter().map(|s| s.layers * s.timings[which].dense_bytes).sum(),
            sparse_bytes: shapes.iter().map(|s| s.layers * s.timings[which].sparse_bytes).sum(),
            speed_up: (verdict != Finding::TooNoisy).then_some(interval.median),
            interval,
            verdict,
        }
    }
}

/// Returns the verdict in a sentence.
pub(super) fn verdict(totals: &[Total]) -> String {
    let list = |wanted: Finding| {
        let hits = totals.iter().filter(|t| t.verdict == wanted);
        let figure = |t: &Total| match t.speed_up {
            Some(speed_up) => units::factor(speed_up),
            None => range(t.interval),
        };
        hits.map(|t| format!("{} for {}", figure(t), units::plural(t.tokens, "token"))).collect::<Vec<_>>().join(", ")
    };
    let parts = [
        ("2:4 is faster here", Finding::Faster),
        ("as fast as dense", Finding::AsFast),
        ("slower than dense", Finding::Slower),
        ("this machine is too noisy to tell", Finding::TooNoisy),
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
                format!("{cpu}, {}, engine {engine}\n", units::plural(*threads, "thread"))
            }
            Machinery::Gpu(Gpu { gpu, architecture, .. }) => format!("{gpu}, {architecture}\n"),
        })?;
        screen.line(self.table())?;
        screen.line(format!("\n{}", self.verdict))?;
        for remark in self.remarks() {
            screen.line(paint(style::WARNING, remark))?;
        }
        screen.line(paint(
            style::FAINT,
            "Speedup: time of the fastest dense contender by that of 2:4; 99 %: its confidence interval.\n\
             Linear layers only, random values; whether the model stays good is another question (`twofour quickstart`).",
        ))
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
            ("dense", Align::Right),
            ("2:4", Align::Right),
            ("", Align::Left),
        ]);
        let us = |us: f64| units::time(Duration::from_secs_f64(us * 1e-6));
        let mut row = |names: [String; 2],
                       tokens,
                       times: [f64; 2],
                       (interval, finding): (Interval, Finding),
                       bytes: [usize; 2],
                       remark: &str| {
            let (style, told) = match finding {
                Finding::Faster => (style::GOOD, None),
                Finding::Slower => (style::BAD, None),
                Finding::AsFast => (anstyle::Style::new(), None),
                Finding::TooNoisy => (style::WARNING, Some("too noisy")),
            };
            let told = told.map_or_else(|| units::factor(interval.median), str::to_owned);
            let [dense, sparse] = bytes.map(|b| units::bytes(b as u64));
            let [shape, layers] = names;
            let first = [shape, layers, units::count(tokens), us(times[0]), us(times[1])];
            table.row([&first[..], &[paint(style, told), range(interval), dense, sparse, remark.to_owned()]].concat());
        };
        for shape in &self.shapes {
            for t in &shape.timings {
                let name = Shape { out: shape.out, inputs: shape.inputs }.to_string();
                let remark = match (t.capped, t.dense_is_far()) {
                    (true, _) => "[limit]",
                    (_, true) => "[dense]",
                    _ => "",
                };
                let (times, bytes) = ([t.dense_us, t.sparse_us], [t.dense_bytes, t.sparse_bytes]);
                row([name, shape.layers.to_string()], t.tokens, times, (t.interval, t.verdict), bytes, remark);
            }
        }
        let layers: usize = self.shapes.iter().map(|s| s.layers).sum();
        if layers > 1 {
            for t in &self.totals {
                let (times, bytes) = ([t.dense_us, t.sparse_us], [t.dense_bytes, t.sparse_bytes]);
                row(["all".to_owned(), layers.to_string()], t.tokens, times, (t.interval, t.verdict), bytes, "");
            }
        }
        table
    }

    /// Notes that explain the figures.
    fn remarks(&self) -> Vec<String> {
        let timings = || self.shapes.iter().flat_map(|shape| &shape.timings);
        let mut remarks = Vec::new();
        if timings().any(|t| t.verdict == Finding::TooNoisy)
            || self.totals.iter().any(|t| t.verdict == Finding::TooNoisy)
        {
            let load = match (&self.machine, load_average()) {
                (Machinery::Cpu(machine), Some(load)) => {
                    let has = units::plural(machine.hardware_threads, "hardware thread");
                    format!(" (load average {load:.1} on {has})")
                }
                _ => String::new(),
            };
            remarks.push(format!(
                "Too noisy: the runs contradict each other{load}. Close other programs and run this again, or measure longer with --budget."
            ));
        }
        let most = timings().filter(|t| t.capped).map(|t| t.measured_speed_up).fold(0.0, f64::max);
        if most > 0.0 {
            remarks.push(format!(
                "[limit]: up to {} was measured. At one token a GEMM reads the weight once, so 2:4 can gain what it saves in bytes and no more; \
                 the rest is noise or a slow dense contender, and is not reported.",
                units::factor(most)
            ));
        }
        let least = timings().filter(|t| t.dense_is_far()).filter_map(|t| t.dense_share_of_limit).reduce(f64::min);
        if let Some(least) = least {
            remarks.push(format!(
                "[dense]: the dense contender is far from its own limit (down to {:.0} % of what read bandwidth and arithmetic allow here); \
                 a better dense library would gain less from 2:4.",
                least * 100.0
            ));
        }
        remarks
    }
}

#[cfg(test)]
mod tests {
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
    fn a_verdict_needs_a_narrow_interval_on_one_side() {
        assert_eq!(Finding::of(interval(1.5, 1.45, 1.6)), Finding::Faster);
        assert_eq!(Finding::of(interval(0.8, 0.75, 0.85)), Finding::Slower);
        assert_eq!(Finding::of(interval(1.02, 0.97, 1.06)), Finding::AsFast);
        // Surely faster, but nobody knows by how much.
        assert_eq!(Finding::of(interval(3.0, 1.5, 4.46)), Finding::TooNoisy);
        // Narrow enough, but on both sides of 1 by more than does not matter.
        assert_eq!(Finding::of(interval(1.08, 0.97, 1.15)), Finding::TooNoisy);
        assert_eq!(Finding::of(interval(f64::NAN, f64::NAN, f64::NAN)), Finding::TooNoisy);
    }

    #[test]
    fn one_token_gains_the_bandwidth_limit_at_most() {
        let one = timing(1, interval(2.0, 1.9, 2.1), 10.0, None);
        assert_eq!((one.speed_up, one.capped, one.verdict), (Some(16.0 / 9.0), true, Finding::Faster));
        assert_eq!((one.interval.low, one.interval.high, one.measured_speed_up), (16.0 / 9.0, 16.0 / 9.0, 2.0));
        // The cap makes no noise certain.
        let noisy = timing(1, interval(4.46, 1.7, 6.0), 10.0, None);
        assert_eq!((noisy.speed_up, noisy.verdict), (None, Finding::TooNoisy));
        let within = timing(1, interval(1.7, 1.65, 1.75), 10.0, None);
        assert_eq!((within.speed_up, within.capped), (Some(1.7), false));
        // Above one token the dense contender's arithmetic counts too.
        let two = timing(2, interval(2.0, 1.9, 2.1), 10.0, None);
        assert_eq!((two.speed_up, two.capped), (Some(2.0), false));
    }

    #[test]
    fn a_dense_contender_far_from_its_limit_is_remarked_on_above_one_token() {
        let far = |tokens| timing(tokens, interval(1.5, 1.45, 1.55), 10.0, Some(6.0));
        assert!(far(16).dense_is_far() && !far(1).dense_is_far());
        assert_eq!(far(16).dense_share_of_limit, Some(0.4));
        let near = |least| timing(16, interval(1.5, 1.45, 1.55), 10.0, Some(least));
        assert!(!near(14.0).dense_is_far() && near(14.0).dense_share_of_limit.is_some());
        assert_eq!(near(40.0).dense_share_of_limit, None);
    }

    #[test]
    fn a_total_weighs_shapes_by_their_time() {
        let fast = || timing(16, interval(1.5, 1.4, 1.6), 10.0, None);
        let slow = || timing(16, interval(0.9, 0.88, 0.92), 30.0, None);
        let total = Total::of(&[shape(3, fast()), shape(1, slow())], 0);
        assert_eq!((total.dense_us, total.sparse_us), (72.0, 60.0));
        let speed_up = total.speed_up.unwrap();
        assert!((speed_up - 1.2).abs() < 1e-9 && (total.interval.low - 1.14).abs() < 1e-9, "{total:?}");
        assert_eq!(total.verdict, Finding::Faster);
        // What is unknown of most of the time is unknown of the sum, however the cap narrows it.
        let noisy = timing(1, interval(4.0, 1.7, 6.0), 30.0, None);
        let total = Total::of(&[shape(1, noisy), shape(1, timing(1, interval(1.7, 1.69, 1.71), 10.0, None))], 0);
        assert_eq!((total.speed_up, total.verdict), (None, Finding::TooNoisy));
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

    #[test]
    fn passes_are_repeated_until_the_spread_is_small_or_enough_were_made() {
        let pass = |ratio: f64| Pass { sparse: vec![1.0; 5], dense: vec![vec![ratio; 5]] };
        assert!(settled(&[pass(1.5), pass(1.5)]).is_none());
        assert!(settled(&[pass(1.5), pass(1.5), pass(1.5)]).is_some());
        let mut noisy = vec![pass(1.2), pass(1.5), pass(1.8)];
        assert!(settled(&noisy).is_none());
        let hopeless: Vec<Pass> = [0.2, 1.5, 0.9, 1.8, 4.0].map(pass).into();
        assert!(settled(&hopeless[..4]).is_none() && settled(&hopeless).is_some());
        noisy.resize(MOST_PASSES, pass(1.5));
        let found = settled(&noisy).unwrap();
        assert_eq!(medians(&noisy, found.dense), [1.5, 1.0]);
    }
}
