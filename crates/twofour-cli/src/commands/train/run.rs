//! A training run in its folder, from wherever it is to its end.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Error, Result, anyhow, bail};
use twofour::{
    MatrixRef,
    file::{Overwrite, expect_replaceable},
};
use twofour_nn::{
    linear::SparsePrecision,
    model::{CHECKPOINT_FILE, ModelParts as _, TrainedModel as _},
    recipe::{LoadedRecipe, Recipe, RecipeData, RecipePlan},
    report::{LayerMetrics, MetricsLog, StepMetrics},
    train::{DecayChoice, SparsityPlan, StepReport, Trainer, TrainingData, checkpoint_steps, ranks::Seat},
};
use twofour_transformer::engine::Engine;

use super::{adapter, data::RunData, decay, folder::Folder, picture, report::Report, view::View};
use crate::{
    exit::Usage,
    interrupt, measure,
    present::{Screen, units},
};

/// The folder of the newest checkpoint.
pub(super) const LAST: &str = "last";

/// The folder of the checkpoints that are kept under their step's name.
const KEPT: &str = "checkpoints";

/// A line for each step.
pub(super) const METRICS: &str = "metrics.jsonl";

/// The folder of the checkpoint with the lowest validation loss.
const BEST: &str = "best";

/// The picture of the report.
pub(super) const PICTURE: &str = "report.svg";

/// The report, which a finished run has.
pub(super) const REPORT: &str = "report.json";

/// A run in progress.
struct Run<'a, E: Engine, D: RunData> {
    trainer: Trainer<E, D>,
    folder: &'a Folder,
    log: MetricsLog,
    /// Every step so far.
    steps: Vec<StepMetrics>,
    /// The lowest validation loss so far; below every loss where that of `best` is unknown.
    best: f64,
    /// Steps of the checkpoint in `best`, where the line of its validation loss is lost.
    unknown: Option<u64>,
    /// The choice of the decay's strength, where trial runs made it.
    decay: Option<DecayChoice>,
    /// Steps that the checkpoint in `last` has.
    saved: Option<u64>,
    /// Tokens of a step.
    step_tokens: u64,
}

/// Where a run begins: new, or at the folder's checkpoint.
pub(super) struct Beginning<D> {
    recipe: Recipe,
    plan: SparsityPlan,
    data: Arc<D>,
    /// The choice of the decay's strength, where trial runs made it.
    decay: Option<DecayChoice>,
    folder: PathBuf,
}

/// A trainer where a run goes on.
pub(super) struct Ready<E: Engine, D: TrainingData> {
    pub(super) trainer: Trainer<E, D>,
    /// Whether it has the checkpoint in `last`, or is new.
    has_last: bool,
    /// What a person must know of the folder's checkpoints.
    notes: Vec<String>,
}

impl<D: RecipeData> Beginning<D> {
    /// The beginning of a run on these data in a folder.
    pub(super) fn new(loaded: &LoadedRecipe, data: Arc<D>, folder: &Folder) -> Result<Self> {
        let recipe = &loaded.recipe;
        Ok(Beginning {
            recipe: recipe.clone(),
            plan: recipe.sparsity_plan()?,
            data,
            decay: None,
            folder: folder.path().to_owned(),
        })
    }

    /// Decides the decay of pruned weights by trial runs with the engine, where the recipe asks for them. An engine
    /// that has a share of each batch in the run has as many sequences at once here.
    pub(super) fn decide_decay<E: Engine>(
        &mut self,
        engine: E,
        devices: usize,
        folder: &Folder,
        screen: &mut Screen,
    ) -> Result<E> {
        let Beginning { recipe, plan, data, .. } = &*self;
        if let Some(search) = recipe.decay_search() {
            decay::expect_own(folder, search, data.fingerprint())?;
            folder.adopt(recipe)?;
        }
        let mut training = recipe.training.clone();
        if devices > 1 {
            training.micro_batch = Some(training.micro_batch().min(training.batch / devices));
        }
        let trials = Recipe { training, ..recipe.clone() };
        let (engine, choice) = decay::search(engine, &trials, plan, data, folder, screen)?;
        if let Some(choice) = &choice {
            self.plan.set_decay(choice.strength);
        }
        self.decay = choice;
        Ok(engine)
    }

    /// The choice of the decay's strength, where trial runs made it.
    pub(super) fn decay(&self) -> Option<DecayChoice> {
        self.decay.clone()
    }

    /// The trainer with an engine, at the folder's newest checkpoint that can be used: `last`, or where it is missing
    /// or damaged one of the others.
    ///
    /// # Errors
    /// Checkpoints of another run, or none that can be used; a run that is finished and has none.
    pub(super) fn ready<E: Engine>(&self, engine: E) -> Result<Ready<E, D>> {
        let Beginning { recipe, plan, data, folder, .. } = self;
        let model = D::model(&engine, recipe)?;
        let mut trainer = Trainer::with_model(engine, model, &recipe.training, plan.clone(), data.clone())?;
        if let Some((teacher, loss)) = D::teacher(trainer.engine(), recipe)? {
            trainer = trainer.learn_from(teacher, loss)?;
        }
        let mut notes = vec![];
        let last = folder.join(LAST);
        let found = checkpoints(folder);
        if !found.is_empty() && found[0] != last {
            notes.push(format!("{} is missing", last.display()));
        }
        for checkpoint in &found {
            match trainer.resume(checkpoint) {
                Ok(()) if *checkpoint == last => return Ok(Ready { trainer, has_last: true, notes }),
                Ok(()) => {
                    notes.push(format!("going on from {}, step {}", checkpoint.display(), trainer.steps_done()));
                    return Ok(Ready { trainer, has_last: false, notes });
                }
                Err(error @ twofour_nn::Error::OtherRun { .. }) => return Err(error.into()),
                Err(error) => notes.push(error.to_string()),
            }
        }
        let (path, report) = (folder.display(), folder.join(REPORT));
        if !found.is_empty() {
            let message = format!(
                "{path}: no checkpoint can be used; choose another folder with -o, or remove the checkpoints to begin \
                 anew"
            );
            let notes = notes.into_iter().rev().map(Error::msg);
            return Err(notes
                .reduce(|causes, note| causes.context(note))
                .unwrap_or_else(|| anyhow!("none is there"))
                .context(message));
        }
        if report.exists() {
            bail!(Usage(format!(
                "{path}: the run is finished, and its checkpoints are gone; choose another folder with -o, or remove \
                 {} to train again",
                report.display()
            )));
        }
        if std::fs::metadata(folder.join(METRICS)).is_ok_and(|file| file.len() > 0) {
            notes.push(format!("{path}: there is no checkpoint to go on from; the run begins anew"));
        }
        Ok(Ready { trainer, has_last: true, notes })
    }
}

impl<E: Engine, D: TrainingData> Ready<E, D> {
    /// The same with a seat among other ranks.
    pub(super) fn take(self, seat: Seat<E>) -> Result<Self> {
        let Ready { trainer, has_last, notes } = self;
        Ok(Ready { trainer: trainer.take(seat)?, has_last, notes })
    }
}

/// The checkpoints of a run's folder, the one to go on from first.
pub(super) fn checkpoints(folder: &Path) -> Vec<PathBuf> {
    let kept = std::fs::read_dir(folder.join(KEPT)).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut others: Vec<PathBuf> = kept.chain([folder.join(BEST)]).collect();
    // Newest first; what has no readable step comes last.
    others.sort_by_cached_key(|path| (Reverse(checkpoint_steps(path).ok()), path.clone()));
    let all = std::iter::once(folder.join(LAST)).chain(others);
    all.filter(|path| path.join(CHECKPOINT_FILE).exists()).collect()
}

/// Trains from where a trainer is to the end, and reports.
pub(super) fn train<E: Engine, D: RunData>(
    ready: Ready<E, D>,
    decay: Option<DecayChoice>,
    loaded: &LoadedRecipe,
    plan: &RecipePlan,
    folder: &Folder,
    screen: &mut Screen,
) -> Result<Report> {
    // Not before: what is wrong with data and model is known now.
    folder.adopt(&loaded.recipe)?;
    let Ready { trainer, has_last, notes } = ready;
    notes.iter().for_each(|note| screen.warn(note));
    let mut run = Run::open((trainer, has_last), decay, plan.step_tokens, folder)?;
    let lost = run.trainer.steps_done() - run.steps.len() as u64;
    if lost > 0 {
        screen.warn(format_args!(
            "{}: the lines of {lost} of {} steps are damaged or missing; they are left out of curves and report",
            folder.file(METRICS).display(),
            run.trainer.steps_done()
        ));
    }
    if let Some(steps) = run.unknown {
        screen.warn(format_args!(
            "{}: the line with the validation loss of step {steps} is lost, so that it is not known whether a later \
             one is better: the checkpoint stays",
            folder.file(BEST).display()
        ));
    }
    if has_last {
        run.keep_last(loaded)?;
    } else {
        run.save()?;
    }
    let what = match plan.adapter_elements {
        0 => format!("{} parameters", units::count(plan.parameters)),
        elements => format!("{} elements beside {} parameters", units::count(elements), units::count(plan.parameters)),
    };
    screen.line(format!(
        "Training {what}, {}, {} steps on {}",
        plan.method,
        plan.steps,
        units::bytes(loaded.data.bytes() as u64)
    ))?;
    if plan.sparse_weights + plan.masked_weights > 0 {
        screen.note("flips: the share of the masks that a step changed; loss: nats, of which 0.69 are one bit")?;
    }
    let is_float8 = |part: &SparsityPlan| part.precision == SparsePrecision::Fp8 && !part.layers.is_empty();
    if run.trainer.engine().name() == "cpu" && run.trainer.plan().parts().any(is_float8) {
        screen.line("8-bit floats are simulated on a CPU: operands are rounded to them, and GEMMs compute in f32")?;
    }
    let begun = run.trainer.steps_done();
    if begun > 0 {
        screen.line(format!("going on from step {begun} of {}", plan.steps))?;
    }
    let mut view = View::new(screen, plan.steps, begun);
    while !run.trainer.is_finished() {
        if interrupt::requested() {
            run.save()?;
            drop(view);
            screen.line(format!("saved at step {} of {}", run.trainer.steps_done(), plan.steps))?;
            return Err(interrupt::Interrupted.into());
        }
        let metrics = run.step(loaded)?;
        view.update(screen, metrics)?;
        if let Some(note) = run.trainer.take_note() {
            screen.warn(note);
        }
    }
    drop(view);
    run.finish(loaded, plan)
}

impl<'a, E: Engine, D: RunData> Run<'a, E, D> {
    fn open(
        (trainer, has_last): (Trainer<E, D>, bool),
        decay: Option<DecayChoice>,
        step_tokens: u64,
        folder: &'a Folder,
    ) -> Result<Self> {
        let done = trainer.steps_done();
        let (log, steps) = MetricsLog::open(&folder.file(METRICS), done)?;
        if trainer.is_finished() && steps.last().is_none_or(|last| last.step + 1 != done) {
            bail!(
                "{}: the line of the last step, of which the report is made, is damaged or missing; remove {} to go on \
                 from an earlier checkpoint, or choose another folder with -o",
                folder.file(METRICS).display(),
                folder.file(LAST).display()
            );
        }
        let known = steps.iter().filter_map(|step| step.val_loss).fold(f64::INFINITY, f64::min);
        let has_loss = |done: u64| steps.iter().any(|step| step.step + 1 == done && step.val_loss.is_some());
        let unknown = checkpoint_steps(folder.file(BEST)).ok().filter(|best| *best <= done && !has_loss(*best));
        let best = if unknown.is_some() { f64::NEG_INFINITY } else { known };
        let saved = (done > 0 && has_last).then_some(done);
        Ok(Run { trainer, folder, log, steps, best, unknown, decay, saved, step_tokens })
    }

    /// One step, its validation and its checkpoint.
    fn step(&mut self, loaded: &LoadedRecipe) -> Result<&StepMetrics> {
        let report = self.trainer.step().with_context(|| match self.saved {
            Some(step) => format!(
                "stopped; {} holds the checkpoint of step {step}, and {} that of the lowest validation loss, if any \
                 was measured",
                self.folder.file(LAST).display(),
                self.folder.file(BEST).display()
            ),
            None => "stopped before the first checkpoint".to_owned(),
        })?;
        let done = self.trainer.steps_done();
        let training = &loaded.recipe.training;
        let is_due = |every: u64| every > 0 && done.is_multiple_of(every);
        let validates = is_due(training.validate_every) || self.trainer.is_finished();
        let found = if validates { Some(self.trainer.evaluate(training.validation_sequences)?) } else { None };
        let layers = self.layers(&report, validates)?;
        let finite = |value: f64| value.is_finite().then_some(value);
        self.steps.push(StepMetrics {
            step: report.step,
            loss: finite(report.loss),
            learning_rate: report.learning_rate,
            gradient_norm: finite(report.gradient_norm),
            skipped: report.skipped,
            flip_rate: report.flip_rate,
            observed_flip_rate: report.observed_flip_rate,
            decay: self.decay.as_ref().map(|choice| choice.strength),
            val_loss: found.and_then(|found| finite(found.loss)),
            val_accuracy: found.and_then(|found| found.accuracy),
            layers,
            tokens_per_s: self.step_tokens as f64 / report.seconds.max(1e-9),
        });
        let metrics = self.steps.last().context("a step has metrics")?;
        // At once, so that a program that follows the file sees the line.
        self.log.append(metrics).and_then(|()| self.log.flush()).with_context(|| unsaved(self.saved))?;
        if let Some(loss) = metrics.val_loss.filter(|loss| *loss < self.best) {
            self.best = loss;
            self.trainer.save(self.folder.file(BEST)).with_context(|| unsaved(self.saved))?;
        }
        // Where steps are skipped, the checkpoint before may be the last good one.
        if is_due(training.checkpoint_every) && !report.skipped || self.trainer.is_finished() {
            self.save()?;
            self.keep(training.keep_checkpoints)?;
        }
        self.steps.last().context("a step has metrics")
    }

    /// Flip rates, kept mass and levels of the layers with masks, at steps that record them.
    fn layers(&self, report: &StepReport, validates: bool) -> Result<BTreeMap<String, LayerMetrics>> {
        // At every step, the lines would be mostly these.
        let rare = self.trainer.plan().parts().all(|part| part.mask_every != 1);
        let rare = rare && !report.layer_flip_rates.is_empty();
        if !validates && !rare {
            return Ok(BTreeMap::new());
        }
        let engine = self.trainer.engine();
        let masked = self.trainer.model().linears().filter(|linear| linear.has_mask());
        let mut layers = BTreeMap::new();
        for (index, linear) in masked.enumerate() {
            let mask = if validates { linear.mask()? } else { None };
            let kept = match mask {
                None => None,
                Some(mask) => {
                    let master = engine.read(linear.weight().master())?;
                    let matrix = MatrixRef::new(linear.out_features(), linear.in_features(), &master)?;
                    Some(mask.kept_l1(matrix)?)
                }
            };
            let flip_rate = report.layer_flip_rates.get(index).copied();
            let mut masks = self.trainer.host_masks().filter(|_| linear.masked().is_some());
            let level = masks.find_map(|masks| masks.level(linear.weight().name()));
            layers.insert(linear.name().to_owned(), LayerMetrics { flip_rate, kept, level });
        }
        Ok(layers)
    }

    /// Writes the checkpoint to go on from. The metrics of its steps are on the disk before it is.
    fn save(&mut self) -> Result<()> {
        let done = self.trainer.steps_done();
        if self.saved == Some(done) {
            return Ok(());
        }
        self.log.sync().with_context(|| unsaved(self.saved))?;
        self.trainer.save(self.folder.file(LAST)).with_context(|| unsaved(self.saved))?;
        self.saved = Some(done);
        Ok(())
    }

    /// Keeps the checkpoint that the run goes on from, where the process that wrote it was killed before it did.
    fn keep_last(&self, loaded: &LoadedRecipe) -> Result<()> {
        let (done, training) = (self.trainer.steps_done(), &loaded.recipe.training);
        let is_due = training.checkpoint_every > 0 && done.is_multiple_of(training.checkpoint_every);
        let is_skipped = self.steps.last().is_none_or(|step| step.skipped);
        if self.trainer.is_finished() || is_due && !is_skipped { self.keep(training.keep_checkpoints) } else { Ok(()) }
    }

    /// Keeps the newest checkpoint under its step's name too, where more than one is kept, and removes the oldest.
    fn keep(&self, count: usize) -> Result<()> {
        let folder = self.folder.file(KEPT);
        if count < 2 {
            return Ok(());
        }
        let done = self.trainer.steps_done();
        let at = || folder.display().to_string();
        let copy = folder.join(format!("{done:010}"));
        std::fs::create_dir_all(&copy).with_context(at)?;
        let (from, to) = (self.folder.file(LAST).join(CHECKPOINT_FILE), copy.join(CHECKPOINT_FILE));
        if !to.exists() {
            expect_replaceable(&to, Overwrite::Yes)?;
            // A checkpoint's file is replaced, never written to: both names may have the same one.
            std::fs::hard_link(&from, &to).or_else(|_| std::fs::copy(&from, &to).map(|_| ())).with_context(at)?;
        }
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&folder).with_context(at)? {
            let name = entry.with_context(at)?.file_name();
            // Files that the run did not write stay.
            if name.len() == 10 && name.to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
                names.push(name);
            }
        }
        names.sort();
        for name in names.iter().rev().skip(count) {
            std::fs::remove_dir_all(folder.join(name)).with_context(at)?;
        }
        Ok(())
    }

    /// An error where the run ended with weights that are worth nothing: the validation loss is not finite. A step that
    /// was skipped has left the weights as they were.
    fn expect_learned(&self, last: &StepMetrics) -> Result<()> {
        if last.val_loss.is_some() {
            return Ok(());
        }
        let skipped = self.steps.iter().filter(|step| step.skipped).count();
        let at_end = self.steps.iter().rev().take_while(|step| step.skipped).count();
        let steps = self.steps.len();
        let because = "because the loss or a gradient was NaN or infinite; ";
        let updates = match (skipped, at_end) {
            (0, _) => String::new(),
            (_, 0) => format!("{skipped} of {steps} steps were skipped, {because}"),
            _ => format!("{skipped} of {steps} steps were skipped, the last {at_end} among them, {because}"),
        };
        bail!(
            "{updates}the validation loss at the end is NaN or infinite; no model was written; train again with a \
             lower training.learning_rate or a longer training.warm_up, in another folder (-o); {} has the losses, and \
             {} the last checkpoint",
            self.folder.file(METRICS).display(),
            self.folder.file(LAST).display()
        )
    }

    /// Writes the model, the picture, and last the report.
    fn finish(mut self, loaded: &LoadedRecipe, plan: &RecipePlan) -> Result<Report> {
        self.save()?;
        let Some(last) = self.steps.last() else { bail!("a run of no steps") };
        self.expect_learned(last)?;
        let tokens = self.trainer.data().tokens(self.trainer.model().positions());
        let data = self.trainer.data().clone();
        let adapter = adapter::leave(self.folder, &loaded.recipe, &mut self.trainer)?;
        let probe = data.probe(&loaded.recipe, self.trainer.engine_and_model())?;
        let model = D::leave(self.folder, &loaded.recipe, (self.trainer.engine(), self.trainer.model()))?;
        let report = Report::new(
            (loaded, tokens, data.targets()[0]),
            plan,
            &self.steps,
            last,
            (self.decay, probe, model, adapter),
            measure::machine()?,
        );
        let loss = report.val_loss.unwrap_or(f64::NAN);
        let [target, kind] = data.targets();
        let title = match report.val_accuracy {
            Some(accuracy) => format!("{}, {:.2} % of unseen {kind}, {loss:.3} nats", plan.method, 100.0 * accuracy),
            None => format!("{}, {loss:.3} nats {target} on unseen {kind}", plan.method),
        };
        let picture = picture::draw(&title, plan, self.trainer.settled_at(), &self.steps)?;
        self.folder.write(PICTURE, picture.as_bytes())?;
        self.folder.write_json(REPORT, &report)?;
        Ok(report)
    }
}

/// What is lost where the folder cannot be written to, and what to do.
fn unsaved(saved: Option<u64>) -> String {
    let from = saved.map_or("the beginning".to_owned(), |step| format!("step {step}"));
    format!(
        "cannot write to the run's folder; make room there and run the same command again, which goes on from {from}"
    )
}
