//! What models compute: against mlx-lm, against themselves step by step, and trellis against dense.

mod support;

use mlx_rs::error::Exception;
use mlx_rs::module::Param;
use mlx_rs::nn::Linear;
use mlx_rs::quantization::MaybeQuantized;
use mlx_rs::{Array, Device, Dtype};
use mlx_trellis::{AxisChoice, MaybeTrellis};
use mlx_trellis_models::{Generation, LinearForm, LoadOptions, Model, Observer, Sampler};
use serde_json::Value;
use support::{Form, floats, greatest_difference, scratch, tiny, tokens, write_dense, write_model};

/// Relative to logits of about 10: float32 through two layers, in another order of summation.
const TOLERANCE: f32 = 2e-5;

fn golden() -> Value {
    serde_json::from_str(include_str!("golden/models.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// On the CPU, whose float32 products are float32: a GPU's may be rounded more.
fn load(path: impl AsRef<std::path::Path>) -> Model {
    Device::set_default(&Device::cpu());
    Model::load(path, &LoadOptions::default()).unwrap()
}

/// Logits of all tokens at once.
fn logits(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    let mut cache = model.new_cache();
    floats(&model.forward(tokens, &mut cache).unwrap())
}

fn as_stored(name: &str, shape: Vec<usize>) -> Option<(String, Vec<usize>)> {
    Some((name.to_owned(), shape))
}

#[test]
fn logits_are_those_of_mlx_lm() {
    let golden = golden();
    let tokens: Vec<u32> = numbers(&golden["tokens"]).into_iter().map(|t| t as u32).collect();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let folder = scratch();
        let config = &case["config"];
        let form = match config["quantization"].as_object() {
            Some(q) => Form::Affine {
                bits: q["bits"].as_i64().unwrap() as i32,
                group_size: q["group_size"].as_i64().unwrap() as i32,
            },
            None => Form::Dense,
        };
        let mut model = load(write_model(&folder.path().join("m"), config, "model", |_| form, as_stored));
        let found = logits(&mut model, &tokens);
        let vocabulary = found.len() / tokens.len();
        for (position, expected) in
            numbers(&golden["positions"]).iter().zip(case["logits"].as_array().unwrap())
        {
            let row = &found[*position as usize * vocabulary..][..vocabulary];
            let worst = greatest_difference(row, &numbers(expected));
            println!("{name} at {position}: {worst:e}");
            assert!(worst < TOLERANCE, "{name} at {position}: {worst}");
        }
    }
}

#[test]
fn step_by_step_is_all_at_once() {
    // More tokens than a cache holds before it grows.
    let tokens = tokens("steps", 300, 96);
    for family in ["llama", "qwen3"] {
        let folder = scratch();
        let mut model = load(write_dense(&folder.path().join("m"), &tiny(family)));
        let whole = logits(&mut model, &tokens);
        let mut cache = model.new_cache();
        let mut steps = floats(&model.forward(&tokens[..250], &mut cache).unwrap());
        for token in &tokens[250..260] {
            steps.extend(floats(&model.forward(&[*token], &mut cache).unwrap()));
        }
        steps.extend(floats(&model.forward(&tokens[260..], &mut cache).unwrap()));
        assert_eq!(cache.len(), 300);
        let worst = greatest_difference(&whole, &steps);
        assert!(worst < TOLERANCE, "{family}: {worst}");
        let last = floats(&model.next_logits(&tokens, &mut model.new_cache()).unwrap());
        assert!(greatest_difference(&last, &whole[299 * 96..]) < TOLERANCE);
    }
}

#[test]
fn prompts_longer_than_a_chunk_are_whole() {
    let folder = scratch();
    let mut model = load(write_dense(&folder.path().join("m"), &tiny("llama")));
    for length in [1, 511, 512, 513, 1025] {
        let prompt = tokens("prompt", length, 96);
        let expected = logits(&mut model, &prompt)[(length - 1) * 96..].to_vec();
        let best = (0..96).max_by(|&a, &b| expected[a].total_cmp(&expected[b])).unwrap() as u32;
        let mut tokens = Generation::new(&mut model, &prompt, Sampler::greedy(), &[], 2).unwrap();
        assert_eq!(tokens.next().unwrap().unwrap(), best, "{length}");
        assert_eq!(tokens.count(), 1);
        let mut stopped = Generation::new(&mut model, &prompt, Sampler::greedy(), &[best], 2).unwrap();
        assert!(stopped.next().is_none() && stopped.next().is_none(), "{length}");
    }
}

#[test]
fn computes_in_the_dtype_asked_for() {
    let folder = scratch();
    let path = write_model(&folder.path().join("m"), &tiny("qwen3"), "model", mixed, as_stored);
    let mut exact = load(&path);
    let tokens = tokens("dtype", 20, 96);
    let expected = logits(&mut exact, &tokens);
    for (dtype, tolerance) in [(Dtype::Float16, 0.1), (Dtype::Bfloat16, 1.0)] {
        let mut model = Model::load(&path, &LoadOptions { dtype: Some(dtype) }).unwrap();
        let mut cache = model.new_cache();
        let found = model.forward(&tokens, &mut cache).unwrap();
        assert_eq!(found.dtype(), dtype);
        let worst = greatest_difference(&floats(&found), &expected);
        assert!(worst > 0.0 && worst < tolerance, "{dtype:?}: {worst}");
    }
}

/// Every form in one model: of two layers, trellis along either axis and affine and dense.
fn mixed(module: &str) -> Form {
    match module {
        _ if module.ends_with("embed_tokens") => Form::Dense,
        _ if module.ends_with("q_proj") => {
            Form::Trellis { bits: 4, axis: AxisChoice::Output, rotated: false }
        }
        _ if module.ends_with("v_proj") => Form::Dense,
        _ if module.contains("layers.1.mlp") => {
            Form::Trellis { bits: 2, axis: AxisChoice::Input, rotated: false }
        }
        _ => Form::Trellis { bits: 3, axis: AxisChoice::Auto, rotated: false },
    }
}

/// The same with rotated inputs.
fn rotated(module: &str) -> Form {
    match mixed(module) {
        Form::Trellis { bits, axis, .. } => Form::Trellis { bits, axis, rotated: true },
        other => other,
    }
}

/// What each linear module of a model was given.
#[derive(Default)]
struct Inputs(Vec<Array>);

impl Observer for Inputs {
    fn inputs(&mut self, modules: &[&'static str], x: &Array) -> Result<(), Exception> {
        self.0.extend(modules.iter().map(|_| x.clone()));
        Ok(())
    }
}

fn inputs(model: &mut Model, tokens: &[u32]) -> Vec<Array> {
    let mut cache = model.new_cache();
    let mut seen = Inputs::default();
    let mut x = model.embed(tokens).unwrap();
    // The cache's layers are private: a layer's own, empty, serves one pass.
    for index in 0..model.config().num_hidden_layers as usize {
        x = model.layer(index, &x, &mut Default::default(), Some(&mut seen)).unwrap();
    }
    let hidden = model.hidden(tokens, &mut cache).unwrap();
    assert_eq!(hidden.shape(), x.shape());
    seen.0
}

/// A dense layer of a weight and, if wanted, a bias.
fn dense(weight: Array, bias: Option<Array>) -> MaybeTrellis<MaybeQuantized<Linear>> {
    MaybeTrellis::Original(MaybeQuantized::Original(Linear {
        weight: Param::new(weight),
        bias: Param::new(bias),
    }))
}

/// The same model with every trellis layer replaced by its dense matrix, and the number of them.
fn dequantized(model: &Model) -> (Model, usize) {
    let mut other = model.clone();
    let mut replaced = 0;
    for (_, _, projection) in other.projections_mut() {
        if let MaybeTrellis::Trellis(layer) = projection {
            *projection = dense(layer.dequantize(Dtype::Float32).unwrap(), None);
            replaced += 1;
        }
    }
    (other, replaced)
}

/// The format's bound on a product, for each output the greatest over the tokens: `2^-24 (n + 8) sum(|w x|) / 4`.
fn allowance(weight: &Array, x: &Array) -> Array {
    let sums = x.abs().unwrap().matmul(weight.abs().unwrap().transpose().unwrap()).unwrap();
    let n = weight.dim(1) as f32;
    let most = sums.max_axes(&[0, 1], false).unwrap();
    most.multiply(Array::from_f32((n + 8.0) / 4.0 * 2f32.powi(-24))).unwrap()
}

#[test]
fn trellis_is_dense_within_the_propagated_bound() {
    let tokens = tokens("bound", 24, 96);
    for family in ["llama", "qwen3"] {
        let folder = scratch();
        let path = write_model(&folder.path().join("m"), &tiny(family), "model", mixed, as_stored);
        let mut model = load(path);
        let (mut plain, replaced) = dequantized(&model);
        assert_eq!(replaced, 12);
        let given = inputs(&mut plain, &tokens);
        let expected = logits(&mut plain, &tokens);

        // Each product alone, given the same x. Twice the bound, as either side may be off by it.
        for ((_, name, trellis), ((_, _, plain), x)) in
            model.projections_mut().zip(plain.clone().projections_mut().zip(&given))
        {
            let MaybeTrellis::Trellis(layer) = trellis else { continue };
            let MaybeTrellis::Original(MaybeQuantized::Original(linear)) = plain else { unreachable!() };
            let y = layer.try_forward(x).unwrap();
            let y64 = x.matmul(linear.weight.value.transpose().unwrap()).unwrap();
            let most = allowance(&linear.weight.value, x);
            let share = y.subtract(y64).unwrap().abs().unwrap().max_axes(&[0, 1], false).unwrap();
            let share = floats(&share.divide(most).unwrap()).into_iter().fold(0.0, f32::max);
            assert!(share <= 2.0, "{family} {name}: {share} of the allowance");
        }

        // The whole: for each module, how far logits move when all its outputs are off by their allowance (signs
        // drawn three times); all modules together may move them by the sum.
        let mut bound = 0.0;
        for (index, x) in given.iter().enumerate() {
            let mut most: f32 = 0.0;
            for draw in 0..3 {
                let mut moved = plain.clone();
                let (_, _, projection) = moved.projections_mut().nth(index).unwrap();
                let MaybeTrellis::Original(MaybeQuantized::Original(linear)) = projection else {
                    unreachable!()
                };
                let weight = linear.weight.value.clone();
                let signs: Vec<f32> = support::number(&format!("{index} {draw}"), weight.dim(0) as usize)
                    .map(|u| if u < 0.0 { -1.0 } else { 1.0 })
                    .collect();
                let signs = Array::from_slice(&signs, &[weight.dim(0)]);
                let bias = allowance(&weight, x).multiply(signs).unwrap();
                *projection = dense(weight, Some(bias));
                most = most.max(greatest_difference(&logits(&mut moved, &tokens), &expected));
            }
            bound += 2.0 * most;
        }
        let worst = greatest_difference(&logits(&mut model, &tokens), &expected);
        println!("{family}: logits differ by {worst:e}, allowed {bound:e}");
        assert!(bound < 1e-2, "{family}: a bound of {bound} would say nothing");
        assert!(worst <= bound, "{family}: {worst} of {bound}");
    }
}

#[test]
fn trellis_and_dense_choose_the_same_64_tokens() {
    let forms: [fn(&str) -> Form; 2] = [mixed, rotated];
    for (family, form) in ["llama", "qwen3"].into_iter().flat_map(|family| forms.map(|form| (family, form))) {
        let folder = scratch();
        let path = write_model(&folder.path().join("m"), &tiny(family), "model", form, as_stored);
        let mut model = load(path);
        let (mut plain, _) = dequantized(&model);
        let prompt = tokens("greedy", 9, 96);
        let greedy = |model: &mut Model| {
            let tokens = Generation::new(model, &prompt, Sampler::greedy(), &[], 64).unwrap();
            tokens.collect::<Result<Vec<_>, _>>().unwrap()
        };
        let found = greedy(&mut model);
        assert_eq!(found.len(), 64);
        assert_eq!(found, greedy(&mut plain), "{family}");
        let worst = greatest_difference(&logits(&mut model, &found), &logits(&mut plain, &found));
        assert!(worst < 1e-3, "{family}: {worst}");
    }
}

#[test]
fn says_what_each_linear_module_takes() {
    let folder = scratch();
    let mut config = tiny("llama");
    config["tie_word_embeddings"] = false.into();
    let model = load(write_model(&folder.path().join("m"), &config, "model", mixed, as_stored));
    let linears = model.linears();
    assert_eq!(linears.len(), 15);
    let q = &linears[0];
    assert_eq!(
        (q.path.as_str(), q.form),
        ("model.layers.0.self_attn.q_proj", LinearForm::Trellis { bits: 4 })
    );
    // 64 stored rows of 128 codes of 4 bits, and a scale of 2 bytes each.
    assert_eq!((q.out_features, q.in_features, q.bytes), (128, 64, 64 * 64 + 64 * 2));
    assert_eq!((linears[2].form, linears[2].bytes), (LinearForm::Dense, 64 * 64 * 4));
    assert!(linears[14].is_head && !linears[13].is_head);
}

#[test]
fn refuses_tokens_outside_the_vocabulary() {
    let folder = scratch();
    let mut model = load(write_dense(&folder.path().join("m"), &tiny("llama")));
    let mut cache = model.new_cache();
    let error = model.forward(&[3, 96], &mut cache).unwrap_err().to_string();
    assert_eq!(error, "found token 96, expected one of the vocabulary's 96");
    assert!(cache.is_empty());
    assert!(model.forward(&[], &mut cache).unwrap_err().to_string().contains("found 0 tokens"));
    assert!(
        model.forward(&[1], &mut Default::default()).unwrap_err().to_string().contains("a cache of 0 layers")
    );
    assert!(Generation::new(&mut model, &[], Sampler::greedy(), &[], 1).is_err());
}
