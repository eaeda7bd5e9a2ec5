//! The binary as a user runs it.

mod dequantize;
mod interrupt;
mod language_models;
mod quantize;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use trellis_codec::Layout;
use trellis_codec::artifact::Artifact;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn trellis(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trellis")).args(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed and print one JSON object.
fn json(args: &[&str]) -> Value {
    let output = trellis(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {}", text(&output.stdout)))
}

/// Runs a command that must fail, and returns what it says.
fn fails(args: &[&str]) -> String {
    let output = trellis(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

fn write_safetensors(path: &Path, tensors: &[(&str, Vec<usize>, Vec<f32>)]) {
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(n, s, v)| ((*n).to_owned(), s.clone(), v.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let views: HashMap<&str, safetensors::tensor::TensorView<'_>> = data
        .iter()
        .map(|(n, s, b)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, s.clone(), b).unwrap();
            (n.as_str(), view)
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.37).sin() + (i as f32 * 0.011).cos()).collect()
}

fn model(folder: &Path) -> PathBuf {
    let path = folder.join("dense");
    std::fs::create_dir(&path).unwrap();
    write_safetensors(
        &path.join("model.safetensors"),
        &[
            ("model.embed_tokens.weight", vec![64, 256], wave(64 * 256)),
            ("model.layers.0.mlp.down_proj.weight", vec![512, 256], wave(512 * 256)),
            ("model.layers.0.mlp.up_proj.weight", vec![96, 512], wave(96 * 512)),
            ("model.layers.0.mlp.odd.weight", vec![30, 50], wave(1500)),
            ("model.layers.0.norm.weight", vec![256], wave(256)),
        ],
    );
    std::fs::write(path.join("config.json"), r#"{"model_type": "toy", "hidden_size": 256}"#).unwrap();
    std::fs::write(path.join("tokenizer.json"), "{}").unwrap();
    path
}

#[test]
fn verify_passes_on_the_golden_cases() {
    let report = json(&["verify", "--cases", golden().to_str().unwrap(), "--json"]);
    assert_eq!(report["backend"], "cpu");
    assert_eq!(report["cases"], 14);
    assert_eq!(report["failed"], 0);
    assert_eq!(report["skipped"], 0);
    let worst = report["worst_ratio"].as_f64().unwrap();
    assert!(worst > 0.0 && worst <= 1.0, "{worst}");
    assert!(report["results"].as_array().unwrap().len() >= 14 * 4);
}

#[test]
fn verify_fails_on_a_wrong_case() {
    let folder = tempfile::tempdir().unwrap();
    let name = "golden_06_axis1_k3_L12_T256_m3.safetensors";
    let mut bytes = std::fs::read(golden().join(name)).unwrap();
    // One bit of the last tensor's last number.
    let end = bytes.len() - 1;
    bytes[end] ^= 0x10;
    std::fs::write(folder.path().join(name), bytes).unwrap();
    let index = r#"[{"file": "NAME", "axis": 1, "k": 3, "L": 12, "T": 256, "rows": 24, "cols": 512,
                     "block_interleave": 0, "m": 3}]"#;
    std::fs::write(folder.path().join("index.json"), index.replace("NAME", name)).unwrap();
    let output = trellis(&["verify", "--cases", folder.path().to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["failed"], 1);
}

#[test]
fn quantize_then_inspect() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path());
    let output = folder.path().join("quantized");
    let (source, out) = (source.to_str().unwrap(), output.to_str().unwrap());
    let report = json(&["quantize", source, "-o", out, "--bits", "4", "--axis", "out", "--json"]);
    let quantized = report["quantized"].as_array().unwrap();
    assert_eq!(quantized.len(), 2, "{report}");
    for q in quantized {
        assert!(q["relative_mse"].as_f64().unwrap() < 0.02, "{q}");
        assert_eq!(q["axis"], 0);
    }
    assert_eq!(quantized[1]["block"], 96);
    let reasons: Vec<&str> =
        report["kept"].as_array().unwrap().iter().map(|k| k["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons.len(), 3);
    for reason in ["an embedding", "no legal block divides its coded dimension", "not a matrix named .weight"]
    {
        assert!(reasons.contains(&reason), "{reasons:?}");
    }
    assert!(output.join("tokenizer.json").exists());

    let inspected = json(&["inspect", out, "--json"]);
    assert_eq!(inspected["modules"].as_array().unwrap().len(), 2);
    assert_eq!(inspected["others"].as_array().unwrap().len(), 3);
    let artifact = Artifact::open(&output).unwrap();
    assert_eq!(artifact.config()["model_type"], "toy");
    assert!(text(&trellis(&["inspect", out]).stdout).contains("2 trellis modules"));

    let again = fails(&["quantize", source, "-o", out]);
    assert!(again.contains("quantized"), "{again}");
    let twice = fails(&["quantize", out, "-o", folder.path().join("b").to_str().unwrap()]);
    assert!(twice.contains("is trellis") && twice.contains("not quantized"), "{twice}");
}

#[test]
fn quantize_chooses_by_glob_axis_and_layout() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path());
    let run = |name: &str, args: &[&str]| {
        let output = folder.path().join(name);
        let mut all = vec!["quantize", source.to_str().unwrap(), "-o", output.to_str().unwrap()];
        all.extend(args);
        assert!(trellis(&all).status.success());
        Artifact::open(&output).unwrap()
    };
    let artifact = run("a", &["--include", "*down_proj*", "--axis", "out", "--interleave"]);
    assert_eq!(artifact.modules().len(), 1);
    assert_eq!(artifact.modules()[0].geometry.layout(), Layout::Interleaved);
    let artifact = run("b", &["--exclude", "*down_proj*", "--block", "32", "--bits", "2"]);
    assert_eq!(artifact.modules().len(), 1);
    assert_eq!(artifact.modules()[0].geometry.block(), 32);
    let artifact = run("c", &["--include", "*embed*"]);
    assert_eq!(artifact.modules()[0].path, "model.embed_tokens");
}

#[test]
fn quantize_names_what_it_cannot_take() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.safetensors");
    let mut values = wave(256 * 4);
    values[300] = f32::NAN;
    write_safetensors(&file, &[("layer.weight", vec![4, 256], values)]);
    let output = folder.path().join("out");
    let error = fails(&["quantize", file.to_str().unwrap(), "-o", output.to_str().unwrap(), "--axis", "in"]);
    assert!(error.contains("layer.weight") && error.contains("NaN"), "{error}");
    assert!(!output.exists(), "nothing half-written");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary folder is left");
    let error = fails(&["quantize", folder.path().join("none.gguf").to_str().unwrap(), "-o", "x"]);
    assert!(error.contains("none.gguf"), "{error}");
}

#[test]
fn quantize_refuses_a_gguf_without_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("toy.gguf");
    let mut gguf = mlx_rs::io::GgufFile::new().unwrap();
    let weight = mlx_rs::Array::from_slice(&wave(64 * 256), &[64, 256]);
    gguf.insert_array("blk.0.ffn_up.weight", &weight).unwrap();
    gguf.insert_array("blk.0.norm.weight", &mlx_rs::Array::from_slice(&wave(64), &[64])).unwrap();
    gguf.save(&file).unwrap();
    let output = folder.path().join("out");
    let error = fails(&["quantize", file.to_str().unwrap(), "-o", output.to_str().unwrap()]);
    assert!(error.contains("toy.gguf") && error.contains("general.architecture"), "{error}");
}

/// Of errors that wrap one another, one alone gives the reason.
#[test]
fn a_reason_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let dense = model(folder.path());
    let dense = dense.to_str().unwrap();
    for args in [
        &["verify", "--cases", "/no/such"][..],
        &["inspect", "/no/such"],
        &["dequantize", "/no/such", "-o", "/no/such/out"],
        &["quantize", "/no/such", "-o", "/no/such/out"],
        &["quantize", dense, "-o", "/no/such/out"],
        &["generate", "--model", "/no/such", "--prompt", "x", "--backend", "cpu"],
        &["eval", "--model", "/no/such", "--text", "/no/such", "--backend", "cpu"],
        &["calibrate", "--model", "/no/such", "--text", "/no/such", "-o", "/no/such/h", "--backend", "cpu"],
    ] {
        let error = fails(args);
        assert_eq!(error.matches("(os error").count(), 1, "{args:?}: {error}");
    }

    let output = folder.path().join("out");
    let quantize = ["quantize", dense, "-o", output.to_str().unwrap(), "--bits", "3"];
    assert!(trellis(&quantize).status.success());
    let config = output.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"L\": 12", "\"L\": 17");
    std::fs::write(&config, text).unwrap();
    let error = fails(&["inspect", output.to_str().unwrap()]);
    assert_eq!(error.matches("state bits (L) is 17").count(), 1, "{error}");
}

#[test]
fn bench_matmul_prints_its_rows() {
    let args =
        ["bench", "matmul", "--rows", "512", "--cols", "512", "--bits", "2,3", "--m", "1,8", "--rounds", "2"];
    let mut args = args.to_vec();
    args.extend(["--rotate-mib", "1", "--json"]);
    for axis in ["in", "out"] {
        let mut args = args.clone();
        args.extend(["--axis", axis]);
        let report = json(&args);
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2 * 2 * 3);
        for name in ["trellis", "mlx-affine", "dense"] {
            assert!(rows.iter().any(|r| r["name"] == name));
        }
        for key in ["axis", "bits", "m", "median_us", "min_us", "max_us", "weights_per_s", "share_of_floor"] {
            assert!(rows.iter().all(|r| r[key].is_number()), "{key}");
        }
        assert!(report["machine"]["read_bytes_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn bench_encode_prints_its_rows() {
    let report = json(&["bench", "encode", "--bits", "2,3", "--blocks", "16", "--rounds", "1", "--json"]);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert!(
        rows.iter().all(|r| r["mse"].as_f64().unwrap() > 0.0 && r["weights_per_s"].as_f64().unwrap() > 0.0)
    );
}

const QWEN: [&str; 10] =
    ["kernels", "--rows", "17408", "--cols", "5120", "--bits", "3", "--axis", "0", "--dtype"];

fn kernels<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut args: Vec<&str> = QWEN.to_vec();
    args.push("bfloat16");
    args.extend(more);
    args
}

#[test]
fn verify_without_metal_exits_3() {
    if mlx_trellis::metal_is_available() {
        println!("skipped: this machine has Metal");
        return;
    }
    let output = trellis(&["verify", "--cases", golden().to_str().unwrap(), "--backend", "metal"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("no Metal device"), "{}", text(&output.stderr));
}

#[test]
fn bench_takes_no_metal() {
    let error = fails(&["bench", "matmul", "--backend", "metal"]);
    assert!(error.contains("[possible values: cpu, cuda]"), "{error}");
}

#[test]
fn without_cuda_verify_and_bench_exit_3() {
    if mlx_trellis::cuda_is_available() {
        println!("skipped: this machine has CUDA");
        return;
    }
    let golden = golden();
    let verify = ["verify", "--cases", golden.to_str().unwrap(), "--backend", "cuda"];
    for args in [&verify[..], &["bench", "matmul", "--backend", "cuda"]] {
        let output = trellis(args);
        assert_eq!(output.status.code(), Some(3));
        assert!(text(&output.stderr).contains("no CUDA"), "{}", text(&output.stderr));
    }
}

#[test]
fn kernels_explains_the_choice_on_cuda() {
    let report = json(&kernels(&["--m", "5", "--cuda", "132", "--explain", "--json"]));
    let explain = &report["explain"];
    assert_eq!(explain["kernel"], "cuda float");
    assert_eq!(explain["launches"][1], "trellis_cuda_sum");
    assert_eq!(explain["refused"][0]["reason"], "M is 5, expected 1 to 2");
    let old = json(&kernels(&["--m", "1", "--cuda", "40", "--capability", "7.5", "--explain", "--json"]));
    assert_eq!(old["explain"]["kernel"], "cuda packed");
    fails(&kernels(&["--m", "1", "--cuda", "132", "--cost"]));
}

#[test]
fn kernels_explains_the_choice() {
    let report = json(&kernels(&["--m", "9", "--explain", "--json"]));
    let explain = &report["explain"];
    assert_eq!(explain["kernel"], "metal expand and matmul");
    assert_eq!(explain["launches"][0], "trellis_expand_vectorised");
    assert_eq!(explain["refused"][0]["reason"], "M is 9, expected 1 to 4");
    let shown = trellis(&kernels(&["--m", "5", "--explain"]));
    assert!(text(&shown.stdout).contains("not metal scatter: M is 5"), "{}", text(&shown.stdout));
    assert!(fails(&kernels(&["--m", "1"])).contains("--explain"), "an action is asked for");
    assert!(fails(&kernels(&["--m", "1", "--explain", "--variant", "14"])).contains("expected 0 to 13"));
}

#[test]
fn kernels_dumps_every_launch() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("launches");
    json(&kernels(&["--m", "5", "--dump", dir.to_str().unwrap(), "--json"]));
    let read =
        |name: &str| -> Value { serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap() };
    let index = read("index.json");
    assert_eq!(index["launches"][1]["inputs"]["partial"], "output partial of launch 0");
    for entry in index["launches"].as_array().unwrap() {
        let launch = read(entry["file"].as_str().unwrap());
        let mut keys: Vec<&str> = launch.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        let expected = [
            "ensure_row_contiguous",
            "grid",
            "header",
            "init_value",
            "inputs",
            "name",
            "outputs",
            "source",
            "template",
            "threadgroup",
        ];
        assert_eq!(keys, expected);
        assert_eq!(launch["template"][0], serde_json::json!(["T", "bfloat16"]));
    }
}

#[test]
fn kernels_exports_and_counts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("product.mlxfn");
    json(&kernels(&["--m", "1", "--export", file.to_str().unwrap(), "--json"]));
    assert!(std::fs::metadata(&file).unwrap().len() > 1000);
    let small =
        ["kernels", "--rows", "256", "--cols", "512", "--bits", "3", "--axis", "out", "--dtype", "float16"];
    let report = json(&[&small[..], &["--m", "1", "--cost", "--json"]].concat());
    let cost = &report["cost"][0];
    assert_eq!(cost["kernel"], "trellis_scatter_balanced");
    assert!(cost["device_loads"].as_f64().unwrap() > 0.0, "{cost}");
}
