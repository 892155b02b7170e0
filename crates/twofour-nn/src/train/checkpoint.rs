//! Checkpoints: everything that training goes on from, in one file, replaced in one step.
//!
//! The file is safetensors: `model.<name>` for each parameter (f32 masters), `optimizer.<name>.first_moment` and
//! `.second_moment` (with gradient descent the momentum as the first moment alone), and for each layer that is 2:4
//! `masks.<name>.mask`, u32 of shape `[out, 2 * ceil(in / 64)]`, the words of the mask with the lower half of each
//! first. Masks and levels of the method `sparsifier` are what
//! [`Sparsifier::load`](twofour::sparsify::Sparsifier::load) reads, by the names of the weights. Settings, step, scales
//! and seeds are in the metadata. `checksums`, u32, holds the CRC-32 of the metadata and of the bytes of every other
//! tensor, by name; files of earlier versions have none. Nothing in it depends on the engine. The batches to come
//! depend on seed and step alone, so there is no generator to save.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Deserialize, Serialize};
use twofour::{
    Axis, Mask, Pattern,
    file::{PlannedTensor, Reader, StoredDType},
    layer::MaskRule,
};

use super::{
    LossScale, SparsityPlan, Trainer, TrainingData, TrainingSettings,
    masks::{MethodMasks, apply},
    teacher::KnownTeacher,
};
use crate::{
    Error, Result,
    cpu::masking::{mask_words_of_row, words},
    engine::{Engine, SparseLayer as _},
    model::{
        CHECKPOINT_FILE, ModelParts as _, TrainedModel,
        run::{STATE_KEY, SavedLayer, SummingWriter, expect_whole, mask_key, mask_of, state_of},
    },
};

/// The steps that were done before a checkpoint in `directory` was saved, as its metadata says.
///
/// # Errors
/// No checkpoint, or one whose metadata is damaged.
pub fn checkpoint_steps(directory: impl AsRef<Path>) -> Result<u64> {
    #[derive(Deserialize)]
    struct Steps {
        step: u64,
    }
    let reader = Reader::open(directory.as_ref().join(CHECKPOINT_FILE))?;
    Ok(state_of::<Steps>(&reader)?.step)
}

/// What a checkpoint says about itself.
#[derive(Debug, Serialize, Deserialize)]
struct State<C> {
    model: C,
    training: TrainingSettings,
    plan: SparsityPlan,
    corpus: u64,
    /// What the model learns from, where it has a teacher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    teacher: Option<KnownTeacher>,
    step: u64,
    updates: u64,
    skipped: u64,
    skipped_in_a_row: u64,
    loss_scale: LossScale,
    switch: Option<SavedSwitch>,
    sparse_layers: Vec<SavedLayer>,
    /// Names of the layers that computed under a mask that a method chose itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    masked_layers: Vec<String>,
}

/// STEP's switch.
#[derive(Debug, Serialize, Deserialize)]
struct SavedSwitch {
    steps: u64,
    switched_at: Option<u64>,
    changes: Vec<f64>,
}

/// Everything of a checkpoint, read and checked.
struct Loaded<C> {
    state: State<C>,
    /// Values and moments of each parameter, in the model's order.
    parameters: Vec<(Vec<f32>, Vec<Vec<f32>>)>,
    masks: Vec<Mask>,
}

const MOMENTS: [&str; 2] = ["first_moment", "second_moment"];

/// The description of the model that learns from `D`.
type Config<E, D> = <<D as TrainingData>::Model<E> as TrainedModel<E>>::Config;

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    fn state(&self) -> Result<State<Config<E, D>>> {
        let sparse_layers = self
            .model
            .linears()
            .filter_map(|linear| Some((linear.name(), linear.sparse()?)))
            .map(|(name, sparse)| {
                let scale = sparse.scale()?.map(f32::to_bits);
                Ok(SavedLayer { name: name.to_owned(), scale, seed: sparse.seed()?.wrapping_sub(self.seed_offset()) })
            })
            .collect::<Result<_>>()?;
        let masked = self.model.linears().filter(|linear| linear.masked().is_some());
        let masked_layers = masked.map(|linear| linear.name().to_owned()).collect();
        let progress = &self.progress;
        Ok(State {
            model: self.model.config().clone(),
            training: self.settings.clone(),
            plan: self.plan.clone(),
            corpus: self.data.fingerprint(),
            teacher: self.known_teacher(),
            step: progress.step,
            updates: progress.updates,
            skipped: progress.skipped,
            skipped_in_a_row: progress.skipped_in_a_row,
            loss_scale: progress.loss_scale,
            switch: progress.switch.as_ref().map(|switch| SavedSwitch {
                steps: switch.steps(),
                switched_at: switch.switched_at(),
                changes: switch.changes().collect(),
            }),
            sparse_layers,
            masked_layers,
        })
    }

    /// Writes a checkpoint to `directory`, which is made if it does not exist. The one before it stays until the new
    /// one is complete and on the disk: whenever the process is killed, one of the two is there.
    ///
    /// # Errors
    /// Those of the file system and of the engine.
    pub fn save(&self, directory: impl AsRef<Path>) -> Result<()> {
        let directory = directory.as_ref();
        let io = |source| twofour::Error::Io { path: directory.to_owned(), action: "creating it", source };
        fs::create_dir_all(directory).map_err(io)?;
        let parameters = self.model.parameters();
        let mut planned = vec![];
        for parameter in &parameters {
            let name = parameter.name();
            let mut plan = |key: String| planned.push(PlannedTensor::new(key, StoredDType::F32, parameter.shape()));
            plan(format!("model.{name}"));
            let moments = parameter.moments().map_or(0, |moments| moments.len());
            MOMENTS.iter().take(moments).for_each(|moment| plan(format!("optimizer.{name}.{moment}")));
        }
        let sparse = || self.model.linears().filter_map(|linear| Some((linear, linear.sparse()?)));
        for (linear, _) in sparse() {
            let shape = [linear.out_features(), mask_words_of_row(linear.in_features())];
            planned.push(PlannedTensor::new(mask_key(linear.name()), StoredDType::U32, shape));
        }
        let masks: Vec<_> = self.host_masks().flat_map(|masks| masks.tensors()).collect();
        planned.extend(masks.iter().map(|(tensor, _)| tensor.clone()));
        let path = directory.join(CHECKPOINT_FILE);
        let state = serde_json::to_string(&self.state()?)
            .map_err(|error| Error::State { path: path.clone(), reason: error.to_string() })?;
        let mut metadata = BTreeMap::from([(STATE_KEY.to_owned(), state)]);
        metadata.extend(self.host_masks().flat_map(|masks| masks.metadata()));
        let mut writer = SummingWriter::create(&path, planned, metadata)?;
        for parameter in &parameters {
            let name = parameter.name();
            writer.write(&format!("model.{name}"), &self.engine.read(parameter.master())?)?;
            for (key, moment) in MOMENTS.iter().zip(parameter.moments().into_iter().flatten()) {
                writer.write(&format!("optimizer.{name}.{key}"), &self.engine.read(moment)?)?;
            }
        }
        for (linear, sparse) in sparse() {
            writer.write(&mask_key(linear.name()), &words(&sparse.mask()?))?;
        }
        for (tensor, bytes) in &masks {
            writer.write_bytes(&tensor.name, bytes)?;
        }
        writer.finish()
    }

    /// Goes back to the checkpoint in `directory`: parameters, moments, masks and step. The trainer must have been made
    /// as the one that saved it was: same sizes, settings, plan and data; the engine may be another. Training then goes
    /// on as if it had never stopped, on the same engine bit for bit.
    ///
    /// # Errors
    /// No checkpoint; [`Error::OtherRun`] where another run saved it; [`Error::State`] where it is damaged or a tensor
    /// does not fit. The trainer is unchanged then. Those of the engine.
    pub fn resume(&mut self, directory: impl AsRef<Path>) -> Result<()> {
        self.resume_from_reader(&Reader::open(directory.as_ref().join(CHECKPOINT_FILE))?)
    }

    /// [`Trainer::resume`], from a file that is open already.
    ///
    /// # Errors
    /// As for [`Trainer::resume`].
    pub fn resume_from_reader(&mut self, reader: &Reader) -> Result<()> {
        // Everything is read and checked before anything is changed.
        let loaded = self.load(reader)?;
        let Loaded { state, parameters, masks } = loaded;
        self.masks.iter_mut().try_for_each(|own| own.masks.load(reader))?;
        for (parameter, (values, moments)) in self.model.parameters_mut().into_iter().zip(parameters) {
            parameter.write(&self.engine, &values)?;
            for (moment, values) in parameter.moments_mut().into_iter().flatten().zip(moments) {
                self.engine.write(moment, &values)?;
            }
        }
        let offset = self.seed_offset();
        let Trainer { engine, model, plan, masks: host_masks, .. } = &mut *self;
        let mut sparse = state.sparse_layers.into_iter().zip(masks).peekable();
        for linear in model.linears_mut() {
            // Forms that are made of the weight alone are made anew below.
            linear.forget();
            match sparse.next_if(|(layer, _)| layer.name == linear.name()) {
                Some((layer, mask)) => {
                    let part = plan.part_of(&layer.name);
                    if let Some(part) = part.filter(|_| linear.sparse().is_none()) {
                        linear.make_sparse_in(engine, part.layer_settings(), part.precision, layer.seed)?;
                    }
                    let seed = layer.seed.wrapping_add(offset);
                    linear.restore(mask, layer.scale.map(f32::from_bits), seed)?;
                }
                None => linear.make_dense(engine)?,
            }
            let is_masked = state.masked_layers.iter().any(|name| name == linear.name());
            if let Some(part) = plan.part_of(linear.name()).filter(|_| is_masked)
                && let Some(own) = MethodMasks::of(host_masks, part.method)
            {
                apply(engine, linear, (part, &*own))?;
            }
        }
        let progress = &mut self.progress;
        progress.step = state.step;
        progress.updates = state.updates;
        progress.skipped = state.skipped;
        progress.skipped_in_a_row = state.skipped_in_a_row;
        if progress.loss_scale.is_like(&state.loss_scale) {
            progress.loss_scale = state.loss_scale;
        }
        progress.switch = match (progress.switch.take(), state.switch) {
            (Some(switch), Some(saved)) => Some(switch.resumed(saved.steps, saved.switched_at, saved.changes)),
            (switch, _) => switch,
        };
        self.change_form(1.0)?;
        Ok(())
    }

    /// Reads a checkpoint and checks that it belongs to this run.
    fn load(&self, reader: &Reader) -> Result<Loaded<Config<E, D>>> {
        let fault = |reason: String| Error::State { path: reader.path().to_owned(), reason };
        let state: State<Config<E, D>> = state_of(reader)?;
        expect_whole(reader)?;
        let differing = [
            ("sizes of the model", state.model == *self.model.config()),
            ("training settings", trajectory(&state.training) == trajectory(&self.settings)),
            ("sparsity", state.plan == self.plan),
            ("data", state.corpus == self.data.fingerprint()),
            ("teacher or weights of its loss", state.teacher == self.known_teacher()),
        ];
        if let Some((what, _)) = differing.iter().find(|(_, same)| !same) {
            return Err(Error::OtherRun { path: reader.path().to_owned(), what });
        }
        let floats = |key: String, shape: &[usize]| -> Result<Vec<f32>> {
            let view = reader.tensor(&key)?;
            if view.info.shape != shape {
                return Err(fault(format!("`{key}` is {:?}, not {shape:?}", view.info.shape)));
            }
            Ok(view.to_vec::<f32>()?)
        };
        let parameters = self.model.parameters().into_iter().map(|parameter| {
            let (name, shape) = (parameter.name(), parameter.shape());
            let moments = parameter.moments().into_iter().flatten().zip(MOMENTS);
            let moments = moments.map(|(_, moment)| floats(format!("optimizer.{name}.{moment}"), shape));
            Ok((floats(format!("model.{name}"), shape)?, moments.collect::<Result<_>>()?))
        });
        let parameters = parameters.collect::<Result<Vec<_>>>()?;
        let mut linears = self.model.linears();
        let masks = state.sparse_layers.iter().map(|layer| {
            // In the model's order, each once.
            let linear = linears.find(|linear| linear.name() == layer.name);
            let Some((linear, part)) = linear.zip(self.part_of(&layer.name)) else {
                return Err(fault(format!("`{}` is 2:4 in it, which the run does not plan", layer.name)));
            };
            let (rows, cols) = (linear.out_features(), linear.in_features());
            let mask = mask_of(reader, &layer.name, (rows, cols))?;
            mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
            if matches!(part.rule, MaskRule::Transposable(_)) {
                mask.verify(Pattern::TWO_FOUR, Axis::Column)?;
            }
            Ok(mask)
        });
        let masks = masks.collect::<Result<Vec<_>>>()?;
        if let Some(scale) =
            state.sparse_layers.iter().filter_map(|l| l.scale.map(f32::from_bits)).find(|s| !s.is_finite())
        {
            return Err(fault(format!("the scale of a soft threshold is {scale}")));
        }
        Ok(Loaded { state, parameters, masks })
    }
}

/// The settings that decide how training goes; the others may differ from run to run.
fn trajectory(settings: &TrainingSettings) -> TrainingSettings {
    let neutral = TrainingSettings::default();
    TrainingSettings {
        validate_every: neutral.validate_every,
        validation_sequences: neutral.validation_sequences,
        checkpoint_every: neutral.checkpoint_every,
        keep_checkpoints: neutral.keep_checkpoints,
        // Another engine goes on in its own precision.
        precision: neutral.precision,
        micro_batch: None,
        ..settings.clone()
    }
}
