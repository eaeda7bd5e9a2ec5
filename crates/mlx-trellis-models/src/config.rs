//! A decoder's dimensions and settings, from `config.json`.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;
use crate::json::Settings;
use crate::rope::{DEFAULT_BASE, RopeScaling};

/// Epsilon of the RMS norms where `config.json` has none: that of both families in Hugging Face's configurations.
const DEFAULT_NORM_EPS: f64 = 1e-6;

/// Every `model_type` there is a decoder for.
const SUPPORTED: &[&str] = &["llama", "qwen3"];

/// A family of models. They differ in one thing: Qwen3 normalises queries and keys, head by head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `model_type` "llama": Llama 2, Llama 3, SmolLM2 and others of that shape.
    Llama,
    /// `model_type` "qwen3", dense.
    Qwen3,
}

/// A decoder's dimensions and settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The family.
    pub family: Family,
    /// Tokens in the vocabulary.
    pub vocab_size: i32,
    /// Features between the layers.
    pub hidden_size: i32,
    /// Features inside the MLP.
    pub intermediate_size: i32,
    /// Number of layers.
    pub num_hidden_layers: i32,
    /// Heads of the queries.
    pub num_attention_heads: i32,
    /// Heads of keys and values; the query heads are a multiple of it.
    pub num_key_value_heads: i32,
    /// Features of a head.
    pub head_dim: i32,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// How the rotary embedding is stretched to long contexts.
    pub rope_scaling: RopeScaling,
    /// Whether the attention's four projections have a bias.
    pub attention_bias: bool,
    /// Whether the MLP's three projections have a bias.
    pub mlp_bias: bool,
    /// Whether the token embedding is the output projection too.
    pub tie_word_embeddings: bool,
}

impl Config {
    /// A decoder's settings from a model's `config.json`; where that describes several parts, from its `text_config`.
    /// `file` is for messages.
    ///
    /// # Errors
    /// [`Error::Family`] for a model without a decoder here; [`Error::Setting`] for a setting that is missing, out of
    /// range or not implemented.
    pub fn from_json(file: &Path, json: &Map<String, Value>) -> Result<Self, Error> {
        let whole = Settings { file, map: json };
        let s = whole.object("text_config")?.unwrap_or(whole);
        let family = match s.get("model_type").and_then(Value::as_str) {
            Some("llama") => Family::Llama,
            Some("qwen3") => Family::Qwen3,
            _ => {
                let found = s.get("model_type").map_or_else(|| "nothing".to_owned(), Value::to_string);
                return Err(Error::Family { file: file.to_owned(), found, supported: SUPPORTED });
            }
        };
        let act = s.text("hidden_act")?.unwrap_or("silu");
        if !matches!(act, "silu" | "swish") {
            return Err(s.error("hidden_act", "\"silu\""));
        }
        if s.flag("use_sliding_window")? {
            return Err(s.error("use_sliding_window", "false: sliding windows are not implemented"));
        }
        if s.positive_or("partial_rotary_factor", 1.0)? != 1.0 {
            return Err(s.error("partial_rotary_factor", "1: partial rotation is not implemented"));
        }
        let hidden_size = s.dimension("hidden_size")?;
        let heads = s.dimension("num_attention_heads")?;
        let kv_heads = s.dimension_or("num_key_value_heads", heads)?;
        if heads % kv_heads != 0 {
            return Err(s.error("num_key_value_heads", &format!("a divisor of num_attention_heads {heads}")));
        }
        if s.get("head_dim").is_none() && hidden_size % heads != 0 {
            return Err(s.error("num_attention_heads", &format!("a divisor of hidden_size {hidden_size}")));
        }
        let head_dim = s.dimension_or("head_dim", hidden_size / heads)?;
        if head_dim % 2 != 0 {
            return Err(Error::setting(file, "head_dim", head_dim, "an even number, for rotary embedding"));
        }
        if heads.checked_mul(head_dim).is_none() {
            return Err(Error::setting(file, "head_dim", head_dim, "fewer features than MLX's shapes hold"));
        }
        // Newer versions of Hugging Face's library write one object that holds the base too.
        let (rope, key) = match s.object("rope_parameters")? {
            Some(parameters) => (Some(parameters), "rope_parameters"),
            None => (s.object("rope_scaling")?, "rope_scaling"),
        };
        let base = rope.filter(|r| r.get("rope_theta").is_some()).unwrap_or(s);
        Ok(Self {
            family,
            vocab_size: s.dimension("vocab_size")?,
            hidden_size,
            intermediate_size: s.dimension("intermediate_size")?,
            num_hidden_layers: s.dimension("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rms_norm_eps: s.positive_or("rms_norm_eps", DEFAULT_NORM_EPS)? as f32,
            rope_theta: base.positive_or("rope_theta", DEFAULT_BASE)?,
            rope_scaling: RopeScaling::from_json(rope, key)?,
            attention_bias: s.flag("attention_bias")?,
            mlp_bias: family == Family::Llama && s.flag("mlp_bias")?,
            tie_word_embeddings: whole.flag("tie_word_embeddings")? || s.flag("tie_word_embeddings")?,
        })
    }
}
