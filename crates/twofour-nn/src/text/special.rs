//! The tokens that are no text.

/// The tokens that are no text: what [`Tokenizer::special`](super::Tokenizer::special) returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The tokens before and after a text.
    pub framing: [Vec<u32>; 2],
    /// The token that stands for a masked one.
    pub mask: u32,
}

impl SpecialTokens {
    /// The names that tokenizers have for the token that stands for a masked one.
    pub(super) const MASKS: [&str; 2] = ["[MASK]", "<mask>"];

    /// A text that was encoded whole, without the tokens that frame it.
    pub(crate) fn inner<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        let [before, after] = &self.framing;
        let rest = tokens.strip_prefix(before.as_slice()).unwrap_or(tokens);
        rest.strip_suffix(after.as_slice()).unwrap_or(rest)
    }
}
