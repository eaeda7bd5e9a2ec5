//! A Qwen3 model with the real shapes of one layer (those of Qwen3-32B), in the layout of public trellis artifacts. The
//! codes are random bits, all of which are valid.

mod support;

use std::time::Instant;

use mlx_rs::Dtype;
use mlx_trellis::{Axis, Geometry, Layout, f16};
use mlx_trellis_models::{LinearForm, LoadOptions, Model};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use trellis_codec::artifact::{ArtifactWriter, Dtype as FileDtype, KeySpace, RawTensor, WriteOptions};

const HIDDEN: usize = 5120;
const INNER: usize = 17408;
const HEADS: usize = 64;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const VOCABULARY: usize = 512;

#[test]
fn loads_and_runs_a_layer_of_real_shape() {
    let started = Instant::now();
    let folder = support::scratch();
    let path = folder.path().join("m");
    let root = "language_model.model";
    let config = json!({
        "model_type": "some_larger_model",
        "text_config": {
            "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false,
            "attention_bias": false, "use_sliding_window": false, "hidden_act": "silu",
        },
    });
    // Tensors in one of the format's key spaces, config entries in the other.
    let options = WriteOptions { key_space: KeySpace::ModelLanguageModel, ..WriteOptions::default() };
    let mut writer = ArtifactWriter::create(&path, options).unwrap();
    writer.set_config(config).unwrap();
    let mut rng = SmallRng::seed_from_u64(5);
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for (name, out, inputs, axis, bits) in [
        ("self_attn.q_proj", q, HIDDEN, Axis::Input, 4),
        ("self_attn.k_proj", kv, HIDDEN, Axis::Output, 4),
        ("self_attn.v_proj", kv, HIDDEN, Axis::Input, 4),
        ("self_attn.o_proj", HIDDEN, q, Axis::Output, 3),
        ("mlp.gate_proj", INNER, HIDDEN, Axis::Input, 2),
        ("mlp.up_proj", INNER, HIDDEN, Axis::Input, 2),
        ("mlp.down_proj", HIDDEN, INNER, Axis::Output, 3),
    ] {
        let mut g = Geometry::for_linear(axis, bits, 12, 256, out, inputs).unwrap();
        if name == "mlp.down_proj" {
            g = g.with_layout(Layout::Interleaved).unwrap();
        }
        let codes: Vec<u32> = (0..g.words()).map(|_| rng.random()).collect();
        let scales = vec![f16::from_f32((inputs as f32).sqrt().recip()); g.rows()];
        writer.add_module(&format!("{root}.layers.0.{name}"), &g, &codes, &scales, None).unwrap();
    }
    let mut float = |name: &str, shape: &[usize], spread: f32| {
        let count: usize = shape.iter().product();
        let number = |_| 1.0 - spread + spread * rng.random_range(-1.0f32..1.0);
        let bytes: Vec<u8> =
            (0..count).map(number).flat_map(|v| mlx_trellis::bf16::from_f32(v).to_le_bytes()).collect();
        writer.add_tensor(name, RawTensor { dtype: FileDtype::BF16, shape, bytes: &bytes }).unwrap();
    };
    float(&format!("{root}.embed_tokens.weight"), &[VOCABULARY, HIDDEN], 1.0);
    float("language_model.lm_head.weight", &[VOCABULARY, HIDDEN], 1.0);
    float(&format!("{root}.norm.weight"), &[HIDDEN], 0.1);
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        float(&format!("{root}.layers.0.{norm}.weight"), &[HIDDEN], 0.1);
    }
    for norm in ["q_norm", "k_norm"] {
        float(&format!("{root}.layers.0.self_attn.{norm}.weight"), &[HEAD_DIM], 0.1);
    }
    writer.finish().unwrap();
    let written = started.elapsed();

    let mut model = Model::load(&path, &LoadOptions::default()).unwrap();
    let loaded = started.elapsed() - written;
    let forms: Vec<LinearForm> = model.linears().iter().map(|l| l.form).collect();
    let trellis = |bits| LinearForm::Trellis { bits };
    assert_eq!(
        forms,
        [4, 4, 4, 3, 2, 2, 3].map(trellis).into_iter().chain([LinearForm::Dense]).collect::<Vec<_>>()
    );
    let mut cache = model.new_cache();
    let logits = model.forward(&[1, 2, 3], &mut cache).unwrap();
    assert_eq!((logits.shape(), logits.dtype()), (&[1, 3, VOCABULARY as i32][..], Dtype::Bfloat16));
    let logits = support::floats(&logits);
    assert!(logits.iter().all(|v| v.is_finite()) && logits.iter().any(|v| v.abs() > 1.0));
    let next = support::floats(&model.next_logits(&[4], &mut cache).unwrap());
    assert_eq!(next.len(), VOCABULARY);
    println!("written in {written:?}, loaded in {loaded:?}, all in {:?}", started.elapsed());
}
