//! The suite `blocks`: block-sparse weights on the CPU.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Result, bail};
use clap::Args;
use half::bf16;
use serde::Serialize;
use twofour::{
    Axis, MatrixRef, Selector,
    kernel::{BlockSparseWeight, DenseWeight, Epilogue, KernelElement},
    select::Sparsity,
    store::Bsr,
};
use twofour_cli::{
    exit::{Usage, Verdict},
    measure::{self, Machine, Shape, random::Random},
    present::{
        Screen,
        style::{self, paint},
        table::Table,
        units,
    },
    threads,
};

use crate::{load::warn_if_busy, output::Output};

/// Bytes of the copies that calls rotate through, so that weights come from memory as in a model.
const COPIES: usize = 256 << 20;

const SHAPES: [Shape; 2] = [Shape { out: 4096, inputs: 4096 }, Shape { out: 14336, inputs: 4096 }];
const TOKENS: [u32; 7] = [1, 4, 8, 16, 64, 256, 512];

/// Measure block-sparse weights against dense ones on this machine's CPU
///
/// Weights are random and pruned by blocks. Contenders are interleaved in shuffled order: block-sparse and dense, in
/// f32 and in bf16. Times are medians.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench blocks --threads 2 --pattern block:64x64@0.8 -o blocks.json")]
pub(crate) struct Blocks {
    /// Threads
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = threads::option)]
    threads: usize,

    /// What is pruned: block:RxC@SHARE
    #[arg(
        long,
        default_value_t = Sparsity::Blocks { rows: 64, cols: 64, level: 0.8 },
        value_name = "PATTERN"
    )]
    pattern: Sparsity,

    /// Measure layers of this shape instead of the suite's; may be repeated
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,

    /// Numbers of tokens to multiply at once [default: 1,4,8,16,64,256,512]
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: Vec<u32>,

    /// Seconds to spend on each layer and number of tokens; at least five rounds are measured in any case
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    seconds: f64,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct Answer {
    machine: Machine,
    command: String,
    /// Over the minute before the measurement; null where the operating system does not tell.
    load_average: Option<f64>,
    rows: Vec<Row>,
}

/// Medians of one layer and number of tokens, in microseconds.
#[derive(Debug, Serialize)]
struct Row {
    /// Output and input features.
    shape: [usize; 2],
    tokens: usize,
    block_f32_us: f64,
    dense_f32_us: f64,
    block_bf16_us: f64,
    dense_bf16_us: f64,
}

impl Blocks {
    /// Runs the suite.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let Sparsity::Blocks { rows, cols, .. } = self.pattern else {
            bail!(Usage(format!("--pattern {}: not a pattern of blocks, such as block:64x64@0.8", self.pattern)));
        };
        let budget = measure::time("--seconds", self.seconds)?;
        self.output.expect_writable()?;
        let shapes = if self.shape.is_empty() { &SHAPES[..] } else { &self.shape };
        let tokens = if self.tokens.is_empty() { &TOKENS[..] } else { &self.tokens };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().map_err(threads::refused)?;
        let machine = Machine { threads: self.threads, ..measure::machine()? };
        let command = self.told(shapes, tokens);
        let mut answer = Answer { machine, command, load_average: measure::load_average(), rows: Vec::new() };
        let mut progress = screen.progress();
        for (done, shape) in shapes.iter().enumerate() {
            let single = Layer::<f32>::new(*shape, self.pattern, [rows, cols])?;
            let half = Layer::<bf16>::new(*shape, self.pattern, [rows, cols])?;
            for tokens in tokens.iter().map(|tokens| *tokens as usize) {
                progress.steps(&format!("{shape}, {tokens} tokens"), done as u64, shapes.len() as u64);
                answer.rows.push(pool.install(|| row(*shape, tokens, (&single, &half), budget))?);
            }
        }
        drop(progress);
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self, shapes: &[Shape], tokens: &[u32]) -> String {
        let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
        let shapes: String = shapes.iter().map(|shape| format!(" --shape {shape}")).collect();
        let (threads, pattern, seconds) = (self.threads, self.pattern, self.seconds);
        let tokens = tokens.join(",");
        format!(
            "twofour-bench blocks --threads {threads} --pattern {pattern}{shapes} --tokens {tokens} --seconds {seconds}"
        )
    }
}

/// A weight, block-sparse and dense, in copies.
struct Layer<T: KernelElement> {
    block: Vec<BlockSparseWeight<T>>,
    dense: Vec<DenseWeight<T>>,
    turn: AtomicUsize,
}

impl<T: KernelElement> Layer<T> {
    fn new(shape: Shape, pattern: Sparsity, block: [usize; 2]) -> Result<Self> {
        let Shape { out, inputs } = shape;
        let mut random = Random::new();
        let weight: Vec<T> = (0..out * inputs).map(|_| T::from_f32(random.float())).collect();
        let matrix = MatrixRef::new(out, inputs, &weight)?;
        let pruned = Selector::by_magnitude(pattern, Axis::Row).mask(matrix)?.apply(matrix)?;
        let block = BlockSparseWeight::pack(&Bsr::from_dense(MatrixRef::new(out, inputs, &pruned)?, block)?)?;
        let dense = DenseWeight::pack(matrix)?;
        let copies = |bytes: usize| COPIES.div_ceil(bytes.max(1)).clamp(1, 64) + 1;
        let (blocks, denses) = (copies(block.bytes()), copies(dense.bytes()));
        Ok(Layer { block: vec![block; blocks], dense: vec![dense; denses], turn: AtomicUsize::new(0) })
    }

    fn next(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }
}

fn row(shape: Shape, tokens: usize, (single, half): (&Layer<f32>, &Layer<bf16>), budget: Duration) -> Result<Row> {
    let mut random = Random::new();
    let x: Vec<f32> = (0..tokens * shape.inputs).map(|_| random.float()).collect();
    let x16: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let (mut y, mut y16) = (vec![0f32; tokens * shape.out], vec![bf16::ZERO; tokens * shape.out]);
    let (mut z, mut z16) = (y.clone(), y16.clone());
    let none = Epilogue::default();
    let mut block = || Ok(single.block[single.next() % single.block.len()].linear(&x, tokens, none, &mut y)?);
    let mut dense = || Ok(single.dense[single.next() % single.dense.len()].linear(&x, tokens, none, &mut z)?);
    let mut block16 = || Ok(half.block[half.next() % half.block.len()].linear(&x16, tokens, none, &mut y16)?);
    let mut dense16 = || Ok(half.dense[half.next() % half.dense.len()].linear(&x16, tokens, none, &mut z16)?);
    let times = measure::medians(&mut [&mut block, &mut dense, &mut block16, &mut dense16], budget)?;
    let us = |i: usize| times[i].as_secs_f64() * 1e6;
    Ok(Row {
        shape: [shape.out, shape.inputs],
        tokens,
        block_f32_us: us(0),
        dense_f32_us: us(1),
        block_bf16_us: us(2),
        dense_bf16_us: us(3),
    })
}

impl Answer {
    /// Prints the table.
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, threads, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}, {}", units::plural(*threads, "thread")))?;
        warn_if_busy(screen, self.load_average, &self.machine)?;
        screen.line("")?;
        let mut table = Table::of(
            ["layer"],
            [
                "tokens",
                "blocks f32",
                "dense f32",
                "blocks bf16",
                "dense bf16",
                "f32 over dense f32",
                "bf16 over dense f32",
                "bf16 over dense bf16",
            ],
        );
        for row in &self.rows {
            let [out, inputs] = row.shape;
            let times = [row.block_f32_us, row.dense_f32_us, row.block_bf16_us, row.dense_bf16_us];
            let factors = [
                row.dense_f32_us / row.block_f32_us,
                row.dense_f32_us / row.block_bf16_us,
                row.dense_bf16_us / row.block_bf16_us,
            ];
            let mut cells = vec![format!("{out}x{inputs}"), row.tokens.to_string()];
            cells.extend(times.map(units::microseconds));
            cells.extend(
                factors.map(|factor| paint(if factor > 1.0 { style::GOOD } else { style::BAD }, units::factor(factor))),
            );
            table.row(cells);
        }
        screen.line(table)?;
        screen.line(paint(style::FAINT, "\nMedians. Over: the dense time divided by that of the blocks."))
    }
}
