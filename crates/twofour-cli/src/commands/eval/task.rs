//! `twofour eval --task` of decoders.

use std::{path::Path, time::Instant};

use anyhow::Result;
use serde::Serialize;
use twofour_nn::{
    model::SavedModel,
    questions::{TaskFile, TaskPrompt, TaskScore},
};

use super::super::model::ModelArguments;
use crate::{
    exit::Usage,
    interrupt,
    present::{Screen, units},
};

/// Questions as a user's messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chat<'a> {
    /// What the system says before.
    pub(super) system: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct Answer {
    #[serde(flatten)]
    score: TaskScore,
    chat: bool,
    window: usize,
    dtype: String,
    device: String,
    seconds: f64,
}

/// Asks a model the items of a file and shows the share of right answers.
pub(super) fn answer(
    screen: &mut Screen,
    model: &ModelArguments,
    file: &Path,
    chat: Option<Chat<'_>>,
    (window, limit): (Option<usize>, Option<usize>),
) -> Result<()> {
    let task = TaskFile::read(file, &interrupt::requested)?.first(limit.unwrap_or(usize::MAX));
    let template = match chat {
        Some(_) => Some(SavedModel::open(model.directory())?.chat_template()?),
        None => None,
    };
    let loaded = model.load()?;
    let context = loaded.decoder.config().context();
    let window = window.unwrap_or(context);
    if window < 2 || window > context {
        return Err(Usage(format!("--window {window}: from 2 to the model's context, {context} tokens")).into());
    }
    let prompt = match (&template, chat) {
        (Some(template), Some(Chat { system })) => TaskPrompt::Chat { template, system },
        _ => TaskPrompt::Text { begin: loaded.begin },
    };
    let (begin, mut progress) = (Instant::now(), screen.progress());
    let asked = (loaded.decoder.as_ref(), &loaded.tokenizer);
    let score = TaskScore::of(asked, &task, prompt, window, &mut |done, of| {
        progress.steps("questions", done as u64, of as u64);
    })?;
    drop(progress);
    let seconds = begin.elapsed().as_secs_f64();
    let TaskScore { accuracy, accuracy_stderr, items, truncated, .. } = score;
    let shown = |share: f64, error: f64| format!("{:.2} % ± {:.2}", 100.0 * share, 100.0 * error);
    let by_bytes = match (score.accuracy_norm, score.accuracy_norm_stderr) {
        (Some(share), Some(error)) => format!(", by the likelihood of a byte {}", shown(share, error)),
        _ => String::new(),
    };
    screen.line(format_args!(
        "right {}{by_bytes}, {}",
        shown(accuracy, accuracy_stderr),
        units::plural(items, "question")
    ))?;
    screen.note("±: the standard error, by which another sample of such questions would differ")?;
    if truncated > 0 {
        let many = units::plural(truncated, "context");
        screen.warn(format_args!("{many} lost the beginning, being longer than the window of {window} tokens"));
    }
    screen.json(&Answer {
        score,
        chat: chat.is_some(),
        window,
        dtype: loaded.dtype.to_string(),
        device: model.device().to_string(),
        seconds,
    })
}
