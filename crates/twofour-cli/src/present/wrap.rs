//! Text in lines of a width.

/// Lines of at most `width` characters: broken after a space, or else after a dot or a slash, or else after an
/// underscore or a comma, or else anywhere. Spaces at a break are left out.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = Vec::new();
    let mut rest = text.trim_end();
    while rest.chars().count() > width {
        // A space may stand right behind the line.
        let end = rest.char_indices().nth(width).map_or(rest.len(), |(at, _)| at);
        let head = &rest[..end];
        let space = if rest[end..].starts_with(' ') { Some(end) } else { head.rfind(' ') };
        let joint = || head.rfind(['.', '/']).or_else(|| head.rfind(['_', ','])).map(|at| at + 1);
        let at = space.filter(|at| *at > 0).or_else(joint).filter(|at| *at > 0).unwrap_or(end);
        lines.push(rest[..at].trim_end().to_owned());
        rest = rest[at..].trim_start();
    }
    lines.push(rest.to_owned());
    lines
}

/// The text in `width` characters: what does not fit is left out in its middle.
pub(crate) fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let tail = kept.div_ceil(2);
    let head: String = text.chars().take(kept - tail).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{head}…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_words_then_at_joints_then_anywhere() {
        assert_eq!(wrapped("not named *.weight", 9), ["not named", "*.weight"]);
        assert_eq!(wrapped("model.layers.*.self_attn.q_proj", 15), ["model.layers.*.", "self_attn.", "q_proj"]);
        assert_eq!(wrapped("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrapped("", 3), [""]);
        assert_eq!(wrapped("µµµ µµµ", 3), ["µµµ", "µµµ"]);
        for width in 1..40 {
            let text = "a.bc de/f gh  ijklmnop, qrs_tuv wxyz";
            let lines = wrapped(text, width);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}: {lines:?}");
            let letters = |text: &str| text.chars().filter(|c| *c != ' ').collect::<String>();
            assert_eq!(letters(&lines.concat()), letters(text));
        }
    }

    #[test]
    fn the_middle_is_left_out() {
        assert_eq!(shortened("model.layers.0.up", 17), "model.layers.0.up");
        assert_eq!(shortened("model.layers.0.up", 9), "mode…0.up");
        assert_eq!([shortened("abc", 1), shortened("abc", 0)], ["…", "…"]);
    }
}
