//! Tiny models in folders, their weights a hash of tensor name and index, as in `golden/make.py`.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::path::{Path, PathBuf};

use mlx_rs::Array;
use mlx_trellis::artifact::to_bytes;
use mlx_trellis::{AxisChoice, QuantizeOptions, Rotation, quantize_weight};
use serde_json::{Value, json};
use trellis_codec::artifact::{ArtifactWriter, Dtype, RawTensor, WriteOptions};

/// Hashes in [-0.5, 0.5): `number` of `golden/make.py`.
pub(crate) fn number(name: &str, count: usize) -> impl Iterator<Item = f64> {
    let seed = name.bytes().fold(0x811C_9DC5u32, |h, byte| (h ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (0..count as u32).map(move |i| {
        let mut x = seed.wrapping_add(i.wrapping_mul(2_654_435_761));
        x ^= x >> 15;
        x = x.wrapping_mul(2_246_822_519);
        x ^= x >> 13;
        f64::from(x) / 4_294_967_296.0 - 0.5
    })
}

pub(crate) fn weight(name: &str, shape: &[usize]) -> Vec<f32> {
    let inputs = *shape.last().unwrap() as f64;
    let scaled = move |name: &str, u: f64| match name {
        _ if name.ends_with("norm.weight") => 1.0 + u,
        _ if name.contains("embed_tokens") => 2.0 * u,
        _ if name.ends_with(".weight") => 6.0 / inputs.sqrt() * u,
        _ => u,
    };
    number(name, shape.iter().product()).map(|u| scaled(name, u) as f32).collect()
}

/// Names and shapes of a model's tensors, under `root`.
pub(crate) fn tensors(config: &Value, root: &str) -> Vec<(String, Vec<usize>)> {
    let n = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, inner, heads) = (n("hidden_size"), n("intermediate_size"), n("num_attention_heads"));
    let dim = config["head_dim"].as_u64().map_or(hidden / heads, |d| d as usize);
    let (q, kv) = (heads * dim, n("num_key_value_heads") * dim);
    let mut list = vec![(format!("{root}.embed_tokens.weight"), vec![n("vocab_size"), hidden])];
    for i in 0..n("num_hidden_layers") {
        let mut add =
            |name: &str, shape: &[usize]| list.push((format!("{root}.layers.{i}.{name}"), shape.to_vec()));
        for (name, out, inputs) in [
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ] {
            add(&format!("{name}.weight"), &[out, inputs]);
            let key = if name.starts_with("mlp") { "mlp_bias" } else { "attention_bias" };
            if config[key] == true {
                add(&format!("{name}.bias"), &[out]);
            }
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(&format!("{norm}.weight"), &[hidden]);
        }
        if config["model_type"] == "qwen3" {
            add("self_attn.q_norm.weight", &[dim]);
            add("self_attn.k_norm.weight", &[dim]);
        }
    }
    list.push((format!("{root}.norm.weight"), vec![hidden]));
    if config["tie_word_embeddings"] != true {
        list.push(("lm_head.weight".to_owned(), vec![n("vocab_size"), hidden]));
    }
    list
}

/// How a matrix is stored.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Dense,
    Affine { bits: i32, group_size: i32 },
    Trellis { bits: u32, axis: AxisChoice, rotated: bool },
}

/// A folder being written.
pub(crate) struct Folder {
    writer: ArtifactWriter,
    path: PathBuf,
}

impl Folder {
    pub(crate) fn new(path: &Path, config: &Value) -> Self {
        let mut writer = ArtifactWriter::create(path, WriteOptions::default()).unwrap();
        writer.set_config(config.clone()).unwrap();
        Self { writer, path: path.to_owned() }
    }

    pub(crate) fn dense(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.raw(name, Dtype::F32, shape, &bytes);
    }

    pub(crate) fn raw(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) {
        self.writer.add_tensor(name, RawTensor { dtype, shape, bytes }).unwrap();
    }

    pub(crate) fn matrix(&mut self, path: &str, shape: &[usize], values: &[f32], form: Form) {
        let &[out, inputs] = shape else { panic!("{path}: {shape:?}") };
        match form {
            Form::Dense => self.dense(&format!("{path}.weight"), shape, values),
            Form::Affine { bits, group_size } => {
                let dense = Array::from_slice(values, &[out as i32, inputs as i32]);
                let (w, s, b) = mlx_rs::ops::quantize(&dense, group_size, bits).unwrap();
                w.eval().unwrap();
                let words: Vec<u8> = w.as_slice::<u32>().iter().flat_map(|v| v.to_le_bytes()).collect();
                let dims = |a: &Array| a.shape().iter().map(|&d| d as usize).collect::<Vec<_>>();
                self.raw(&format!("{path}.weight"), Dtype::U32, &dims(&w), &words);
                for (part, array) in [("scales", s), ("biases", b)] {
                    let (dtype, bytes) = to_bytes(&array).unwrap();
                    self.raw(&format!("{path}.{part}"), dtype, &dims(&array), &bytes);
                }
            }
            Form::Trellis { bits, axis, rotated } => {
                let rotation = rotated.then(|| Rotation::new(32, 1).unwrap());
                let options = QuantizeOptions { bits, axis, rotation, ..QuantizeOptions::default() };
                let encoded = quantize_weight(values, out, inputs, &options, path, None).unwrap();
                self.writer.add_encoded(path, &encoded, None).unwrap();
            }
        }
    }

    pub(crate) fn finish(self) -> PathBuf {
        self.writer.finish().unwrap();
        self.path
    }
}

/// Writes a model; `form` says how each matrix but norms and biases is stored, by its module's path. What
/// `edit` returns `None` for is left out.
pub(crate) fn write_model(
    path: &Path,
    config: &Value,
    root: &str,
    form: impl Fn(&str) -> Form,
    edit: impl Fn(&str, Vec<usize>) -> Option<(String, Vec<usize>)>,
) -> PathBuf {
    let mut folder = Folder::new(path, config);
    for (name, shape) in tensors(config, root) {
        let Some((name, shape)) = edit(&name, shape) else { continue };
        let values = weight(&name, &shape);
        match name.strip_suffix(".weight") {
            Some(module) if shape.len() == 2 => folder.matrix(module, &shape, &values, form(module)),
            _ => folder.dense(&name, &shape, &values),
        }
    }
    folder.finish()
}

/// [`write_model`] of dense weights, nothing edited.
pub(crate) fn write_dense(path: &Path, config: &Value) -> PathBuf {
    write_model(path, config, "model", |_| Form::Dense, |name, shape| Some((name.to_owned(), shape)))
}

/// A tiny configuration.
pub(crate) fn tiny(family: &str) -> Value {
    json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    })
}

/// A folder that goes away with the test.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// `tokens` pseudo-random tokens of a vocabulary.
pub(crate) fn tokens(name: &str, count: usize, vocabulary: u32) -> Vec<u32> {
    number(name, count).map(|u| ((u + 0.5) * f64::from(vocabulary)) as u32).collect()
}

pub(crate) fn floats(array: &Array) -> Vec<f32> {
    let array = array.as_dtype(mlx_rs::Dtype::Float32).unwrap();
    array.eval().unwrap();
    array.to_vec_exact().unwrap()
}

pub(crate) fn greatest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { m.max(d) })
}

/// A byte-level tokenizer without merges, so that each byte is a token, and three special tokens from 256 on.
pub(crate) fn write_tokenizer(folder: &Path) {
    // GPT-2's alphabet: bytes that print stand for themselves, the others for what comes after 255.
    let prints = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut beyond = 256..;
    let letter = |b: u32| if prints(b) { b } else { beyond.next().unwrap() };
    let letters: Vec<char> = (0..256).map(letter).map(|c| char::from_u32(c).unwrap()).collect();
    let vocabulary: serde_json::Map<String, Value> =
        letters.iter().enumerate().map(|(byte, letter)| (letter.to_string(), byte.into())).collect();
    let special: Vec<Value> = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
        .into_iter()
        .enumerate()
        .map(|(i, token)| {
            json!({"id": 256 + i, "content": token, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        })
        .collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": special, "normalizer": null, "pre_tokenizer": bytes, "post_processor": null,
        "decoder": bytes, "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}
