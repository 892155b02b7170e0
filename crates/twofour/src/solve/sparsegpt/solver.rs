//! The columns of a layer, block by block.

use rayon::prelude::*;

use super::super::{Method, method::pattern_error};
use super::{BySparseGpt, Solved, SparseGpt};
use crate::{
    Error, Mask, Pattern, Result,
    linear_algebra::gemm::{Block, Operand, Threads, multiply},
    mask::set_bits,
    select::{Sparsity, nm, unstructured},
};

/// Rows that a thread takes at a time. Results do not depend on how many threads there are.
const ROWS: usize = 128;

/// About how many columns are done without GEMM.
const INNER: usize = 32;

/// The settings, checked for one width.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    sparsity: Sparsity,
    level: f64,
    block: usize,
    inner: usize,
}

impl Plan {
    pub(super) fn new(settings: &SparseGpt) -> Result<Self> {
        if settings.block == 0 {
            return Err(Error::Setting { what: "columns of a block", value: 0.0, expected: "at least 1" });
        }
        let level = settings.sparsity.level()?;
        if !BySparseGpt.prunes_to(settings.sparsity) {
            return Err(pattern_error(&BySparseGpt, settings.sparsity));
        }
        // No group is cut by a block or by the innermost columns.
        let m = if let Sparsity::Groups(pattern) = settings.sparsity { pattern.m() } else { 1 };
        let multiple = |n: usize| (n / m).max(1) * m;
        let inner = multiple(INNER);
        let block = multiple(settings.block);
        Ok(Self { sparsity: settings.sparsity, level, block, inner })
    }
}

/// A layer in the making.
pub(super) struct Solver {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) plan: Plan,
    /// `R`.
    pub(super) factor: Vec<f32>,
    /// Its diagonal.
    pub(super) diagonal: Vec<f32>,
}

/// What a thread works on: some rows of everything.
struct Band<'a> {
    first: usize,
    /// The dense weight, and, in the columns that are done, the change `W - Ŵ`.
    changes: &'a mut [f32],
    weight: &'a mut [f32],
    words: &'a mut [u64],
    /// `a` of the block's columns, `[ROWS, block]`.
    sums: &'a mut [f32],
    /// Squared errors `Σ e²` of the rows: `‖d·R‖²`.
    error: &'a mut f64,
}

impl Solver {
    /// Solves for a dense weight.
    pub(super) fn run(&self, mut changes: Vec<f32>) -> Result<Solved> {
        let (rows, cols, block) = (self.rows, self.cols, self.plan.block.min(self.cols));
        let mut weight = vec![0f32; rows * cols];
        let mut mask = Mask::empty(rows, cols);
        let stride = mask.words_per_row();
        let bands = rows.div_ceil(ROWS);
        let mut sums = vec![0f32; bands * ROWS * block];
        let mut errors = vec![0f64; bands];
        for start in (0..cols).step_by(block) {
            let end = (start + block).min(cols);
            let mut bands: Vec<Band<'_>> = {
                let parts = changes.chunks_mut(ROWS * cols).zip(weight.chunks_mut(ROWS * cols));
                let parts = parts.zip(mask.words_mut().chunks_mut(ROWS * stride));
                let parts = parts.zip(sums.chunks_mut(ROWS * block)).zip(&mut errors);
                let band = |(i, ((((changes, weight), words), sums), error))| Band {
                    first: i * ROWS,
                    changes,
                    weight,
                    words,
                    sums,
                    error,
                };
                parts.enumerate().map(band).collect()
            };
            bands.par_iter_mut().for_each(|band| self.gather(band, start, end));
            self.choose(&mut bands, start, end)?;
            bands.par_iter_mut().for_each(|band| self.solve(band, start, end));
        }
        Ok(Solved { weight, mask, integers: None, scales: None, squared_error: errors.iter().sum() })
    }

    /// `a` of a block's columns: the changes of all columns before it times their rows of `R`.
    fn gather(&self, band: &mut Band<'_>, start: usize, end: usize) {
        let (cols, width) = (self.cols, end - start);
        let rows = band.changes.len() / cols;
        let sums = &mut band.sums[..rows * width];
        if start == 0 {
            sums.fill(0.0);
            return;
        }
        let changes = Operand::new(band.changes, cols, Block { row: 0, col: 0, rows, cols: start });
        let factor = Operand::new(&self.factor, cols, Block { row: 0, col: start, rows: start, cols: width });
        let all = Block { row: 0, col: 0, rows, cols: width };
        multiply((sums, width, all), 0.0, 1.0, changes, factor, Threads::One);
    }

    /// Chooses the mask of a block's columns, where they are chosen together.
    fn choose(&self, bands: &mut [Band<'_>], start: usize, end: usize) -> Result<()> {
        let width = end - start;
        match self.plan.sparsity {
            Sparsity::EachRow(_) => {
                let pruned = unstructured::pruned_count(width, self.plan.level);
                bands.par_iter_mut().for_each(|band| {
                    let (mut scores, mut keys) = (vec![0f32; width], Vec::new());
                    let mut kept = vec![0u64; width.div_ceil(64)];
                    for row in 0..band.rows(self.cols) {
                        self.scores(band, row, start, &mut scores);
                        kept.fill(0);
                        unstructured::keep_best(&scores, pruned, &mut kept, &mut keys);
                        set_words(band.mask_row(row, self.cols), start, &kept);
                    }
                });
            }
            Sparsity::Tensor(_) => {
                let pruned = unstructured::pruned_count(self.rows * width, self.plan.level);
                let mask =
                    unstructured::masks(&[&BlockScores { solver: self, bands, start, width }], pruned)?.remove(0);
                bands.par_iter_mut().for_each(|band| {
                    for row in 0..band.rows(self.cols) {
                        let chosen = mask.row_words(band.first + row);
                        set_words(band.mask_row(row, self.cols), start, chosen);
                    }
                });
            }
            _ => {}
        }
        Ok(())
    }

    /// Turns `a` of consecutive columns into what they are adjusted by while all of them are still free: `a · R⁻¹` for
    /// their square of `R`.
    fn adjust(&self, first: usize, sums: &mut [f32]) {
        for i in 0..sums.len() {
            let x = sums[i] / self.diagonal[first + i];
            sums[i] = x;
            let of_factor = &self.factor[(first + i) * self.cols + first + i + 1..];
            sums[i + 1..].iter_mut().zip(of_factor).for_each(|(sum, r)| *sum -= x * r);
        }
    }

    /// `(w_j / U_jj)²` of a row's columns from `start` on, as they are adjusted when the block begins.
    fn scores(&self, band: &Band<'_>, row: usize, start: usize, scores: &mut [f32]) {
        let width = scores.len();
        scores.copy_from_slice(&band.sums[row * width..][..width]);
        self.adjust(start, scores);
        let weights = &band.changes[row * self.cols + start..][..width];
        for ((score, w), r) in scores.iter_mut().zip(weights).zip(&self.diagonal[start..]) {
            let e = (w + *score) * r;
            *score = e * e;
        }
    }

    /// Prunes and adjusts a block's columns.
    fn solve(&self, band: &mut Band<'_>, start: usize, end: usize) {
        let (cols, width, rows) = (self.cols, end - start, band.rows(self.cols));
        for from in (start..end).step_by(self.plan.inner) {
            let to = (from + self.plan.inner).min(end);
            if from > start {
                let changes = Block { row: 0, col: start, rows, cols: from - start };
                let factor = Block { row: start, col: from, rows: from - start, cols: to - from };
                multiply(
                    (&mut band.sums[..rows * width], width, Block { row: 0, col: from - start, rows, cols: to - from }),
                    1.0,
                    1.0,
                    Operand::new(band.changes, cols, changes),
                    Operand::new(&self.factor, cols, factor),
                    Threads::One,
                );
            }
            for row in 0..rows {
                self.solve_row(band, row, (start, width), from, to);
            }
        }
    }

    /// Prunes and adjusts the innermost columns of a row.
    fn solve_row(&self, band: &mut Band<'_>, row: usize, (start, width): (usize, usize), from: usize, to: usize) {
        let cols = self.cols;
        let count = to - from;
        let stride = band.words.len() / band.rows(cols);
        let sums = &mut band.sums[row * width + from - start..][..count];
        let changes = &mut band.changes[row * cols + from..][..count];
        let weight = &mut band.weight[row * cols + from..][..count];
        let words = &mut band.words[row * stride..][..stride];
        let diagonal = &self.diagonal[from..to];
        let mut kept = 0u64;
        let pattern = match self.plan.sparsity {
            Sparsity::Groups(pattern) => Some(pattern),
            _ => {
                kept = bits(words, from, count);
                None
            }
        };
        let mut error = 0f64;
        for j in 0..count {
            if let Some(pattern) = pattern
                && j % pattern.m() == 0
            {
                let end = (j + pattern.m()).min(count);
                let mut scores = [0f32; Pattern::MAX_M];
                let group = &mut scores[..end - j];
                group.copy_from_slice(&sums[j..end]);
                self.adjust(from + j, group);
                for (k, score) in (j..end).zip(group) {
                    let e = (changes[k] + *score) * diagonal[k];
                    *score = e * e;
                }
                kept |= match (pattern, end - j) {
                    (Pattern::TWO_FOUR, 4) => {
                        u64::from(nm::best_two_of_four([scores[0], scores[1], scores[2], scores[3]]))
                    }
                    _ => nm::best(&scores[..end - j], pattern.n()),
                } << j;
            }
            let (dense, r, a) = (changes[j], diagonal[j], sums[j]);
            let change = if kept >> j & 1 == 0 {
                weight[j] = 0.0;
                dense
            } else {
                weight[j] = dense + a / r;
                -(a / r)
            };
            changes[j] = change;
            let e = f64::from(a) + f64::from(change) * f64::from(r);
            error += e * e;
            let of_factor = &self.factor[(from + j) * cols + from..][..count];
            for (sum, r) in sums[j + 1..].iter_mut().zip(&of_factor[j + 1..]) {
                *sum += change * r;
            }
        }
        if pattern.is_some() {
            set_bits(words, from, kept);
        }
        *band.error += error;
    }
}

impl Band<'_> {
    fn rows(&self, cols: usize) -> usize {
        self.weight.len() / cols
    }

    fn mask_row(&mut self, row: usize, cols: usize) -> &mut [u64] {
        let stride = self.words.len() / self.rows(cols);
        &mut self.words[row * stride..][..stride]
    }
}

/// The scores of a block's columns, of all rows.
struct BlockScores<'a, 'b> {
    solver: &'a Solver,
    bands: &'a [Band<'b>],
    start: usize,
    width: usize,
}

impl unstructured::ScoreRows for BlockScores<'_, '_> {
    fn rows(&self) -> usize {
        self.solver.rows
    }

    fn cols(&self) -> usize {
        self.width
    }

    fn row(&self, row: usize, scores: &mut [f32]) -> Result<()> {
        self.solver.scores(&self.bands[row / ROWS], row % ROWS, self.start, scores);
        Ok(())
    }
}

/// Sets a mask's bits from a column on to those of a narrower mask.
fn set_words(words: &mut [u64], start: usize, narrow: &[u64]) {
    narrow.iter().enumerate().for_each(|(i, bits)| set_bits(words, start + 64 * i, *bits));
}

/// `count` bits, at most 64, of a mask's row from a column on.
fn bits(words: &[u64], col: usize, count: usize) -> u64 {
    let (word, shift) = (col / 64, col % 64);
    let low = words[word] >> shift;
    let high = if shift + count > 64 { words[word + 1] << (64 - shift) } else { 0 };
    let all = if count < 64 { (1 << count) - 1 } else { u64::MAX };
    (low | high) & all
}
