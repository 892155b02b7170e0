//! `twofour train`.
//!
//! | file | holds |
//! |---|---|
//! | `adapter` | the adapter at the end |
//! | `decay` | the trial runs that decide the decay of pruned weights |
//! | `folder` | the run's folder: its lock, its recipe, its files |
//! | `dry_run` | the plan as a table |
//! | `tokens` | the text as tokens |
//! | `run` | training, validation, checkpoints |
//! | `outcome` | the model at the end |
//! | `view` | the run while it goes on |
//! | `report`, `picture` | `report.json`, `report.svg` |

mod adapter;
mod data;
mod decay;
mod dry_run;
mod folder;
mod outcome;
mod picture;
mod report;
mod run;
mod tokens;
mod view;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Result;
use clap::Args;
use twofour_cuda::Device;
use twofour_nn::{
    recipe::{LoadedData, LoadedRecipe, ModelConfig, Override, RecipeError, RecipePlan},
    train::{
        Corpus, EncoderData, GradientReduction, MaskedText, SparseBegin,
        ranks::{NcclReduction, train_together},
    },
};
use twofour_transformer::engine::{Engine, cpu::CpuEngine, cuda::CudaEngine};

use self::{data::RunData, folder::Folder, report::Report, run::Beginning};
use super::next;
use crate::{
    device::ComputeDevice,
    exit::{Usage, UsageList, Verdict},
    interrupt::{self, Interrupted},
    memory,
    present::{Screen, escape, table::Table, units},
};

/// Train a model dense or 2:4 from a recipe, resumable at any moment
///
/// A recipe is a TOML file with the model, its text, questions or images, the loop, and the method of sparsity. The
/// repository has examples in recipes/; docs/reference/recipe.md describes methods and keys. Every mistake of a recipe
/// is reported before anything is trained.
///
/// Training starts from random weights, or from a model: with model.from, a checkpoint of transformers (LLaMA, Mistral,
/// Qwen2; BERT, which always starts from one) or the folder of another run.
///
/// Leaves in the folder: metrics.jsonl (a line for each step), report.json, report.svg, the model, the checkpoints
/// last/ and best/, and the recipe with its overrides; of a run of adapters the adapter, too. The model is model/, as
/// transformers loads it, where it has one of that kind; otherwise model.safetensors (bf16, 2:4 layers compressed). The
/// same command again goes on where an interrupted or killed run stopped.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour train recipes/ste.toml --dry-run
  twofour train recipes/ste.toml -o runs/ste        ends with a 2:4 model
  twofour train recipes/fst.toml -o runs/fst        ends with a dense one
  twofour train recipes/ste.toml -o runs/two --device cuda:0,1
  twofour train recipes/ste.toml -o runs/mine \\
      --set data.text='[\"tinyshakespeare.txt\"]' --set training.steps=2000
  twofour train recipes/fine-tune.toml -o runs/tuned \\
      --set model.from=pruned/ --set data.text=text.txt
  twofour train recipes/recover.toml -o runs/recovered \\
      --set model.from=pruned/ --set distillation.teacher=dense/
  twofour train recipes/adapters.toml -o runs/adapted \\
      --set model.from=pruned/ --set data.text=text.txt
  twofour train recipes/questions.toml -o runs/answers \\
      --set model.from=minilm/ --set data.questions=train.json
  twofour train recipes/ste.toml -o runs/ste-attention \\
      --set sparsity.layers='[\"blocks.*\"]'

A value of --set is TOML; a word such as fst needs no quotes. Paths in a recipe are relative to it, paths in --set to \
the working directory.")]
pub(crate) struct Train {
    /// The recipe, a TOML file
    recipe: PathBuf,

    /// Folder of the run; a run that was interrupted there goes on
    #[arg(long, short, value_name = "DIR", required_unless_present = "dry_run")]
    output: Option<PathBuf>,

    /// Where to compute: cpu, cuda, cuda:NUMBER, or several GPUs that share each batch, as in cuda:0,1
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: ComputeDevice,

    /// Replace a value of the recipe, as in training.steps=20; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Override>,

    /// Show which layers become 2:4 and why, parameters, memory, steps and tokens; train nothing
    #[arg(long)]
    dry_run: bool,
}

impl Train {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let loaded = LoadedRecipe::read(&self.recipe, &self.set).map_err(|error| match error {
            RecipeError::Io { .. } => error.into(),
            RecipeError::Mistakes { path, mistakes } => UsageList::of_mistakes(path.display(), &mistakes).into(),
            error => anyhow::Error::from(Usage(error.to_string())),
        })?;
        let refused = |mistakes| UsageList::of_mistakes(self.recipe.display(), &mistakes);
        let compute = loaded.recipe.compute_type(self.device.kind()).map_err(refused)?;
        loaded.recipe.expect_even_shares(self.device.count()).map_err(refused)?;
        let plan = loaded.recipe.plan_on(self.device.kind(), self.device.count());
        let Some(output) = self.output.filter(|_| !self.dry_run) else {
            dry_run::show(screen, &plan)?;
            screen.next(&["the same command with -o FOLDER in the place of --dry-run".to_owned()])?;
            screen.json(&plan)?;
            return Ok(Verdict::Yes);
        };
        match self.device {
            ComputeDevice::Cpu => {
                let what =
                    format!("the run, with {} of it for activations, takes", units::bytes(plan.memory.activations));
                let remedy = "lower model.width, model.layers, training.batch or training.micro_batch";
                memory::expect_room(plan.memory.total(), &what, remedy)?;
                train_in(&output, Engines::One(CpuEngine), &loaded, &plan, screen)
            }
            ComputeDevice::Cuda(numbers) => {
                let open = |number: usize| Ok(CudaEngine::new(&Device::open(number)?, compute)?);
                let mut engines = numbers.into_iter().map(open).collect::<Result<Vec<_>>>()?;
                let engines = match engines.pop_if(|_| plan.devices == 1) {
                    Some(engine) => Engines::One(engine),
                    None => {
                        let sums = NcclReduction::group(&engines)?;
                        Engines::Several(
                            engines.into_iter().zip(sums.into_iter().map(|sum| Box::new(sum) as _)).collect(),
                        )
                    }
                };
                train_in(&output, engines, &loaded, &plan, screen)
            }
        }
    }
}

/// What a run computes with.
enum Engines<E: Engine> {
    One(E),
    /// Each with the sums of its gradients.
    Several(Vec<(E, Box<dyn GradientReduction<E>>)>),
}

/// Trains in a folder and prints the results.
fn train_in<E: Engine + 'static>(
    output: &Path,
    engines: Engines<E>,
    loaded: &LoadedRecipe,
    plan: &RecipePlan,
    screen: &mut Screen,
) -> Result<Verdict> {
    let folder = Folder::open(output)?;
    folder.expect_same(&loaded.recipe)?;
    let _guard = interrupt::guard();
    let trained = match &loaded.data {
        LoadedData::Text(text) => {
            let (recipe, share) = (&loaded.recipe, loaded.recipe.data.validation);
            let tokens = tokens::of(recipe, text, &folder, screen)?;
            match recipe.model_config() {
                ModelConfig::Bert(config) => {
                    let (tokenizer, vocabulary) = (recipe.text_tokenizer()?, config.encoder.vocabulary());
                    let masked = MaskedText::of_tokens(&tokens, &tokenizer, share, vocabulary)?;
                    train_with(engines, Arc::new(EncoderData::MaskedText(masked)), loaded, plan, &folder, screen)
                }
                _ => {
                    let corpus = Corpus::of_tokens(tokens, share)?;
                    train_with(engines, Arc::new(corpus), loaded, plan, &folder, screen)
                }
            }
        }
        LoadedData::Questions(questions) => {
            let data = EncoderData::Questions(questions.clone());
            train_with(engines, Arc::new(data), loaded, plan, &folder, screen)
        }
        LoadedData::Images(images) => train_with(engines, images.clone(), loaded, plan, &folder, screen),
    };
    let report = trained.inspect_err(|error| {
        if error.is::<Interrupted>() {
            screen.warn("stopped; run the same command again to go on");
        }
    })?;
    finish(screen, &folder, plan, &report)
}

/// Trains with one engine, or with several together.
fn train_with<E: Engine + 'static, D: RunData>(
    engines: Engines<E>,
    data: Arc<D>,
    loaded: &LoadedRecipe,
    plan: &RecipePlan,
    folder: &Folder,
    screen: &mut Screen,
) -> Result<Report> {
    let mut beginning = Beginning::new(loaded, data, folder)?;
    let mut members = match engines {
        Engines::One(engine) => {
            let engine = beginning.decide_decay(engine, 1, folder, screen)?;
            return run::train(beginning.ready(engine)?, beginning.decay(), loaded, plan, folder, screen);
        }
        Engines::Several(members) => members,
    };
    if !members.is_empty() {
        let count = members.len();
        let (engine, sums) = members.remove(0);
        members.insert(0, (beginning.decide_decay(engine, count, folder, screen)?, sums));
    }
    let beginning = Arc::new(beginning);
    let make = {
        let beginning = beginning.clone();
        move |engine| beginning.ready(engine).map(|ready| ready.trainer)
    };
    train_together(members, Arc::new(make), |engine, seat| {
        run::train(beginning.ready(engine)?.take(seat)?, beginning.decay(), loaded, plan, folder, screen)
    })
}

fn finish(screen: &mut Screen, folder: &Folder, plan: &RecipePlan, report: &Report) -> Result<Verdict> {
    let mut table = Table::of(["result"], ["value"]);
    let loss = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    row(&format!("validation loss, nats {}", report.target), loss(report.val_loss));
    if let Some(accuracy) = report.val_accuracy {
        row("validation accuracy", units::percent(accuracy));
    }
    if let Some(probe) = &report.linear_probe {
        row("accuracy of logistic regression on features", units::percent(probe.validation_accuracy));
    }
    if let Some(steps) = report.best_steps.filter(|steps| *steps != report.steps) {
        row(&format!("lowest, after {steps} steps"), loss(report.best_val_loss));
    }
    row("training loss", loss(report.loss));
    row("tokens a second", units::count(report.tokens_per_s as usize));
    if report.skipped_steps > 0 {
        row("skipped steps", units::count(report.skipped_steps as usize));
    }
    let never = plan.stages.iter().all(|stage| matches!(stage.begin, SparseBegin::Settled { .. }))
        && report.model.two_of_four == 0;
    if plan.sparse_weights > 0 && never && plan.stages.iter().all(|stage| stage.end == plan.steps) {
        row("weights of 2:4 layers", "none: variances never settled".to_owned());
    } else if plan.sparse_weights > 0 {
        let share = units::percent(plan.sparse_weights as f64 / plan.parameters as f64);
        // FST and its kin end dense, as their papers have it.
        let ends = plan.stages.iter().filter(|stage| stage.two_of_four_weights).map(|stage| stage.end);
        let (first, last) = (ends.clone().min().unwrap_or(plan.steps), ends.max().unwrap_or(plan.steps));
        match (first < plan.steps, last < plan.steps) {
            (false, _) => row("weights of 2:4 layers", share),
            (true, false) => row("weights of 2:4 layers", format!("{share}, some of them only until step {first}")),
            (true, true) if first < last => {
                row("weights that were 2:4", format!("{share}, until steps {first} to {last}; dense at the end"));
            }
            (true, true) => row("weights that were 2:4", format!("{share}, until step {last}; dense at the end")),
        }
    }
    if let Some(adapter) = &report.adapter {
        row("elements of the adapter", units::count(adapter.elements));
        if adapter.lost() > 0.0 {
            row("update that zeros lose when it is merged", units::percent(adapter.lost()));
        }
        row("validation loss of the merged model", loss(adapter.merged_val_loss));
    }
    if let Some(zeros) = report.model.zeros {
        row("zeros of masked layers", units::percent(zeros));
    }
    screen.line("")?;
    screen.line(table)?;
    screen.line("")?;
    for (name, what) in [
        ("report.json", "all figures"),
        ("report.svg", "the picture"),
        ("metrics.jsonl", "a line for each step"),
        (report.model.path, report.model.describe()),
    ] {
        screen.line(format!("{}  {what}", escape::path(&folder.file(name))))?;
    }
    match report.adapter.as_ref().map(|adapter| (adapter, adapter.path)) {
        Some((adapter, Some(path))) => {
            screen.line(format!("{}  {}", escape::path(&folder.file(path)), adapter.describe()))?;
        }
        Some((_, None)) => {
            screen
                .line("no adapter: SPP's rows are outputs, and these weights are stored by inputs; the model has it")?;
        }
        None => {}
    }
    screen.next(&next_commands(folder, plan, report))?;
    screen.json(report)?;
    Ok(Verdict::Yes)
}

/// What a person may do next: run the model, and store it compressed, or prune it where it is dense.
fn next_commands(folder: &Folder, plan: &RecipePlan, report: &Report) -> Vec<String> {
    let model = folder.file(report.model.path);
    let mut commands = next::run(&model, None);
    match (report.model.two_of_four, report.model.is_checkpoint) {
        (0, _) if plan.masked_weights == 0 => commands.push(next::prune(&model)),
        (0, _) | (_, false) => {}
        (_, true) => commands.push(next::compress(&model)),
    }
    commands
}
