//! The greedy rules, over sorting networks.
//!
//! A comparator (i, j) leaves its pair as it is only where key i is below key j: equal keys are exchanged. Ties are
//! therefore decided by the network itself, and another network or a stable sort gives other masks.

/// The Bose-Nelson network for 16 inputs, ascending (Bose and Nelson, "A sorting problem", JACM 1962).
const SORT_16: [(u8, u8); 65] = bose_nelson::<65>(16);

/// The same for 4 inputs.
const SORT_4: [(u8, u8); 5] = bose_nelson::<5>(4);

struct Comparators<const N: usize> {
    pairs: [(u8, u8); N],
    len: usize,
}

const fn bose_nelson<const N: usize>(inputs: u8) -> [(u8, u8); N] {
    let made = sort(Comparators { pairs: [(0, 0); N], len: 0 }, 0, inputs);
    assert!(made.len == N);
    made.pairs
}

const fn sort<const N: usize>(out: Comparators<N>, i: u8, m: u8) -> Comparators<N> {
    if m < 2 {
        return out;
    }
    let a = m / 2;
    let out = sort(out, i, a);
    let out = sort(out, i + a, m - a);
    merge(out, i, a, i + a, m - a)
}

/// Merges the sorted runs of `x` inputs at `i` and of `y` inputs at `j`.
const fn merge<const N: usize>(out: Comparators<N>, i: u8, x: u8, j: u8, y: u8) -> Comparators<N> {
    match (x, y) {
        (1, 1) => compare(out, i, j),
        (1, 2) => compare(compare(out, i, j + 1), i, j),
        (2, 1) => compare(compare(out, i, j), i + 1, j),
        _ => {
            let a = x / 2;
            let b = if x % 2 == 1 { y / 2 } else { y.div_ceil(2) };
            let out = merge(out, i, a, j, b);
            let out = merge(out, i + a, x - a, j + b, y - b);
            merge(out, i + a, x - a, j, b)
        }
    }
}

const fn compare<const N: usize>(mut out: Comparators<N>, i: u8, j: u8) -> Comparators<N> {
    out.pairs[out.len] = (i, j);
    out.len += 1;
    out
}

/// The elements in ascending order of their keys, by a network.
fn ascending<const N: usize>(keys: [f32; N], network: &[(u8, u8)]) -> [u8; N] {
    let mut order: [(f32, u8); N] = std::array::from_fn(|i| (keys[i], i as u8));
    for &(i, j) in network {
        let (i, j) = (usize::from(i), usize::from(j));
        let (a, b) = (order[i], order[j]);
        let in_order = a.0 < b.0;
        order[i] = if in_order { a } else { b };
        order[j] = if in_order { b } else { a };
    }
    order.map(|(_, element)| element)
}

/// Keeps elements from the largest key down while their row and column hold fewer than two.
pub(super) fn greedy(keys: &[f32; 16], inside: u16) -> u16 {
    let mut kept = 0u16;
    for element in ascending(*keys, &SORT_16).into_iter().rev() {
        let row = 0xF << (element & !3);
        let column = 0x1111 << (element & 3);
        let room = (kept & row).count_ones() < 2 && (kept & column).count_ones() < 2;
        if room {
            kept |= 1 << element & inside;
        }
    }
    kept
}

/// Walks the rows in order and keeps, from the largest key down, at most 1, 1, 2, 2 of them while their column holds
/// fewer than two.
pub(super) fn causal1122(keys: &[f32; 16], inside: u16) -> u16 {
    let mut kept = 0u16;
    for (row, (keys, room)) in keys.as_chunks::<4>().0.iter().zip([1, 1, 2, 2]).enumerate() {
        for col in ascending(*keys, &SORT_4).into_iter().rev() {
            let in_row = (kept >> (4 * row) & 0xF).count_ones();
            let in_column = (kept & 0x1111 << col).count_ones();
            if in_row < room && in_column < 2 {
                kept |= 1 << (4 * row + usize::from(col)) & inside;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_networks_are_those_of_the_peers() {
        assert_eq!(SORT_4, [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2)]);
        assert_eq!(SORT_16[..19].last(), Some(&(3, 4)));
        assert_eq!(SORT_16[38..42], [(0, 8), (1, 9), (1, 8), (2, 10)]);
        // The order in which equal keys are taken, recorded from a run of torch's rule.
        let mut taken = ascending([1.0; 16], &SORT_16);
        taken.reverse();
        assert_eq!(taken, [0, 8, 4, 2, 12, 6, 10, 1, 14, 5, 9, 3, 13, 11, 7, 15]);
    }

    /// Knuth's 0-1 principle: a network that sorts all sequences of zeros and ones sorts everything.
    #[test]
    fn the_networks_sort() {
        for bits in 0..1u32 << 16 {
            let keys: [f32; 16] = std::array::from_fn(|i| (bits >> i & 1) as f32);
            assert!(ascending(keys, &SORT_16).map(|i| keys[usize::from(i)]).is_sorted());
        }
        for bits in 0..16 {
            let keys: [f32; 4] = std::array::from_fn(|i| (bits >> i & 1) as f32);
            assert!(ascending(keys, &SORT_4).map(|i| keys[usize::from(i)]).is_sorted());
        }
    }
}
