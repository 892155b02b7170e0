//! Chat templates and answers of tasks against transformers; skipped where python3 does not have it.
#![allow(missing_docs)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde::Deserialize;
use twofour::{DataType, file::Reader};
use twofour_nn::{
    model::{LanguageModel, SavedModel, Tokenizer},
    questions::{Expected, TaskFile, TaskPrompt, TaskScore},
    text::{ChatTemplate, Message},
};

/// Runs a script with the folder of checkpoints and another one to write to; none where python3 lacks a package.
fn python(script: &str, folder: &Path) -> Option<()> {
    let present = Command::new("python3").args(["-c", "import torch, transformers, jinja2"]).output();
    if !present.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: python3 with torch, transformers and jinja2 is not installed");
        return None;
    }
    let output = Command::new("python3").args(["-c", script]).arg(checkpoints()).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(())
}

fn checkpoints() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints")
}

/// Templates in the style of four families, in folders with a model, and what transformers makes of conversations.
const CHATS: &str = r#"
import json, os, shutil, sys
from transformers import PreTrainedTokenizerFast
checkpoints, out = sys.argv[1:]
# Roles are named, a system prompt stands in front even where none is given.
qwen = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nA model of four layers.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# A begin token, the date, headers, trimmed texts.
llama = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|headed|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|headed|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|headed|>\\n\\n' }}
{%- endif %}
"""
# No system's turn: it stands before the user's text; the assistant is the model; roles must alternate.
gemma = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("user and assistant must alternate") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<turned>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn>model\\n'}}
{%- endif -%}
"""
# Instructions in brackets, an end token after each reply, whitespace as blocks leave it.
mistral = """{%- set ns = namespace(index=0) %}
{{- bos_token }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' -}}
        {% set ns.index = ns.index + 1 %}
    {% elif message['role'] == 'system' %}
        {{ '<<SYS>>' + message.content.strip() + '<</SYS>>' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + message['content'] + eos_token }}
    {% else %}
        {{ raise_exception('only user, system and assistant are roles') }}
    {% endif %}
{% endfor %}
{{ ns.index }}"""
user = lambda text: {"role": "user", "content": text}
reply = lambda text: {"role": "assistant", "content": text}
system = lambda text: {"role": "system", "content": text}
conversations = [
    [user("two of four")],
    [system(" the mask "), user("is it < 2 & \"so\" €\n\n")],
    [user("rows\n"), reply(" half of  them"), user("the rest")],
    [user("one"), user("two")],
    [system("s"), user("a"), reply("b")],
]
for name, template in {"qwen": qwen, "llama": llama, "gemma": gemma, "mistral": mistral}.items():
    folder = os.path.join(out, name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=os.path.join(checkpoints, "qwen2", "tokenizer.json"), bos_token="<begin>", eos_token="<end>")
    tokens = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|headed|>", "<|eot|>", "<turn>", "<turned>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    for file in ["config.json", "model.safetensors"]:
        shutil.copy(os.path.join(checkpoints, "qwen2", file), folder)
    found = []
    for messages in conversations:
        for prompts_reply in [False, True]:
            def made(tokenize):
                options = {"return_dict": False} if tokenize else {}
                return tokenizer.apply_chat_template(
                    messages, tokenize=tokenize, add_generation_prompt=prompts_reply, **options)
            try:
                text, ids, error = made(False), made(True), None
            except Exception as failed:
                text, ids, error = None, None, str(failed)
            found.append(
                {"messages": messages, "prompts_reply": prompts_reply, "text": text, "ids": ids, "error": error})
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump(found, file)
"#;

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Said>,
    prompts_reply: bool,
    text: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
}

#[test]
fn conversations_are_written_as_transformers_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let Some(()) = python(CHATS, folder.path()) else { return };
    let mut refused = 0;
    for (name, end) in [("qwen", "<|im_end|>"), ("llama", "<|eot|>"), ("gemma", "<turned>"), ("mistral", "<end>")] {
        let at = folder.path().join(name);
        let expected: Vec<Chat> = serde_json::from_slice(&fs::read(at.join("expected.json")).unwrap()).unwrap();
        let template = ChatTemplate::beside(&Reader::open(&at).unwrap()).unwrap();
        let tokenizer = Tokenizer::read(&at.join("tokenizer.json")).unwrap();
        for chat in expected {
            let messages: Vec<Message<'_>> =
                chat.messages.iter().map(|own| Message { role: &own.role, content: &own.content }).collect();
            match (template.render(&messages, chat.prompts_reply), chat.error) {
                (Ok(found), None) => {
                    assert_eq!(Some(found), chat.text, "{name}");
                    assert_eq!(template.encode(&tokenizer, &messages, chat.prompts_reply).ok(), chat.ids, "{name}");
                }
                (Err(error), Some(expected)) => {
                    assert!(error.to_string().contains(&expected), "{name}: {error}, {expected}");
                    refused += 1;
                }
                (found, expected) => panic!("{name}: {found:?}, where transformers has {expected:?}"),
            }
        }
        assert_eq!(template.end_of_turn(&tokenizer).unwrap(), tokenizer.token(end), "{name}");
        let before = template.before_user().unwrap();
        assert!(!before.is_empty() && !before.contains("user asks"), "{name}: {before}");
    }
    assert_eq!(refused, 2, "Gemma's template refuses two users in a row");
}

/// The log-likelihoods of transformers, of tokens as lm-evaluation-harness cuts them.
const TASKS: &str = r#"
import json, math, os, random, sys
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
checkpoints, out = sys.argv[1:]
words = "two of four the mask a weight is pruned and rest them are kept rows half work".split()
chance = random.Random(0)
text = lambda count: " ".join(chance.choice(words) for _ in range(count))
for family in ["llama", "qwen2", "gpt2", "gemma3"]:
    at = os.path.join(checkpoints, family)
    model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(at, "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    framed, plain = tokenizer.encode("a"), encode("a")
    begin = framed[: framed.index(plain[0])]
    def pair(context, answer):
        spaces = len(context) - len(context.rstrip())
        if spaces:
            answer = context[-spaces:] + answer
            context = context[:-spaces]
        own = encode(context)
        return begin + own, encode(context + answer)[len(own):]
    def likelihood(context, answer):
        context, answer = pair(context, answer)
        ids = torch.tensor([context + answer])
        with torch.no_grad():
            logs = torch.log_softmax(model(ids).logits[0, len(context) - 1 : -1], -1)
        greedy = bool((logs.argmax(-1) == ids[0, len(context):]).all())
        return float(logs.gather(-1, ids[0, len(context):, None]).sum()), greedy
    def written(context):
        ids = torch.tensor([begin + encode(context)])
        with torch.no_grad():
            return tokenizer.decode(model(ids).logits[0, -1].argmax().item())
    choices, targets, expected = [], [], {"logs": [], "greedy": [], "right": [], "right_by_bytes": []}
    for index in range(24):
        context = text(chance.randrange(1, 4))
        context = "\n".join(context.split(" ", 1)) + (" " if index % 5 == 4 else "")
        own = list(dict.fromkeys([text(1), text(2), text(1), text(3)]))
        answer = chance.randrange(len(own))
        logs = [likelihood(context, ("" if context.endswith(" ") else " ") + choice)[0] for choice in own]
        by_bytes = [log / len(choice.encode()) for log, choice in zip(logs, own)]
        expected["logs"].append(logs)
        expected["right"].append(logs.index(max(logs)) == answer)
        expected["right_by_bytes"].append(by_bytes.index(max(by_bytes)) == answer)
        line = {"question": context} if index % 2 else {"context": context}
        choices.append({**line, "choices": own, "answer": answer, "id": index})
    for index in range(24):
        context, target = text(2), text(1)
        if index % 2:
            target = written(context)
        if not target.strip():
            target = " two"
        delimiter = "" if target[0].isspace() else " "
        expected["greedy"].append(likelihood(context, delimiter + target)[1])
        targets.append({"context": context, "target": target})
    os.makedirs(os.path.join(out, family))
    for name, lines in [("choices", choices), ("targets", targets)]:
        with open(os.path.join(out, family, name + ".jsonl"), "w") as file:
            file.write("\n".join(map(json.dumps, lines)) + "\n\n")
    with open(os.path.join(out, family, "expected.json"), "w") as file:
        json.dump(expected, file)
"#;

#[derive(Deserialize)]
struct Likelihoods {
    logs: Vec<Vec<f64>>,
    greedy: Vec<bool>,
    right: Vec<bool>,
    right_by_bytes: Vec<bool>,
}

#[test]
fn answers_are_as_likely_as_transformers_finds_them() {
    let folder = tempfile::tempdir().unwrap();
    let Some(()) = python(TASKS, folder.path()) else { return };
    let mut greedy = 0;
    for family in ["llama", "qwen2", "gpt2", "gemma3"] {
        let at = folder.path().join(family);
        let expected: Likelihoods = serde_json::from_slice(&fs::read(at.join("expected.json")).unwrap()).unwrap();
        let model = LanguageModel::load_as(checkpoints().join(family), Some(DataType::F32)).unwrap();
        let read = |name: &str| TaskFile::read(at.join(name), &|| false).unwrap();
        let prompt = TaskPrompt::Text { begin: model.begin };
        let (task, context) = (read("choices.jsonl"), model.decoder.config().context());
        let score = |task: &TaskFile| {
            let asked = (model.decoder.as_ref(), &model.tokenizer);
            TaskScore::of(asked, task, prompt, context, &mut |_, _| ()).unwrap()
        };
        let share = |right: &[bool]| right.iter().filter(|right| **right).count() as f64 / right.len() as f64;
        let found = score(&task);
        assert_eq!((found.items, found.truncated), (24, 0), "{family}");
        assert_eq!(found.accuracy, share(&expected.right), "{family}");
        assert_eq!(found.accuracy_norm, Some(share(&expected.right_by_bytes)), "{family}");
        let error = (found.accuracy * (1.0 - found.accuracy) / 23.0).sqrt();
        assert!((found.accuracy_stderr - error).abs() < 1e-12, "{family}");
        for (item, logs) in task.items.iter().zip(&expected.logs) {
            let likelihoods = prompt.likelihoods((model.decoder.as_ref(), &model.tokenizer), item, context).unwrap();
            assert_eq!(likelihoods.len(), logs.len());
            for (found, expected) in likelihoods.iter().zip(logs) {
                assert!((found.log - expected).abs() < 2e-4 * expected.abs(), "{family}: {found:?}, {expected}");
            }
        }
        let targets = read("targets.jsonl");
        assert!(targets.items.iter().all(|item| matches!(item.expected, Expected::Target(_))));
        let found = score(&targets);
        assert_eq!((found.accuracy, found.accuracy_norm), (share(&expected.greedy), None), "{family}");
        greedy += expected.greedy.iter().filter(|is| **is).count();
        assert!(SavedModel::open(checkpoints().join(family)).unwrap().chat_template().is_err());
    }
    assert!(greedy > 10, "{greedy} targets are what the models write");
}
