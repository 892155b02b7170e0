//! Picking layers by glob, and finding what was meant by one that matches nothing.

use globset::{GlobBuilder, GlobMatcher};

use crate::error::Unmatched;
use crate::{Error, Result};

/// How many near misses an error lists.
const NEAR: usize = 3;

/// Globs over fully-qualified names. `*` matches any letters, dots too; a name without wildcards matches itself.
#[derive(Debug)]
pub(super) struct Globs(Vec<(String, GlobMatcher)>);

impl Globs {
    pub(super) fn new(globs: &[String]) -> Result<Self> {
        let matcher = |glob: &String| {
            let compiled = GlobBuilder::new(glob).literal_separator(false).build();
            let compiled = compiled.map_err(|e| Error::Glob { glob: glob.clone(), reason: e.kind().to_string() })?;
            Ok((glob.clone(), compiled.compile_matcher()))
        };
        Ok(Globs(globs.iter().map(matcher).collect::<Result<_>>()?))
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|(_, glob)| glob.is_match(name))
    }

    /// The globs that match none of the names.
    pub(super) fn unmatched(&self, names: &[String]) -> Vec<Unmatched> {
        let lost = self.0.iter().filter(|(_, glob)| !names.iter().any(|name| glob.is_match(name)));
        lost.map(|(glob, _)| unmatched(glob, names)).collect()
    }
}

/// What was asked for and the names most like it: those that end as it does or it as they do, then those that differ in
/// few letters.
pub(super) fn unmatched(name: &str, names: &[String]) -> Unmatched {
    let mut near: Vec<(usize, &String)> = names
        .iter()
        .filter_map(|candidate| {
            let contained = ends_with_part(candidate, name) || ends_with_part(name, candidate);
            let distance = if contained { 1 } else { edit_distance(name, candidate) };
            // Beyond half of the letters there is no likeness left.
            (distance <= name.chars().count().max(candidate.chars().count()) / 2).then_some((distance, candidate))
        })
        .collect();
    near.sort();
    Unmatched { name: name.to_owned(), near: near.into_iter().take(NEAR).map(|(_, n)| n.clone()).collect() }
}

/// Whether `part` is the end of `name` after a dot.
fn ends_with_part(name: &str, part: &str) -> bool {
    !part.is_empty() && name.strip_suffix(part).is_some_and(|rest| rest.ends_with('.'))
}

/// Levenshtein's distance: the fewest letters to insert, delete or replace.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_levenshteins() {
        for (a, b, d) in [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("fc1", "fc2", 1), ("flaw", "lawn", 2)]
        {
            assert_eq!((edit_distance(a, b), edit_distance(b, a)), (d, d), "{a} {b}");
        }
    }

    #[test]
    fn near_misses_come_nearest_first() {
        let names = ["blocks.0.fc1", "blocks.0.fc2", "head"].map(String::from);
        assert_eq!(unmatched("blocks.0.fc", &names).near, ["blocks.0.fc1", "blocks.0.fc2"]);
        assert_eq!(unmatched("model.head", &names).near, ["head"]);
        assert!(unmatched("zzzz", &names).near.is_empty());
    }
}
