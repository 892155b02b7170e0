//! The tokenizer, as the library tokenizers has it, from a GGUF file's metadata.
//!
//! | `tokenizer.ggml.model` | vocabulary | merges |
//! |---|---|---|
//! | `gpt2` | byte pairs over 256 characters that stand for bytes | stored |
//! | `llama` | pieces of SentencePiece, with a token for each byte | all ways to cut a piece in two, the piece with the highest score first |
//!
//! `tokenizer.ggml.pre` names how `gpt2` cuts a text before it merges; llama.cpp has the expressions in its source.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::{families::Described, metadata::Metadata};

const TOKENS: &str = "tokenizer.ggml.tokens";

/// Bytes that a token may take: all its cuts are looked up.
const LONGEST: usize = 4096;

/// What a token is, by its number in `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    /// It controls the model, and is never part of a text.
    Control,
    /// It is found in a text before anything else is.
    UserDefined,
    Unused,
    Byte,
}

/// A vocabulary.
struct Tokens<'a> {
    texts: &'a [String],
    kinds: Vec<Kind>,
}

impl<'a> Tokens<'a> {
    fn of(metadata: &'a Metadata) -> Described<Self> {
        let texts = Metadata::required(TOKENS, metadata.texts(TOKENS)?)?;
        let kinds = match metadata.integers("tokenizer.ggml.token_type")? {
            None => vec![Kind::Normal; texts.len()],
            Some(numbers) => numbers.iter().map(|number| kind(*number)).collect::<Described<_>>()?,
        };
        expect_length("tokenizer.ggml.token_type", kinds.len(), texts.len())?;
        if let Some(number) = texts.iter().position(|text| text.len() > LONGEST) {
            return Err(format!("metadata `{TOKENS}`: token {number} takes more than {LONGEST} bytes"));
        }
        Ok(Tokens { texts, kinds })
    }

    /// The tokens with their numbers.
    fn iter(&self) -> impl Iterator<Item = (usize, &'a str, Kind)> {
        self.texts.iter().zip(&self.kinds).enumerate().map(|(number, (text, kind))| (number, text.as_str(), *kind))
    }

    /// The text of a token.
    fn text(&self, number: usize) -> Described<&'a str> {
        let text = self.texts.get(number).map(String::as_str);
        text.ok_or_else(|| format!("token {number} is named, and there are {}", self.texts.len()))
    }

    /// The tokens by their texts, but for those that are never used.
    fn vocabulary(&self) -> Described<Map<String, Value>> {
        let mut vocabulary = Map::new();
        for (number, text, _) in self.iter().filter(|(.., kind)| *kind != Kind::Unused) {
            if vocabulary.insert(text.to_owned(), number.into()).is_some() {
                return Err(format!("metadata `{TOKENS}`: {text:?} is there twice"));
            }
        }
        Ok(vocabulary)
    }

    /// The tokens that are looked for in a text before it is cut.
    fn added(&self) -> Vec<Value> {
        let is_added = |kind| matches!(kind, Kind::Control | Kind::UserDefined | Kind::Unknown);
        let added = self.iter().filter(|(.., kind)| is_added(*kind));
        added
            .map(|(number, text, kind)| {
                json!({
                    "id": number,
                    "content": text,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": kind != Kind::UserDefined,
                })
            })
            .collect()
    }
}

fn kind(number: i64) -> Described<Kind> {
    Ok(match number {
        1 => Kind::Normal,
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        5 => Kind::Unused,
        6 => Kind::Byte,
        _ => return Err(format!("metadata `tokenizer.ggml.token_type` has the unknown kind {number}")),
    })
}

fn expect_length(key: &str, found: usize, tokens: usize) -> Described<()> {
    match found == tokens {
        true => Ok(()),
        false => Err(format!("metadata `{key}` has {found} entries for {tokens} tokens")),
    }
}

/// How a vocabulary is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Model {
    BytePairs,
    SentencePiece,
}

/// The kind of tokenizer, if the file has one.
fn model(metadata: &Metadata) -> Described<Option<Model>> {
    match metadata.text("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => Ok(None),
        Some("gpt2") => Ok(Some(Model::BytePairs)),
        Some("llama") => Ok(Some(Model::SentencePiece)),
        Some(other) => Err(format!("metadata `tokenizer.ggml.model` is {other:?}; supported are gpt2 and llama")),
    }
}

/// The contents of `tokenizer.json`.
pub(super) fn tokenizer(metadata: &Metadata) -> Described<Option<Value>> {
    let Some(model) = model(metadata)? else { return Ok(None) };
    let tokens = Tokens::of(metadata)?;
    let (normalizer, pre_tokenizer, decoder, model) = match model {
        Model::BytePairs => byte_pairs(metadata, &tokens)?,
        Model::SentencePiece => sentence_piece(metadata, &tokens)?,
    };
    Ok(Some(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": around(metadata, &tokens)?,
        "decoder": decoder,
        "model": model,
    })))
}

/// Normalizer, pre-tokenizer, decoder and model.
type Parts = (Value, Value, Value, Value);

/// How LLaMA 3 cuts a text.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How Qwen2 cuts a text.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn byte_pairs(metadata: &Metadata, tokens: &Tokens<'_>) -> Described<Parts> {
    let pre = metadata.text("tokenizer.ggml.pre")?;
    let split = |expression: &str| {
        let split =
            json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
        json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] })
    };
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let (normalizer, pre_tokenizer) = match pre {
        None | Some("gpt-2") => (Value::Null, byte_level(true)),
        Some("qwen2" | "deepseek-r1-qwen") => (json!({ "type": "NFC" }), split(QWEN2)),
        Some("llama-bpe" | "llama3" | "llama-v3") => (Value::Null, split(LLAMA3)),
        Some("smollm") => (Value::Null, json!({ "type": "Sequence", "pretokenizers": [digits, byte_level(true)] })),
        Some(other) => {
            return Err(format!(
                "metadata `tokenizer.ggml.pre` is {other:?}; supported are gpt-2, llama-bpe, qwen2 and smollm"
            ));
        }
    };
    let key = "tokenizer.ggml.merges";
    let merges = Metadata::required(key, metadata.texts(key)?)?;
    let model = json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": null,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": false,
        "byte_fallback": false,
        // A word that is a token is that token, however its parts merge.
        "ignore_merges": matches!(pre, Some("llama-bpe" | "llama3" | "llama-v3")),
        "vocab": tokens.vocabulary()?,
        "merges": merges,
    });
    Ok((normalizer, pre_tokenizer, byte_level(true), model))
}

/// Bytes as characters; with the cuts of GPT-2, or none.
fn byte_level(cuts: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": cuts })
}

fn sentence_piece(metadata: &Metadata, tokens: &Tokens<'_>) -> Described<Parts> {
    let adds_space = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let normalizer = match adds_space {
        true => json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, spaces] }),
        false => spaces,
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if adds_space {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = match metadata.size("tokenizer.ggml.unknown_token_id")? {
        Some(number) => tokens.text(number)?.into(),
        None => tokens.iter().find(|(.., kind)| *kind == Kind::Unknown).map_or(Value::Null, |(_, text, _)| text.into()),
    };
    let model = json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unknown,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": true,
        "byte_fallback": true,
        "ignore_merges": false,
        "vocab": tokens.vocabulary()?,
        "merges": merges(metadata, tokens)?,
    });
    Ok((normalizer, Value::Null, json!({ "type": "Sequence", "decoders": decoders }), model))
}

/// The merges by which byte pairs give what SentencePiece gives: it merges the two neighbours whose piece has the
/// highest score. Of equal scores transformers' order counts: longer parts first.
fn merges(metadata: &Metadata, tokens: &Tokens<'_>) -> Described<Vec<Value>> {
    let key = "tokenizer.ggml.scores";
    let scores = Metadata::required(key, metadata.floats(key)?)?;
    expect_length(key, scores.len(), tokens.texts.len())?;
    let pieces = || tokens.iter().filter(|(.., kind)| *kind == Kind::Normal);
    let numbers: HashMap<&str, usize> = pieces().map(|(number, text, _)| (text, number)).collect();
    let mut merges = Vec::new();
    for (number, text, _) in pieces() {
        let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let parts = cuts.filter_map(|(left, right)| Some((left, right, numbers.get(left)?, numbers.get(right)?)));
        let mut parts: Vec<_> = parts.collect();
        parts.sort_by_key(|(_, _, left, right)| (*left, *right));
        let length = |text: &str| text.chars().count();
        merges.extend(
            parts.into_iter().map(|(left, right, ..)| (scores[number], length(left), length(right), left, right)),
        );
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(b.2.cmp(&a.2)));
    Ok(merges.into_iter().map(|(.., left, right)| json!([left, right])).collect())
}

/// Whether the tokenizer puts the first token of all texts before one, and the last behind it.
fn adds(metadata: &Metadata) -> Described<(bool, bool)> {
    let llama3 = matches!(metadata.text("tokenizer.ggml.pre")?, Some("llama-bpe" | "llama3" | "llama-v3"));
    let begins = model(metadata)? == Some(Model::SentencePiece) || llama3;
    let flag = |key: &str, default: bool| Ok::<_, String>(metadata.flag(key)?.unwrap_or(default));
    Ok((flag("tokenizer.ggml.add_bos_token", begins)?, flag("tokenizer.ggml.add_eos_token", false)?))
}

/// What stands around a text.
fn around(metadata: &Metadata, tokens: &Tokens<'_>) -> Described<Value> {
    let (begins, ends) = adds(metadata)?;
    let token = |is_added: bool, name: &str| match metadata.size(&format!("tokenizer.ggml.{name}_token_id"))? {
        Some(number) if is_added => Ok(Some((number, tokens.text(number)?))),
        _ => Ok::<_, String>(None),
    };
    let (begin, end) = (token(begins, "bos")?, token(ends, "eos")?);
    if begin.is_none() && end.is_none() {
        return Ok(match model(metadata)? {
            Some(Model::BytePairs) => byte_level(false),
            _ => Value::Null,
        });
    }
    let of = |sequence: &str, number: u32| {
        let special = |text: &str| json!({ "SpecialToken": { "id": text, "type_id": number } });
        let parts = [
            begin.map(|(_, text)| special(text)),
            Some(json!({ "Sequence": { "id": sequence, "type_id": number } })),
            end.map(|(_, text)| special(text)),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>()
    };
    let mut known = Map::new();
    for (number, text) in [begin, end].into_iter().flatten() {
        known.insert(text.to_owned(), json!({ "id": text, "ids": [number], "tokens": [text] }));
    }
    let pair = [of("A", 0), of("B", 1)].concat();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": of("A", 0),
        "pair": pair,
        "special_tokens": known,
    }))
}

/// The special tokens that `config.json` and other files name: here, and there.
const SPECIAL: [(&str, &str); 4] =
    [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")];

/// Adds the numbers of the special tokens to a configuration.
pub(super) fn special_tokens(metadata: &Metadata, fields: &mut Map<String, Value>) -> Described<()> {
    for (ours, theirs) in SPECIAL.iter().filter(|(ours, _)| *ours != "unknown") {
        if let Some(number) = metadata.size(&format!("tokenizer.ggml.{ours}_token_id"))? {
            fields.insert(format!("{theirs}_id"), number.into());
        }
    }
    Ok(())
}

/// Texts of tokens that end what a model says, as llama.cpp knows them.
const ENDS: [&str; 12] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
];

/// The contents of `generation_config.json`.
pub(super) fn generation(metadata: &Metadata) -> Described<Value> {
    let mut fields = Map::new();
    special_tokens(metadata, &mut fields)?;
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(metadata.size(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    if model(metadata)?.is_some() {
        let tokens = Tokens::of(metadata)?;
        let is_end = |text: &str, kind| kind == Kind::Control && ENDS.contains(&text);
        ends.extend(tokens.iter().filter(|(_, text, kind)| is_end(text, *kind)).map(|(number, ..)| number));
    }
    let mut seen = HashSet::new();
    ends.retain(|number| seen.insert(*number));
    if !ends.is_empty() {
        fields.insert("eos_token_id".to_owned(), ends.into());
    }
    Ok(Value::Object(fields))
}

/// The contents of `tokenizer_config.json`, with the chat template.
pub(super) fn settings(metadata: &Metadata) -> Described<Option<Value>> {
    if model(metadata)?.is_none() {
        return Ok(None);
    }
    let tokens = Tokens::of(metadata)?;
    let (begins, ends) = adds(metadata)?;
    let mut fields = Map::new();
    fields.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
    fields.insert("add_bos_token".to_owned(), begins.into());
    fields.insert("add_eos_token".to_owned(), ends.into());
    fields.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    for (ours, theirs) in SPECIAL {
        if let Some(number) = metadata.size(&format!("tokenizer.ggml.{ours}_token_id"))? {
            fields.insert(theirs.to_owned(), tokens.text(number)?.into());
        }
    }
    if let Some(template) = metadata.text("tokenizer.chat_template")? {
        fields.insert("chat_template".to_owned(), template.into());
    }
    Ok(Some(Value::Object(fields)))
}
