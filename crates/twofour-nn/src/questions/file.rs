//! SQuAD's JSON format.

use std::{
    fs::File,
    io::{BufReader, Read},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::QuestionsError;
use crate::Result;

/// Texts, and questions whose answers are in them (Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine
/// Comprehension of Text", 2016). Version 1.1: every question has an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuestionFile {
    /// The texts.
    pub contexts: Vec<String>,
    /// The questions, in the file's order.
    pub questions: Vec<Question>,
}

/// A question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Its name.
    pub id: String,
    /// What is asked.
    pub text: String,
    /// The index of its text.
    pub context: usize,
    /// Answers, any of which is right: one or more.
    pub answers: Vec<Answer>,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its words.
    pub text: String,
    /// Where they begin in the text, in bytes.
    pub begin: usize,
}

#[derive(Deserialize)]
struct Document {
    data: Vec<Article>,
}

#[derive(Deserialize)]
struct Article {
    paragraphs: Vec<Paragraph>,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    qas: Vec<Asked>,
}

#[derive(Deserialize)]
struct Asked {
    id: String,
    question: String,
    answers: Vec<Given>,
}

#[derive(Deserialize)]
struct Given {
    text: String,
    /// In characters.
    answer_start: usize,
}

impl QuestionFile {
    /// A file is not larger.
    const LARGEST: u64 = 1 << 30;

    /// Reads a file.
    ///
    /// # Errors
    /// [`QuestionsError`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |source| QuestionsError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let not = |reason: String| QuestionsError::NotQuestions { path: path.to_owned(), reason };
        if file.metadata().map_err(io)?.len() > Self::LARGEST {
            return Err(not("larger than 1 GiB".to_owned()).into());
        }
        let document: Document = serde_json::from_reader(BufReader::new(file.take(Self::LARGEST)))
            .map_err(|error| not(error.to_string()))?;
        Self::of(document, path)
    }

    /// The texts and questions of several files, in this order.
    pub fn joined(files: impl IntoIterator<Item = QuestionFile>) -> Self {
        let mut all = QuestionFile { contexts: vec![], questions: vec![] };
        for QuestionFile { contexts, questions } in files {
            let first = all.contexts.len();
            let moved = questions.into_iter().map(|own| Question { context: first + own.context, ..own });
            all.questions.extend(moved);
            all.contexts.extend(contexts);
        }
        all
    }

    /// The first `most` questions, with the texts up to that of the last one.
    #[must_use]
    pub fn first(mut self, most: usize) -> Self {
        self.questions.truncate(most);
        let last = self.questions.iter().map(|question| question.context + 1).max().unwrap_or(0);
        self.contexts.truncate(last);
        self
    }

    fn of(document: Document, path: &Path) -> Result<Self> {
        let (mut contexts, mut questions) = (vec![], vec![]);
        for Paragraph { context, qas } in document.data.into_iter().flat_map(|article| article.paragraphs) {
            for Asked { id, question, answers } in qas {
                let fault = |reason: String| QuestionsError::Answer { path: path.to_owned(), id: id.clone(), reason };
                let found = answers.into_iter().map(|answer| found(answer, &context)).collect::<Result<Vec<_>, _>>();
                let answers = found.map_err(fault)?;
                if answers.is_empty() {
                    let reason = "no answer; SQuAD 2.0's questions without one are not supported, remove them";
                    return Err(fault(reason.to_owned()).into());
                }
                questions.push(Question { id, text: question, context: contexts.len(), answers });
            }
            contexts.push(context);
        }
        match questions.is_empty() {
            false => Ok(QuestionFile { contexts, questions }),
            true => {
                let (path, reason) = (PathBuf::from(path), "there are no questions in it".to_owned());
                Err(QuestionsError::NotQuestions { path, reason }.into())
            }
        }
    }
}

/// An answer with its place in bytes, or what is wrong with it.
fn found(Given { text, answer_start }: Given, context: &str) -> Result<Answer, String> {
    let begin = context.char_indices().map(|(at, _)| at).nth(answer_start);
    match begin.filter(|begin| !text.is_empty() && context[*begin..].starts_with(text.as_str())) {
        Some(begin) => Ok(Answer { text, begin }),
        None => Err(format!("the answer {text:?} is not at character {answer_start} of the context")),
    }
}
