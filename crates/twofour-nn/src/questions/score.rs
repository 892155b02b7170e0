//! How good answers are: exact match and F1 over words, after the normalization of SQuAD's official evaluation (version
//! 1.1).

use std::collections::HashMap;

/// The mean scores of many answers, in percent.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Scores {
    /// The share of answers that are one of the right ones.
    pub exact_match: f64,
    /// The mean of [`f1`].
    pub f1: f64,
}

/// The scores of answers, each with all that are right; zeros where there is none.
///
/// ```
/// use twofour_nn::questions::score::scores;
/// let found = scores([("The Eiffel Tower!", &["Eiffel tower", "the tower"][..]), ("two of four", &["two"][..])]);
/// assert_eq!((found.exact_match, found.f1), (50.0, 75.0));
/// ```
pub fn scores<'a>(answers: impl IntoIterator<Item = (&'a str, &'a [&'a str])>) -> Scores {
    let (mut exact, mut sum, mut count) = (0usize, 0f64, 0usize);
    for (answer, right) in answers {
        exact += usize::from(right.iter().any(|right| is_exact(answer, right)));
        sum += right.iter().map(|right| f1(answer, right)).fold(0.0, f64::max);
        count += 1;
    }
    let percent = |total: f64| 100.0 * total / count.max(1) as f64;
    Scores { exact_match: percent(exact as f64), f1: percent(sum) }
}

/// Whether an answer is the right one once both are normalized.
pub fn is_exact(answer: &str, right: &str) -> bool {
    normalized(answer) == normalized(right)
}

/// The harmonic mean of precision and recall of an answer's words, both normalized; 0 where no word is shared.
pub fn f1(answer: &str, right: &str) -> f64 {
    let (answer, right) = (normalized(answer), normalized(right));
    let mut counts: HashMap<&str, usize> = HashMap::new();
    right.split(' ').filter(|word| !word.is_empty()).for_each(|word| *counts.entry(word).or_default() += 1);
    let total: usize = counts.values().sum();
    let (mut shared, mut words) = (0usize, 0usize);
    for word in answer.split(' ').filter(|word| !word.is_empty()) {
        words += 1;
        if let Some(count) = counts.get_mut(word).filter(|count| **count > 0) {
            *count -= 1;
            shared += 1;
        }
    }
    if shared == 0 {
        return 0.0;
    }
    let (precision, recall) = (shared as f64 / words as f64, shared as f64 / total as f64);
    2.0 * precision * recall / (precision + recall)
}

/// Lower case, without ASCII punctuation, without the words a, an and the, with single spaces.
pub fn normalized(text: &str) -> String {
    let lower = text.to_lowercase();
    let plain: String = lower.chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let mut out = String::with_capacity(plain.len());
    // Articles are words between characters that are no letters and no digits.
    let mut rest = plain.as_str();
    while let Some(first) = rest.chars().next() {
        let is_word = first.is_alphanumeric();
        let end = rest.find(|c: char| c.is_alphanumeric() != is_word).unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        out.push_str(if matches!(run, "a" | "an" | "the") { " " } else { run });
        rest = after;
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}
