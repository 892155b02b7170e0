use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::{Axis, Pattern};

fn rows_of(mask: &Mask) -> [u64; 4] {
    std::array::from_fn(|row| mask.row_words(row)[0] & 15)
}

/// A mask's row as it is written: column 0 first.
fn written(text: &str) -> [u64; 4] {
    let mut rows = text.split(" / ").map(|row| row.bytes().rev().fold(0, |bits, b| bits << 1 | u64::from(b == b'1')));
    std::array::from_fn(|_| rows.next().unwrap())
}

fn select_tile(values: [f32; 16], rule: Transposable) -> [u64; 4] {
    rows_of(&transposable(MatrixRef::new(4, 4, &values).unwrap(), rule).unwrap())
}

/// The peers' own fixtures and one of all ties.
#[test]
fn fixtures() {
    use Transposable::*;
    let signed = [2., -1., -2., -3., -1., 8., -1., 6., -1., -1., 4., 5., -1., 3., 7., -1.];
    assert_eq!(select_tile(signed, GreedySigned), written("1000 / 0101 / 0011 / 0110"));
    let abs = [4., 3., 2., 1., -1., -3., 0.6, 0.5, 1., 2., 3., 4., 10., 2., -1., 5.];
    assert_eq!(select_tile(abs, GreedyAbs), written("1100 / 0110 / 0011 / 1001"));
    let positive = [9., 1., 7., 4., 1., 2., 3., 0., 8., 3., 5., 4., 1., 2., 6., 2.];
    assert_eq!(select_tile(positive, GreedySigned), written("1010 / 0101 / 1001 / 0110"));
    for rule in [GreedyAbs, GreedySigned] {
        assert_eq!(select_tile([1.0; 16], rule), written("1010 / 0110 / 1100 / 0001"));
    }
    // A row of equal values is visited in column order 0, 2, 1, 3.
    assert_eq!(select_tile([1.0; 16], Causal1122), written("1000 / 1000 / 0110 / 0110"));
    assert_eq!(select_tile([1.0; 16], Optimal), written("1100 / 1100 / 0011 / 0011"));
}

/// The comparators as they are published: "i,j" in the order in which they run.
const PUBLISHED: &str = "0,1 2,3 0,2 1,3 1,2 4,5 6,7 4,6 5,7 5,6 0,4 1,5 1,4 2,6 3,7 3,6 2,4 3,5 3,4 8,9 10,11 8,10 \
                         9,11 9,10 \
    12,13 14,15 12,14 13,15 13,14 8,12 9,13 9,12 10,14 11,15 11,14 10,12 11,13 11,12 0,8 1,9 1,8 2,10 3,11 3,10 2,8 \
    3,9 3,8 \
    4,12 5,13 5,12 6,14 7,15 7,14 6,12 7,13 7,12 4,8 5,9 5,8 6,10 7,11 7,10 6,8 7,9 7,8";

/// Indices from the largest key down: each comparator leaves its two where they are only if the first is strictly
/// smaller.
fn by_published_network(keys: &[f32], comparators: &str) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    for comparator in comparators.split_whitespace() {
        let (i, j) = comparator.split_once(',').unwrap();
        let (i, j): (usize, usize) = (i.parse().unwrap(), j.parse().unwrap());
        let stays = keys[order[i]] < keys[order[j]];
        if !stays {
            order.swap(i, j);
        }
    }
    order.reverse();
    order
}

/// Values with many ties, zeros of both signs among them.
fn tied() -> impl Strategy<Value = f32> {
    prop_oneof![Just(0.0f32), Just(-0.0), Just(1.0), Just(-1.0), Just(2.0), Just(-2.0)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16 * ProptestConfig::default().cases, ..Default::default() })]
    #[test]
    fn ties_are_decided_by_the_published_network(values in proptest::array::uniform16(tied())) {
        prop_assert_eq!(PUBLISHED.split_whitespace().count(), 65);
        let tile = Tile { values, inside: u16::MAX };
        for (rule, key) in [(Transposable::GreedyAbs, f32::abs as fn(f32) -> f32), (Transposable::GreedySigned, |v| v)] {
            let order = by_published_network(&values.map(key), PUBLISHED);
            prop_assert_eq!(tile.select(rule), greedy_by(&order), "{}", rule);
        }
    }

    #[test]
    fn causal1122_is_its_sentence(values in proptest::array::uniform16(tied())) {
        let (mut kept, mut in_column) = (0u16, [0; 4]);
        for (row, room) in [1, 1, 2, 2].into_iter().enumerate() {
            let order = by_published_network(&values[4 * row..][..4], "0,1 2,3 0,2 1,3 1,2");
            let chosen: Vec<usize> = order.into_iter().filter(|c| in_column[*c] < 2).take(room).collect();
            for col in chosen {
                in_column[col] += 1;
                kept |= 1 << (4 * row + col);
            }
        }
        prop_assert_eq!(Tile { values, inside: u16::MAX }.select(Transposable::Causal1122), kept);
    }
}

/// The greedy rule as a sentence, over an order that is given.
fn greedy_by(order: &[usize]) -> u16 {
    let (mut kept, mut in_row, mut in_column) = (0, [0; 4], [0; 4]);
    for &i in order {
        if in_row[i / 4] < 2 && in_column[i % 4] < 2 {
            in_row[i / 4] += 1;
            in_column[i % 4] += 1;
            kept |= 1 << i;
        }
    }
    kept
}

fn values() -> impl Strategy<Value = f32> {
    prop_oneof![
        3 => -1f32..1.0,
        2 => (-2i8..=2).prop_map(f32::from),
        1 => prop_oneof![Just(0.0f32), Just(-0.0), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(1e-45), Just(f32::MAX)],
    ]
}

fn matrices() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (0usize..14, 0usize..75).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(values(), r * c)))
}

proptest! {
    #[test]
    fn without_ties_any_sort_gives_the_greedy_mask(seed in proptest::array::uniform16(0u32..1 << 24)) {
        let values: [f32; 16] = std::array::from_fn(|i| (seed[i] as f32) * if i % 3 == 0 { -1.0 } else { 1.0 });
        let mut distinct: Vec<u32> = seed.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assume!(distinct.len() == 16);
        let tile = Tile { values, inside: u16::MAX };
        for (rule, key) in [(Transposable::GreedyAbs, f32::abs as fn(f32) -> f32), (Transposable::GreedySigned, |v| v)] {
            let mut order: Vec<usize> = (0..16).collect();
            order.sort_by(|&a, &b| key(values[b]).total_cmp(&key(values[a])));
            prop_assert_eq!(tile.select(rule), greedy_by(&order));
        }
    }

    #[test]
    fn every_rule_obeys_both_ways_and_every_dtype_agrees((rows, cols, data) in matrices()) {
        let data: Vec<bf16> = data.into_iter().map(bf16::from_f32).collect();
        let wide: Vec<f32> = data.iter().map(|v| v.to_f32()).collect();
        for rule in Transposable::ALL {
            let mask = transposable(MatrixRef::new(rows, cols, &data).unwrap(), rule).unwrap();
            prop_assert!(mask.verify(Pattern::TWO_FOUR, Axis::Row).is_ok());
            prop_assert!(mask.verify(Pattern::TWO_FOUR, Axis::Column).is_ok());
            prop_assert_eq!(&mask, &transposable(MatrixRef::new(rows, cols, &wide).unwrap(), rule).unwrap());
        }
    }

    #[test]
    fn counts_are_those_of_each_rule(values in proptest::array::uniform16(values())) {
        let tile = Tile { values, inside: u16::MAX };
        prop_assert_eq!(tile.select(Transposable::Optimal).count_ones(), 8);
        prop_assert_eq!(tile.select(Transposable::Causal1122).count_ones(), 6);
        for rule in [Transposable::GreedyAbs, Transposable::GreedySigned] {
            prop_assert!((7..=8).contains(&tile.select(rule).count_ones()));
        }
    }
}

#[test]
fn a_nan_is_named() {
    let mut data = vec![1f32; 6 * 7];
    data[5 * 7 + 6] = f32::NAN;
    let error = transposable(MatrixRef::new(6, 7, &data).unwrap(), Transposable::Optimal).unwrap_err();
    assert!(matches!(error, Error::NotANumber { row: 5, col: 6 }), "{error}");
}

/// The shares of Gaussian weights that each rule keeps, as `docs/explanation/masks.md` states them.
#[test]
fn kept_mass_on_gaussian_weights() {
    // Box and Muller over a linear congruential generator: any fair Gaussian will do.
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f64 + 0.5) / (1u64 << 24) as f64
    };
    let w: Vec<f32> = (0..512 * 512)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect();
    let matrix = MatrixRef::new(512, 512, &w).unwrap();
    let kept = |rule| {
        let mask = transposable(matrix, rule).unwrap();
        (mask.kept_l1(matrix).unwrap(), mask.density())
    };
    for (rule, l1) in
        [(Transposable::GreedySigned, 0.542), (Transposable::GreedyAbs, 0.692), (Transposable::Optimal, 0.702)]
    {
        assert!((kept(rule).0 - l1).abs() < 0.003, "{rule}: {}", kept(rule).0);
    }
    // 15.8 % of tiles keep seven: 0.158 / 16 of the elements are missing from one half.
    assert!((0.5 - kept(Transposable::GreedyAbs).1 - 0.158 / 16.0).abs() < 0.0005);
}
