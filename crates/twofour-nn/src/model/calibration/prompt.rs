//! Texts that begin with tokens whose inputs are not shown.

use super::{BlockInput, Observation, States};
use crate::Result;

/// A text's input, without that of its first tokens.
pub(super) fn observation<'a, S: States>(
    input: &'a BlockInput,
    x: &'a S,
    tokens: usize,
    prompt: usize,
) -> Result<Observation<'a, S::View<'a>>> {
    Ok(Observation { input, x: behind(x, tokens, prompt)?, tokens: tokens.saturating_sub(prompt) })
}

/// The rows of a text of so many tokens, without those of its first tokens.
pub(super) fn behind<S: States>(rows: &S, tokens: usize, prompt: usize) -> Result<S::View<'_>> {
    let width = rows.elements() / tokens.max(1);
    S::last(rows.view(), rows.elements() - prompt.min(tokens) * width)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::*;

    #[test]
    fn inputs_of_a_prompt_are_not_shown_and_the_others_are_what_they_are_behind_it() {
        let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/llama");
        let checkpoint = Checkpoint::open(at).unwrap();
        let texts: [Vec<u32>; 2] = [(1..12).collect(), (20..26).collect()];
        // Every input of the first block, and of the dense model's beside it.
        let shown = |prompt: usize, is_beside: bool| {
            let mut calibration = Calibration::new(&checkpoint, &texts).unwrap().behind_prompt(prompt);
            if is_beside {
                calibration = calibration.beside_dense_of(usize::MAX).unwrap();
            }
            let mut found = vec![];
            for index in 0..calibration.inputs().unwrap().len() {
                let observe = &mut |seen: Observation<'_>, beside: Beside<&[f32]>| {
                    let dense = match beside {
                        Beside::Nothing => vec![],
                        Beside::Inputs(x) | Beside::Outputs(x) => x.to_vec(),
                    };
                    found.push((seen.tokens, seen.x.to_vec(), dense));
                };
                calibration.observe(index, &|_| None, observe).unwrap();
            }
            found
        };
        for (prompt, is_beside) in [(0, true), (4, true), (6, true), (99, false)] {
            let (all, rest) = (shown(0, is_beside), shown(prompt, is_beside));
            assert_eq!(all.len(), rest.len());
            for ((tokens, x, dense), (left, own, beside)) in all.iter().zip(&rest) {
                assert_eq!(*left, tokens.saturating_sub(prompt));
                assert!(x.ends_with(own) && own.len() * tokens == x.len() * left, "{prompt}");
                assert!(dense.ends_with(beside) && beside.len() * tokens == dense.len() * left, "{prompt}");
            }
        }
        let calibration = Calibration::new(&checkpoint, &texts).unwrap().behind_prompt(6);
        let mut seen = vec![];
        calibration.preview(usize::MAX, &mut |observation, _| seen.push(observation.tokens)).unwrap();
        assert_eq!(seen, [5, 5, 5, 5, 0, 0, 0, 0]);
    }
}
