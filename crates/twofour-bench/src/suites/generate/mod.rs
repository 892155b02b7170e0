//! The suite `generate`: generation by whole models on the CPU.

mod contender;
mod generation;
mod process;

use std::{
    io,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cli::{
    exit::{Usage, Verdict},
    interrupt,
    measure::{self, Machine, median, random},
    present::{
        Screen,
        style::{self, paint},
        table::Table,
        units,
    },
    threads,
};

use self::{
    contender::{ModelSource, Weights, serve},
    generation::{Introduction, Task, Times},
    process::{ContenderProcess, own_contender},
};
use crate::{load::warn_if_busy, output::Output};

/// Measure generation by a whole model: prefill and decode, 2:4 against dense and against llama.cpp
///
/// Each form of weights is a process of its own that holds a model: the same shape with weights of several types,
/// random where the model is a name. Models take turns, in shuffled order, with a prompt in an empty context
/// (prefill, until the first token is chosen) and further tokens one by one (decode); all on the CPU. The result is the
/// median over the rounds, the fastest round beside it, and the most memory that the process had.
///
/// All models are in memory at the same time: with fewer layers (`--layers`) or fewer contenders they take less.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour-bench generate --model llama-3.2-1b --layers 8
  twofour-bench generate --model llama-3-8b --layers 8 --weights 2:4-int8 --rounds 7 -o 8b.json
  twofour-bench generate --model model-24/ --weights stored --prompt 128 --length 100
  twofour-bench generate --llama-cpp 'node bench/peers/llama_cpp.mjs m-q8_0.gguf'

--model takes a published model's name (one that is not known lists those that are), or the
directory of a checkpoint; random weights get its shape. Where layers are integers, embedding and
head are dense int8. --llama-cpp may be given more than once. bench/peers/llama_cpp_model.py writes
a model of the same shape for it, and bench/peers/llama_cpp.mjs describes what such a command
reads and prints.")]
pub(crate) struct Generate {
    #[command(flatten)]
    model: ModelOptions,

    /// The contenders' weights [default: dense-bf16,2:4-bf16,2:4-int8,2:4-int4; of a checkpoint `stored`]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    weights: Vec<Weights>,

    /// Tokens to read
    #[arg(
        long,
        default_value_t = 512,
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    prompt: u32,

    /// Tokens to write after the first
    #[arg(long, default_value_t = 40, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    length: u32,

    /// Threads of this program [default: all of the machine]; those of --llama-cpp are up to its command
    #[arg(long, value_name = "THREADS", value_parser = threads::option)]
    threads: Option<usize>,

    /// Rounds, after one that warms up
    #[arg(long, default_value_t = 5, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Begin no further round after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    /// A command that runs llama.cpp (or any other program) beside this one; may be repeated
    #[arg(long, value_name = "COMMAND")]
    llama_cpp: Vec<String>,

    #[command(flatten)]
    output: Output,
}

/// Which model is measured.
#[derive(Debug, Args)]
pub(super) struct ModelOptions {
    /// A published model's name, or a checkpoint's directory
    #[arg(long, default_value = "llama-3.2-1b", value_name = "MODEL")]
    model: String,

    /// Layers, if not all of the model's
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,

    /// Tokens of the vocabulary, if not the model's
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    vocabulary: Option<u32>,
}

/// Run as a contender of `generate`; started by it
#[derive(Debug, Args)]
pub(crate) struct GenerateWorker {
    #[command(flatten)]
    model: ModelOptions,

    /// The weights
    #[arg(long, value_enum)]
    weights: Weights,
}

/// The answer; `bench/tables/generate_tables.py` reads its JSON.
#[derive(Debug, Serialize)]
struct Answer {
    machine: Machine,
    command: String,
    model: ModelAnswer,
    #[serde(flatten)]
    task: Task,
    /// Of the last minute, before each round; null where the operating system does not tell.
    load_average: Vec<Option<f64>>,
    rows: Vec<Row>,
}

/// The shape that was measured.
#[derive(Debug, Serialize)]
struct ModelAnswer {
    name: String,
    layers: usize,
    vocabulary: usize,
    parameters: usize,
}

/// What a contender did.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    introduction: Introduction,
    /// Medians over the rounds.
    decode_tokens_per_s: f64,
    prefill_tokens_per_s: f64,
    /// Of the fastest rounds.
    best_decode_tokens_per_s: f64,
    best_prefill_tokens_per_s: f64,
    /// The most that the process had, loading included; null where the operating system does not tell.
    peak_memory_bytes: Option<u64>,
    /// Seconds of each round.
    decode_s: Vec<f64>,
    prefill_s: Vec<f64>,
}

impl ModelOptions {
    fn source(&self) -> ModelSource {
        ModelSource {
            model: self.model.clone(),
            layers: self.layers.map(usize::from),
            vocabulary: self.vocabulary.map(|tokens| tokens as usize),
        }
    }
}

impl GenerateWorker {
    /// Runs as a contender.
    pub(crate) fn run(self, _: &mut Screen) -> Result<Verdict> {
        serve(&self.model.source(), self.weights, io::stdin().lock(), io::stdout().lock())?;
        Ok(Verdict::Yes)
    }
}

impl Generate {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let source = self.model.source();
        let weights = self.weights(&source)?;
        let config = source.config()?;
        let task = Task { prompt: self.prompt as usize, length: self.length as usize };
        if task.prompt + task.length > config.context() {
            let tokens = task.prompt + task.length;
            bail!(Usage(format!("--prompt and --length: {tokens} tokens for a context of {}", config.context())));
        }
        let threads = self.threads.unwrap_or_else(threads::of_machine);
        self.output.expect_writable()?;
        let mut answer = Answer {
            machine: Machine { threads, ..measure::machine()? },
            command: self.told(),
            model: ModelAnswer {
                name: self.shown_model(),
                layers: config.layers,
                vocabulary: config.vocabulary(),
                parameters: config.parameters(),
            },
            task,
            load_average: vec![],
            rows: vec![],
        };
        let _guard = interrupt::guard();
        let mut contenders = vec![];
        let mut progress = screen.progress();
        let all = (weights.len() + self.llama_cpp.len()) as u64;
        for (name, command) in self.commands(&source, &weights, threads)? {
            progress.steps(&format!("loading {name}"), contenders.len() as u64, all);
            contenders.push(ContenderProcess::start(command, &name)?);
        }
        let mut times: Vec<Vec<Times>> = vec![vec![]; contenders.len()];
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        // The same orders in every run.
        let mut random = random::Random::new();
        let begun = Instant::now();
        // The round before the first warms up.
        for round in 0..=self.rounds {
            if round > 1 && self.limit.is_some_and(|limit| begun.elapsed() >= Duration::from_secs(limit.into())) {
                break;
            }
            if round > 0 {
                answer.load_average.push(measure::load_average());
            }
            random.shuffle(&mut order);
            for &which in &order {
                let contender = &mut contenders[which];
                let name = &contender.introduction.contender;
                progress.steps(&format!("{name}, round {round}"), round.into(), u64::from(self.rounds) + 1);
                let found = contender.run(task)?;
                tracing::info!(contender = %contender.introduction.contender, ?found, "measured");
                if round > 0 {
                    times[which].push(found);
                }
            }
        }
        drop(progress);
        answer.rows = contenders.iter().zip(&times).map(|(contender, times)| row(contender, task, times)).collect();
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// The contenders' names and commands.
    fn commands(&self, source: &ModelSource, weights: &[Weights], threads: usize) -> Result<Vec<(String, Command)>> {
        let mut commands = vec![];
        for &weights in weights {
            commands.push((weights.name(), own_contender(source, weights, threads)?));
        }
        for text in &self.llama_cpp {
            let mut command = Command::new("sh");
            // `exec`, so that the process is the contender's own.
            command.args(["-c", &format!("exec {text}")]);
            commands.push((text.clone(), command));
        }
        Ok(commands)
    }

    fn weights(&self, source: &ModelSource) -> Result<Vec<Weights>> {
        let is_stored = source.directory().is_some();
        let is_part = source.layers.is_some() || source.vocabulary.is_some();
        if !self.weights.is_empty() {
            if self.weights.contains(&Weights::Stored) && (!is_stored || is_part) {
                bail!(Usage("--weights stored: needs a checkpoint's directory as --model, whole".to_owned()));
            }
            return Ok(self.weights.clone());
        }
        if is_stored && is_part {
            bail!(Usage(
                "--layers and --vocabulary: a checkpoint's own weights are measured whole; leave them out, or name \
                 random weights with --weights"
                    .to_owned()
            ));
        }
        Ok(match is_stored {
            true => vec![Weights::Stored],
            false => vec![Weights::DenseBf16, Weights::SparseBf16, Weights::SparseInt8, Weights::SparseInt4],
        })
    }

    /// The model's name, without paths of this machine.
    fn shown_model(&self) -> String {
        let model = &self.model.model;
        std::path::Path::new(model)
            .file_name()
            .map_or_else(|| model.clone(), |name| name.to_string_lossy().into_owned())
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self) -> String {
        let mut command = format!("twofour-bench generate --model {}", self.shown_model());
        let mut add = |option: &str, value: Option<String>| {
            if let Some(value) = value {
                command += &format!(" {option} {value}");
            }
        };
        add("--layers", self.model.layers.map(|layers| layers.to_string()));
        add("--vocabulary", self.model.vocabulary.map(|tokens| tokens.to_string()));
        let weights: Vec<_> = self.weights.iter().map(|weights| weights.name()).collect();
        add("--weights", (!weights.is_empty()).then(|| weights.join(",")));
        add("--prompt", Some(self.prompt.to_string()));
        add("--length", Some(self.length.to_string()));
        add("--threads", self.threads.map(|threads| threads.to_string()));
        add("--rounds", Some(self.rounds.to_string()));
        for text in &self.llama_cpp {
            let words = text.split_whitespace().map(|word| word.rsplit('/').next().unwrap_or(word));
            add("--llama-cpp", Some(format!("'{}'", words.collect::<Vec<_>>().join(" "))));
        }
        command
    }
}

fn row(contender: &ContenderProcess, task: Task, times: &[Times]) -> Row {
    let all = |of: fn(&Times) -> f64| times.iter().map(of).collect::<Vec<f64>>();
    let (decode_s, prefill_s) = (all(|times| times.decode_s), all(|times| times.prefill_s));
    let middle = |seconds: &[f64]| median(&mut seconds.to_vec());
    let least = |seconds: &[f64]| seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let (length, prompt) = (task.length as f64, task.prompt as f64);
    Row {
        introduction: contender.introduction.clone(),
        decode_tokens_per_s: length / middle(&decode_s),
        prefill_tokens_per_s: prompt / middle(&prefill_s),
        best_decode_tokens_per_s: length / least(&decode_s),
        best_prefill_tokens_per_s: prompt / least(&prefill_s),
        peak_memory_bytes: contender.peak_memory(),
        decode_s,
        prefill_s,
    }
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, threads, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}, {}", units::plural(*threads, "thread")))?;
        let ModelAnswer { name, layers, vocabulary, parameters } = &self.model;
        let Task { prompt, length } = self.task;
        screen.line(format!(
            "{name}: {}, {vocabulary} tokens, {:.2} billion parameters; a prompt of {prompt} tokens, {length} written",
            units::plural(*layers, "layer"),
            *parameters as f64 / 1e9
        ))?;
        warn_if_busy(screen, self.load_average.first().copied().flatten(), &self.machine)?;
        screen.line("")?;
        let mut table =
            Table::of(["program"], ["weights", "decode tokens/s", "best", "prefill tokens/s", "best", "peak memory"]);
        for row in &self.rows {
            table.row([
                row.introduction.contender.clone(),
                units::bytes(row.introduction.weight_bytes),
                paint(style::STRONG, format!("{:.1}", row.decode_tokens_per_s)),
                format!("{:.1}", row.best_decode_tokens_per_s),
                paint(style::STRONG, format!("{:.0}", row.prefill_tokens_per_s)),
                format!("{:.0}", row.best_prefill_tokens_per_s),
                row.peak_memory_bytes.map_or_else(String::new, units::bytes),
            ]);
        }
        screen.line(table)?;
        let rounds = units::plural(self.load_average.len(), "round");
        screen.line(paint(
            style::FAINT,
            format!(
                "\nMedians of {rounds} and the best of them. Weights: those that a token is multiplied with. Peak \
                 memory: of the process, loading included."
            ),
        ))
    }
}
