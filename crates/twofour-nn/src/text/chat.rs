//! Chat templates: conversations as the text that a model was trained on.

use std::{collections::BTreeMap, path::PathBuf};

use minijinja::{
    Environment, Error as JinjaError, ErrorKind, UndefinedBehavior,
    syntax::SyntaxConfig,
    value::{Kwargs, Value},
};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use twofour::file::Reader;

use super::{TextError, Tokenizer};
use crate::Result;

/// The file of a template alone, which comes before that of the settings.
const TEMPLATE_FILE: &str = "chat_template.jinja";
const SETTINGS_FILE: &str = "tokenizer_config.json";

/// The name of the template that counts where a checkpoint has several.
const DEFAULT: &str = "default";

/// Steps after which a template is taken for one that does not end: a long conversation takes a thousandth of them.
const MAX_STEPS: u64 = 50_000_000;

/// A message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// The speaker: `system`, `user` or `assistant`.
    pub role: &'a str,
    /// The text.
    pub content: &'a str,
}

/// How a model's conversations are written as text: a checkpoint's Jinja template, rendered as transformers renders it.
///
/// ```
/// use twofour_nn::text::{ChatTemplate, Message};
/// let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}\
///                 {% if add_generation_prompt %}[assistant]{% endif %}";
/// let template = ChatTemplate::new("chat_template.jinja".into(), template.to_owned(), [])?;
/// let text = template.render(&[Message { role: "user", content: "Two of four?" }], true)?;
/// assert_eq!(text, "[user] Two of four?\n[assistant]");
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    /// The file of the template.
    path: PathBuf,
    environment: Environment<'static>,
    source: String,
    /// Special tokens by the names that templates have for them, such as `bos_token`.
    special: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// The template beside a checkpoint's weights: `chat_template.jinja`, or `chat_template` of
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`]; [`TextError::Template`] for one that cannot be read.
    pub fn beside(reader: &Reader) -> Result<Self> {
        let path = reader.path_beside(SETTINGS_FILE);
        let fault = |reason: String| TextError::Template { path: path.clone(), reason };
        let settings = match reader.beside(SETTINGS_FILE)? {
            Some(text) => {
                let read: serde_json::Value =
                    serde_json::from_slice(&text).map_err(|error| fault(error.to_string()))?;
                read.as_object().cloned().ok_or_else(|| fault("expected a JSON object".to_owned()))?
            }
            None => serde_json::Map::new(),
        };
        let special = settings.iter().filter(|(name, _)| name.ends_with("_token")).filter_map(|(name, token)| {
            // A token is written as its text, or as an object with it.
            let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
            Some((name.clone(), text.to_owned()))
        });
        if let Some(text) = reader.beside(TEMPLATE_FILE)? {
            let path = reader.path_beside(TEMPLATE_FILE);
            let source = String::from_utf8(text)
                .map_err(|_| TextError::Template { path: path.clone(), reason: "not UTF-8".to_owned() })?;
            return Self::new(path, source, special);
        }
        let source = match settings.get("chat_template") {
            None | Some(serde_json::Value::Null) => return Err(TextError::NoTemplate { path }.into()),
            Some(serde_json::Value::String(source)) => source.clone(),
            Some(serde_json::Value::Array(several)) => {
                let named = several.iter().find(|own| own["name"] == DEFAULT);
                let source = named.and_then(|own| own["template"].as_str());
                source.ok_or_else(|| fault("`chat_template` has no template named `default`".to_owned()))?.to_owned()
            }
            Some(_) => return Err(fault("`chat_template` is neither text nor a list of templates".to_owned()).into()),
        };
        Self::new(path, source, special)
    }

    /// A template from its text; `path` is named in errors. `special` are special tokens by the names that the template
    /// has for them.
    ///
    /// # Errors
    /// [`TextError::Template`] for text that is no template.
    pub fn new(path: PathBuf, source: String, special: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let fault = |error: &JinjaError| TextError::Template { path: path.clone(), reason: reason(error) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| fault(&error))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(MAX_STEPS));
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, format!("it refuses: {message}")))
        });
        environment.add_function("strftime_now", |format: String| -> Result<String, JinjaError> {
            let failed = |error: jiff::Error| JinjaError::new(ErrorKind::InvalidOperation, error.to_string());
            jiff::fmt::strtime::format(&format, &jiff::ZonedDateTime::now()).map_err(failed)
        });
        environment.template_from_str(&source).map_err(|error| fault(&error))?;
        let special = special.into_iter().collect();
        Ok(ChatTemplate { path, environment, source, special })
    }

    /// The text of a conversation; with `prompts_reply`, up to where the model's reply begins.
    ///
    /// # Errors
    /// [`TextError::Template`] where the template fails or refuses the conversation.
    pub fn render(&self, messages: &[Message<'_>], prompts_reply: bool) -> Result<String> {
        let mut context: BTreeMap<&str, Value> =
            self.special.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))).collect();
        let message = |own: &Message<'_>| Value::from_pairs([("role", own.role), ("content", own.content)]);
        context.insert("messages", messages.iter().map(message).collect::<Vec<_>>().into());
        context.insert("add_generation_prompt", prompts_reply.into());
        // transformers names them, without a value.
        context.insert("tools", ().into());
        context.insert("documents", ().into());
        let text = self.environment.render_str(&self.source, Value::from_pairs(context));
        Ok(text.map_err(|error| TextError::Template { path: self.path.clone(), reason: reason(&error) })?)
    }

    /// The tokens of [`ChatTemplate::render`], special ones among them.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render`] and [`Tokenizer::encode`]; a special token of the text that the tokenizer does
    /// not have.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message<'_>], prompts_reply: bool) -> Result<Vec<u32>> {
        let text = self.render(messages, prompts_reply)?;
        self.expect_special(tokenizer, &text)?;
        Ok(tokenizer.encode_with_places(&text)?.0)
    }

    /// Checks that the special tokens in a text are tokens of the tokenizer, each of them one.
    ///
    /// # Errors
    /// [`TextError::Template`].
    pub fn expect_special(&self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        for token in self.special.values().filter(|token| !token.is_empty() && text.contains(token.as_str())) {
            if tokenizer.encode_with_places(token)?.0.len() != 1 {
                let reason = format!("its special token {token:?} is none of the tokenizer's; complete tokenizer.json");
                return Err(TextError::Template { path: self.path.clone(), reason }.into());
            }
        }
        Ok(())
    }

    /// The special token after a reply, which ends the model's turn; none where the template writes none.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        const REPLY: &str = "the reply of the model";
        let messages = [Message { role: "user", content: "2:4" }, Message { role: "assistant", content: REPLY }];
        // A template may refuse it, as one for a single question does.
        let Ok(text) = self.render(&messages, false) else { return Ok(None) };
        let Some((_, after)) = text.rsplit_once(REPLY) else { return Ok(None) };
        let (tokens, _) = tokenizer.encode_with_places(after)?;
        Ok(tokens.into_iter().find(|token| tokenizer.is_special(*token)))
    }

    /// The text before the first message of a user.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render`].
    pub fn before_user(&self) -> Result<String> {
        const ASKED: &str = "what the user asks";
        let text = self.render(&[Message { role: "user", content: ASKED }], true)?;
        match text.split_once(ASKED) {
            Some((before, _)) => Ok(before.to_owned()),
            None => {
                let reason = "it leaves the user's message out".to_owned();
                Err(TextError::Template { path: self.path.clone(), reason }.into())
            }
        }
    }
}

/// What went wrong, and in which line of the template.
fn reason(error: &JinjaError) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or_else(|| what.clone(), |line| format!("line {line} of the template: {what}"))
}

/// JSON as Python's `json.dumps` writes it, with characters beyond ASCII as they are.
fn to_json(value: Value, options: Kwargs) -> Result<String, JinjaError> {
    let failed = |error: serde_json::Error| JinjaError::new(ErrorKind::InvalidOperation, error.to_string());
    let indent: Option<usize> = options.get("indent")?;
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut text = vec![];
    let written = match indent {
        Some(spaces) => {
            let spaces = vec![b' '; spaces.min(16)];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)),
    };
    written.map_err(failed)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A space after each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn template(source: &str) -> Result<ChatTemplate> {
        ChatTemplate::new("t.jinja".into(), source.to_owned(), [("bos_token".to_owned(), "<s>".to_owned())])
    }

    const ASKED: [Message<'static>; 1] = [Message { role: "user", content: "is it <2:4> & \"so\" €?" }];

    #[test]
    fn templates_have_what_those_of_python_have() {
        for (source, expected) in [
            (
                "{{ bos_token }}{{ eos_token }}|{{ tools }}|{{ tools is none }}|{{ missing is defined }}",
                "<s>|None|True|False",
            ),
            ("{{ messages[0]['content'].split('>')[0].strip() }}", "is it <2:4"),
            ("{{ messages[-1].content | tojson }}", "\"is it <2:4> & \\\"so\\\" €?\""),
            ("{{ messages[0] | tojson }}", "{\"role\": \"user\", \"content\": \"is it <2:4> & \\\"so\\\" €?\"}"),
            ("{{ {'a': [1, true]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1,\n    true\n  ]\n}"),
            (
                "{% for m in messages %}\n    {%- if loop.last %}{% break %}{% endif %}{% endfor %}\n  \
                 {% set x = 1 %}\n.",
                ".",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
            ("{% generation %}", ""),
        ] {
            match template(source).and_then(|template| template.render(&ASKED, false)) {
                Ok(found) => assert_eq!(found, expected, "{source}"),
                Err(error) => assert!(expected.is_empty(), "{source}: {error}"),
            }
        }
        let year = template("{{ strftime_now('%Y-%m-%d') }}").unwrap().render(&ASKED, false).unwrap();
        assert!(year.len() == 10 && year.starts_with("20"), "{year}");
    }

    #[test]
    fn a_template_that_fails_is_an_error_with_its_line() {
        let failed = |source: &str| template(source).and_then(|own| own.render(&ASKED, true)).unwrap_err().to_string();
        let refused = failed("\n{{ raise_exception('roles must alternate') }}");
        assert!(refused.contains("t.jinja") && refused.contains("roles must alternate"), "{refused}");
        assert!(refused.contains("line 2"), "{refused}");
        assert!(failed("{% for m in messages %}").contains("t.jinja"));
        assert!(failed("{{ messages[0].content.nothing() }}").contains("line 1"));
        assert!(failed("{{ strftime_now('%!') }}").contains("line 1"));
        let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(failed(endless).contains("fuel"));
    }

    #[test]
    fn the_template_of_a_directory_is_that_of_its_own_file_first() {
        let folder = tempfile::tempdir().unwrap();
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/qwen2");
        for name in ["config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
        }
        let found = || ChatTemplate::beside(&Reader::open(folder.path()).unwrap());
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let none = found().unwrap_err().to_string();
        assert!(none.contains("no chat template"), "{none}");
        write(SETTINGS_FILE, r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>", "chat_template": null}"#);
        assert!(matches!(found(), Err(crate::Error::Text(TextError::NoTemplate { .. }))));
        write(
            SETTINGS_FILE,
            r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>", "chat_template":
            [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]}"#,
        );
        assert_eq!(found().unwrap().render(&ASKED, false).unwrap(), "<b><e>");
        write(TEMPLATE_FILE, "{{ eos_token }}.");
        assert_eq!(found().unwrap().render(&ASKED, false).unwrap(), "<e>.");
        fs::remove_file(folder.path().join(TEMPLATE_FILE)).unwrap();
        for wrong in ["[1]", "{", r#"{"chat_template": 3}"#, r#"{"chat_template": [{"name": "tools"}]}"#] {
            write(SETTINGS_FILE, wrong);
            let error = found().unwrap_err().to_string();
            assert!(error.contains(SETTINGS_FILE), "{wrong}: {error}");
        }
        // A token that the tokenizer does not have would be read as its letters.
        write(
            SETTINGS_FILE,
            r#"{"bos_token": "<nowhere>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}"#,
        );
        let tokenizer = Tokenizer::read(&folder.path().join("tokenizer.json")).unwrap();
        let error = found().unwrap().encode(&tokenizer, &ASKED, true).unwrap_err().to_string();
        assert!(error.contains("<nowhere>"), "{error}");
    }
}
