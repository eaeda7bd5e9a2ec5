//! Between text and tokens: the folder's tokenizer, its chat template, and text from tokens as they come.

use std::fs;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::Value;
use tokenizers::step_decode_stream;

use crate::error::Error;
use crate::json::{Settings, read_object, read_optional};

const TOKENIZER_FILE: &str = "tokenizer.json";
const SETTINGS_FILE: &str = "tokenizer_config.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";
const GENERATION_FILE: &str = "generation_config.json";
const CONFIG_FILE: &str = "config.json";

/// Special tokens that chat templates use by these names.
const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of the user's.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into() }
    }

    /// A message that sets the scene.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".to_owned(), content: content.into() }
    }
}

/// A folder's tokenizer and chat template.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    folder: PathBuf,
    inner: tokenizers::Tokenizer,
    template: Option<(PathBuf, String)>,
    /// Names and texts of the special tokens there are.
    special: Vec<(&'static str, String)>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in a folder and, where they are there, `tokenizer_config.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// A file that cannot be read, or is not what its name says.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self, Error> {
        let folder = folder.as_ref();
        let file = folder.join(TOKENIZER_FILE);
        let bytes = fs::read(&file).map_err(|reason| Error::Io { path: file.clone(), reason })?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| Error::Tokenizer { file: file.clone(), reason: e.to_string() })?;
        // Settings of the batches it was trained with, which would cut or fill up a text.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::Tokenizer { file, reason: e.to_string() })?;
        let settings_file = folder.join(SETTINGS_FILE);
        let map = read_optional(&settings_file)?.unwrap_or_default();
        let settings = Settings { file: &settings_file, map: &map };
        let special = SPECIAL.into_iter().filter_map(|name| {
            let token = settings.get(name)?;
            Some((name, token.as_str().or_else(|| token.get("content")?.as_str())?.to_owned()))
        });
        Ok(Self {
            folder: folder.to_owned(),
            inner,
            template: template(folder, settings)?,
            special: special.collect(),
        })
    }

    /// The tokens of a text; with `special`, with those that the tokenizer puts around a text of its own.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a text that the tokenizer does not take.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| self.error(&*e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.inner.decode(tokens, true).map_err(|e| self.error(&*e))
    }

    /// Text from tokens as they come.
    pub fn stream(&self) -> Detokenizer<'_> {
        Detokenizer { tokenizer: self, tokens: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }

    /// Whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// A chat as the model was trained to read it, up to where the assistant's answer starts. Its special tokens are in
    /// the text: [`Tokenizer::encode`] it without adding any.
    ///
    /// # Errors
    /// [`Error::Template`] if there is no chat template, or it fails.
    pub fn chat(&self, messages: &[Message]) -> Result<String, Error> {
        let Some((file, template)) = &self.template else {
            return Err(Error::Template {
                file: self.folder.clone(),
                reason: format!("found none in {SETTINGS_FILE} or {TEMPLATE_FILE}, expected one"),
            });
        };
        let failed = |e: minijinja::Error| {
            let line = e.line().map_or_else(String::new, |line| format!("line {line}: "));
            Error::Template { file: file.clone(), reason: format!("{line}{e}") }
        };
        let mut jinja = Environment::new();
        // The settings that Hugging Face's library renders with.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        jinja.set_syntax(syntax.map_err(failed)?);
        jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        jinja.add_function("raise_exception", |message: String| -> Result<Jinja, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        jinja.add_template("chat", template).map_err(failed)?;
        let message =
            |m: &Message| Jinja::from_pairs([("role", m.role.as_str()), ("content", m.content.as_str())]);
        let special = self.special.iter().map(|(name, token)| (*name, Jinja::from(token.as_str())));
        let values = special.chain([
            ("messages", messages.iter().map(message).collect()),
            ("add_generation_prompt", Jinja::from(true)),
        ]);
        let values = Jinja::from_pairs(values);
        jinja.get_template("chat").and_then(|chat| chat.render(values)).map_err(failed)
    }

    fn error(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        Error::Tokenizer { file: self.folder.join(TOKENIZER_FILE), reason: error.to_string() }
    }
}

/// The folder's own file counts, as for Hugging Face's library. A list of templates has one called "default".
fn template(folder: &Path, settings: Settings<'_>) -> Result<Option<(PathBuf, String)>, Error> {
    let file = folder.join(TEMPLATE_FILE);
    match fs::read_to_string(&file) {
        Ok(text) => return Ok(Some((file, text))),
        Err(reason) if reason.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::Io { path: file, reason });
        }
        Err(_) => {}
    }
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|t| t.get("name").is_some_and(|name| name == "default"))?;
        Some(default.get("template")?.as_str()?.to_owned())
    };
    let text = match settings.get("chat_template") {
        None => return Ok(None),
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(list)) => named(list),
        Some(_) => None,
    };
    let text =
        text.ok_or_else(|| settings.error("chat_template", "a template, or a list with one named default"))?;
    Ok(Some((settings.file.to_owned(), text)))
}

/// Text from tokens as they come, never part of a character.
#[derive(Debug, Clone)]
pub struct Detokenizer<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl Detokenizer<'_> {
    /// The text that a token adds: often a word, nothing while a character is not complete.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot.
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        let Self { tokenizer, tokens, prefix, prefix_index } = self;
        let text = step_decode_stream(&tokenizer.inner, vec![token], true, tokens, prefix, prefix_index);
        Ok(text.map_err(|e| tokenizer.error(&*e))?.unwrap_or_default())
    }

    /// What is left at the end: a character that never became complete, as U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot.
    pub fn finish(self) -> Result<String, Error> {
        let whole = self.tokenizer.decode(&self.tokens)?;
        Ok(whole.strip_prefix(&self.prefix).unwrap_or_default().to_owned())
    }
}

/// The tokens that end a text: those of `generation_config.json` or, where it has none, of `config.json`, and the
/// tokenizer's end-of-sequence token.
///
/// # Errors
/// A file that cannot be read, or an `eos_token_id` that is neither a token nor a list of them.
pub fn stop_tokens(folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Vec<u32>, Error> {
    let folder = folder.as_ref();
    let (generation, config) = (folder.join(GENERATION_FILE), folder.join(CONFIG_FILE));
    let mut stop = match read_optional(&generation)? {
        Some(map) => eos(Settings { file: &generation, map: &map })?,
        None => Vec::new(),
    };
    if stop.is_empty() {
        let map = read_object(&config)?;
        let whole = Settings { file: &config, map: &map };
        stop = eos(whole)?;
        if let (true, Some(text)) = (stop.is_empty(), whole.object("text_config")?) {
            stop = eos(text)?;
        }
    }
    let own = tokenizer.special.iter().find(|(name, _)| *name == "eos_token");
    stop.extend(own.and_then(|(_, token)| tokenizer.inner.token_to_id(token)));
    stop.sort_unstable();
    stop.dedup();
    Ok(stop)
}

fn eos(settings: Settings<'_>) -> Result<Vec<u32>, Error> {
    let key = "eos_token_id";
    let token = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    let tokens = match settings.get(key) {
        None => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(token).collect(),
        Some(one) => token(one).map(|t| vec![t]),
    };
    tokens.ok_or_else(|| settings.error(key, "a token or a list of tokens"))
}
