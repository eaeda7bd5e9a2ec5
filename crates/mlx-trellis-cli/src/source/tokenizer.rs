//! The tokenizer of a GGUF file as `tokenizer.json` and its companions.
//!
//! Byte-level BPE only (`tokenizer.ggml.model` "gpt2"). What splits text before the merges is not in the file: only
//! a name for it is, and the names known here stand for what the model's own `tokenizer.json` has.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::gguf::Gguf;

pub(crate) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(crate) const EOS: &str = "tokenizer.ggml.eos_token_id";
const PADDING: &str = "tokenizer.ggml.padding_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
/// Ends a turn rather than a text, where the two differ.
const EOT: &str = "tokenizer.ggml.eot_token_id";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Kinds of token (`llama_token_type` in llama.cpp).
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// Fills the vocabulary up to the embedding's rows; stands for nothing.
const UNUSED: i64 = 5;

/// How Qwen2 and Qwen3 split text, from their `tokenizer.json`.
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`; none where the file has no tokenizer.
pub(crate) fn files(gguf: &Gguf) -> Result<Vec<(String, Vec<u8>)>> {
    let Some(model) = gguf.string("tokenizer.ggml.model")? else { return Ok(Vec::new()) };
    ensure!(model == "gpt2", "tokenizer.ggml.model is {model:?}, expected gpt2 (byte-level BPE)");
    let vocabulary = Vocabulary::read(gguf)?;
    let file = |name: &str, value: Value| (name.to_owned(), format!("{value:#}\n").into_bytes());
    Ok(vec![
        file("tokenizer.json", tokenizer_json(gguf, &vocabulary)?),
        file("tokenizer_config.json", tokenizer_config(gguf, &vocabulary)?),
        file("generation_config.json", generation_config(gguf)?),
    ])
}

struct Vocabulary<'a> {
    tokens: &'a [String],
    kinds: &'a [i64],
    merges: Vec<(&'a str, &'a str)>,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self> {
        let need = |key: &str| gguf.strings(key)?.with_context(|| format!("found no {key}"));
        let tokens = need("tokenizer.ggml.tokens")?;
        let kinds =
            gguf.integers("tokenizer.ggml.token_type")?.context("found no tokenizer.ggml.token_type")?;
        ensure!(
            kinds.len() == tokens.len(),
            "tokenizer.ggml.token_type has {} elements, expected the {} of tokenizer.ggml.tokens",
            kinds.len(),
            tokens.len()
        );
        if let Some(i) = kinds.iter().position(|k| ![NORMAL, CONTROL, USER_DEFINED, UNUSED].contains(k)) {
            bail!("token {i} ({:?}) is of type {}, expected 1, 3, 4 or 5", tokens[i], kinds[i]);
        }
        let merges = need("tokenizer.ggml.merges")?
            .iter()
            .map(|m| m.split_once(' ').with_context(|| format!("merge {m:?}, expected two tokens")))
            .collect::<Result<_>>()?;
        Ok(Self { tokens, kinds, merges })
    }

    /// Ids and texts of the tokens that stand for something.
    fn used(&self) -> impl Iterator<Item = (usize, &'a str, i64)> {
        let all = self.tokens.iter().zip(self.kinds).enumerate();
        all.map(|(id, (token, &kind))| (id, token.as_str(), kind)).filter(|&(.., kind)| kind != UNUSED)
    }

    /// Those that text is searched for before it is split.
    fn added(&self) -> impl Iterator<Item = (usize, Value)> {
        self.used().filter(|&(.., kind)| kind != NORMAL).map(|(id, token, kind)| {
            let value = json!({
                "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            });
            (id, value)
        })
    }

    /// The token that a key of the metadata names.
    fn named(&self, gguf: &Gguf, key: &str) -> Result<Option<(usize, &'a str)>> {
        let Some(id) = gguf.integer(key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| Some((id, self.tokens.get(id)?.as_str())));
        token.with_context(|| format!("{key} is {id}, expected below {}", self.tokens.len())).map(Some)
    }
}

fn tokenizer_json(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value> {
    let byte_level = |trim_offsets: bool, use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": trim_offsets, "use_regex": use_regex });
    let kind = gguf.string("tokenizer.ggml.pre")?.unwrap_or("default");
    let (normalizer, split, level) = match kind {
        "smollm" => {
            (Value::Null, json!({ "type": "Digits", "individual_digits": true }), byte_level(true, true))
        }
        "qwen2" => (
            json!({ "type": "NFC" }),
            json!({ "type": "Split", "pattern": { "Regex": QWEN2_SPLIT }, "behavior": "Isolated", "invert": false }),
            byte_level(false, false),
        ),
        other => bail!("tokenizer.ggml.pre is {other:?}, expected smollm or qwen2"),
    };
    let added: Vec<Value> = vocabulary
        .added()
        .map(|(id, token)| {
            let mut entry = json!({ "id": id });
            if let (Some(entry), Value::Object(token)) = (entry.as_object_mut(), token) {
                entry.extend(token);
            }
            entry
        })
        .collect();
    let mut vocab = Map::new();
    for (id, token, _) in vocabulary.used() {
        ensure!(vocab.insert(token.to_owned(), id.into()).is_none(), "token {token:?} is there twice");
    }
    for (a, b) in &vocabulary.merges {
        let merged = format!("{a}{b}");
        if let Some(missing) = [a, b, &merged.as_str()].into_iter().find(|t| !vocab.contains_key(**t)) {
            bail!("merge {a:?} {b:?}: token {missing:?} is missing");
        }
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, level] },
        "post_processor": post_processor(gguf, vocabulary)?,
        "decoder": byte_level(true, true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": vocabulary.merges,
        },
    }))
}

/// Puts the tokens that begin and end every text around it, where the file asks for them.
fn post_processor(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value> {
    let mut around = Vec::new();
    for (flag, key) in [("tokenizer.ggml.add_bos_token", BOS), ("tokenizer.ggml.add_eos_token", EOS)] {
        around.push(match gguf.boolean(flag)? {
            Some(true) => {
                Some(vocabulary.named(gguf, key)?.with_context(|| format!("{flag} is true without {key}"))?)
            }
            _ => None,
        });
    }
    if around.iter().all(Option::is_none) {
        return Ok(Value::Null);
    }
    let special = |token: Option<(usize, &str)>, part: usize| {
        token.map(|(_, text)| json!({ "SpecialToken": { "id": text, "type_id": part } }))
    };
    let template = |letters: &[&str]| -> Vec<Value> {
        letters
            .iter()
            .enumerate()
            .flat_map(|(part, letter)| {
                let sequence = json!({ "Sequence": { "id": letter, "type_id": part } });
                [special(around[0], part), Some(sequence), special(around[1], part)]
            })
            .flatten()
            .collect()
    };
    let mut tokens = Map::new();
    for (id, text) in around.iter().flatten() {
        tokens.insert((*text).to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    Ok(json!({
        "type": "TemplateProcessing",
        "single": template(&["A"]),
        "pair": template(&["A", "B"]),
        "special_tokens": tokens,
    }))
}

fn tokenizer_config(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Value> {
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| config.insert(key.to_owned(), value);
    set("tokenizer_class", "PreTrainedTokenizerFast".into());
    set("add_prefix_space", false.into());
    for key in ["add_bos_token", "add_eos_token"] {
        set(key, gguf.boolean(&format!("tokenizer.ggml.{key}"))?.unwrap_or(false).into());
    }
    set("clean_up_tokenization_spaces", false.into());
    for (name, key) in
        [("bos_token", BOS), ("eos_token", EOS), ("unk_token", UNKNOWN), ("pad_token", PADDING)]
    {
        if let Some((_, token)) = vocabulary.named(gguf, key)? {
            set(name, token.into());
        }
    }
    let architecture = gguf.string("general.architecture")?.unwrap_or_default();
    if let Some(length) = gguf.integer(&format!("{architecture}.context_length"))? {
        set("model_max_length", length.into());
    }
    if let Some(template) = gguf.string(TEMPLATE)? {
        set("chat_template", template.into());
    }
    let added: Map<_, _> = vocabulary.added().map(|(id, token)| (id.to_string(), token)).collect();
    set("added_tokens_decoder", added.into());
    Ok(config.into())
}

fn generation_config(gguf: &Gguf) -> Result<Value> {
    let mut config = Map::new();
    for (name, key) in [("bos_token_id", BOS), ("pad_token_id", PADDING)] {
        if let Some(id) = gguf.integer(key)? {
            config.insert(name.to_owned(), id.into());
        }
    }
    let ends = (gguf.integer(EOS)?, gguf.integer(EOT)?);
    if let (Some(eos), eot) = ends {
        let value = match eot.filter(|&eot| eot != eos) {
            Some(eot) => json!([eos, eot]),
            None => eos.into(),
        };
        config.insert("eos_token_id".to_owned(), value);
    }
    Ok(config.into())
}
