//! A GGUF file as the Hugging Face folder it was made from: names, rows in their order, `config.json`.
//!
//! llama.cpp's `convert_hf_to_gguf.py` renames the tensors and, for `llama`, reorders the rows of q and k so that the
//! two halves that rotary embedding pairs lie next to each other. Both are undone here. A tensor, a metadata value or
//! an architecture that would change what the model computes and is not known is refused.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};
use trellis_codec::artifact::Dtype;

use super::gguf::Gguf;
use super::tokenizer;
use super::{Stored, TensorInfo, Values};

/// An architecture as both sides name it.
struct Architecture {
    gguf: &'static str,
    class: &'static str,
    /// Whether rows of q and k were reordered.
    permuted: bool,
    /// Whether each head of q and k is normalised.
    head_norms: bool,
}

const ARCHITECTURES: [Architecture; 2] = [
    Architecture { gguf: "llama", class: "LlamaForCausalLM", permuted: true, head_norms: false },
    Architecture { gguf: "qwen3", class: "Qwen3ForCausalLM", permuted: false, head_norms: true },
];

/// Tensors of a layer: name in GGUF, name in Hugging Face, whether it is a matrix.
const LAYER: [(&str, &str, bool); 9] = [
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", true),
    ("attn_output", "self_attn.o_proj", true),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", true),
    ("ffn_up", "mlp.up_proj", true),
    ("ffn_down", "mlp.down_proj", true),
];

/// Norms of a layer's heads, for the architectures that have them.
const HEAD_NORMS: [(&str, &str); 2] =
    [("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm")];

/// A model's dimensions, under the names that Hugging Face gives them.
struct Dimensions {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    vocabulary: usize,
}

/// A GGUF file seen as a Hugging Face model.
pub(crate) struct Model {
    gguf: Gguf,
    tensors: Vec<TensorInfo>,
    /// For each of `tensors`: its name in the file, and the heads whose rows are to be put back in order.
    origins: Vec<(String, Option<usize>)>,
    config: Map<String, Value>,
    files: Vec<(String, Vec<u8>)>,
}

impl Model {
    /// Opens a file and checks that it is the whole of a model of a known architecture.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        Self::from_gguf(gguf).with_context(|| format!("{}", path.display()))
    }

    fn from_gguf(gguf: Gguf) -> Result<Self> {
        let name = gguf.string("general.architecture")?.context("found no general.architecture")?;
        let Some(architecture) = ARCHITECTURES.iter().find(|a| a.gguf == name) else {
            let known: Vec<_> = ARCHITECTURES.iter().map(|a| a.gguf).collect();
            bail!("general.architecture is {name:?}, expected one of {}", known.join(", "));
        };
        if let Some(parts) = gguf.integer("split.count")?.filter(|&n| n > 1) {
            bail!(
                "this is one of {parts} parts of a split file, expected a whole one (llama-gguf-split --merge)"
            );
        }
        let dimensions = Dimensions::read(&gguf, architecture)?;
        let expected = dimensions.tensors(&gguf, architecture);
        let mut model =
            Self { tensors: Vec::new(), origins: Vec::new(), config: Map::new(), files: Vec::new(), gguf };
        for (from, to, shape, heads) in expected {
            let tensor =
                model.gguf.tensors.get(&from).with_context(|| format!("tensor {from} is missing"))?;
            ensure!(
                tensor.shape == shape,
                "tensor {from}: shape is {:?}, expected {shape:?} from the metadata",
                tensor.shape
            );
            let ggml_type = tensor.ggml_type;
            let stored =
                if ggml_type.is_quantized() { Stored::Gguf(ggml_type.name()) } else { Stored::Plain };
            model.tensors.push(TensorInfo { name: to, shape, dtype: ggml_type.dtype(), stored });
            model.origins.push((from, heads.filter(|_| architecture.permuted)));
        }
        let known: HashSet<&String> = model.origins.iter().map(|(name, _)| name).collect();
        if let Some(name) = model.gguf.tensors.keys().find(|name| !known.contains(name)) {
            bail!("tensor {name}: not part of the {} architecture as it is known here", architecture.gguf);
        }
        model.config = config(&model.gguf, architecture, &dimensions)?;
        model.files = tokenizer::files(&model.gguf)?;
        Ok(model)
    }

    /// The tensors under their Hugging Face names, in the order of the layers.
    pub(crate) fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// `config.json`, without a dtype.
    pub(crate) fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// The tokenizer's and the generation's files, made from the metadata.
    pub(crate) fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// The numbers of a tensor as Hugging Face orders them.
    pub(crate) fn values(&self, index: usize) -> Result<Values> {
        let (from, heads) = &self.origins[index];
        let values = self.gguf.read(from)?;
        let Some(heads) = *heads else { return Ok(values) };
        let rows = self.tensors[index].shape[0];
        Ok(match values {
            Values::F32(v) => Values::F32(unpermute(&v, rows, heads)),
            Values::F16(v) => Values::F16(unpermute(&v, rows, heads)),
            Values::Bf16(v) => Values::Bf16(unpermute(&v, rows, heads)),
        })
    }
}

/// Puts rows back: row `2i + j` of a head's rows in GGUF is row `i + j * half` of them in Hugging Face (`permute` in
/// llama.cpp's `convert_hf_to_gguf.py`).
fn unpermute<T: Copy>(values: &[T], rows: usize, heads: usize) -> Vec<T> {
    let (width, half) = (values.len() / rows, rows / heads / 2);
    let mut out = Vec::with_capacity(values.len());
    for row in 0..rows {
        let (head, within) = (row / (2 * half), row % (2 * half));
        let from = head * 2 * half + within % half * 2 + within / half;
        out.extend_from_slice(&values[from * width..][..width]);
    }
    out
}

impl Dimensions {
    fn read(gguf: &Gguf, architecture: &Architecture) -> Result<Self> {
        let prefix = architecture.gguf;
        let get = |key: &str| -> Result<Option<usize>> {
            Ok(gguf.integer(&format!("{prefix}.{key}"))?.map(usize::try_from).transpose()?)
        };
        let need = |key: &str| get(key)?.with_context(|| format!("found no {prefix}.{key}"));
        let (hidden, heads) = (need("embedding_length")?, need("attention.head_count")?);
        let kv_heads = get("attention.head_count_kv")?.unwrap_or(heads);
        ensure!(
            heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "{heads} heads and {kv_heads} key-value heads, expected the second to divide the first"
        );
        let head = get("attention.key_length")?.unwrap_or(hidden / heads);
        let value = get("attention.value_length")?.unwrap_or(head);
        let rotary = get("rope.dimension_count")?.unwrap_or(head);
        ensure!(
            head > 0 && head.is_multiple_of(2) && head < 1 << 20 && value == head && rotary == head,
            "keys have {head} dimensions, values {value}, rotary embedding {rotary}, expected one even number"
        );
        if let Some(scaling) = gguf.string(&format!("{prefix}.rope.scaling.type"))?.filter(|&s| s != "none") {
            bail!("{prefix}.rope.scaling.type is {scaling:?}, expected none");
        }
        let embedding =
            gguf.tensors.get("token_embd.weight").context("tensor token_embd.weight is missing")?;
        Ok(Self {
            layers: need("block_count")?,
            hidden,
            intermediate: need("feed_forward_length")?,
            heads,
            kv_heads,
            head,
            vocabulary: embedding.shape[0],
        })
    }

    /// Each tensor of the model: name in GGUF, name in Hugging Face, shape, heads of the rows of q and k.
    fn tensors(
        &self,
        gguf: &Gguf,
        architecture: &Architecture,
    ) -> Vec<(String, String, Vec<usize>, Option<usize>)> {
        let matrix = |name: &str| {
            let (queries, keys) =
                (self.heads.saturating_mul(self.head), self.kv_heads.saturating_mul(self.head));
            match name {
                "attn_q" => (queries, self.hidden, Some(self.heads)),
                "attn_k" => (keys, self.hidden, Some(self.kv_heads)),
                "attn_v" => (keys, self.hidden, None),
                "attn_output" => (self.hidden, queries, None),
                "ffn_down" => (self.hidden, self.intermediate, None),
                _ => (self.intermediate, self.hidden, None),
            }
        };
        let mut all = Vec::new();
        let mut add = |from: String, to: String, shape, heads| all.push((from, to, shape, heads));
        let (vocabulary, hidden) = (self.vocabulary, self.hidden);
        add("token_embd.weight".into(), "model.embed_tokens.weight".into(), vec![vocabulary, hidden], None);
        // A count beyond the tensors there are is found out at the first that is missing.
        for layer in 0..self.layers.min(gguf.tensors.len() + 1) {
            let (blk, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
            for (name, target, is_matrix) in LAYER {
                let (weight, target) = (format!("{blk}.{name}.weight"), format!("{to}.{target}"));
                if !is_matrix {
                    add(weight, format!("{target}.weight"), vec![hidden], None);
                    continue;
                }
                let (out, n, heads) = matrix(name);
                add(weight, format!("{target}.weight"), vec![out, n], heads);
                let bias = format!("{blk}.{name}.bias");
                if gguf.tensors.contains_key(&bias) {
                    add(bias, format!("{target}.bias"), vec![out], heads);
                }
            }
            if architecture.head_norms {
                for (name, target) in HEAD_NORMS {
                    add(
                        format!("{blk}.{name}.weight"),
                        format!("{to}.{target}.weight"),
                        vec![self.head],
                        None,
                    );
                }
            }
        }
        add("output_norm.weight".into(), "model.norm.weight".into(), vec![hidden], None);
        if gguf.tensors.contains_key("output.weight") {
            add("output.weight".into(), "lm_head.weight".into(), vec![vocabulary, hidden], None);
        }
        all
    }
}

fn config(gguf: &Gguf, architecture: &Architecture, d: &Dimensions) -> Result<Map<String, Value>> {
    let prefix = architecture.gguf;
    let key = |key: &str| format!("{prefix}.{key}");
    let epsilon = key("attention.layer_norm_rms_epsilon");
    let has = |part: &str| gguf.tensors.keys().any(|name| name.contains(part) && name.ends_with(".bias"));
    let mut config = json!({
        "architectures": [architecture.class],
        "model_type": prefix,
        "hidden_size": d.hidden,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head,
        "intermediate_size": d.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": gguf.float(&epsilon)?.with_context(|| format!("found no {epsilon}"))?,
        // The base that ggml takes where the file names none.
        "rope_theta": gguf.float(&key("rope.freq_base"))?.unwrap_or(10000.0),
        "rope_scaling": null,
        "max_position_embeddings": gguf.integer(&key("context_length"))?
            .with_context(|| format!("found no {}", key("context_length")))?,
        "vocab_size": d.vocabulary,
        "tie_word_embeddings": !gguf.tensors.contains_key("output.weight"),
        "attention_bias": has(".attn_"),
        "attention_dropout": 0.0,
    });
    let map = config.as_object_mut().expect("an object was just made");
    if prefix == "llama" {
        map.insert("mlp_bias".to_owned(), has(".ffn_").into());
    } else {
        ensure!(!has(".ffn_"), "the feed-forward layers have biases, expected none for {prefix}");
        map.insert("use_sliding_window".to_owned(), false.into());
    }
    for (name, key) in [("bos_token_id", tokenizer::BOS), ("eos_token_id", tokenizer::EOS)] {
        if let Some(id) = gguf.integer(key)? {
            map.insert(name.to_owned(), id.into());
        }
    }
    Ok(std::mem::take(map))
}

/// Sets the dtype that a model's config names.
pub(crate) fn set_dtype(config: &mut Map<String, Value>, dtype: Dtype) {
    let name = match dtype {
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        _ => "float32",
    };
    config.insert("torch_dtype".to_owned(), name.into());
    // The name that newer versions of transformers write.
    if let Some(newer) = config.get_mut("dtype") {
        *newer = name.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula of the converter: reshape to `[heads, 2, half, width]` and swap the middle two.
    #[test]
    fn unpermute_undoes_the_converter() {
        let (heads, half, width) = (3, 4, 5);
        let rows = heads * 2 * half;
        let original: Vec<u32> = (0..(rows * width) as u32).collect();
        let mut permuted = Vec::new();
        for head in 0..heads {
            for i in 0..half {
                for j in 0..2 {
                    let row = head * 2 * half + j * half + i;
                    permuted.extend_from_slice(&original[row * width..][..width]);
                }
            }
        }
        assert_ne!(permuted, original);
        assert_eq!(unpermute(&permuted, rows, heads), original);
    }
}
