//! Keys and values of the tokens so far.

use twofour::kernel::KernelElement;

/// Positions of a block of keys: one or two registers.
pub(super) const BLOCK: usize = 16;

/// Keys and values of one layer, of the tokens so far, in `T`, head by head.
#[derive(Debug, Clone)]
pub(crate) struct Cache<T> {
    heads: Vec<HeadCache<T>>,
}

/// Keys and values of one head.
#[derive(Debug, Clone)]
pub(super) struct HeadCache<T> {
    dim: usize,
    positions: usize,
    /// `[position / BLOCK, dim, BLOCK]`, so that a register holds one element of the keys of neighbouring positions.
    /// The last block is completed with zeros.
    pub(super) keys: Vec<T>,
    /// `[position, dim]`.
    pub(super) values: Vec<T>,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Cache { heads: vec![] }
    }
}

impl<T: KernelElement> Cache<T> {
    /// Adds the keys and values of a token, `[heads, dim]` each.
    pub(super) fn push(&mut self, dim: usize, keys: &[f32], values: &[f32]) {
        if self.heads.is_empty() {
            let head = HeadCache { dim, positions: 0, keys: vec![], values: vec![] };
            self.heads = vec![head; keys.len() / dim];
        }
        let token = keys.chunks_exact(dim).zip(values.chunks_exact(dim));
        self.heads.iter_mut().zip(token).for_each(|(head, (key, value))| head.push(key, value));
    }

    /// Forgets all tokens but the first `positions`.
    pub(super) fn truncate(&mut self, positions: usize) {
        self.heads.iter_mut().for_each(|head| head.truncate(positions));
    }

    /// A head's keys and values.
    pub(super) fn head(&self, head: usize) -> &HeadCache<T> {
        &self.heads[head]
    }
}

impl<T: KernelElement> HeadCache<T> {
    fn push(&mut self, key: &[f32], value: &[f32]) {
        let (block, lane) = (self.positions / BLOCK, self.positions % BLOCK);
        if lane == 0 {
            self.keys.resize((block + 1) * self.dim * BLOCK, T::ZERO);
        }
        let block = &mut self.keys[block * self.dim * BLOCK..];
        block.chunks_exact_mut(BLOCK).zip(key).for_each(|(lanes, key)| lanes[lane] = T::from_f32(*key));
        self.values.extend(value.iter().map(|value| T::from_f32(*value)));
        self.positions += 1;
    }

    fn truncate(&mut self, positions: usize) {
        if positions >= self.positions {
            return;
        }
        self.positions = positions;
        self.values.truncate(positions * self.dim);
        self.keys.truncate(positions.div_ceil(BLOCK) * self.dim * BLOCK);
        let (begun, kept) = (positions / BLOCK * self.dim * BLOCK, positions % BLOCK);
        self.keys[begun..].chunks_exact_mut(BLOCK).for_each(|lanes| lanes[kept..].fill(T::ZERO));
    }

    /// How many tokens it holds.
    pub(super) fn positions(&self) -> usize {
        self.positions
    }

    /// The keys in f32, transposed: `[dim, positions]`, of positions from a multiple of [`BLOCK`] on, completed to
    /// whole blocks.
    pub(super) fn transposed_keys(&self, first: usize, out: &mut Vec<f32>) {
        let blocks = self.keys[first / BLOCK * self.dim * BLOCK..].chunks_exact(self.dim * BLOCK);
        let stride = blocks.len() * BLOCK;
        out.resize(self.dim * stride, 0.0);
        for (block, keys) in blocks.enumerate() {
            for (i, lanes) in keys.chunks_exact(BLOCK).enumerate() {
                let out = &mut out[i * stride + block * BLOCK..][..BLOCK];
                out.iter_mut().zip(lanes).for_each(|(out, key)| *out = key.to_f32());
            }
        }
    }
}
