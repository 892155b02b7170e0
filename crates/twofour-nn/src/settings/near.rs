//! Near misses: the known names that a wrong one was probably meant to be.

/// The least number of characters inserted, deleted, replaced, or swapped with their neighbour that turn one text into
/// the other (optimal string alignment). Texts longer than this bound are compared by their first characters.
const LONGEST: usize = 64;

fn distance(a: &str, b: &str) -> usize {
    let [a, b] = [a, b].map(|text| text.chars().take(LONGEST).collect::<Vec<_>>());
    let mut rows = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    rows[0].iter_mut().enumerate().for_each(|(j, cell)| *cell = j);
    for i in 1..=a.len() {
        rows[i][0] = i;
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

/// Returns the names that are nearest to the wrong one, nearest first, at most `most` of them; none that differ in more
/// than a third of their characters.
pub(crate) fn near<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>, most: usize) -> Vec<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace(['-', ' '], "_");
    let wrong = plain(wrong);
    let reach = (wrong.chars().count() / 3).max(2);
    let mut found: Vec<(usize, &str)> =
        known.into_iter().map(|name| (distance(&wrong, &plain(name)), name)).filter(|(far, _)| *far <= reach).collect();
    found.sort();
    found.into_iter().take(most).map(|(_, name)| name).collect()
}

/// Returns `; did you mean ...?` for near misses, or else the list of what is known.
pub(crate) fn suggestion<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    let nearest = near(wrong, known.clone(), 1);
    match nearest.first() {
        Some(name) => format!("did you mean `{name}`?"),
        None => {
            let names: Vec<_> = known.into_iter().map(|name| format!("`{name}`")).collect();
            format!("expected {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits_and_swaps() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("steps", "setps", 1),
            ("kitten", "sitting", 3),
            ("é", "e", 1),
            ("ab", "ab", 0),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn near_misses_are_sorted_and_far_ones_are_left_out() {
        let known = ["steps", "batch", "micro_batch", "seed"];
        assert_eq!(near("step", known, 3), ["steps", "seed"]);
        assert_eq!(near("micro-batch", known, 3), ["micro_batch"]);
        assert_eq!(near("bathc", known, 3), ["batch"]);
        assert!(near("learning", known, 3).is_empty());
        assert_eq!(suggestion("xyzzyplugh", ["a", "b"]), "expected `a`, `b`");
    }
}
