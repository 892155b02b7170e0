//! `generate --chat` and `eval --task` on decoders.

use std::{fs, path::Path};

use crate::support::{checkpoint, copy, fixture, run};
use serde_json::{Value, json};

/// A folder with a tiny decoder in `model`, whose chats are written by a template.
fn folder(template: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy(fixture("llama"), folder.path().join("model"));
    let settings = json!({"bos_token": "<begin>", "eos_token": {"content": "<end>"}, "chat_template": template});
    fs::write(folder.path().join("model/tokenizer_config.json"), settings.to_string()).unwrap();
    folder
}

/// Roles in front of what they say, an end token behind a reply.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content | trim }}\
                        {{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}\
                        {% if add_generation_prompt %}rows{% endif %}";

fn generated(at: &Path, arguments: &[&str]) -> Value {
    let all = [&["generate", "model", "--temperature", "0", "--length", "6", "--json"][..], arguments].concat();
    run(at, &all).good().json()
}

#[test]
fn a_reply_goes_on_from_the_template_s_text() {
    let folder = folder(TEMPLATE);
    let at = folder.path();
    let plain = |text: &str| generated(at, &["--prompt", text]);
    let found = generated(at, &["--chat", "--prompt", " two of four "]);
    // The tokenizer adds the begin token to a plain prompt.
    let expected = plain("user two of four rows");
    assert_eq!((&found["token_ids"], &found["prompt_tokens"]), (&expected["token_ids"], &expected["prompt_tokens"]));
    let found = generated(at, &["--chat", "--system", "half", "--prompt", "two"]);
    assert_eq!(found["token_ids"], plain("system half user two rows")["token_ids"]);
    // People get the reply alone.
    let said = run(at, &["generate", "model", "--chat", "--prompt", "two", "--length", "3"]).good().stdout;
    assert!(!said.contains("user"), "{said}");
}

#[test]
fn chats_that_cannot_be_written_are_errors() {
    let folder = folder("{{ raise_exception('no ' ~ messages[0].role) }}");
    let at = folder.path();
    let asked = ["generate", "model", "--chat", "--prompt", "two"];
    let refused = run(at, &asked).bad(1);
    assert!(refused.contains("tokenizer_config.json") && refused.contains("no user"), "{refused}");
    assert!(run(at, &["generate", "model", "--chat"]).bad(2).contains("--prompt"));
    assert!(run(at, &["generate", "model", "--system", "x"]).bad(2).contains("--chat"));
    fs::write(at.join("task.jsonl"), r#"{"context": "two", "target": "four"}"#).unwrap();
    assert!(run(at, &["eval", "model", "--task", "task.jsonl", "--chat"]).bad(1).contains("no user"));
    fs::remove_file(at.join("model/tokenizer_config.json")).unwrap();
    assert!(run(at, &asked).bad(1).contains("no chat template"));
    assert!(run(at, &["eval", "model", "--task", "task.jsonl", "--chat"]).bad(1).contains("no chat template"));
    assert_eq!(run(at, &["eval", "model", "--task", "task.jsonl", "--json"]).good().json()["items"], 1);
}

#[test]
fn right_answers_are_counted_with_their_standard_error() {
    let folder = folder(TEMPLATE);
    let at = folder.path();
    // What the model writes first, where that begins with the space that stands before an answer.
    let contexts = ["two of four", "the mask", "rows", "half of them", "a weight is", "kept", "pruned", "the rest"];
    let written = contexts.map(|context| {
        let found =
            run(at, &["generate", "model", "--temperature", "0", "--length", "1", "--prompt", context, "--json"]);
        (context, found.good().json()["text"].as_str().unwrap().to_owned())
    });
    let (context, greedy) = written.iter().find(|(_, text)| text.starts_with(' ') && text.trim() != "").unwrap();
    let lines = [
        json!({"context": context, "target": greedy}),
        json!({"context": context, "target": format!("{greedy} the mask is kept half")}),
    ];
    let write = |name: &str, lines: &[Value]| {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        fs::write(at.join(name), lines.join("\n")).unwrap();
    };
    write("targets.jsonl", &lines);
    let found = run(at, &["eval", "model", "--task", "targets.jsonl", "--json"]).good().json();
    assert_eq!((&found["accuracy"], &found["items"], &found["chat"]), (&json!(0.5), &json!(2), &json!(false)));
    assert!(found.get("accuracy_norm").is_none(), "{found}");
    let choices: Vec<Value> = ["half", "the mask", "kept rows", "two"]
        .iter()
        .map(|own| json!({"question": format!("two of {own}"), "choices": ["half", "rows are", "mask"], "answer": 1}))
        .collect();
    write("choices.jsonl", &choices);
    for more in [&[][..], &["--chat"], &["--chat", "--system", "half"], &["--limit", "3", "--window", "30"]] {
        let all = [&["eval", "model", "--task", "choices.jsonl"][..], more].concat();
        let found = run(at, &[&all[..], &["--json"]].concat()).good().json();
        let [share, error] = ["accuracy_norm", "accuracy_norm_stderr"].map(|name| found[name].as_f64().unwrap());
        let items = found["items"].as_f64().unwrap();
        assert_eq!(items, if more.contains(&"--limit") { 3.0 } else { 4.0 });
        assert!((error - (share * (1.0 - share) / (items - 1.0)).sqrt()).abs() < 1e-12, "{found}");
        let people = run(at, &all).good().stdout;
        assert!(people.contains('±') && people.contains("questions"), "{people}");
    }
    let warned = run(at, &["eval", "model", "--task", "choices.jsonl", "--window", "6"]);
    assert!(warned.stderr.contains("lost the beginning"), "{warned:?}");

    fs::write(at.join("bad.jsonl"), format!("{}\n{{\"context\": 1}}\n", choices[0])).unwrap();
    assert!(run(at, &["eval", "model", "--task", "bad.jsonl"]).bad(1).contains("bad.jsonl: line 2: "));
    fs::write(at.join("squad.json"), json!({"data": []}).to_string()).unwrap();
    assert!(run(at, &["eval", "model", "--task", "squad.json"]).bad(1).contains("line 1"));
    assert!(run(at, &["eval", "model", "--task", "choices.jsonl", "--window", "41"]).bad(2).contains("40 tokens"));
    assert!(run(at, &["eval", "model", "--task", "choices.jsonl", "--text", "bad.jsonl"]).bad(2).contains("--text"));
    assert!(run(at, &["eval", &checkpoint("bert"), "--task", "squad.json", "--chat"]).bad(2).contains("--chat"));
}
