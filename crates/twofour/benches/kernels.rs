//! Micro-benchmarks of one kernel at a time: `cargo bench -p twofour`.
//!
//! Small and cache-resident, to see a change of the instructions in a minute. `twofour-bench cpu` measures what counts
//! for a user: weights from memory, interleaved with a dense baseline.
#![allow(missing_docs)] // The macro of divan makes public items.

use divan::{
    Bencher,
    counter::{BytesCount, ItemsCount},
};
use half::{bf16, f16};
use twofour::{
    Arithmetic, Axis, Compressed, Element, MatrixRef, Pattern,
    kernel::{Activation, DenseWeight, DenseWeightI8, Epilogue, KernelElement, SparseWeight, SparseWeightI8},
    select::{self, Transposable},
};

const OUT: usize = 1024;
const IN: usize = 1024;

fn main() {
    divan::main();
}

/// Numbers from -1 to 1 (xorshift64).
fn random<T: Arithmetic>(count: usize) -> Vec<T> {
    let mut state = 0x1234_5678_9ABC_DEF1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

fn int8() -> Vec<i8> {
    random::<f32>(OUT * IN).iter().map(|v| (v * 127.0) as i8).collect()
}

fn matrix<T: Element>(values: &[T]) -> MatrixRef<'_, T> {
    MatrixRef::new(OUT, IN, values).expect("the length fits")
}

const EPILOGUE: Epilogue<'static> = Epilogue { bias: None, activation: Activation::Identity };

/// Counts the bytes of the weight: what a kernel must read.
fn multiply<T: KernelElement>(
    bencher: Bencher<'_, '_>,
    tokens: usize,
    bytes: usize,
    linear: impl Fn(&[T], &mut [T]) -> twofour::Result<()>,
) {
    let (x, mut y) = (random::<T>(tokens * IN), vec![T::ZERO; tokens * OUT]);
    bencher.counter(BytesCount::new(bytes)).bench_local(|| linear(&x, &mut y));
}

fn sparse_float<T: KernelElement>(bencher: Bencher<'_, '_>, tokens: usize) {
    let values = random::<T>(OUT * IN);
    let compressed = Compressed::from_pruned(matrix(&values)).expect("finite");
    let weight = SparseWeight::pack(compressed).expect("an engine");
    multiply::<T>(bencher, tokens, weight.bytes(), |x, y| weight.linear(x, tokens, EPILOGUE, y));
}

fn dense_float<T: KernelElement>(bencher: Bencher<'_, '_>, tokens: usize) {
    let values = random::<T>(OUT * IN);
    let weight = DenseWeight::pack(matrix(&values)).expect("an engine");
    multiply::<T>(bencher, tokens, weight.bytes(), |x, y| weight.linear(x, tokens, EPILOGUE, y));
}

fn sparse_int8(bencher: Bencher<'_, '_>, tokens: usize) {
    let values = int8();
    let compressed = Compressed::from_pruned(matrix(&values)).expect("integers");
    let weight = SparseWeightI8::with_scales(compressed, vec![0.01; OUT]).expect("an engine");
    multiply::<f32>(bencher, tokens, weight.bytes(), |x, y| weight.linear(x, tokens, EPILOGUE, y));
}

fn dense_int8(bencher: Bencher<'_, '_>, tokens: usize) {
    let weight = DenseWeightI8::with_scales(matrix(&int8()), vec![0.01; OUT]).expect("an engine");
    multiply::<f32>(bencher, tokens, weight.bytes(), |x, y| weight.linear(x, tokens, EPILOGUE, y));
}

/// Few tokens.
#[divan::bench_group(max_time = 0.5)]
mod decode {
    use super::*;

    const TOKENS: [usize; 2] = [1, 4];

    #[divan::bench(types = [f32, bf16, f16], args = TOKENS)]
    fn sparse<T: KernelElement>(bencher: Bencher<'_, '_>, tokens: usize) {
        sparse_float::<T>(bencher, tokens);
    }

    #[divan::bench(types = [f32, bf16, f16], args = TOKENS)]
    fn dense<T: KernelElement>(bencher: Bencher<'_, '_>, tokens: usize) {
        dense_float::<T>(bencher, tokens);
    }

    #[divan::bench(args = TOKENS)]
    fn sparse_i8(bencher: Bencher<'_, '_>, tokens: usize) {
        sparse_int8(bencher, tokens);
    }

    #[divan::bench(args = TOKENS)]
    fn dense_i8(bencher: Bencher<'_, '_>, tokens: usize) {
        dense_int8(bencher, tokens);
    }
}

/// Many tokens.
#[divan::bench_group(max_time = 0.5)]
mod prefill {
    use super::*;

    const TOKENS: usize = 256;

    #[divan::bench(types = [f32, bf16, f16])]
    fn sparse<T: KernelElement>(bencher: Bencher<'_, '_>) {
        sparse_float::<T>(bencher, TOKENS);
    }

    #[divan::bench(types = [f32, bf16, f16])]
    fn dense<T: KernelElement>(bencher: Bencher<'_, '_>) {
        dense_float::<T>(bencher, TOKENS);
    }

    #[divan::bench]
    fn sparse_i8(bencher: Bencher<'_, '_>) {
        sparse_int8(bencher, TOKENS);
    }

    #[divan::bench]
    fn dense_i8(bencher: Bencher<'_, '_>) {
        dense_int8(bencher, TOKENS);
    }

    #[divan::bench(types = [f32, bf16])]
    fn input_gradient<T: KernelElement>(bencher: Bencher<'_, '_>) {
        let values = random::<T>(OUT * IN);
        let weight = SparseWeight::pack(Compressed::from_pruned(matrix(&values)).expect("finite")).expect("an engine");
        let (dy, mut dx) = (random::<T>(TOKENS * OUT), vec![T::ZERO; TOKENS * IN]);
        bencher.bench_local(|| weight.input_gradient(&dy, TOKENS, &mut dx));
    }
}

/// Choosing a mask for f32.
#[divan::bench_group(max_time = 0.5)]
mod selection {
    use super::*;

    #[divan::bench]
    fn magnitude(bencher: Bencher<'_, '_>) {
        let values = random::<f32>(OUT * IN);
        let run = || select::magnitude(matrix(&values), Pattern::TWO_FOUR, Axis::Row);
        bencher.counter(ItemsCount::new(OUT * IN)).bench_local(run);
    }

    #[divan::bench(args = [Transposable::GreedyAbs, Transposable::Optimal])]
    fn transposable(bencher: Bencher<'_, '_>, algorithm: Transposable) {
        let values = random::<f32>(OUT * IN);
        let run = || select::transposable(matrix(&values), algorithm);
        bencher.counter(ItemsCount::new(OUT * IN)).bench_local(run);
    }
}

/// The compressed form, made and undone.
#[divan::bench_group(max_time = 0.5)]
mod compress {
    use super::*;

    #[divan::bench(types = [f32, bf16])]
    fn from_pruned<T: KernelElement>(bencher: Bencher<'_, '_>) {
        let values = random::<T>(OUT * IN);
        bencher.counter(ItemsCount::new(OUT * IN)).bench_local(|| Compressed::from_pruned(matrix(&values)));
    }

    #[divan::bench(types = [f32, bf16])]
    fn to_dense<T: KernelElement>(bencher: Bencher<'_, '_>) {
        let values = random::<T>(OUT * IN);
        let compressed = Compressed::from_pruned(matrix(&values)).expect("finite");
        bencher.counter(ItemsCount::new(OUT * IN)).bench_local(|| compressed.to_dense());
    }
}

/// What it costs to split a layer's work: a pass over as many numbers as the layer keeps, in eight parts, from a thread
/// outside rayon's pool.
#[divan::bench_group(max_time = 0.5)]
mod threads {
    use rayon::prelude::*;

    use super::*;

    /// Input and output features.
    const FEATURES: [usize; 4] = [256, 512, 1024, 2048];
    const PARTS: usize = 8;

    fn pass(part: &mut [f32]) {
        part.iter_mut().for_each(|v| *v = 1.0 - *v);
    }

    #[divan::bench(args = FEATURES)]
    fn shared(bencher: Bencher<'_, '_>, features: usize) {
        let mut kept = random::<f32>(features * features / 2);
        let part = kept.len() / PARTS;
        bencher.bench_local(|| twofour::kernel::share(kept.chunks_mut(part), || (), |(), part| pass(part)));
    }

    #[divan::bench(args = FEATURES)]
    fn by_rayon(bencher: Bencher<'_, '_>, features: usize) {
        let mut kept = random::<f32>(features * features / 2);
        let part = kept.len() / PARTS;
        bencher.bench_local(|| kept.par_chunks_mut(part).for_each(pass));
    }
}
