//! Measurement in a process of its own.
//!
//! The number of threads is fixed when rayon's pool starts. So the command starts itself anew for each number of
//! threads, with `RAYON_NUM_THREADS` set. The new process reads the request as JSON from stdin, and writes results line
//! by line.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use twofour::DataType;

use super::{
    alternate::{MIN_ROUNDS, Stake, Times, Turn, alternate, rounds},
    contender::{Contender, Weights, expect_agreement, single, weights},
    read::{ReadBandwidth, Reader, gb_per_s},
    work::{Kind, Row, Shape, Work},
};
use crate::{exit::Verdict, interrupt, threads, weight_format::WeightFormat};

/// The hidden command that [`work`] is run by, in every program that measures.
pub const WORKER: &str = "measure-worker";

/// A request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Weights are kept from one piece of work to the next with the same shape and dtype.
    pub works: Vec<Work>,
    /// Time for each piece of work.
    pub budget: Duration,
    /// The fewest rounds, even when the budget is used up.
    pub least_rounds: usize,
    /// Whether read bandwidth is measured too.
    pub bandwidth: Bandwidth,
    /// Whether arithmetic throughput is measured first.
    pub arithmetic: Arithmetic,
    /// Whether the kernel in f32 is interleaved.
    pub single: Single,
}

impl Request {
    /// Returns a request to time the contenders only.
    pub fn new(works: Vec<Work>, budget: Duration) -> Self {
        Request {
            works,
            budget,
            least_rounds: MIN_ROUNDS,
            bandwidth: Bandwidth::Skip,
            arithmetic: Arithmetic::Skip,
            single: Single::Skip,
        }
    }
}

/// Whether read bandwidth is measured too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bandwidth {
    /// Before everything and, for decode, interleaved with the contenders.
    Beside,
    /// Before everything only.
    Before,
    /// No.
    Skip,
}

/// Whether the arithmetic throughput of the dense baselines is measured first, on a large GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Arithmetic {
    /// For this dtype.
    Before(WeightFormat),
    /// No.
    Skip,
}

/// Whether the 2:4 kernel in f32 is interleaved with the contenders of other dtypes in compute-bound work, where fewer
/// bytes are no advantage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Single {
    /// It is interleaved.
    Beside,
    /// It is not.
    Skip,
}

/// A message of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// How fast memory is read.
    Bandwidth(ReadBandwidth),
    /// The arithmetic throughput of the fastest dense baseline, 10^9 operations a second (a multiplication and an
    /// addition are two).
    Arithmetic(f64),
    /// A piece of work begins.
    Begun(Work),
    /// A piece of work is complete.
    Done {
        /// A row for each contender.
        rows: Vec<Row>,
        /// Microseconds of each round, by contender.
        rounds_us: Vec<Vec<f64>>,
    },
    /// The last message: an error, cause by cause.
    Failed(Vec<String>),
}

/// Why a worker returned nothing.
#[derive(Debug, thiserror::Error)]
enum WorkerError {
    #[error("{0}")]
    Failed(String),
    #[error("the measuring process ended ({status}) {place}; a process that takes too much memory ends like that")]
    Ended { status: ExitStatus, place: String },
    #[error("the measuring process answered what is no answer: {line}")]
    Unreadable { line: String, source: serde_json::Error },
}

/// Ends the process when dropped, if it still runs.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Either fails only where the process is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures in a new process with `threads` threads; `told` is called with every message as it arrives.
///
/// # Errors
/// What went wrong in the process, that it ended early, [`interrupt::Interrupted`], and errors of `told`.
pub fn measure(threads: usize, request: &Request, told: &mut dyn FnMut(Message) -> Result<()>) -> Result<()> {
    let _guard = interrupt::guard();
    let program = env::current_exe().context("finding this program, to start it anew for measuring")?;
    let child = Command::new(program)
        .arg(WORKER)
        .env("RAYON_NUM_THREADS", threads.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(threads::refused)?;
    let mut running = Running(child);
    if let Some(mut stdin) = running.0.stdin.take() {
        serde_json::to_writer(&mut stdin, request).context("asking the measuring process")?;
    }
    let (send, lines) = mpsc::channel();
    if let Some(stdout) = running.0.stdout.take() {
        // Ends when the process does, or when the receiver is dropped.
        let read = move || BufReader::new(stdout).lines().map_while(io::Result::ok).try_for_each(|l| send.send(l));
        thread::Builder::new().spawn(read).map_err(threads::refused)?;
    }
    let mut place = "before it began".to_owned();
    loop {
        interrupt::check()?;
        let line = match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        match serde_json::from_str(&line).map_err(|source| WorkerError::Unreadable { line, source })? {
            Message::Failed(causes) => return Err(rebuild(causes)),
            message => {
                if let Message::Begun(work) = &message {
                    place = format!("at {work}");
                }
                told(message)?;
            }
        }
    }
    let status = running.0.wait().context("waiting for the measuring process")?;
    // A Ctrl-C reaches both processes.
    interrupt::check()?;
    if status.success() { Ok(()) } else { Err(WorkerError::Ended { status, place }.into()) }
}

/// Returns the chain of causes as an error again.
fn rebuild(causes: Vec<String>) -> anyhow::Error {
    let mut causes = causes.into_iter().rev();
    let last = causes.next().unwrap_or_else(|| "the measuring process failed".to_owned());
    causes.fold(WorkerError::Failed(last).into(), anyhow::Error::context)
}

/// The worker process: reads the request on stdin, measures, and writes the results to stdout. An error is part of the
/// results.
///
/// # Errors
/// Only where answering is impossible.
pub fn work() -> Result<Verdict> {
    serve(io::stdin().lock(), io::stdout().lock())?;
    Ok(Verdict::Yes)
}

fn serve(input: impl io::Read, mut output: impl Write) -> Result<()> {
    let mut tell = |message: &Message| -> Result<()> {
        serde_json::to_writer(&mut output, message)?;
        output.write_all(b"\n")?;
        Ok(output.flush()?)
    };
    let done = serde_json::from_reader(input)
        .with_context(|| format!("the request is not one; `{WORKER}` is started by other commands only"))
        .and_then(|request| answer(&request, &mut tell));
    match done {
        Ok(()) => Ok(()),
        Err(error) => tell(&Message::Failed(error.chain().map(ToString::to_string).collect())),
    }
}

/// Time spent on finding the best way of reading, where it is measured in one process only.
const READ_BUDGET: Duration = Duration::from_millis(1500);

fn answer(request: &Request, tell: &mut dyn FnMut(&Message) -> Result<()>) -> Result<()> {
    // A wrong engine is told before gigabytes are filled.
    twofour::kernel::Engine::best()?;
    let mut reader = None;
    if request.bandwidth != Bandwidth::Skip {
        let budget = if request.bandwidth == Bandwidth::Beside { READ_BUDGET } else { READ_BUDGET / 3 };
        let (found, bandwidth) = Reader::new(budget)?;
        tell(&Message::Bandwidth(bandwidth))?;
        reader = (request.bandwidth == Bandwidth::Beside).then_some(found);
    }
    if let Arithmetic::Before(dtype) = request.arithmetic {
        tell(&Message::Arithmetic(arithmetic(dtype)?))?;
    }
    let mut kept: Option<(Shape, WeightFormat, Box<dyn Weights>)> = None;
    for &work in &request.works {
        tell(&Message::Begun(work))?;
        if kept.as_ref().is_none_or(|(shape, dtype, _)| (*shape, *dtype) != (work.shape, work.dtype)) {
            // Gone before its successor comes: both may not fit.
            drop(kept.take());
            kept = Some((work.shape, work.dtype, weights(work.shape, work.dtype)?));
        }
        if let Some((_, _, weights)) = &kept {
            tell(&take_turns(work, weights.as_ref(), reader.as_mut(), request)?)?;
        }
    }
    Ok(())
}

/// A GEMM whose arithmetic takes far longer than reading its weight, and time to run it.
const ARITHMETIC: (Shape, usize) = (Shape { out: 1024, inputs: 1024 }, 512);
const ARITHMETIC_BUDGET: Duration = Duration::from_millis(200);

/// 10^9 operations a second of the fastest dense baseline on [`ARITHMETIC`], by its fastest sample: what others add to
/// a time is no part of the limit.
fn arithmetic(dtype: WeightFormat) -> Result<f64> {
    let (shape, tokens) = ARITHMETIC;
    let mut contenders = weights(shape, dtype)?.contenders(tokens)?;
    contenders.retain(|contender| contender.who().is_dense());
    let mut runs: Vec<_> = contenders.iter_mut().map(|contender| || contender.multiply()).collect();
    let mut turns: Vec<&mut dyn FnMut() -> Result<()>> = runs.iter_mut().map(|run| run as _).collect();
    let times = alternate(&mut turns, ARITHMETIC_BUDGET)?;
    let fastest = times.iter().map(|times| times.min).min().unwrap_or_default();
    Ok((2 * shape.out * shape.inputs * tokens) as f64 / fastest.as_secs_f64() / 1e9)
}

/// Runs one unit of a contender's work.
type Run<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// Interleaves the contenders of one piece of work.
fn take_turns(work: Work, weights: &dyn Weights, reader: Option<&mut Reader>, request: &Request) -> Result<Message> {
    let mut contenders = weights.contenders(work.tokens)?;
    if request.single == Single::Beside && work.kind() == Kind::Prefill && work.dtype != DataType::F32.into() {
        contenders.push(single(work.shape, work.tokens)?);
    }
    let mut bytes_read = 0;
    let samples = {
        let mut runs: Vec<(Stake, Run<'_>)> = Vec::with_capacity(contenders.len() + 1);
        for contender in &mut contenders {
            let stake = if contender.who().is_dense() { Stake::Rival } else { Stake::Own };
            runs.push((stake, Box::new(|| contender.multiply())));
        }
        if let Some(reader) = reader.filter(|_| work.kind() == Kind::Decode) {
            let read = || {
                bytes_read = reader.read(weights.dense_bytes());
                Ok(())
            };
            runs.push((Stake::Own, Box::new(read)));
        }
        let mut turns: Vec<Turn<'_>> =
            runs.iter_mut().map(|(stake, run)| Turn { stake: *stake, run: run.as_mut() }).collect();
        rounds(&mut turns, request.budget, request.least_rounds)?
    };
    let times: Vec<Times> = samples.iter().map(|samples| Times::of(samples)).collect();
    expect_agreement(&contenders, work.shape.inputs)?;
    let read_gb_per_s = times.get(contenders.len()).map(|times| gb_per_s(bytes_read, times.median));
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let row = |(contender, times): (&dyn Contender, &Times)| {
        let gb_per_s = gb_per_s(contender.weight_bytes(), times.median);
        Row {
            work: work.kind(),
            dtype: work.dtype,
            shape: [work.shape.out, work.shape.inputs],
            tokens: work.tokens,
            threads: rayon::current_num_threads(),
            contender: contender.who(),
            median_us: us(times.median),
            min_us: us(times.min),
            max_us: us(times.max),
            rounds: times.rounds,
            weight_bytes: contender.weight_bytes(),
            gb_per_s,
            byte_limit: weights.dense_bytes() as f64 / weights.sparse_bytes() as f64,
            read_gb_per_s,
            read_share: read_gb_per_s.map(|read| gb_per_s / read),
        }
    };
    let rounds_us = samples.iter().take(contenders.len()).map(|of| of.iter().copied().map(us).collect()).collect();
    Ok(Message::Done { rows: contenders.iter().map(Box::as_ref).zip(&times).map(row).collect(), rounds_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Outcome, Who};

    fn answers(input: &[u8]) -> Vec<Message> {
        let mut output = Vec::new();
        serve(input, &mut output).unwrap();
        output.split(|b| *b == b'\n').filter(|l| !l.is_empty()).map(|l| serde_json::from_slice(l).unwrap()).collect()
    }

    #[test]
    fn works_are_answered_in_turn() {
        let shape = Shape { out: 32, inputs: 64 };
        let works = [1, 2].map(|tokens| Work { shape, dtype: DataType::F32.into(), tokens }).to_vec();
        let request = Request::new(works, Duration::from_millis(1));
        let told = answers(&serde_json::to_vec(&request).unwrap());
        assert_eq!(told.len(), 4);
        let (Message::Begun(work), Message::Done { rows, rounds_us }) = (&told[2], &told[3]) else {
            panic!("{told:?}")
        };
        assert!(rows.iter().zip(rounds_us).all(|(row, rounds)| row.rounds == rounds.len()), "{told:?}");
        assert_eq!((work.tokens, rows.len()), (2, 3));
        assert!(rows.iter().all(|r| r.what() == *work && r.median_us > 0.0 && r.min_us <= r.median_us));
        assert!((rows[0].byte_limit - 32.0 / 17.0).abs() < 1e-9, "{}", rows[0].byte_limit);
    }

    #[test]
    fn f32_takes_turns_with_smaller_dtypes_in_prefill_where_asked() {
        let shape = Shape { out: 32, inputs: 64 };
        let of = |dtype, tokens, single| {
            let works = vec![Work { shape, dtype: WeightFormat::Plain(dtype), tokens }];
            let request = Request { single, ..Request::new(works, Duration::from_millis(1)) };
            let told = answers(&serde_json::to_vec(&request).unwrap());
            let Some(Message::Done { rows, .. }) = told.into_iter().nth(1) else { panic!("no rows") };
            let single = rows.iter().filter(|row| row.contender == Who::SparseF32).count();
            let outcome = Outcome::of(&rows).unwrap();
            assert!(outcome.sparse.contender == Who::Sparse && outcome.best_dense.contender.is_dense());
            single
        };
        for dtype in [DataType::BF16, DataType::I8] {
            assert_eq!(of(dtype, 32, Single::Beside), 1, "{dtype}");
            assert_eq!(of(dtype, 32, Single::Skip), 0, "{dtype}");
            assert_eq!(of(dtype, 1, Single::Beside), 0, "{dtype}");
        }
        assert_eq!(of(DataType::F32, 32, Single::Beside), 0);
    }

    #[test]
    fn what_is_no_request_is_answered_with_an_error() {
        let told = answers(b"hello");
        let [Message::Failed(causes)] = told.as_slice() else { panic!("{told:?}") };
        assert!(causes[0].contains("started by other commands"), "{causes:?}");
        let error = rebuild(causes.clone());
        assert_eq!(error.chain().map(ToString::to_string).collect::<Vec<_>>(), *causes);
    }
}
