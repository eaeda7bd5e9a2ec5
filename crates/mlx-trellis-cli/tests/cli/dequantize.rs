//! `trellis dequantize` on GGUF files that the tests write themselves.

use std::path::{Path, PathBuf};

use mlx_trellis::{bf16, f16};
use serde_json::{Value, json};
use trellis_codec::artifact::{Dtype, Tensors};

use super::{fails, json as run};

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const FFN: usize = 96;
const VOCABULARY: usize = 260;

/// A metadata value.
enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
}

/// Writes a GGUF file: the format's own documentation, and nothing shared with the reader.
#[derive(Default)]
struct Writer {
    meta: Vec<(String, Meta)>,
    /// Name, dimensions (the contiguous one first), type number, data.
    tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

impl Writer {
    fn bytes(&self) -> Vec<u8> {
        let string = |out: &mut Vec<u8>, s: &str| {
            out.extend((s.len() as u64).to_le_bytes());
            out.extend(s.as_bytes());
        };
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, value) in &self.meta {
            string(&mut out, key);
            let kind = |out: &mut Vec<u8>, n: u32| out.extend(n.to_le_bytes());
            match value {
                Meta::U32(n) => {
                    kind(&mut out, 4);
                    out.extend(n.to_le_bytes());
                }
                Meta::F32(x) => {
                    kind(&mut out, 6);
                    out.extend(x.to_le_bytes());
                }
                Meta::Bool(b) => {
                    kind(&mut out, 7);
                    out.push(u8::from(*b));
                }
                Meta::Str(s) => {
                    kind(&mut out, 8);
                    string(&mut out, s);
                }
                Meta::Strs(all) => {
                    kind(&mut out, 9);
                    kind(&mut out, 8);
                    out.extend((all.len() as u64).to_le_bytes());
                    all.iter().for_each(|s| string(&mut out, s));
                }
                Meta::I32s(all) => {
                    kind(&mut out, 9);
                    kind(&mut out, 5);
                    out.extend((all.len() as u64).to_le_bytes());
                    out.extend(all.iter().flat_map(|n| n.to_le_bytes()));
                }
            }
        }
        let mut data = Vec::new();
        for (name, dims, kind, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|&d| (d as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            data.resize(data.len().next_multiple_of(32), 0);
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }

    fn set(&mut self, key: &str, value: Meta) {
        self.meta.retain(|(k, _)| k != key);
        self.meta.push((key.to_owned(), value));
    }
}

/// Bytes of a tensor in a type of ggml, and what they decode to.
fn coded(kind: u32, weights: usize, seed: usize) -> (Vec<u8>, Vec<f32>) {
    let byte = |i: usize| ((i * 167 + seed * 31) >> 2) as u8;
    let half = |x: f32| f16::from_f32(x);
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    match kind {
        0 => values.extend((0..weights).map(|i| ((i + seed) as f32 * 0.37).sin())),
        1 => values.extend((0..weights).map(|i| half(((i + seed) as f32 * 0.37).sin()).to_f32())),
        30 => values.extend((0..weights).map(|i| bf16::from_f32(((i + seed) as f32 * 0.37).sin()).to_f32())),
        _ => {
            for block in 0..weights / 32 {
                let (scale, least) =
                    (half(0.01 * (block % 9 + 1) as f32), half(-0.3 - 0.1 * (block % 5) as f32));
                bytes.extend(scale.to_le_bytes());
                if kind == 3 {
                    bytes.extend(least.to_le_bytes());
                }
                let codes: Vec<u8> =
                    (0..if kind == 8 { 32 } else { 16 }).map(|i| byte(block * 32 + i)).collect();
                bytes.extend(&codes);
                let scale = scale.to_f32();
                for i in 0..32 {
                    let nibble = |i: usize| if i < 16 { codes[i] & 15 } else { codes[i - 16] >> 4 };
                    values.push(match kind {
                        2 => scale * (f32::from(nibble(i)) - 8.0),
                        3 => scale * f32::from(nibble(i)) + least.to_f32(),
                        _ => scale * f32::from(codes[i] as i8),
                    });
                }
            }
        }
    }
    match kind {
        0 => bytes.extend(values.iter().flat_map(|x| x.to_le_bytes())),
        1 => bytes.extend(values.iter().flat_map(|&x| half(x).to_le_bytes())),
        30 => bytes.extend(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        _ => {}
    }
    (bytes, values)
}

/// Name in GGUF and in Hugging Face, rows, columns, type, heads whose rows are permuted.
fn layout(architecture: &str) -> Vec<(String, String, usize, usize, u32, Option<usize>)> {
    let (blk, to) = ("blk.0", "model.layers.0");
    let mut all = vec![
        ("token_embd".to_owned(), "model.embed_tokens".to_owned(), VOCABULARY, HIDDEN, 8, None),
        ("output_norm".to_owned(), "model.norm".to_owned(), 1, HIDDEN, 0, None),
    ];
    let llama = architecture == "llama";
    let mut add = |from: &str, name: &str, rows, cols, kind, heads| {
        all.push((format!("{blk}.{from}"), format!("{to}.{name}"), rows, cols, kind, heads));
    };
    add("attn_norm", "input_layernorm", 1, HIDDEN, 0, None);
    add("ffn_norm", "post_attention_layernorm", 1, HIDDEN, 0, None);
    add("attn_q", "self_attn.q_proj", HEADS * HEAD, HIDDEN, 3, llama.then_some(HEADS));
    add("attn_k", "self_attn.k_proj", KV_HEADS * HEAD, HIDDEN, 8, llama.then_some(KV_HEADS));
    add("attn_v", "self_attn.v_proj", KV_HEADS * HEAD, HIDDEN, 2, None);
    add("attn_output", "self_attn.o_proj", HIDDEN, HEADS * HEAD, 1, None);
    add("ffn_gate", "mlp.gate_proj", FFN, HIDDEN, 30, None);
    add("ffn_up", "mlp.up_proj", FFN, HIDDEN, 0, None);
    add("ffn_down", "mlp.down_proj", HIDDEN, FFN, 3, None);
    if !llama {
        add("attn_q_norm", "self_attn.q_norm", 1, HEAD, 0, None);
        add("attn_k_norm", "self_attn.k_norm", 1, HEAD, 0, None);
        all.push(("output".to_owned(), "lm_head".to_owned(), VOCABULARY, HIDDEN, 2, None));
    }
    all
}

fn toy(architecture: &str) -> Writer {
    let mut w = Writer::default();
    w.set("general.architecture", Meta::Str(architecture.to_owned()));
    let number =
        |w: &mut Writer, key: &str, n: usize| w.set(&format!("{architecture}.{key}"), Meta::U32(n as u32));
    number(&mut w, "block_count", 1);
    number(&mut w, "context_length", 128);
    number(&mut w, "embedding_length", HIDDEN);
    number(&mut w, "feed_forward_length", FFN);
    number(&mut w, "attention.head_count", HEADS);
    number(&mut w, "attention.head_count_kv", KV_HEADS);
    number(&mut w, "attention.key_length", HEAD);
    w.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Meta::F32(1e-5));
    w.set(&format!("{architecture}.rope.freq_base"), Meta::F32(1e6));
    let mut tokens: Vec<String> = vec!["<|end|>".to_owned()];
    tokens.extend((0..256).map(|i| char::from_u32(0x100 + i).unwrap().to_string()));
    tokens.extend(["\u{100}\u{101}", "<tool>", "[PAD259]"].map(str::to_owned));
    let mut kinds = vec![1; VOCABULARY];
    (kinds[0], kinds[258], kinds[259]) = (3, 4, 5);
    w.set("tokenizer.ggml.model", Meta::Str("gpt2".to_owned()));
    w.set(
        "tokenizer.ggml.pre",
        Meta::Str(if architecture == "llama" { "smollm" } else { "qwen2" }.to_owned()),
    );
    w.set("tokenizer.ggml.tokens", Meta::Strs(tokens));
    w.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    w.set("tokenizer.ggml.merges", Meta::Strs(vec!["\u{100} \u{101}".to_owned()]));
    w.set("tokenizer.ggml.bos_token_id", Meta::U32(0));
    w.set("tokenizer.ggml.eos_token_id", Meta::U32(0));
    w.set("tokenizer.ggml.add_bos_token", Meta::Bool(architecture == "llama"));
    w.set("tokenizer.chat_template", Meta::Str("{{ messages }}".to_owned()));
    for (i, (name, _, rows, cols, kind, _)) in layout(architecture).into_iter().enumerate() {
        let dims = if rows == 1 { vec![cols] } else { vec![cols, rows] };
        w.tensors.push((format!("{name}.weight"), dims, kind, coded(kind, rows * cols, i).0));
    }
    w
}

fn read(folder: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn gguf_becomes_the_folder_it_was_made_from() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in ["llama", "qwen3"] {
        let file = folder.path().join(format!("{architecture}.gguf"));
        toy(architecture).write(&file);
        let output = folder.path().join(architecture);
        run(&["dequantize", s(&file), "-o", s(&output), "--json"]);
        let tensors = Tensors::open(&output).unwrap();
        let all = layout(architecture);
        assert_eq!(tensors.len(), all.len());
        for (i, (_, name, rows, cols, kind, heads)) in all.into_iter().enumerate() {
            let tensor = tensors.get(&format!("{name}.weight")).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(tensor.dtype, Dtype::F32);
            assert_eq!(tensor.shape, if rows == 1 { vec![cols] } else { vec![rows, cols] }, "{name}");
            let found: Vec<f32> = tensor.bytes.as_chunks().0.iter().map(|&c| f32::from_le_bytes(c)).collect();
            let stored = coded(kind, rows * cols, i).1;
            for row in 0..rows {
                // Where the converter puts row `half * j + i` of a head: at `2 i + j`.
                let from = heads.map_or(row, |heads| {
                    let size = rows / heads;
                    let (head, within) = (row / size, row % size);
                    head * size + 2 * (within % (size / 2)) + within / (size / 2)
                });
                assert_eq!(found[row * cols..][..cols], stored[from * cols..][..cols], "{name} row {row}");
            }
        }

        let config = read(&output, "config.json");
        let expected = json!({
            "model_type": architecture, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": FFN, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "max_position_embeddings": 128, "vocab_size": VOCABULARY,
            "tie_word_embeddings": architecture == "llama", "bos_token_id": 0, "eos_token_id": 0,
            "torch_dtype": "float32",
        });
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(config[key], *value, "{key}");
        }
        let tokenizer = read(&output, "tokenizer.json");
        let model = &tokenizer["model"];
        assert_eq!(model["vocab"].as_object().unwrap().len(), VOCABULARY - 1, "no padding token");
        assert_eq!(model["vocab"]["\u{100}\u{101}"], 257);
        assert_eq!(model["merges"], json!([["\u{100}", "\u{101}"]]));
        let added: Vec<_> =
            tokenizer["added_tokens"].as_array().unwrap().iter().map(|t| (&t["id"], &t["special"])).collect();
        assert_eq!(added, [(&json!(0), &json!(true)), (&json!(258), &json!(false))]);
        let first = &tokenizer["pre_tokenizer"]["pretokenizers"][0]["type"];
        assert_eq!(first, if architecture == "llama" { "Digits" } else { "Split" });
        let begins = &tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"];
        assert_eq!(*begins, if architecture == "llama" { json!("<|end|>") } else { Value::Null });
        let settings = read(&output, "tokenizer_config.json");
        assert_eq!(settings["chat_template"], "{{ messages }}");
        assert_eq!(settings["eos_token"], "<|end|>");
        assert_eq!(read(&output, "generation_config.json")["eos_token_id"], 0);
    }
}

#[test]
fn dtypes_are_rounded_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("toy.gguf");
    toy("llama").write(&file);
    let (half, brain) = (folder.path().join("half"), folder.path().join("brain"));
    run(&["dequantize", s(&file), "-o", s(&half), "--dtype", "float16", "--json"]);
    run(&["dequantize", s(&file), "-o", s(&brain), "--dtype", "bfloat16", "--json"]);
    let name = "model.layers.0.mlp.up_proj.weight";
    let index = layout("llama").iter().position(|l| l.0 == "blk.0.ffn_up").unwrap();
    let exact = coded(0, FFN * HIDDEN, index).1;
    let bytes = |folder: &PathBuf| Tensors::open(folder).unwrap().read(name).unwrap();
    assert_eq!(bytes(&half), exact.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect::<Vec<_>>());
    assert_eq!(
        bytes(&brain),
        exact.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<_>>()
    );
    assert_eq!(read(&half, "config.json")["torch_dtype"], "float16");
}

#[test]
fn a_quantized_gguf_is_quantized_only_on_demand() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("toy.gguf");
    toy("qwen3").write(&file);
    let (direct, decoded, through) =
        (folder.path().join("direct"), folder.path().join("decoded"), folder.path().join("through"));
    let error = fails(&["quantize", s(&file), "-o", s(&direct)]);
    assert!(error.contains("is GGUF Q8_0") && error.contains("--requantize"), "{error}");
    run(&["quantize", s(&file), "-o", s(&direct), "--requantize", "--json"]);
    run(&["dequantize", s(&file), "-o", s(&decoded), "--json"]);
    run(&["quantize", s(&decoded), "-o", s(&through), "--dtype", "float16", "--json"]);
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&direct), names(&through));
    for name in names(&direct) {
        let content = |folder: &Path| std::fs::read(folder.join(&name)).unwrap();
        assert_eq!(content(&direct), content(&through), "{name}");
    }
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("toy.gguf");
    let output = folder.path().join("out");
    let refused = |bytes: &[u8], expected: &str| {
        std::fs::write(&file, bytes).unwrap();
        let error = fails(&["dequantize", s(&file), "-o", s(&output)]);
        assert!(error.contains("toy.gguf") && error.contains(expected), "{expected}: {error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
    };
    let changed = |change: &dyn Fn(&mut Writer)| {
        let mut w = toy("llama");
        change(&mut w);
        w.bytes()
    };
    let named = |w: &mut Writer, name: &str| w.tensors.iter().position(|t| t.0 == name).unwrap();

    let whole = toy("llama").bytes();
    refused(&whole[..whole.len() - 100], "within the file");
    refused(&whole[..12], "the header ends");
    refused(&whole[..40], "more than the 8 left");
    refused(b"GGML", "expected GGUF");
    refused(&[b"GGUF".as_slice(), &9u32.to_le_bytes()].concat(), "version is 9");
    let huge =
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &0u64.to_le_bytes(), &1u64.to_le_bytes(), &[0xff; 8]]
            .concat();
    refused(&huge, "more than the");

    refused(&changed(&|w| w.set("general.architecture", Meta::Str("gemma3".into()))), "\"gemma3\"");
    refused(&changed(&|w| w.set("tokenizer.ggml.pre", Meta::Str("llama-bpe".into()))), "\"llama-bpe\"");
    refused(&changed(&|w| w.set("tokenizer.ggml.model", Meta::Str("llama".into()))), "expected gpt2");
    refused(&changed(&|w| w.set("llama.rope.scaling.type", Meta::Str("yarn".into()))), "\"yarn\"");
    refused(&changed(&|w| w.set("llama.rope.dimension_count", Meta::U32(8))), "rotary embedding 8");
    refused(&changed(&|w| w.set("llama.attention.head_count", Meta::U32(3))), "3 heads and 2");
    refused(&changed(&|w| w.set("llama.feed_forward_length", Meta::U32(64))), "expected [64, 64]");
    refused(&changed(&|w| w.set("llama.block_count", Meta::U32(2))), "blk.1.attn_norm.weight is missing");
    refused(&changed(&|w| w.set("split.count", Meta::U32(2))), "one of 2 parts");
    refused(&changed(&|w| w.set("llama.context_length", Meta::Bool(true))), "is a boolean");
    let last = |w: &mut Writer| w.tensors.last().cloned().unwrap();
    refused(
        &changed(&|w| {
            let mut extra = last(w);
            extra.0 = "blk.0.ffn_gate_inp.weight".into();
            w.tensors.push(extra);
        }),
        "ffn_gate_inp.weight: not part of the llama architecture",
    );
    refused(
        &changed(&|w| {
            let twice = last(w);
            w.tensors.push(twice);
        }),
        "there twice",
    );
    refused(
        &changed(&|w| {
            let i = named(w, "blk.0.attn_q.weight");
            w.tensors[i].2 = 14;
        }),
        "tensor blk.0.attn_q.weight: type is Q6_K",
    );
    refused(
        &changed(&|w| {
            let i = named(w, "blk.0.attn_q.weight");
            w.tensors[i].1 = vec![40, 64];
        }),
        "a multiple of 32 for Q4_1",
    );
}
