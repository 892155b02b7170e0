//! The transformer that trains: forward pass, loss and gradients, whatever it reads and is trained for.

mod build;
mod embedding;
mod task;
mod teacher;
mod trained;

use twofour::layer::Accumulate;

pub(crate) use self::task::expect_below;
pub use self::task::{Saved, Task};
pub(super) use self::{
    build::{Builder, INITIAL_DEVIATION, normal},
    embedding::{Places, SavedEmbedding, TokenEmbedding, TokenIds},
};
use crate::{
    Result,
    block::{Attention, BatchShape, Block, Branch as _, FeedForward, Norm, Normalized, SavedBlock, Stream, Workspace},
    engine::{Buffer as _, DistillationWeights, Engine, ErrorMeasure, StepPhase},
    linear::Linear,
    model::Objective,
    parameter::Parameter,
    parts::{ModelParts, Part, PartMut, parts},
};

/// A transformer: what its [`Task`] embeds, layers of attention and feed-forward blocks, a norm behind them where these
/// are pre-norm, and the task's head. Linear layers are dense or 2:4, each for itself.
#[derive(Debug)]
pub struct Transformer<E: Engine, T: Task<E>> {
    config: T::Config,
    task: T,
    layers: Vec<Layer<E>>,
    norm: Option<Norm<E>>,
    workspace: Workspace<E>,
}

/// One layer of a [`Transformer`].
#[derive(Debug)]
pub struct Layer<E: Engine> {
    /// Attention.
    pub attention: Block<E, Attention<E>>,
    /// Feed-forward.
    pub feed_forward: Block<E, FeedForward<E>>,
}

parts!(Layer<E> { attention, feed_forward });

/// What the backward pass of a [`Layer`] reads.
#[derive(Debug)]
pub(super) struct SavedLayer<E: Engine> {
    attention: SavedBlock<E, Attention<E>>,
    feed_forward: SavedBlock<E, FeedForward<E>>,
}

impl<E: Engine> SavedLayer<E> {
    /// Gives the buffers back where there is no backward pass.
    pub(super) fn release(self, engine: &E, workspace: &mut Workspace<E>) {
        let x = self.release_but_input(engine, workspace);
        workspace.give([x]);
    }

    /// [`SavedLayer::release`] of all but the hidden states in front of the layer, which are returned.
    fn release_but_input(self, engine: &E, workspace: &mut Workspace<E>) -> E::Buffer {
        Block::<E, FeedForward<E>>::release(engine, self.feed_forward, workspace);
        Block::<E, Attention<E>>::release_but_input(engine, self.attention, workspace)
    }
}

impl<E: Engine> Layer<E> {
    /// Elements of a token's hidden state.
    pub(super) fn width(&self) -> usize {
        self.attention.branch.width()
    }

    /// The hidden states behind the layer, already normalized by `next` where that reads them, and what the backward
    /// pass needs.
    pub(super) fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (input, shape): (Stream<E>, BatchShape),
        next: Option<&Norm<E>>,
    ) -> Result<(Stream<E>, SavedLayer<E>)> {
        let before = self.feed_forward.norms.before();
        let (between, attention) = self.attention.forward(engine, workspace, input, shape, before)?;
        let (output, feed_forward) = self.feed_forward.forward(engine, workspace, between, shape, next)?;
        Ok((output, SavedLayer { attention, feed_forward }))
    }

    /// Turns the gradient of the hidden states behind the layer into that of those in front of it.
    pub(super) fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: SavedLayer<E>,
        dx: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let dx = self.feed_forward.backward(engine, workspace, saved.feed_forward, dx, accumulate)?;
        self.attention.backward(engine, workspace, saved.attention, dx, accumulate)
    }
}

/// What the backward pass reads beside the output of the layers.
struct SavedPass<E: Engine, T: Task<E>> {
    input: T::SavedInput,
    layers: Vec<SavedLayer<E>>,
}

impl<E: Engine, T: Task<E>> ModelParts<E> for Transformer<E, T> {
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>)) {
        self.task.input().visit(visit);
        self.layers.visit(visit);
        self.norm.visit(visit);
        self.task.head().visit(visit);
    }

    fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>)) {
        let (input, head) = self.task.input_and_head_mut();
        input.visit_mut(visit);
        self.layers.visit_mut(visit);
        self.norm.visit_mut(visit);
        head.visit_mut(visit);
    }
}

impl<E: Engine, T: Task<E>> Transformer<E, T> {
    /// The description.
    pub fn config(&self) -> &T::Config {
        &self.config
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[Layer<E>] {
        &self.layers
    }

    /// The linear layers, in the order of computation.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        ModelParts::linears(self)
    }

    /// The linear layers for changing them.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        ModelParts::linears_mut(self)
    }

    /// All parameters in a fixed order: embeddings, norms, linear layers.
    pub fn parameters(&self) -> Vec<&Parameter<E>> {
        ModelParts::parameters(self)
    }

    /// All parameters for changing them, in the order of [`Transformer::parameters`]. After a change of a 2:4 layer's
    /// weight, call [`Linear::refresh`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        ModelParts::parameters_mut(self)
    }

    /// Allocates gradients and moments of all parameters.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn begin_training(&mut self, engine: &E) -> Result<()> {
        Ok(self.parameters_mut().into_iter().try_for_each(|parameter| parameter.begin_training(engine))?)
    }

    pub(super) fn task_mut(&mut self) -> &mut T {
        &mut self.task
    }

    /// The hidden states behind the last layer and its norm, and what was saved for the backward pass.
    fn forward(&mut self, engine: &E, batch: &T::Batch, shape: BatchShape) -> Result<(Stream<E>, SavedPass<E, T>)> {
        let mut layers = Vec::with_capacity(self.layers.len());
        let (output, input) = self.pass(engine, batch, shape, &mut |saved, _| layers.push(saved))?;
        Ok((output, SavedPass { input, layers }))
    }

    /// The hidden states behind the last layer and its norm, where there is no backward pass.
    fn infer(&mut self, engine: &E, batch: &T::Batch, shape: BatchShape) -> Result<Stream<E>> {
        let (output, input) =
            self.pass(engine, batch, shape, &mut |saved, workspace| saved.release(engine, workspace))?;
        self.workspace.give(input.into_buffers());
        Ok(output)
    }

    /// The hidden states behind the last layer and its norm, and what the embedding saved; `keep` gets what each layer
    /// did.
    fn pass(
        &mut self,
        engine: &E,
        batch: &T::Batch,
        shape: BatchShape,
        keep: &mut dyn FnMut(SavedLayer<E>, &mut Workspace<E>),
    ) -> Result<(Stream<E>, T::SavedInput)> {
        self.task.expect_shape(&self.config, shape)?;
        let Transformer { config, task, layers, norm, workspace } = self;
        let (x, input) = task.embed(engine, workspace, (config, batch), shape)?;
        let mut stream = Stream::Plain(x);
        let mut following = layers.iter().skip(1).map(|layer| layer.attention.norms.before());
        for layer in &*layers {
            let next = following.next().unwrap_or(norm.as_ref());
            let (output, saved) = layer.forward(engine, workspace, (stream, shape), next)?;
            stream = output;
            keep(saved, workspace);
        }
        let output = stream.through(engine, workspace, norm.as_ref(), shape.tokens())?;
        Ok((output, input))
    }

    /// What `read` makes of the scores of a batch, and of what the head saved.
    pub(super) fn with_scores<R>(
        &mut self,
        engine: &E,
        batch: &T::Batch,
        shape: BatchShape,
        read: impl FnOnce(&T::SavedHead, &mut E::Buffer) -> Result<R>,
    ) -> Result<R> {
        let output = self.infer(engine, batch, shape)?;
        let (mut scores, head) = self.task.scores(engine, &mut self.workspace, (output.read(), batch), shape)?;
        let found = read(&head, &mut scores)?;
        self.workspace.give(output.into_buffers().chain([scores]).chain(head.into_buffers()));
        Ok(found)
    }

    /// The hidden states behind the last layer and its norm, `[batch, positions, width]`.
    pub(super) fn hidden_of(&mut self, engine: &E, batch: &T::Batch, shape: BatchShape) -> Result<Vec<f32>> {
        let output = self.infer(engine, batch, shape)?;
        let values = engine.read(output.read())?;
        self.workspace.give(output.into_buffers());
        Ok(values)
    }

    /// Computes the hidden states of a batch and reads none of them: the work of inference alone, which a benchmark
    /// times. The engine may repeat what an earlier call of the same shape launched, so the batch must be the same one
    /// in the engine's memory, with whatever inputs.
    ///
    /// # Errors
    /// Another shape than the batch's, sequences longer than the context; not enough memory.
    pub fn encode(&mut self, engine: &E, batch: &T::Batch, shape: BatchShape) -> Result<()> {
        // No training step has such a key but by chance.
        let key = (shape.batch as u64) << 32 | shape.positions as u64;
        engine.repeat(key, None, || {
            let output = self.infer(engine, batch, shape)?;
            self.workspace.give(output.into_buffers());
            Ok(())
        })
    }

    /// Adds the sum of the cross-entropies, in nats, of a batch's targets to `loss`. Of a classifier it returns how
    /// many of the targets, which are the batch's, were its first choice.
    pub(super) fn loss_of(
        &mut self,
        engine: &E,
        (batch, targets): (&T::Batch, &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<Option<usize>> {
        let classes = self.task.classes(shape);
        self.with_scores(engine, batch, shape, |_, scores| {
            let correct = match T::IS_CLASSIFIER {
                true => Some(first_choices(&engine.read(scores)?, classes, targets)),
                false => None,
            };
            engine.cross_entropy(classes, scores, T::targets(batch), None, loss)?;
            Ok(correct)
        })
    }

    /// A forward and a backward pass: adds the sum of the losses of the objective to `loss`, and writes or adds the
    /// gradients, times `scale`, of all parameters. `ready` receives gradients as they are complete: those of all
    /// parameters, each once, in an order that depends on the configuration alone.
    pub(crate) fn gradients_of(
        &mut self,
        engine: &E,
        (batch, objective): (&T::Batch, Objective<'_, Self>),
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        // First, so that what the teacher's layers take is used again.
        let taught = match objective {
            Objective::Targets => None,
            Objective::Teacher(teacher, of) => {
                Some((teacher.taught(engine, &mut self.workspace, batch, shape, of.hidden > 0.0)?, of))
            }
        };
        let (output, SavedPass { input, layers: saved }) = self.forward(engine, batch, shape)?;
        let Transformer { task, layers, norm, workspace, .. } = self;
        let (mut scores, head) = task.scores(engine, workspace, (output.read(), batch), shape)?;
        let (classes, targets) = (task.classes(shape), T::targets(batch));
        let mut pull = HiddenPull { states: vec![], weight: 0.0, scale };
        match taught {
            None => engine.cross_entropy(classes, &mut scores, targets, Some(scale), loss)?,
            Some((taught, of)) => {
                let (divergence, cross_entropy) = (of.divergence as f32, of.cross_entropy as f32);
                let weights = DistillationWeights { divergence, cross_entropy };
                engine.distillation(weights, classes, (&mut scores, &taught.scores), targets, scale, loss)?;
                workspace.give([taught.scores]);
                // The mean over layers and tokens counts as much as a target does.
                let share = targets.len() as f64 / (shape.tokens() * layers.len()) as f64;
                pull = HiddenPull { states: taught.states, weight: (of.hidden * share) as f32, scale };
            }
        }
        engine.begin_phase(StepPhase::Backward)?;
        let mut pulled = pull.next(engine, workspace, (output.x(), shape), loss)?;
        let (hidden, before) = match output {
            Stream::Plain(x) => (x, None),
            Stream::Normalized(Normalized { x, y, statistics }) => (y, Some((x, statistics))),
        };
        let mut dx = task.scores_gradient(engine, workspace, (hidden, head, batch), scores, shape, accumulate)?;
        if let (Some(norm), Some((x, statistics))) = (&mut *norm, before) {
            let mut d_sum = workspace.compute(engine, shape.tokens() * norm.width())?;
            engine.clear(&mut d_sum)?;
            norm.backward(engine, (&x, &statistics), &dx, &mut d_sum, accumulate)?;
            workspace.give([dx, x].into_iter().chain(statistics.into_buffers()));
            dx = d_sum;
        }
        add_pull(engine, workspace, pulled, &mut dx)?;
        let table = task.table().map(|table| table.name().to_owned());
        // The gradient of a head's weight that is the embedding is complete at the end alone.
        let is_complete = |parameter: &&mut Parameter<E>| table.as_deref() != Some(parameter.name());
        let of_head = task.input_and_head_mut().1.parameters_mut().into_iter().filter(is_complete);
        ready(norm.parameters_mut().into_iter().chain(of_head).filter_map(Parameter::gradient_mut).collect())?;
        for (index, (layer, SavedLayer { attention, feed_forward })) in layers.iter_mut().zip(saved).enumerate().rev() {
            pulled = match index {
                0 => None,
                _ => pull.next(engine, workspace, (attention.x(), shape), loss)?,
            };
            dx = layer.feed_forward.backward(engine, workspace, feed_forward, dx, accumulate)?;
            ready(layer.feed_forward.gradients_mut())?;
            dx = layer.attention.backward(engine, workspace, attention, dx, accumulate)?;
            ready(layer.attention.gradients_mut())?;
            add_pull(engine, workspace, pulled, &mut dx)?;
        }
        task.embed_gradient(engine, workspace, (input, batch), dx, shape, accumulate)?;
        let (input, head) = task.input_and_head_mut();
        let rest = head.parameters_mut().into_iter().filter(|parameter| !is_complete(parameter));
        ready(input.parameters_mut().into_iter().chain(rest).filter_map(Parameter::gradient_mut).collect())
    }
}

/// What brings the hidden states behind layers nearer to a teacher's.
struct HiddenPull<E: Engine> {
    /// The teacher's, first to last; none where they are not taught.
    states: Vec<E::Buffer>,
    /// The weight of a token's relative error.
    weight: f32,
    /// The factor of gradients.
    scale: f32,
}

impl<E: Engine> HiddenPull<E> {
    /// The gradient for the hidden states behind the last layer that is left, where there is one.
    fn next(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, shape): (&E::Buffer, BatchShape),
        loss: &mut E::Buffer,
    ) -> Result<Option<E::Buffer>> {
        let Some(state) = self.states.pop() else { return Ok(None) };
        let mut dx = workspace.compute(engine, x.len())?;
        let (width, scaling) = (x.len() / shape.tokens().max(1), (self.weight, self.scale));
        engine.squared_error(ErrorMeasure::RelativeSquared, width, (x, &state), scaling, &mut dx, loss)?;
        workspace.give([state]);
        Ok(Some(dx))
    }
}

fn add_pull<E: Engine>(
    engine: &E,
    workspace: &mut Workspace<E>,
    pulled: Option<E::Buffer>,
    dx: &mut E::Buffer,
) -> Result<()> {
    if let Some(pulled) = pulled {
        engine.add(&pulled, dx)?;
        workspace.give([pulled]);
    }
    Ok(())
}

/// How many of the targets have the highest scores of their rows; of equal scores the first counts.
fn first_choices(scores: &[f32], classes: usize, targets: &[u32]) -> usize {
    let first_choice = |scores: &[f32]| {
        let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        best.map_or(0, |(class, _)| class as u32)
    };
    scores.chunks(classes).zip(targets).filter(|(scores, class)| first_choice(scores) == **class).count()
}
