//! Items as a model reads them.

use super::{Expected, TaskItem};
use crate::{
    Error, Result,
    model::Tokenizer,
    text::{ChatTemplate, Message},
};

/// How items are put before a model.
#[derive(Debug, Clone, Copy)]
pub enum TaskPrompt<'a> {
    /// As text: the answer follows the context after a space, unless one of them has white space there.
    Text {
        /// The token that texts begin with, before which an empty context has none.
        begin: Option<u32>,
    },
    /// As a conversation: the context is what a user says, the answer the beginning of the reply.
    Chat {
        /// The model's template.
        template: &'a ChatTemplate,
        /// What stands in front of the user's message, if anything.
        system: Option<&'a str>,
    },
}

/// An item's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EncodedItem {
    /// One or more.
    pub(super) context: Vec<u32>,
    /// The continuations, each of one or more.
    pub(super) answers: Vec<Vec<u32>>,
}

impl TaskPrompt<'_> {
    /// The tokens of an item.
    ///
    /// # Errors
    /// Those of the tokenizer and of the template; an answer that is no token of its own, an empty context where the
    /// model has no token that texts begin with.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, item: &TaskItem) -> Result<EncodedItem> {
        let answers: Vec<&str> = match &item.expected {
            Expected::Choice { choices, .. } => choices.iter().map(String::as_str).collect(),
            Expected::Target(target) => vec![target],
        };
        let (before, context, delimiter) = match self {
            TaskPrompt::Text { .. } => {
                let has_space = item.context.is_empty() || item.context.ends_with(char::is_whitespace);
                (tokenizer.framing()?[0].clone(), item.context.clone(), if has_space { "" } else { " " })
            }
            TaskPrompt::Chat { template, system } => {
                let system = system.map(|content| Message { role: "system", content });
                let user = Message { role: "user", content: &item.context };
                let messages: Vec<_> = system.into_iter().chain([user]).collect();
                let text = template.render(&messages, true)?;
                template.expect_special(tokenizer, &text)?;
                (vec![], text, "")
            }
        };
        // White space at the end of the context is the answer's: tokens begin with it, and seldom end.
        let shown = match self {
            TaskPrompt::Text { .. } => context.trim_end(),
            TaskPrompt::Chat { .. } => &context,
        };
        let (own, _) = tokenizer.encode_with_places(shown)?;
        let answers = answers.into_iter().map(|answer| {
            let delimiter = if answer.starts_with(char::is_whitespace) { "" } else { delimiter };
            let (whole, _) = tokenizer.encode_with_places(&format!("{context}{delimiter}{answer}"))?;
            match whole.get(own.len()..).filter(|rest| !rest.is_empty()) {
                Some(rest) => Ok(rest.to_vec()),
                None => Err(Error::Setting {
                    what: "an answer",
                    found: format!("{answer:?} of line {}, which is one token with what is before it", item.line),
                    expected: "a token of its own",
                }),
            }
        });
        let answers = answers.collect::<Result<_>>()?;
        let mut context = before;
        context.extend(own);
        if let (TaskPrompt::Text { begin }, true) = (self, context.is_empty()) {
            context.extend(begin);
        }
        if context.is_empty() {
            return Err(Error::Setting {
                what: "the context",
                found: format!("empty in line {}", item.line),
                expected: "some text: the model has no token that texts begin with",
            });
        }
        Ok(EncodedItem { context, answers })
    }
}
