//! Files, windows and scores of questions.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{QuestionFile, WindowSettings, Windows, score};
use crate::model::Tokenizer;

const CONTEXT: &str = "a mask says which two. two of every four weights are zero — the other two are kept";

fn file(value: &Value) -> crate::Result<QuestionFile> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("questions.json");
    fs::write(&path, value.to_string()).unwrap();
    QuestionFile::read(&path)
}

fn squad(answers: Value) -> Value {
    let other = json!({"context": "the rows of a weight are cut into groups of four", "qas": []});
    json!({"version": "1.1", "data": [{"title": "t", "paragraphs": [
        {"context": CONTEXT, "qas": [{"id": "q1", "question": "which are kept", "answers": answers}]}, other]}]})
}

fn kept() -> Value {
    // After the dash, characters and bytes differ.
    let start = CONTEXT.chars().collect::<String>().find("the other two").unwrap();
    json!([{"text": "the other two", "answer_start": CONTEXT[..start].chars().count()}])
}

#[test]
fn places_of_answers_are_characters_and_wrong_ones_are_errors() {
    let found = file(&squad(kept())).unwrap();
    let answer = &found.questions[0].answers[0];
    assert_eq!(&CONTEXT[answer.begin..][..answer.text.len()], "the other two");
    assert_eq!((found.contexts.len(), found.questions[0].id.as_str()), (2, "q1"));
    let wrong = |answers: Value| file(&squad(answers)).unwrap_err().to_string();
    assert!(wrong(json!([{"text": "the other two", "answer_start": 3}])).contains("character 3"));
    assert!(wrong(json!([{"text": "x", "answer_start": 100_000}])).contains("q1"));
    assert!(wrong(json!([{"text": "", "answer_start": 0}])).contains("q1"));
    assert!(wrong(json!([])).contains("no answer"));
    assert!(file(&json!({"data": []})).unwrap_err().to_string().contains("no questions"));
    assert!(file(&json!([1])).unwrap_err().to_string().contains("SQuAD"));
    assert!(QuestionFile::read("missing.json").unwrap_err().to_string().contains("missing.json"));
}

/// The fixture's tokenizer, framed as BERT's.
pub(crate) fn tokenizer(folder: &Path) -> Tokenizer {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/bert/tokenizer.json");
    let mut value: Value = serde_json::from_slice(&fs::read(fixture).unwrap()).unwrap();
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    value["post_processor"]["single"] = json!([special("<begin>"), text, special("<end>")]);
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    value["post_processor"]["special_tokens"] = json!({"<begin>": token("<begin>", 1), "<end>": token("<end>", 0)});
    let path = folder.join("tokenizer.json");
    fs::write(&path, value.to_string()).unwrap();
    Tokenizer::read(&path).unwrap()
}

#[test]
fn windows_cover_the_text_and_hold_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (tokenizer, file) = (tokenizer(folder.path()), file(&squad(kept())).unwrap());
    assert_eq!(tokenizer.framing().unwrap(), [vec![1], vec![0]]);
    for length in [24, 32, 40, 200] {
        let windows = Windows::new(&file, &tokenizer, WindowSettings { length, question: 8 }).unwrap();
        let (found, full) = (windows.of(&file, 0), windows.full(&file, 0));
        assert_eq!(found.len(), full.len());
        let mut covered = 0;
        for (window, full) in found.iter().zip(&full) {
            assert!(window.tokens.len() <= length && full.tokens.len() == length, "{length}");
            assert!(window.tokens[0] == 1 && *window.tokens.last().unwrap() == 0 && *full.tokens.last().unwrap() == 0);
            assert_eq!((window.tokens.len(), window.bytes.len()), (window.types.len(), window.text.len()));
            assert!(window.types.iter().is_sorted() && window.types[window.text.start] == 1);
            assert_eq!(window.types[window.text.start - 1], 0);
            assert_eq!((&full.text, full.target), (&window.text, window.target));
            assert_eq!(full.tokens[..full.text.end], window.tokens[..window.text.end]);
            // No byte of the text is left out between two windows.
            assert!(window.bytes[0].start <= covered, "{length}");
            covered = window.bytes.last().unwrap().end;
            if let [first, last] = window.target.map(|at| at as usize)
                && first > 0
            {
                let at = |token: usize| &window.bytes[token - window.text.start];
                assert_eq!(CONTEXT[at(first).start..at(last).end].trim(), "the other two");
            }
        }
        assert_eq!(covered, CONTEXT.len());
        assert!(found.iter().any(|window| window.target != [0, 0]), "{length}");
    }
    assert!(Windows::new(&file, &tokenizer, WindowSettings { length: 10, question: 8 }).is_err());
    assert!(Windows::new(&file, &Tokenizer::Bytes, WindowSettings::of_length(64)).is_err());
}

/// Values of SQuAD's `evaluate-v1.1.py`.
#[test]
fn scores_are_those_of_the_official_evaluation() {
    assert_eq!(score::normalized("The  Eiffel-Tower, an icon!"), "eiffeltower icon");
    assert_eq!(score::normalized("A\u{2013}the b"), "\u{2013} b");
    assert_eq!(score::normalized("theatre anna"), "theatre anna");
    assert!(score::is_exact("the Two", "two.") && !score::is_exact("two", "two two"));
    assert_eq!(score::f1("", "two"), 0.0);
    assert_eq!(score::f1("two two", "two"), 2.0 / 3.0);
    assert!((score::f1("big red dog", "red dog barks") - 2.0 / 3.0).abs() < 1e-12);
    let none = score::scores([]);
    assert_eq!((none.exact_match, none.f1), (0.0, 0.0));
}

/// A file of as many texts with a question each.
pub(crate) fn asked(count: usize) -> QuestionFile {
    let start = CONTEXT.find("which two").unwrap();
    let paragraph = |id: usize| {
        json!({"context": CONTEXT, "qas": [{"id": id.to_string(), "question": "a mask says what",
        "answers": [{"text": "which two", "answer_start": start}]}]})
    };
    file(&json!({"data": [{"paragraphs": (0..count).map(paragraph).collect::<Vec<_>>()}]})).unwrap()
}

#[test]
fn windows_to_train_on_have_one_length_and_two_parts() {
    use crate::train::QuestionSet;
    let folder = tempfile::tempdir().unwrap();
    let (tokenizer, file) = (tokenizer(folder.path()), asked(5));
    let set = QuestionSet::new(&file, &tokenizer, 60, 0.2).unwrap();
    let all = || set.training().iter().chain(set.validation());
    assert!(all().all(|window| window.tokens.len() == 60 && window.types.len() == 60));
    assert!(set.training().iter().all(|window| window.question < 4));
    assert!(set.validation().iter().all(|window| window.question == 4));
    assert!(all().any(|window| window.target != [0, 0]));
    assert!(set.validation_samples(1).count() == 1 && set.validation_samples(100).count() == set.validation().len());
    assert_ne!(set.fingerprint(), QuestionSet::new(&file, &tokenizer, 61, 0.2).unwrap().fingerprint());
    for (file, length, share) in [(&file, 60, 0.9), (&file, 60, 0.0), (&asked(1), 60, 0.1), (&file, 5, 0.2)] {
        assert!(QuestionSet::new(file, &tokenizer, length, share).is_err(), "{length}, {share}");
    }
    // Two files are one after the other.
    let joined = QuestionFile::joined([asked(2), asked(3)]);
    assert_eq!((joined.contexts, joined.questions.len()), (file.contexts.clone(), 5));
    assert!(joined.questions.iter().map(|question| question.context).eq(0..5));
}
