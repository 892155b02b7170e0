//! Files of tasks, prompts and scores.

use std::{fs, path::Path};

use super::{Expected, TaskFile, TaskItem, TaskPrompt, TaskScore};
use crate::{Result, model::LanguageModel};

fn read(text: &str) -> Result<TaskFile> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("task.jsonl");
    fs::write(&path, text).unwrap();
    TaskFile::read(&path, &|| false)
}

#[test]
fn lines_become_items_and_what_is_beside_them_is_ignored() {
    let task = read(
        "{\"context\": \"c\", \"question\": \"q\", \"choices\": [\"a\", \"b\"], \"answer\": 1, \"id\": [3]}\n\n  \n\
         {\"question\": \"\", \"choices\": [\"€\", \"x\", \" y\"], \"answer\": 0}\r\n",
    )
    .unwrap();
    let choice = |line, context: &str, choices: &[&str], answer| TaskItem {
        line,
        context: context.to_owned(),
        expected: Expected::Choice { choices: choices.iter().map(|own| (*own).to_owned()).collect(), answer },
    };
    assert_eq!(task.items, [choice(1, "c\nq", &["a", "b"], 1), choice(4, "", &["€", "x", " y"], 0)]);
    assert_eq!(task.first(1).items.len(), 1);
}

#[test]
fn a_line_that_is_no_item_is_an_error_with_its_number() {
    let good = r#"{"context": "c", "choices": ["a", "b"], "answer": 1}"#;
    for (line, reason) in [
        ("{", "EOF while parsing an object at column 1"),
        ("[1]", "line 2"),
        ("{\"data\": []}", "neither `context` nor `question`"),
        (r#"{"choices": ["a", "b"], "answer": 1}"#, "neither `context` nor `question`"),
        (r#"{"context": "c"}"#, "neither `choices` nor `target`"),
        (r#"{"context": "c", "choices": ["a", "b"]}"#, "`answer` is missing"),
        (r#"{"context": "c", "answer": 0}"#, "`choices` are missing"),
        (r#"{"context": "c", "choices": ["a"], "answer": 0}"#, "two or more"),
        (r#"{"context": "c", "choices": ["a", " "], "answer": 0}"#, "choice 1 is empty"),
        (r#"{"context": "c", "choices": ["a", "b", "a"], "answer": 0}"#, "choice 2 is the same"),
        (r#"{"context": "c", "choices": ["a", "b"], "answer": 2}"#, "`answer` is 2"),
        (r#"{"context": "c", "choices": ["a", "b"], "answer": -1}"#, "invalid value"),
        (r#"{"context": "c", "choices": ["a", "b"], "answer": "a"}"#, "invalid type"),
        (r#"{"context": "c", "choices": ["a", "b"], "answer": 1, "target": "x"}"#, "an item has one of them"),
        (r#"{"context": "c", "target": " \n"}"#, "`target` is empty"),
        (r#"{"context": "c", "target": "x"}"#, "make two files"),
        (r#"{"context": 3, "target": "x"}"#, "invalid type"),
        (&format!("{good} {good}"), "trailing characters"),
    ] {
        let error = read(&format!("{good}\n{line}\n{good}")).unwrap_err().to_string();
        assert!(error.contains("task.jsonl: line 2: ") && error.contains(reason), "{line}: {error}");
    }
    assert!(read("\n \n").unwrap_err().to_string().contains("no lines"));
    assert!(read("").unwrap_err().to_string().contains("empty"));
    assert!(TaskFile::read("missing.jsonl", &|| false).unwrap_err().to_string().contains("missing.jsonl"));
}

fn model(family: &str) -> LanguageModel {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
    LanguageModel::load(at).unwrap()
}

fn score(model: &LanguageModel, text: &str, window: usize) -> Result<TaskScore> {
    let prompt = TaskPrompt::Text { begin: model.begin };
    let asked = (model.decoder.as_ref(), &model.tokenizer);
    TaskScore::of(asked, &read(text).unwrap(), prompt, window, &mut |_, _| ())
}

#[test]
fn items_are_scored_alike_alone_and_after_others_with_the_same_beginning() {
    let lines = [
        r#"{"context": "two of four rows", "choices": ["half", "the mask", "kept"], "answer": 0}"#,
        r#"{"context": "two of four rows are", "choices": ["half", "the mask", "kept"], "answer": 1}"#,
        r#"{"context": "two of", "choices": ["half", "the mask of", "kept"], "answer": 2}"#,
    ];
    for family in ["llama", "gemma3", "gpt2"] {
        let model = model(family);
        let alone: f64 = lines.iter().map(|line| score(&model, line, 40).unwrap().accuracy).sum();
        let together = score(&model, &lines.join("\n"), 40).unwrap();
        assert!((together.accuracy * 3.0 - alone).abs() < 1e-9, "{family}");
        let prompt = TaskPrompt::Text { begin: model.begin };
        let asked = (model.decoder.as_ref(), &model.tokenizer);
        for item in read(lines[1]).unwrap().items {
            let of_window = |window| prompt.likelihoods(asked, &item, window).unwrap();
            assert!(of_window(40).iter().zip(of_window(39)).all(|(a, b)| (a.log - b.log).abs() < 1e-4));
        }
    }
}

#[test]
fn contexts_lose_their_beginning_and_answers_must_fit() {
    let model = model("qwen2");
    let line = r#"{"context": "two of four rows are kept and half of them", "target": "two"}"#;
    assert_eq!(score(&model, line, 40).unwrap().truncated, 0);
    assert_eq!(score(&model, line, 6).unwrap().truncated, 1);
    let long = r#"{"context": "a", "target": "two of four rows are kept"}"#;
    assert!(score(&model, &format!("{line}\n{long}"), 4).unwrap_err().to_string().contains("line 2"));
    for window in [0, 1, 41] {
        assert!(score(&model, line, window).unwrap_err().to_string().contains("window"));
    }
    // The model's begin token stands in an empty context's place.
    assert_eq!(score(&model, r#"{"context": "", "target": "two"}"#, 40).unwrap().items, 1);
    let none = LanguageModel { begin: None, ..model };
    assert!(score(&none, r#"{"context": " ", "target": "two"}"#, 40).unwrap_err().to_string().contains("line 1"));
}
