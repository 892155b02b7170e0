//! Attention over images, neighbours, and factors of columns.

use twofour::Arithmetic;
use twofour_cuda::{Error, layer::LayerContext};
use twofour_transformer::cuda::{
    ImageAttention, ImageAttentionTensors, SplitHeadsMut, image_attention, neighbours, scale_rows,
};

use crate::{
    Check, context, for_each_type,
    reference::{expect_close, numbers, wide},
    unwritten, up,
};

/// Whether padded positions have a bias.
struct Case(ImageAttention, bool);

/// Attention in f64: `fused` `[images · tokens, 3 heads dim]`, tables `[2 span - 1, dim]`.
fn expected(shape: ImageAttention, fused: &[f64], bias: &[f64], tables: [&[f64]; 2]) -> Vec<f64> {
    let ImageAttention { images, tokens, grid, window, heads, head_dim: dim, relative } = shape;
    let row_len = 3 * heads * dim;
    // Positions of a window, or of the image where there are none: rows, columns, and the token.
    let sequences: Vec<(usize, Vec<Option<usize>>)> = match window {
        None => (0..images).map(|image| (image, (0..tokens).map(Some).collect())).collect(),
        Some(side) => {
            let [down, across] = grid.map(|n| n.div_ceil(side));
            let windows = (0..images).flat_map(|image| (0..down * across).map(move |window| (image, window)));
            let token = |window: usize, at: usize| {
                let (row, column) = (window / across * side + at / side, window % across * side + at % side);
                (row < grid[0] && column < grid[1]).then_some(row * grid[1] + column)
            };
            windows.map(|(image, window)| (image, (0..side * side).map(|at| token(window, at)).collect())).collect()
        }
    };
    let span = window.map_or(grid, |side| [side; 2]);
    let mut out = vec![f64::NAN; images * tokens * heads * dim];
    for (image, positions) in sequences {
        let at = |position: usize, part: usize, head: usize| {
            let from = match positions[position] {
                Some(token) => &fused[(image * tokens + token) * row_len..][..row_len],
                None => bias,
            };
            &from[(part * heads + head) * dim..][..dim]
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for (head, query) in (0..heads).flat_map(|head| (0..positions.len()).map(move |query| (head, query))) {
            let Some(token) = positions[query] else { continue };
            let q = at(query, 0, head);
            let vector = |axis: usize, q: usize, k: usize| &tables[axis][(q + span[axis] - 1 - k) * dim..][..dim];
            let score = |key: usize| {
                let terms = if relative {
                    let [(q_row, q_column), (k_row, k_column)] = [query, key].map(|p| (p / span[1], p % span[1]));
                    dot(q, vector(0, q_row, k_row)) + dot(q, vector(1, q_column, k_column))
                } else {
                    0.0
                };
                dot(q, at(key, 1, head)) / (dim as f64).sqrt() + terms
            };
            let scores: Vec<f64> = (0..positions.len()).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = p.iter().sum();
            for i in 0..dim {
                let value = (0..positions.len()).map(|key| p[key] / sum * at(key, 2, head)[i]).sum();
                out[((image * tokens + token) * heads + head) * dim + i] = value;
            }
        }
    }
    out
}

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case(shape, has_bias) = *self;
        let what = format!("{shape:?} {:?}, bias {has_bias}", T::DTYPE);
        let ImageAttention { images, tokens, grid, window, heads, head_dim: dim, .. } = shape;
        let fused = numbers::<T>(images * tokens * 3 * heads * dim, 1);
        let bias = numbers::<T>(3 * heads * dim, 2);
        let span = window.map_or(grid, |side| [side; 2]);
        // Small, as trained ones are: so that 16-bit terms are not off by much.
        let table = |axis: usize| {
            let numbers = numbers::<f32>((2 * span[axis] - 1) * dim, 3 + axis as u64);
            numbers.into_iter().map(|value| value / 8.0).collect::<Vec<f32>>()
        };
        let tables = [table(0), table(1)];
        let (fused_there, bias_there) = (up(context, &fused), up(context, &bias));
        let tables_there = [&tables[0], &tables[1]].map(|table| up(context, table));
        let len = shape.heads_len(T::DTYPE).unwrap();
        let [mut q, mut k, mut v, mut out] = [(); 4].map(|()| unwritten::<T>(context, len));
        let mut lse = unwritten::<f32>(context, shape.lse_len().unwrap());
        let mut merged = unwritten::<T>(context, images * tokens * heads * dim);
        let tensors = ImageAttentionTensors {
            fused: fused_there.as_slice(),
            bias: has_bias.then(|| bias_there.as_slice()),
            relative: shape.relative.then(|| [tables_there[0].as_slice(), tables_there[1].as_slice()]),
            apart: SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() },
            out: out.as_slice_mut(),
            lse: lse.as_slice_mut(),
            merged: merged.as_slice_mut(),
        };
        image_attention(context, shape, tensors).unwrap();
        let bias = if has_bias { wide(&bias) } else { vec![0.0; bias.len()] };
        let tables = [wide(&tables[0]), wide(&tables[1])];
        let expected = expected(shape, &wide(&fused), &bias, [&tables[0], &tables[1]]);
        // 16-bit queries and terms are rounded once more than the reference's.
        expect_close(&what, &merged.to_host::<T>().unwrap(), &expected, 2.0 * tolerance);
    }
}

#[test]
fn attention_over_images_is_that_of_the_reference() {
    let whole =
        ImageAttention { images: 2, tokens: 30, grid: [5, 6], window: None, heads: 2, head_dim: 16, relative: false };
    for shape in [
        whole,
        // A class token before the grid, and heads of SAM's size, which no kernel has.
        ImageAttention { tokens: 31, head_dim: 80, ..whole },
        // Terms within 32 elements, within 64, within 128, and beyond: SAM's heads over a grid of 30 rows.
        ImageAttention { relative: true, ..whole },
        ImageAttention { relative: true, head_dim: 40, ..whole },
        ImageAttention { relative: true, head_dim: 80, ..whole },
        ImageAttention { relative: true, head_dim: 80, tokens: 30 * 31, grid: [30, 31], images: 1, ..whole },
        // No multiple of a vector.
        ImageAttention { relative: true, head_dim: 18, heads: 3, ..whole },
        // Windows that fill the grid in one direction only, one that is larger than it, and SAM's.
        ImageAttention { window: Some(3), ..whole },
        ImageAttention { window: Some(3), relative: true, ..whole },
        ImageAttention { window: Some(7), relative: true, ..whole },
        ImageAttention { window: Some(14), relative: true, head_dim: 80, tokens: 20 * 17, grid: [20, 17], ..whole },
        ImageAttention { window: Some(1), relative: true, head_dim: 10, ..whole },
    ] {
        for has_bias in [true, false] {
            for_each_type(&Case(shape, has_bias));
        }
    }
}

#[test]
fn tensors_that_do_not_fit_attention_over_images_are_refused() {
    let Some(context) = context() else { return };
    let shape =
        ImageAttention { images: 1, tokens: 6, grid: [2, 3], window: Some(2), heads: 1, head_dim: 8, relative: true };
    let run = |shape: ImageAttention, fused: usize, tables: Option<usize>| {
        let zeros = |len: usize| up(&context, &vec![0f32; len]);
        let (fused, table) = (zeros(fused), tables.map(zeros));
        let len = 2 * 4 * 16;
        let [mut q, mut k, mut v, mut out] = [(); 4].map(|()| zeros(len));
        let (mut lse, mut merged) = (zeros(8), zeros(48));
        let tensors = ImageAttentionTensors {
            fused: fused.as_slice(),
            bias: None,
            relative: table.as_ref().map(|table| [table.as_slice(), table.as_slice()]),
            apart: SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() },
            out: out.as_slice_mut(),
            lse: lse.as_slice_mut(),
            merged: merged.as_slice_mut(),
        };
        image_attention(&context, shape, tensors)
    };
    assert_eq!(shape.heads_len(twofour_cuda::DataType::F32).unwrap(), 2 * 4 * 16);
    run(shape, 144, Some(24)).unwrap();
    assert!(matches!(run(shape, 143, Some(24)), Err(Error::Length { .. })));
    assert!(matches!(run(shape, 144, Some(23)), Err(Error::Length { .. })));
    assert!(matches!(run(shape, 144, None), Err(Error::Length { found: 0, .. })));
    assert!(matches!(run(ImageAttention { tokens: 7, ..shape }, 168, Some(24)), Err(Error::Length { .. })));
    for wrong in [
        ImageAttention { window: Some(0), ..shape },
        ImageAttention { heads: 0, ..shape },
        ImageAttention { head_dim: 0, ..shape },
        ImageAttention { head_dim: 264, ..shape },
    ] {
        assert!(matches!(run(wrong, 144, Some(24)), Err(Error::Dimension { .. })), "{wrong:?}");
    }
}

struct Neighbours {
    images: usize,
    grid: [usize; 2],
    channels: usize,
}

impl Check for Neighbours {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let Neighbours { images, grid: [rows, columns], channels } = *self;
        let x = numbers::<T>(images * rows * columns * channels, 5);
        let mut y = unwritten::<T>(context, 9 * x.len());
        let shape = (images, [rows, columns], channels);
        neighbours(context, shape, up(context, &x).as_slice(), y.as_slice_mut()).unwrap();
        let mut expected = vec![];
        for (image, row, column) in
            (0..images * rows * columns).map(|i| (i / columns / rows, i / columns % rows, i % columns))
        {
            for (down, right) in (0..9).map(|place| (place / 3, place % 3)) {
                let inside = (1..=rows).contains(&(row + down)) && (1..=columns).contains(&(column + right));
                let from =
                    |i: usize| x[((image * rows + row + down - 1) * columns + column + right - 1) * channels + i];
                expected.extend((0..channels).map(|i| if inside { from(i) } else { T::from_f32(0.0) }));
            }
        }
        assert!(y.to_host::<T>().unwrap() == expected, "{shape:?} {:?}", T::DTYPE);
    }
}

#[test]
fn neighbours_are_gathered_with_zeros_beyond_the_image() {
    for (images, grid, channels) in [(2, [3, 4], 16), (1, [1, 1], 8), (1, [5, 2], 3), (2, [2, 1], 260)] {
        for_each_type(&Neighbours { images, grid, channels });
    }
}

struct Scale(usize, usize);

impl Check for Scale {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let Scale(rows, columns) = *self;
        let (y, factors) = (numbers::<T>(rows * columns, 6), numbers::<f32>(columns, 7));
        let mut there = up(context, &y);
        scale_rows(context, (rows, columns), up(context, &factors).as_slice(), there.as_slice_mut()).unwrap();
        let product = |(i, y): (usize, &T)| T::from_f32(y.to_f32() * factors[i % columns]);
        let expected: Vec<T> = y.iter().enumerate().map(product).collect();
        assert!(there.to_host::<T>().unwrap() == expected, "{rows} {columns} {:?}", T::DTYPE);
    }
}

#[test]
fn rows_are_multiplied_by_the_factors_of_their_columns() {
    for (rows, columns) in [(1, 1), (3, 300), (70, 16), (0, 8)] {
        for_each_type(&Scale(rows, columns));
    }
}
