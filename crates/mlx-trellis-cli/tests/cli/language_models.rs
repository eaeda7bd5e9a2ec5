//! `generate`, `eval` and `calibrate` as a user runs them, on tiny models.

#[path = "../../../mlx-trellis-models/tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use mlx_rs::error::Exception;
use mlx_rs::{Array, Device};
use mlx_trellis::AxisChoice;
use mlx_trellis_models::{LayerCache, LoadOptions, Model, Observer};
use serde_json::{Value, json};
use support::{Form, floats, scratch, tiny, write_model, write_tokenizer};
use trellis_codec::artifact::Tensors;

use super::{fails, json as run, text, trellis};

const TEXT: &str = "It was a bright cold day in April, and the clocks were striking thirteen; naïve 木.\n";

/// A model that the tiny tokenizer's tokens go into, with a chat template. Everything here runs on the CPU, whose float32
/// products are float32.
fn model(folder: &Path, name: &str, form: impl Fn(&str) -> Form) -> PathBuf {
    Device::set_default(&Device::cpu());
    let mut config = tiny("llama");
    config["vocab_size"] = 288.into();
    // For modules with scales; the others are dense or say otherwise.
    config["quantization"] = json!({"group_size": 32, "bits": 4});
    let form = |path: &str| if path.ends_with("embed_tokens") { Form::Dense } else { form(path) };
    let path =
        write_model(&folder.join(name), &config, "model", form, |n, shape| Some((n.to_owned(), shape)));
    write_tokenizer(&path);
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    let settings = json!({"chat_template": template, "eos_token": "<|im_end|>"});
    fs::write(path.join("tokenizer_config.json"), settings.to_string()).unwrap();
    path
}

fn coded(bits: u32) -> impl Fn(&str) -> Form {
    move |_| Form::Trellis { bits, axis: AxisChoice::Input, rotated: false }
}

#[test]
fn generates_the_same_text_in_either_form() {
    let folder = scratch();
    let path = model(folder.path(), "m", coded(3));
    let model = path.to_str().unwrap();
    let args = ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "24", "--backend", "cpu"];
    let report = run(&[&args[..], &["--json"]].concat());
    // <|im_start|>user, newline, Hello, <|im_end|>, newline, <|im_start|>assistant; Jinja drops a template's last newline.
    assert_eq!(report["prompt_tokens"], 1 + 5 + 5 + 1 + 1 + 1 + 9);
    let tokens = report["tokens"].as_array().unwrap();
    assert_eq!(report["generated_tokens"], tokens.len());
    assert!(!tokens.is_empty() && tokens.len() <= 24);
    assert!(report["prompt_tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(report["peak"]["mlx_bytes"].as_u64().unwrap() > 0);
    let shown = trellis(&args);
    assert!(shown.status.success());
    assert_eq!(text(&shown.stdout), format!("{}\n", report["text"].as_str().unwrap()));
    assert!(text(&shown.stderr).contains("tokens generated"), "{}", text(&shown.stderr));

    let raw = run(&[&args[..], &["--json", "--raw"]].concat());
    assert_eq!(raw["prompt_tokens"], 5);
    let system = run(&[&args[..], &["--json", "--system", "Be brief."]].concat());
    assert_eq!(system["prompt_tokens"], 23 + 1 + 7 + 9 + 1 + 1);
}

#[test]
fn draws_by_seed() {
    let folder = scratch();
    let path = model(folder.path(), "m", |_| Form::Dense);
    let draw = |seed: &str, temperature: &str| {
        let args = [
            "generate",
            "--model",
            path.to_str().unwrap(),
            "--prompt",
            "x",
            "--max-tokens",
            "16",
            "--backend",
            "cpu",
            "--json",
        ];
        run(&[&args[..], &["--temperature", temperature, "--top-p", "0.95", "--seed", seed]].concat())["tokens"].clone()
    };
    assert_eq!(draw("1", "2"), draw("1", "2"));
    assert_ne!(draw("1", "2"), draw("2", "2"));
    assert_eq!(draw("1", "0"), draw("2", "0"));
}

#[test]
fn says_why_it_does_not_generate() {
    let folder = scratch();
    let path = model(folder.path(), "m", |_| Form::Dense);
    let model = path.to_str().unwrap();
    let base = ["generate", "--model", model, "--prompt", "x"];
    assert!(
        fails(&[&base[..], &["--temperature=-1"]].concat())
            .contains("temperature: found -1, expected a finite number")
    );
    assert!(fails(&[&base[..], &["--top-p", "1.5"]].concat()).contains("top_p: found 1.5, expected above 0"));
    fs::write(path.join("tokenizer_config.json"), "{}").unwrap();
    assert!(fails(&base).contains("found no chat template, expected one (or --raw"));
    fs::write(path.join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    assert!(
        fails(&[&base[..], &["--raw"]].concat())
            .contains("model_type: found \"gpt2\", expected one of llama, qwen3")
    );
    assert!(fails(&["generate", "--model", "/no/such", "--prompt", "x"]).contains("/no/such/tokenizer.json"));
    if !mlx_trellis::cuda_is_available() {
        let output = trellis(&[&base[..], &["--backend", "cuda"]].concat());
        assert_eq!(output.status.code(), Some(3));
        assert!(text(&output.stderr).contains("no CUDA"));
    }
}

#[test]
fn evaluates_against_a_reference() {
    let folder = scratch();
    let dense = model(folder.path(), "dense", |_| Form::Dense);
    let (k2, k4) = (model(folder.path(), "k2", coded(2)), model(folder.path(), "k4", coded(4)));
    let affine = model(folder.path(), "affine", |_| Form::Affine { bits: 4, group_size: 32 });
    let file = folder.path().join("text.txt");
    fs::write(&file, TEXT).unwrap();
    let paths = [&dense, &k2, &k4, &affine].map(|p| p.to_str().unwrap());
    let mut args = vec![
        "eval",
        "--reference",
        paths[0],
        "--text",
        file.to_str().unwrap(),
        "--context",
        "16",
        "--backend",
        "cpu",
    ];
    paths.iter().for_each(|path| args.extend(["--model", path]));
    let report = run(&[&args[..], &["--json"]].concat());
    assert_eq!(report["predicted"], TEXT.len() - 1);
    let rows = report["models"].as_array().unwrap();
    let number =
        |row: usize, key: &str| rows[row][key].as_f64().unwrap_or_else(|| panic!("{key} of {}", rows[row]));
    assert_eq!(rows.len(), 5);
    assert!(rows[0].get("kl").is_none());

    // Layers of 64 and 96 and 128 inputs: float32, and codes with a float16 scale a row or float32 pairs a group.
    assert_eq!(number(0, "bits_per_weight"), 32.0);
    let (weights, rows_coded) =
        (64 * (128 + 64 + 64 + 128 + 96 + 96 + 96), 128 + 64 + 64 + 64 + 96 + 96 + 64);
    for (row, bits) in [(2, 2.0), (3, 4.0)] {
        assert_eq!(number(row, "bits_per_weight"), bits + 16.0 * f64::from(rows_coded) / f64::from(weights));
    }
    assert_eq!(number(4, "bits_per_weight"), 4.0 + 2.0);

    // The reference against itself, and more bits against fewer.
    assert_eq!(
        (number(1, "kl"), number(1, "top1"), number(1, "perplexity")),
        (0.0, 1.0, number(0, "perplexity"))
    );
    assert!(number(2, "kl") > number(3, "kl") && number(3, "kl") > 1e-4, "{report}");
    assert!(number(2, "top1") < 1.0 && number(2, "kl_error") > 0.0);

    // By hand, window by window.
    let tokens: Vec<u32> = TEXT.bytes().map(u32::from).collect();
    let mut model = Model::load(&dense, &LoadOptions::default()).unwrap();
    let mut total = 0.0;
    for (window, next) in tokens[..tokens.len() - 1].chunks(16).zip(tokens[1..].chunks(16)) {
        let logits = floats(&model.forward(window, &mut model.new_cache()).unwrap());
        for (row, &next) in logits.chunks(288).zip(next) {
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            total += sum.ln() - f64::from(row[next as usize]);
        }
    }
    let expected = (total / (tokens.len() - 1) as f64).exp();
    assert!((number(0, "perplexity") / expected - 1.0).abs() < 1e-9, "{report} {expected}");

    let shown = text(&trellis(&[&args[..], &["--tokens", "20"]].concat()).stdout);
    assert_eq!(shown.lines().count(), 7, "{shown}");
    assert!(shown.contains("20 predictions in windows of 16 tokens"), "{shown}");
    assert!(shown.lines().nth(1).unwrap().ends_with("reference"), "{shown}");
}

#[test]
fn says_why_it_does_not_evaluate() {
    let folder = scratch();
    let path = model(folder.path(), "m", |_| Form::Dense);
    let (model, file) = (path.to_str().unwrap(), folder.path().join("text.txt"));
    let file = file.to_str().unwrap();
    assert!(fails(&["eval", "--model", model, "--text", file]).contains("text.txt"));
    fs::write(file, "a").unwrap();
    assert!(
        fails(&["eval", "--model", model, "--text", file]).contains("found 1 tokens, expected two or more")
    );
    fs::write(file, [0x80, 0x80]).unwrap();
    assert!(fails(&["eval", "--model", model, "--text", file]).contains("UTF-8"));
    fs::write(file, "aa<|im_end|>").unwrap();
    let small = write_model(
        &folder.path().join("small"),
        &tiny("llama"),
        "model",
        |_| Form::Dense,
        |n, s| Some((n.to_owned(), s)),
    );
    let error = fails(&["eval", "--reference", model, "--model", small.to_str().unwrap(), "--text", file]);
    assert!(
        error.contains("small: found token 97 in the text, expected ones of its vocabulary of 96"),
        "{error}"
    );
    fs::write(file, "!!!").unwrap();
    let error = fails(&["eval", "--reference", model, "--model", small.to_str().unwrap(), "--text", file]);
    assert!(error.contains("small: found a vocabulary of 96, expected the reference's 288"), "{error}");
}

/// Everything that linear modules of a layer are given, token by token, in float64.
#[derive(Default)]
struct Given(Vec<(&'static str, Vec<f64>, usize)>);

impl Observer for Given {
    fn inputs(&mut self, modules: &[&'static str], x: &Array) -> Result<(), Exception> {
        let (values, features) = (floats(x), x.dim(-1) as usize);
        for module in modules {
            let values = values.iter().map(|&v| f64::from(v));
            match self.0.iter_mut().find(|(name, ..)| name == module) {
                Some((_, all, _)) => all.extend(values),
                None => self.0.push((module, values.collect(), features)),
            }
        }
        Ok(())
    }
}

#[test]
fn calibrates_with_the_mean_of_x_xt_over_its_mean_square() {
    let folder = scratch();
    let path = model(folder.path(), "m", |_| Form::Dense);
    let (file, out) = (folder.path().join("text.txt"), folder.path().join("h.safetensors"));
    fs::write(&file, TEXT).unwrap();
    let args = [
        "calibrate",
        "--model",
        path.to_str().unwrap(),
        "--text",
        file.to_str().unwrap(),
        "-o",
        out.to_str().unwrap(),
        "--context",
        "16",
        "--tokens",
        "40",
        "--backend",
        "cpu",
    ];
    let report = run(&[&args[..], &["--json"]].concat());
    assert_eq!((&report["modules"], &report["tokens"]), (&json!(14), &json!(40)));
    assert_eq!(report["bytes"].as_u64().unwrap(), fs::metadata(&out).unwrap().len());

    let found = Tensors::open(&out).unwrap();
    assert_eq!(found.len(), 14);
    let tokens: Vec<u32> = TEXT.bytes().map(u32::from).take(40).collect();
    let mut model = Model::load(&path, &LoadOptions::default()).unwrap();
    let mut windows: Vec<Array> = tokens.chunks(16).map(|w| model.embed(w).unwrap()).collect();
    for layer in 0..2 {
        let mut given = Given::default();
        for x in &mut windows {
            *x = model.layer(layer, x, &mut LayerCache::default(), Some(&mut given)).unwrap();
        }
        assert_eq!(given.0.len(), 7);
        for (module, x, n) in given.0 {
            let name = format!("model.layers.{layer}.{module}.hessian");
            let tensor = found.get(&name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(tensor.shape, [n, n]);
            let rms = |x: &[f64]| (x.iter().map(|v| v * v).sum::<f64>() / n as f64).sqrt();
            let x: Vec<f64> =
                x.chunks(n).flat_map(|x| x.iter().map(|v| v / rms(x)).collect::<Vec<_>>()).collect();
            for i in 0..n {
                for j in 0..n {
                    let expected = x.chunks(n).map(|x| x[i] * x[j]).sum::<f64>() / 40.0;
                    let size = x.chunks(n).map(|x| (x[i] * x[j]).abs()).sum::<f64>() / 40.0;
                    let at = 4 * (i * n + j);
                    let value = f32::from_le_bytes(tensor.bytes[at..at + 4].try_into().unwrap());
                    // float32 sums of 40 terms, which two roundings each went into.
                    assert!((f64::from(value) - expected).abs() <= 48.0 * 6e-8 * size, "{name} {i} {j}");
                }
            }
        }
    }
    let header = fs::read(&out).unwrap();
    let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&header[8..8 + length]).unwrap();
    assert_eq!(header["__metadata__"]["tokens"], "40");
    assert_eq!(length % 8, 0);

    // Nothing is replaced unless asked, and nothing is left beside it.
    assert!(fails(&args).contains("h.safetensors: found it there already"));
    let before = fs::read(&out).unwrap();
    run(&[&args[..], &["--json", "--overwrite"]].concat());
    assert_eq!(fs::read(&out).unwrap(), before);
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert!(
        fails(&[
            "calibrate",
            "--model",
            path.to_str().unwrap(),
            "--text",
            file.to_str().unwrap(),
            "-o",
            "/no/such/folder/h"
        ])
        .contains("/no/such/folder/h: cannot create a temporary file beside it")
    );
}
