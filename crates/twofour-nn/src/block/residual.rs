//! A block: what is added to the residual stream, and the norms around it.

use std::fmt::Debug;

use twofour::layer::Accumulate;

use super::{BatchShape, Norm, NormStatistics, Normalized, Workspace};
use crate::{
    Error, Result,
    engine::Engine,
    parts::{ModelParts, parts},
};

/// What a block computes between its norms, for `x: [tokens, width]`.
pub trait Branch<E: Engine>: ModelParts<E> + Debug {
    /// What the backward pass reads beside the input.
    type Saved: Debug;

    /// Width of input and output.
    fn width(&self) -> usize;

    /// The output, and what the backward pass needs.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        shape: BatchShape,
    ) -> Result<(E::Buffer, Self::Saved)>;

    /// The gradient of the input, from the input, what was saved, and the gradient of the output.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: (E::Buffer, Self::Saved),
        dy: &E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer>;

    /// Gives the buffers back where there is no backward pass.
    fn release(engine: &E, saved: Self::Saved, workspace: &mut Workspace<E>);
}

/// `behind(x + after(branch(before(x))))`, where each norm may be absent.
///
/// Pre-norm blocks have the norm before alone, BERT's (Devlin et al., 2019) that behind alone; Gemma 2's have norms
/// before and after.
#[derive(Debug)]
pub struct Block<E: Engine, B: Branch<E>> {
    /// The norms.
    pub norms: BlockNorms<E>,
    /// What is added to the input.
    pub branch: B,
}

/// The norms of a [`Block`].
#[derive(Debug)]
pub struct BlockNorms<E: Engine> {
    before: Option<Norm<E>>,
    after: Option<Norm<E>>,
    behind: Option<Norm<E>>,
}

parts!(BlockNorms<E> { before, after, behind });
parts!(Block<E, B: Branch<E>> { norms, branch });

/// The input of a block: the residual stream, with the block's norm before where it is computed already.
#[derive(Debug)]
pub enum Stream<E: Engine> {
    /// The stream alone.
    Plain(E::Buffer),
    /// The stream and its norm.
    Normalized(Normalized<E>),
}

/// What the backward pass of a [`Block`] reads.
#[derive(Debug)]
pub struct SavedBlock<E: Engine, B: Branch<E>> {
    shape: BatchShape,
    input: Stream<E>,
    branch: B::Saved,
    after: Option<NormInput<E>>,
    behind: Option<NormInput<E>>,
}

/// What the backward pass of a norm reads.
#[derive(Debug)]
struct NormInput<E: Engine> {
    x: E::Buffer,
    statistics: NormStatistics<E>,
}

impl<E: Engine> BlockNorms<E> {
    /// `x + branch(norm(x))`.
    pub fn pre(norm: Norm<E>) -> Self {
        BlockNorms { before: Some(norm), after: None, behind: None }
    }

    /// `norm(x + branch(x))`.
    pub fn post(norm: Norm<E>) -> Self {
        BlockNorms { before: None, after: None, behind: Some(norm) }
    }

    /// `x + after(branch(before(x)))`.
    pub fn sandwich(before: Norm<E>, after: Norm<E>) -> Self {
        BlockNorms { before: Some(before), after: Some(after), behind: None }
    }

    /// The norm that the branch reads the stream through.
    pub fn before(&self) -> Option<&Norm<E>> {
        self.before.as_ref()
    }
}

impl<E: Engine> Stream<E> {
    /// The residual stream.
    pub fn x(&self) -> &E::Buffer {
        match self {
            Stream::Plain(x) | Stream::Normalized(Normalized { x, .. }) => x,
        }
    }

    /// What is read of the stream: its norm where there is one.
    pub fn read(&self) -> &E::Buffer {
        match self {
            Stream::Plain(x) | Stream::Normalized(Normalized { y: x, .. }) => x,
        }
    }

    /// The stream with this norm, or with none, whatever was computed already.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn through(
        self,
        engine: &E,
        workspace: &mut Workspace<E>,
        norm: Option<&Norm<E>>,
        tokens: usize,
    ) -> Result<Self> {
        match (self, norm) {
            (Stream::Plain(x), Some(norm)) => {
                Ok(Stream::Normalized(Normalized::new(engine, workspace, norm, x, tokens)?))
            }
            (stream @ Stream::Normalized(_), None) => Ok(Stream::Plain(stream.into_x(workspace))),
            (stream, _) => Ok(stream),
        }
    }

    /// The residual stream; what else there is goes back.
    pub fn into_x(self, workspace: &mut Workspace<E>) -> E::Buffer {
        match self {
            Stream::Plain(x) => x,
            Stream::Normalized(Normalized { x, y, statistics }) => {
                workspace.give(std::iter::once(y).chain(statistics.into_buffers()));
                x
            }
        }
    }

    /// The buffers, to give them back.
    pub fn into_buffers(self) -> impl Iterator<Item = E::Buffer> {
        let (plain, normalized) = match self {
            Stream::Plain(x) => (Some(x), None),
            Stream::Normalized(normalized) => (None, Some(normalized)),
        };
        plain.into_iter().chain(normalized.into_iter().flat_map(Normalized::into_buffers))
    }
}

impl<E: Engine> NormInput<E> {
    /// The gradient of the norm's input, from that of its output.
    fn gradient(
        self,
        engine: &E,
        workspace: &mut Workspace<E>,
        norm: &mut Norm<E>,
        (dy, tokens): (&E::Buffer, usize),
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let mut dx = workspace.compute(engine, tokens * norm.width())?;
        // The norm's gradient is added to what is there.
        engine.clear(&mut dx)?;
        norm.backward(engine, (&self.x, &self.statistics), dy, &mut dx, accumulate)?;
        workspace.give(self.into_buffers());
        Ok(dx)
    }

    fn into_buffers(self) -> impl Iterator<Item = E::Buffer> {
        std::iter::once(self.x).chain(self.statistics.into_buffers())
    }
}

impl<E: Engine, B: Branch<E>> SavedBlock<E, B> {
    /// The residual stream in front of the block.
    pub fn x(&self) -> &E::Buffer {
        self.input.x()
    }
}

impl<E: Engine, B: Branch<E>> Block<E, B> {
    /// A block of these norms.
    ///
    /// # Errors
    /// Norms of another width than the branch's.
    pub fn new(norms: BlockNorms<E>, branch: B) -> Result<Self> {
        let all = [&norms.before, &norms.after, &norms.behind].map(|norm| norm.as_ref().map(Norm::width));
        match all.into_iter().flatten().find(|width| *width != branch.width()) {
            None => Ok(Block { norms, branch }),
            Some(width) => {
                let found = format!("{width} for a branch of {}", branch.width());
                Err(Error::Setting { what: "the width of a block's norm", found, expected: "the branch's" })
            }
        }
    }

    /// The block's output, and what its backward pass needs. The output is already normalized by `next`, the norm that
    /// reads it, where this saves a pass over it: the bits are those of the norm apart.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: Stream<E>,
        shape: BatchShape,
        next: Option<&Norm<E>>,
    ) -> Result<(Stream<E>, SavedBlock<E, B>)> {
        let (tokens, BlockNorms { before, after, behind }) = (shape.tokens(), &self.norms);
        let input = input.through(engine, workspace, before.as_ref(), tokens)?;
        let (y, branch) = self.branch.forward(engine, workspace, input.read(), shape)?;
        let (mut y, after) = match after {
            Some(norm) => {
                let Normalized { x, y, statistics } = Normalized::new(engine, workspace, norm, y, tokens)?;
                (y, Some(NormInput { x, statistics }))
            }
            None => (y, None),
        };
        let (output, behind) = match (behind, next) {
            (Some(norm), _) => {
                let sum = Normalized::of_sum(engine, workspace, norm, (input.x(), y), tokens)?;
                let Normalized { x, y, statistics } = sum;
                (Stream::Plain(y), Some(NormInput { x, statistics }))
            }
            (None, Some(next)) => {
                let sum = Normalized::of_sum(engine, workspace, next, (input.x(), y), tokens)?;
                (Stream::Normalized(sum), None)
            }
            (None, None) => {
                engine.add(input.x(), &mut y)?;
                (Stream::Plain(y), None)
            }
        };
        Ok((output, SavedBlock { shape, input, branch, after, behind }))
    }

    /// Turns the gradient of the output into that of the input.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: SavedBlock<E, B>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedBlock { shape, input, branch, after, behind } = saved;
        let (tokens, norms) = (shape.tokens(), &mut self.norms);
        let mut d_sum = match (&mut norms.behind, behind) {
            (Some(norm), Some(behind)) => {
                let d_sum = behind.gradient(engine, workspace, norm, (&dy, tokens), accumulate)?;
                workspace.give([dy]);
                d_sum
            }
            _ => dy,
        };
        let d_branch = match (&mut norms.after, after) {
            (Some(norm), Some(after)) => Some(after.gradient(engine, workspace, norm, (&d_sum, tokens), accumulate)?),
            _ => None,
        };
        let (read, before) = match input {
            Stream::Plain(x) => (x, None),
            Stream::Normalized(Normalized { x, y, statistics }) => (y, Some(NormInput { x, statistics })),
        };
        let dy = d_branch.as_ref().unwrap_or(&d_sum);
        let mut d_read = self.branch.backward(engine, workspace, (read, branch), dy, shape, accumulate)?;
        workspace.give(d_branch);
        match (&mut norms.before, before) {
            (Some(norm), Some(before)) => {
                norm.backward(engine, (&before.x, &before.statistics), &d_read, &mut d_sum, accumulate)?;
                workspace.give(before.into_buffers().chain([d_read]));
                Ok(d_sum)
            }
            _ => {
                engine.add(&d_sum, &mut d_read)?;
                workspace.give([d_sum]);
                Ok(d_read)
            }
        }
    }

    /// Gives the buffers back where there is no backward pass.
    pub fn release(engine: &E, saved: SavedBlock<E, B>, workspace: &mut Workspace<E>) {
        let x = Self::release_but_input(engine, saved, workspace);
        workspace.give([x]);
    }

    /// [`Block::release`] of all but the residual stream in front of the block, which is returned.
    pub fn release_but_input(engine: &E, saved: SavedBlock<E, B>, workspace: &mut Workspace<E>) -> E::Buffer {
        let SavedBlock { input, branch, after, behind, .. } = saved;
        B::release(engine, branch, workspace);
        workspace.give(after.into_iter().chain(behind).flat_map(NormInput::into_buffers));
        input.into_x(workspace)
    }
}
