//! `twofour quickstart`.

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::{Result, bail};
use clap::Args;
use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::train::Corpus;
use twofour_transformer::engine::{Engine, cpu::CpuEngine, cuda::CudaEngine};

use crate::{
    device::ComputeDevice,
    exit::{Usage, Verdict},
    interrupt::{self, Interrupted},
    present::{
        Screen, escape,
        shell::word,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    quickstart::{self, Folder, Plan, Report, Training},
};

/// Train a small model dense and 2:4, compress it, and compare the two
///
/// A byte-level GPT is trained twice from the same seed, on 1.1 MB of Shakespeare's plays, which are part of this
/// program: once dense, once with its layers under 2:4. Then loss, size and speed are measured side by side.
///
/// With --device cuda both are trained on an NVIDIA GPU in bf16, with larger batches; decode and prefill are measured
/// on the CPU in either case.
///
/// Leaves in the directory: report.json, report.svg, dense.safetensors and sparse.safetensors (bf16, the latter
/// compressed), and the training checkpoints.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour quickstart
  twofour quickstart --minutes 10 -o ten-minutes
  twofour quickstart --device cuda
  twofour generate twofour-quickstart --prompt 'ROMEO:'

Interrupted? Run it again with the same --output: it goes on from a checkpoint at most half a minute old, on the same \
text.")]
pub(crate) struct Quickstart {
    /// Where to put everything; a run that was interrupted there goes on
    #[arg(long, short, alias = "out", default_value = "twofour-quickstart", value_name = "DIR")]
    output: PathBuf,

    /// Begin anew in the directory, whatever it holds; files that the quickstart does not write stay
    #[arg(long, short)]
    force: bool,

    /// About how long it may take [default: 3]
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,

    /// Where to train: cpu, cuda, or cuda:NUMBER
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: ComputeDevice,

    /// Decides initial weights and batches [default: 0]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

impl Quickstart {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        if let Some(minutes) = self.minutes.filter(|m| !(*m > 0.0 && *m <= 10_000.0)) {
            bail!(Usage(format!("--minutes {minutes}: must be above 0 and at most 10000")));
        }
        if self.device.count() > 1 {
            bail!(Usage("--device: the quickstart trains on one GPU; `twofour train` on several".to_owned()));
        }
        let folder = if self.force { Folder::begin_anew(&self.output)? } else { Folder::open(&self.output)? };
        if let Some(report) = folder.report()? {
            if let Some(plan) = folder.plan()? {
                self.expect_same(&plan, &folder)?;
            }
            screen.line(format!("{} holds a finished run; --force begins anew.\n", escape::path(folder.path())))?;
            return finish(screen, &folder, &report);
        }
        let _guard = interrupt::guard();
        let report = self.work_on_device(&folder, screen).inspect_err(|error| {
            if error.is::<Interrupted>() {
                screen.warn(format!("stopped; run it again with --output {} to go on", word(folder.path())));
            }
        })?;
        finish(screen, &folder, &report)
    }

    fn work_on_device(&self, folder: &Folder, screen: &mut Screen) -> Result<Report> {
        match &self.device {
            ComputeDevice::Cpu => self.work(folder, screen, &|| Ok(CpuEngine)),
            ComputeDevice::Cuda(numbers) => {
                let device = Device::open(numbers.first().copied().unwrap_or(0))?;
                self.work(folder, screen, &|| Ok(CudaEngine::new(&device, DataType::BF16)?))
            }
        }
    }

    /// Trains and measures, from wherever the folder's run is.
    fn work<E: Engine>(&self, folder: &Folder, screen: &mut Screen, open: &impl Fn() -> Result<E>) -> Result<Report> {
        let begun = Instant::now();
        let text = folder.text()?.unwrap_or_else(|| quickstart::TEXT.to_vec());
        let corpus = Arc::new(Corpus::new(text.clone(), quickstart::VALIDATION_SHARE)?);
        let plan = self.plan(folder, &corpus, screen, open)?;
        if folder.text()?.is_none() {
            folder.write_text(&text)?;
        }
        let mut training = Training::open(&plan, folder, &corpus, begun, [open()?, open()?])?;
        train(screen, &plan, folder, &mut training, text.len())?;
        screen.line("Measuring loss, size and speed of both, in turns ...\n")?;
        let report = quickstart::compare(&plan, folder, &mut training, &text)?;
        folder.write("report.svg", quickstart::draw(&report, &training.losses)?.as_bytes())?;
        folder.write_report(&report)?;
        Ok(report)
    }

    /// Refuses options that are not those of the run in the folder.
    fn expect_same(&self, plan: &Plan, folder: &Folder) -> Result<()> {
        let differs = self.minutes.is_some_and(|m| m != plan.minutes) || self.seed.is_some_and(|s| s != plan.seed);
        if differs {
            bail!(Usage(format!(
                "{} holds a run with --minutes {} --seed {}; leave these options away to go on with it, choose another \
                 --output, or begin anew with --force",
                folder.path().display(),
                plan.minutes,
                plan.seed
            )));
        }
        Ok(())
    }

    /// The plan of the run in the folder, or a new one.
    fn plan<E: Engine>(
        &self,
        folder: &Folder,
        corpus: &Arc<Corpus>,
        screen: &mut Screen,
        open: &impl Fn() -> Result<E>,
    ) -> Result<Plan> {
        if let Some(plan) = folder.plan()? {
            self.expect_same(&plan, folder)?;
            return Ok(plan);
        }
        screen.line("Timing a few steps, to plan the run ...")?;
        let (minutes, seed) = (self.minutes.unwrap_or(3.0), self.seed.unwrap_or(0));
        let plan = Plan::new(minutes, seed, corpus, self.device.kind(), open)?;
        folder.write_plan(&plan)?;
        Ok(plan)
    }
}

fn train<E: Engine>(
    screen: &mut Screen,
    plan: &Plan,
    folder: &Folder,
    training: &mut Training<E>,
    text_bytes: usize,
) -> Result<()> {
    let steps = plan.training.steps;
    let begun = training.steps_done();
    screen.line(format!(
        "Training {} parameters twice, dense and 2:4, {steps} steps on {} of Shakespeare's plays",
        units::count(plan.model.parameters()),
        units::bytes(text_bytes as u64)
    ))?;
    if begun > 0 {
        screen.line(format!("going on from step {begun}"))?;
    }
    let mut progress = screen.progress();
    let mut told = begun * 10 / steps;
    while !training.is_finished(plan) {
        if interrupt::requested() {
            training.save(folder)?;
            screen.line(format!("saved at step {} of {steps}", training.steps_done()))?;
            interrupt::check()?;
        }
        training.step()?;
        training.save_if_due(folder)?;
        let Some((dense, sparse)) = training.recent() else { continue };
        let done = training.steps_done();
        let message = format!("loss: dense {dense:.3}, 2:4 {sparse:.3}");
        progress.steps(&message, done, steps);
        if done * 10 / steps > told && !progress.can_show() {
            screen.line(format!("  step {done:>5} of {steps}  {message}"))?;
            told = done * 10 / steps;
        }
    }
    drop(progress);
    if training.steps_done() < steps {
        screen.line(format!("stopped at step {} of {steps}: the time is up", training.steps_done()))?;
    }
    training.save(folder)
}

fn finish(screen: &mut Screen, folder: &Folder, report: &Report) -> Result<Verdict> {
    let (dense, sparse) = (&report.dense, &report.sparse);
    let mut table = Table::new([("", Align::Left), ("dense", Align::Right), ("2:4", Align::Right), ("", Align::Left)]);
    let rate = |value: f64| units::count(value.round() as usize);
    let change = sparse.val_loss - dense.val_loss;
    table.row(
        [
            "loss on unseen text",
            &format!("{:.3}", dense.val_loss),
            &format!("{:.3}", sparse.val_loss),
            &format!("{change:+.3}"),
        ]
        .map(str::to_owned),
    );
    let mut row = |name: &str, [dense, sparse]: [String; 2], verdict: String, good: bool| {
        let verdict = if good { paint(style::GOOD, verdict) } else { verdict };
        table.row([name.to_owned(), dense, sparse, verdict]);
    };
    let size = [dense.weight_bytes, sparse.weight_bytes].map(|b| units::bytes(b as u64));
    row("weights under 2:4, bf16", size, units::percent(1.0 / report.size_ratio()) + " of the size", true);
    for (name, values, ratio) in [
        ("decode in f32, bytes/s", [dense.decode_tokens_per_s, sparse.decode_tokens_per_s], report.decode_ratio()),
        ("prefill in f32, bytes/s", [dense.prefill_tokens_per_s, sparse.prefill_tokens_per_s], report.prefill_ratio()),
    ] {
        row(name, values.map(rate), units::factor_of(ratio, "faster", "slower"), ratio > 1.05);
    }
    screen.line(table)?;
    screen.note("loss: nats a byte, less is better; decode: one byte after another; prefill: a whole text at once")?;
    screen.line(format!("\nThe 2:4 model goes on after {:?}:\n", report.prompt))?;
    screen.line(paint(style::FAINT, format!("{}{}", report.prompt, report.sample)))?;
    screen.line("")?;
    for (name, what) in [
        ("report.json", "all figures"),
        ("report.svg", "the picture"),
        ("sparse.safetensors", "the 2:4 model, compressed"),
        ("dense.safetensors", "the dense model"),
    ] {
        screen.line(format!("{}  {what}", escape::path(&folder.file(name))))?;
    }
    screen.next(&[format!("twofour generate {} --prompt 'ROMEO:'", word(folder.path()))])?;
    screen.json(report)?;
    Ok(Verdict::Yes)
}
