//! What the loader takes and what it refuses.

mod support;

use mlx_trellis::AxisChoice;
use mlx_trellis_models::{LinearForm, LoadOptions, Model, RopeScaling};
use serde_json::{Value, json};
use support::{Folder, Form, floats, scratch, tensors, tiny, weight, write_dense, write_model};
use trellis_codec::artifact::Dtype;

fn as_stored(name: &str, shape: Vec<usize>) -> Option<(String, Vec<usize>)> {
    Some((name.to_owned(), shape))
}

fn dense(_: &str) -> Form {
    Form::Dense
}

fn set(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn load(path: &std::path::Path) -> Result<Model, mlx_trellis_models::Error> {
    Model::load(path, &LoadOptions::default())
}

/// What loading says of a model with this configuration, whose tensors are those of the tiny one's.
fn refusal(changes: Value) -> String {
    let folder = scratch();
    let config = set(tiny("llama"), changes);
    let mut writer = Folder::new(&folder.path().join("m"), &config);
    for (name, shape) in tensors(&tiny("llama"), "model") {
        writer.dense(&name, &shape, &weight(&name, &shape));
    }
    load(&writer.finish()).unwrap_err().to_string()
}

#[track_caller]
fn says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in {message:?}");
    }
}

#[test]
fn refuses_settings_it_does_not_implement() {
    for (changes, parts) in [
        (json!({"model_type": "mistral"}), ["model_type: found \"mistral\"", "one of llama, qwen3"]),
        (json!({"model_type": null}), ["model_type: found nothing", "llama"]),
        (json!({"hidden_act": "gelu"}), ["hidden_act: found \"gelu\"", "silu"]),
        (json!({"use_sliding_window": true}), ["use_sliding_window: found true", "false"]),
        (json!({"partial_rotary_factor": 0.5}), ["partial_rotary_factor: found 0.5", "1"]),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 2}}),
            ["rope_scaling.type: found \"yarn\"", "llama3"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "longrope"}}),
            ["rope_parameters.rope_type: found \"longrope\"", "linear"],
        ),
        (json!({"rope_scaling": {"type": "linear"}}), ["factor: found nothing", "above zero"]),
        (json!({"rope_scaling": "linear"}), ["rope_scaling: found \"linear\"", "an object"]),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
            ["high_freq_factor: found 4", "more than low_freq_factor 4"],
        ),
    ] {
        let message = refusal(changes);
        says(&message, &["config.json"]);
        says(&message, &parts);
    }
}

#[test]
fn refuses_dimensions_that_make_no_model() {
    for (changes, parts) in [
        (json!({"hidden_size": 0}), ["hidden_size: found 0", "from 1"]),
        (json!({"vocab_size": 2147483648u64}), ["vocab_size: found 2147483648", "2147483647"]),
        (json!({"intermediate_size": "96"}), ["intermediate_size: found \"96\"", "whole number"]),
        (
            json!({"num_key_value_heads": 3}),
            ["num_key_value_heads: found 3", "divisor of num_attention_heads 4"],
        ),
        (json!({"head_dim": 33}), ["head_dim: found 33", "even"]),
        (
            json!({"head_dim": null, "num_attention_heads": 5, "num_key_value_heads": 5}),
            ["num_attention_heads: found 5", "divisor of hidden_size 64"],
        ),
        (json!({"rms_norm_eps": -1}), ["rms_norm_eps: found -1", "above zero"]),
        (json!({"tie_word_embeddings": 1}), ["tie_word_embeddings: found 1", "true or false"]),
    ] {
        says(&refusal(changes), &parts);
    }
}

#[test]
fn refuses_tensors_that_are_not_the_models() {
    let cases: [(Value, &[&str]); 6] = [
        (
            json!({"num_hidden_layers": 3}),
            &["model.layers.2.input_layernorm.weight: found no such tensor", "F32, F16 or BF16 [64]"],
        ),
        (json!({"tie_word_embeddings": false}), &["lm_head.weight: found no such tensor", "[96, 64]"]),
        (
            json!({"attention_bias": true}),
            &["model.layers.0.self_attn.q_proj.bias: found no such tensor", "[128]"],
        ),
        (json!({"model_type": "qwen3"}), &["self_attn.q_norm.weight: found no such tensor", "[32]"]),
        (
            json!({"intermediate_size": 128}),
            &[
                "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight: found F32 [96, 64]",
                "[128, 64]",
            ],
        ),
        (
            json!({"num_hidden_layers": 1}),
            &[
                "found 9 tensors that no part of the model takes",
                "first is model.layers.1.input_layernorm.weight",
            ],
        ),
    ];
    for (changes, parts) in cases {
        says(&refusal(changes), parts);
    }
    let folder = scratch();
    let mut writer = Folder::new(&folder.path().join("m"), &tiny("llama"));
    for (name, shape) in tensors(&tiny("llama"), "model") {
        if name.ends_with("up_proj.weight") {
            let count: usize = shape.iter().product();
            writer.raw(&name, Dtype::I32, &shape, &vec![0; count * 4]);
        } else {
            writer.dense(&name, &shape, &weight(&name, &shape));
        }
    }
    says(
        &load(&writer.finish()).unwrap_err().to_string(),
        &["up_proj.weight: found I32 [96, 64]", "F32, F16 or BF16 [96, 64]"],
    );
}

#[test]
fn takes_a_tied_head_only_as_a_copy_and_ignores_rotary_buffers() {
    let build = |head: &str| {
        let folder = scratch();
        let mut writer = Folder::new(&folder.path().join("m"), &tiny("llama"));
        for (name, shape) in tensors(&tiny("llama"), "model") {
            writer.dense(&name, &shape, &weight(&name, &shape));
        }
        writer.dense("lm_head.weight", &[96, 64], &weight(head, &[96, 64]));
        writer.dense("model.layers.0.self_attn.rotary_emb.inv_freq", &[16], &[0.0; 16]);
        load(&writer.finish())
    };
    assert!(build("model.embed_tokens.weight").unwrap().lm_head.is_none());
    says(&build("another").unwrap_err().to_string(), &["found 1 tensors", "first is lm_head.weight"]);
}

#[test]
fn finds_the_decoder_in_a_larger_model_in_either_key_space() {
    let text = tiny("qwen3");
    let alone = {
        let folder = scratch();
        let mut model = load(&write_dense(&folder.path().join("m"), &text)).unwrap();
        let mut cache = model.new_cache();
        floats(&model.forward(&[1, 2, 3], &mut cache).unwrap())
    };
    for (root, entry) in [
        ("model.language_model", "language_model.model"),
        ("language_model.model", "model.language_model"),
        ("language_model.model", "language_model.model"),
    ] {
        // The same weights whatever the name, one module quantized, with its entry in one space or the other.
        let config = json!({
            "model_type": "some_vl", "text_config": text, "tie_word_embeddings": true,
            "quantization": {"group_size": 64, "bits": 8, "mode": "affine",
                format!("{entry}.layers.1.mlp.up_proj"): {"group_size": 32, "bits": 8, "mode": "affine"}},
        });
        let folder = scratch();
        let mut writer = Folder::new(&folder.path().join("m"), &config);
        for (name, shape) in tensors(&text, "model") {
            let values = weight(&name, &shape);
            let name = name.replace("model.", &format!("{root}."));
            match name.strip_suffix(".weight").filter(|n| n.ends_with("layers.1.mlp.up_proj")) {
                Some(path) => writer.matrix(path, &shape, &values, Form::Affine { bits: 8, group_size: 32 }),
                None => writer.dense(&name, &shape, &values),
            }
        }
        writer.dense("model.visual.patch_embed.weight", &[2], &[0.0; 2]);
        let path = writer.finish();
        let mut model = load(&path).unwrap();
        let forms: Vec<_> = model.linears().iter().filter(|l| l.form != LinearForm::Dense).collect();
        assert_eq!(forms.len(), 1);
        assert_eq!(forms[0].form, LinearForm::Affine { bits: 8, group_size: 32 });
        let mut cache = model.new_cache();
        let found = floats(&model.forward(&[1, 2, 3], &mut cache).unwrap());
        let worst = support::greatest_difference(&alone, &found);
        assert!(worst > 0.0 && worst < 0.5, "{root}: {worst}");
    }
}

#[test]
fn follows_mlx_in_what_is_affine() {
    let affine = |bits, group_size| Form::Affine { bits, group_size };
    let quantization = |changes: Value| {
        set(
            tiny("llama"),
            json!({"quantization": set(json!({"group_size": 32, "bits": 4, "mode": "affine"}), changes)}),
        )
    };
    let attempt = |config: Value, form: &dyn Fn(&str) -> Form| {
        let folder = scratch();
        load(&write_model(&folder.path().join("m"), &config, "model", form, as_stored))
    };
    // Without an entry: affine with scales, dense without; embeddings too. `false`: dense.
    let some =
        |path: &str| if path.contains("mlp") || path.contains("embed") { affine(4, 32) } else { Form::Dense };
    let mut model = attempt(quantization(json!({"model.layers.0.self_attn.q_proj": false})), &some).unwrap();
    let kinds: Vec<bool> =
        model.linears().iter().map(|l| l.form == LinearForm::Affine { bits: 4, group_size: 32 }).collect();
    assert_eq!(kinds, [[false, false, false, false, true, true, true]; 2].concat());
    // 96 x 64 weights at 4 bits, and a float32 scale and bias for each 32.
    assert_eq!(model.linears()[4].bytes, 96 * 64 / 2 + 96 * 2 * 4 * 2);
    let mut cache = model.new_cache();
    assert!(floats(&model.forward(&[5, 6], &mut cache).unwrap()).iter().all(|v| v.is_finite()));

    let all = |_: &str| affine(4, 32);
    let cases: [(Value, &[&str]); 6] = [
        (json!({"bits": 7}), &["quantization of model.embed_tokens: bits: found 7", "[2, 3, 4, 5, 6, 8]"]),
        (json!({"group_size": 48}), &["group_size: found 48", "[32, 64, 128]"]),
        (
            json!({"group_size": 128}),
            &["group_size: found 128", "a divisor of the module's 64 input features"],
        ),
        (json!({"bits": null}), &["bits: found nothing"]),
        (json!({"mode": "mxfp4"}), &["mode: found mxfp4", "affine or trellis"]),
        (json!({"bits": 8}), &["embed_tokens.weight: found U32 [96, 8]", "U32 [96, 16]"]),
    ];
    for (changes, parts) in cases {
        says(&attempt(quantization(changes), &all).unwrap_err().to_string(), parts);
    }
    says(
        &attempt(tiny("llama"), &all).unwrap_err().to_string(),
        &["quantization of model.embed_tokens: scales: found nothing"],
    );
}

#[test]
fn refuses_trellis_modules_that_do_not_fit() {
    let trellis = |path: &str| match path.ends_with("mlp.up_proj") || path.ends_with("embed_tokens") {
        true => Form::Trellis { bits: 3, axis: AxisChoice::Auto, rotated: false },
        false => Form::Dense,
    };
    let attempt = |config: Value, form: &dyn Fn(&str) -> Form, shape: [usize; 2]| {
        let folder = scratch();
        let edit = |name: &str, old: Vec<usize>| {
            Some((name.to_owned(), if name.ends_with("up_proj.weight") { shape.to_vec() } else { old }))
        };
        load(&write_model(&folder.path().join("m"), &config, "model", form, edit)).unwrap_err().to_string()
    };
    let only_up = |path: &str| if path.ends_with("embed_tokens") { Form::Dense } else { trellis(path) };
    says(
        &attempt(tiny("llama"), &trellis, [96, 64]),
        &["model.embed_tokens: found trellis codes of axis", "dense or MLX affine"],
    );
    says(
        &attempt(tiny("llama"), &only_up, [128, 64]),
        &["module model.layers.0.mlp.up_proj", "[128, 64] without a bias", "[96, 64] without a bias"],
    );
    let biased = set(tiny("llama"), json!({"mlp_bias": true}));
    let folder = scratch();
    let form = |path: &str| {
        if path.ends_with("gate_proj") {
            Form::Trellis { bits: 2, axis: AxisChoice::Auto, rotated: false }
        } else {
            Form::Dense
        }
    };
    let lost = |name: &str, shape| (!name.ends_with("gate_proj.bias")).then(|| (name.to_owned(), shape));
    let error = load(&write_model(&folder.path().join("m"), &biased, "model", form, lost)).unwrap_err();
    says(&error.to_string(), &["gate_proj: found trellis codes of [96, 64] without a bias", "with a bias"]);
}

#[test]
fn reads_settings_old_and_new() {
    let read = |changes: Value| {
        let folder = scratch();
        let config = set(tiny("llama"), changes);
        load(&write_model(&folder.path().join("m"), &config, "model", dense, as_stored))
            .unwrap()
            .config()
            .clone()
    };
    let plain = read(json!({"num_key_value_heads": 4, "rope_scaling": null}));
    assert_eq!((plain.rope_theta, plain.rope_scaling), (10_000.0, RopeScaling::None));
    assert_eq!(read(json!({"rope_scaling": {"rope_type": "default"}})).rope_scaling, RopeScaling::None);
    let new = read(
        json!({"rope_theta": 5.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}}),
    );
    assert_eq!((new.rope_theta, new.rope_scaling), (7e5, RopeScaling::Linear { factor: 2.0 }));
    let llama3 = json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192});
    let expected =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
    assert_eq!(read(json!({"rope_scaling": llama3})).rope_scaling, expected);
}

#[test]
fn names_a_folder_that_is_not_there() {
    let error = load(std::path::Path::new("/no/such/model")).unwrap_err().to_string();
    says(&error, &["/no/such/model", "open"]);
}
