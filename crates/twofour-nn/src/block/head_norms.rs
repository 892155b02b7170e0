//! Norms of queries and keys, head by head.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Mutex, PoisonError},
};

use twofour::layer::Accumulate;

use super::{BlockHeads, Norm, NormStatistics, Workspace};
use crate::{
    Result,
    engine::{Buffer as _, Engine, Kind, Memory},
    parts::parts,
};

/// The norms of queries and keys (Qwen3), each over the elements of a head.
#[derive(Debug)]
pub struct HeadNorms<E: Engine> {
    query: Norm<E>,
    key: Norm<E>,
    rows: Mutex<Rows<E>>,
}

/// The numbers of the heads of a projection that are queries, keys and values, by number of tokens.
type Rows<E> = HashMap<usize, [<E as Memory>::Buffer; 3]>;

parts!(HeadNorms<E> { query, key });

/// What the backward pass of [`HeadNorms`] reads: queries and keys before their norms.
#[derive(Debug)]
pub struct SavedHeadNorms<E: Engine>([(E::Buffer, NormStatistics<E>); 2]);

impl<E: Engine> SavedHeadNorms<E> {
    /// The buffers, to give them back.
    pub(super) fn into_buffers(self) -> impl Iterator<Item = E::Buffer> {
        self.0.into_iter().flat_map(|(x, statistics)| std::iter::once(x).chain(statistics.into_buffers()))
    }
}

impl<E: Engine> HeadNorms<E> {
    /// These norms of queries and of keys, of the width of a head.
    pub fn new(query: Norm<E>, key: Norm<E>) -> Self {
        HeadNorms { query, key, rows: Mutex::default() }
    }

    /// The width of a head.
    pub fn width(&self) -> usize {
        self.query.width()
    }

    /// Normalizes the queries and keys of a projection `[tokens, (heads + 2 kv_heads) head_dim]` in place; returns what
    /// the backward pass needs.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub(super) fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (qkv, tokens): (&mut E::Buffer, usize),
        heads: BlockHeads,
    ) -> Result<SavedHeadNorms<E>> {
        let (width, mut rows) = (self.width(), self.rows.lock().unwrap_or_else(PoisonError::into_inner));
        let [queries, keys, values] = rows_of(&mut rows, engine, heads, tokens)?;
        let mut wide = workspace.take(engine, Kind::Wide, qkv.len())?;
        let mut accumulate = Accumulate::Overwrite;
        let mut normalized = |workspace: &mut Workspace<E>, norm: &Norm<E>, rows: &E::Buffer| {
            let mut x = workspace.compute(engine, rows.len() * width)?;
            engine.embedding(qkv, width, rows, &mut x)?;
            let (y, statistics) = norm.forward(engine, workspace, &x, rows.len())?;
            engine.embedding_gradient(&y, width, rows, accumulate, &mut wide)?;
            accumulate = Accumulate::Add;
            workspace.give([y]);
            Ok::<_, crate::Error>((x, statistics))
        };
        let saved = [normalized(workspace, &self.query, queries)?, normalized(workspace, &self.key, keys)?];
        add_rows(engine, workspace, (qkv, width), values, &mut wide)?;
        engine.round(&wide, qkv)?;
        workspace.give([wide]);
        Ok(SavedHeadNorms(saved))
    }

    /// Turns the gradient of the normalized projection into that of the projection, in place.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub(super) fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, d_qkv, tokens): (SavedHeadNorms<E>, &mut E::Buffer, usize),
        heads: BlockHeads,
        accumulate: Accumulate,
    ) -> Result<()> {
        let (width, HeadNorms { query, key, rows }) = (self.width(), self);
        let rows = rows.get_mut().unwrap_or_else(PoisonError::into_inner);
        let [queries, keys, values] = rows_of(rows, engine, heads, tokens)?;
        let mut wide = workspace.take(engine, Kind::Wide, d_qkv.len())?;
        let mut place = Accumulate::Overwrite;
        for ((norm, rows), (x, statistics)) in [(query, queries), (key, keys)].into_iter().zip(saved.0) {
            let mut dy = workspace.compute(engine, rows.len() * width)?;
            engine.embedding(d_qkv, width, rows, &mut dy)?;
            let mut dx = workspace.compute(engine, rows.len() * width)?;
            engine.clear(&mut dx)?;
            norm.backward(engine, (&x, &statistics), &dy, &mut dx, accumulate)?;
            engine.embedding_gradient(&dx, width, rows, place, &mut wide)?;
            place = Accumulate::Add;
            workspace.give([x, dx, dy].into_iter().chain(statistics.into_buffers()));
        }
        add_rows(engine, workspace, (d_qkv, width), values, &mut wide)?;
        engine.round(&wide, d_qkv)?;
        workspace.give([wide]);
        Ok(())
    }
}

/// Returns the rows of queries, keys and values in `qkv` for a number of tokens, from `known` where it has them.
fn rows_of<'a, E: Engine>(
    known: &'a mut Rows<E>,
    engine: &E,
    BlockHeads { heads, kv_heads, .. }: BlockHeads,
    tokens: usize,
) -> Result<&'a [E::Buffer; 3]> {
    let of = |first: usize, count: usize| -> Result<E::Buffer> {
        let all = (0..tokens).map(|token| token * (heads + 2 * kv_heads) + first);
        let ids: Vec<u32> = all.flat_map(|at| at..at + count).map(|row| row as u32).collect();
        let mut rows = engine.zeros(Kind::Index, ids.len())?;
        engine.write_ids(&mut rows, &ids)?;
        Ok(rows)
    };
    match known.entry(tokens) {
        Entry::Occupied(rows) => Ok(rows.into_mut()),
        Entry::Vacant(vacant) => {
            Ok(vacant.insert([of(0, heads)?, of(heads, kv_heads)?, of(heads + kv_heads, kv_heads)?]))
        }
    }
}

/// Adds these heads of a projection to another.
fn add_rows<E: Engine>(
    engine: &E,
    workspace: &mut Workspace<E>,
    (from, width): (&E::Buffer, usize),
    rows: &E::Buffer,
    to: &mut E::Buffer,
) -> Result<()> {
    let mut own = workspace.compute(engine, rows.len() * width)?;
    engine.embedding(from, width, rows, &mut own)?;
    engine.embedding_gradient(&own, width, rows, Accumulate::Add, to)?;
    workspace.give([own]);
    Ok(())
}
