//! `twofour eval --task` of encoders.

use std::{path::Path, time::Instant};

use anyhow::Result;
use serde::Serialize;
use twofour_nn::{
    model::{EncoderCheckpoint, SavedModel},
    questions::{AnswerFinder, QuestionFile, score},
};

use super::super::model::ModelArguments;
use crate::{exit::Usage, present::Screen};

/// The window where none is given, for models of a longer context: BERT's on SQuAD.
const WINDOW: usize = 384;

#[derive(Debug, Serialize)]
struct Answer {
    exact_match: f64,
    f1: f64,
    questions: usize,
    window: usize,
    dtype: String,
    device: String,
    seconds: f64,
}

/// Answers the questions of a file and scores the answers.
pub(super) fn answer(
    screen: &mut Screen,
    model: &ModelArguments,
    questions: &Path,
    (window, limit): (Option<usize>, Option<usize>),
) -> Result<()> {
    let file = QuestionFile::read(questions)?.first(limit.unwrap_or(usize::MAX));
    let directory = SavedModel::locate(model.directory());
    let checkpoint = EncoderCheckpoint::open(&directory)?;
    let context = checkpoint.config().context();
    let window = window.unwrap_or(WINDOW.min(context));
    if window > context {
        return Err(Usage(format!("--window {window}: the model's context is {context} tokens")).into());
    }
    let dtype = model.dtype().unwrap_or_else(|| checkpoint.dtype());
    let begin = Instant::now();
    let finder = match model.opened_gpu()? {
        Some(device) => AnswerFinder::load_on(&device, &directory, dtype)?,
        None => AnswerFinder::load(&directory, dtype)?,
    };
    let mut progress = screen.progress();
    let answers = finder.answers(&file, window, &mut |done, of| progress.steps("questions", done as u64, of as u64))?;
    let right: Vec<Vec<&str>> =
        file.questions.iter().map(|question| question.answers.iter().map(|a| a.text.as_str()).collect()).collect();
    let scores = score::scores(answers.iter().zip(&right).map(|(answer, right)| (answer.as_str(), right.as_slice())));
    let answer = Answer {
        exact_match: scores.exact_match,
        f1: scores.f1,
        questions: answers.len(),
        window,
        dtype: dtype.to_string(),
        device: model.device().to_string(),
        seconds: begin.elapsed().as_secs_f64(),
    };
    let Answer { exact_match, f1, questions, .. } = &answer;
    screen.line(format_args!("exact match {exact_match:.2} %, F1 {f1:.2} %, {questions} questions"))?;
    screen.json(&answer)
}
