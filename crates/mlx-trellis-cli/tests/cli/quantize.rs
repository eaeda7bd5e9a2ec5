//! `trellis quantize` on whole models: sizes, options, sources.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use trellis_codec::artifact::{Artifact, ArtifactWriter, Dtype, Entry, RawTensor, Tensors, WriteOptions};

use super::{fails, json as run, text, trellis};

/// A model of several shards: `layers` times four matrices, embeddings, norms, an odd matrix and integers.
pub(crate) fn model(folder: &Path, layers: usize) -> PathBuf {
    let path = folder.join("dense");
    let mut rng = SmallRng::seed_from_u64(7);
    let options = WriteOptions { max_shard_bytes: 400_000, ..WriteOptions::default() };
    let mut writer = ArtifactWriter::create(&path, options).unwrap();
    writer.set_config(json!({ "model_type": "toy", "hidden_size": 256, "torch_dtype": "float32" })).unwrap();
    writer.add_file("tokenizer.json", b"{}").unwrap();
    let mut add = |name: String, shape: &[usize]| {
        let weights: usize = shape.iter().product();
        let bytes: Vec<u8> =
            (0..weights).flat_map(|_| rng.random_range(-1.0f32..1.0).to_le_bytes()).collect();
        writer.add_tensor(&name, RawTensor { dtype: Dtype::F32, shape, bytes: &bytes }).unwrap();
    };
    add("model.embed_tokens.weight".into(), &[100, 256]);
    for layer in 0..layers {
        add(format!("model.layers.{layer}.self_attn.q_proj.weight"), &[256, 256]);
        add(format!("model.layers.{layer}.mlp.up_proj.weight"), &[160, 256]);
        add(format!("model.layers.{layer}.mlp.down_proj.weight"), &[256, 160]);
        add(format!("model.layers.{layer}.norm.weight"), &[256]);
    }
    add("model.odd.weight".into(), &[30, 50]);
    let ids = RawTensor { dtype: Dtype::I64, shape: &[2], bytes: &[1; 16] };
    writer.add_tensor("model.ids", ids).unwrap();
    let summary = writer.finish().unwrap();
    assert!(summary.shards.len() > 1, "{summary:?}");
    path
}

/// Name and content of every file of a folder.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries
        .map(|e| (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).unwrap()))
        .collect()
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

pub(crate) fn s(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_dry_run_knows_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 2);
    for (i, options) in [
        &["--axis", "in"][..],
        &["--axis", "out", "--bits", "2", "--dtype", "float16", "--rest", "affine:4:64"],
        &["--bits", "4"],
        &["--method", "affine", "--bits", "3", "--group", "32", "--rest", "affine:8:32"],
    ]
    .iter()
    .enumerate()
    {
        let output = folder.path().join(format!("out{i}"));
        let args = [&["quantize", s(&source), "-o", s(&output), "--json"], *options].concat();
        let dry = run(&[&args[..], &["--dry-run"]].concat());
        assert!(!output.exists() && !folder.path().join(format!(".out{i}.quantize")).exists());
        let report = run(&args);
        let real: u64 = Tensors::open(&output).unwrap().iter().map(|(_, t)| t.bytes.len() as u64).sum();
        assert_eq!(report["tensor_bytes"], real);
        let [least, most] = ["least", "most"].map(|k| dry["tensor_bytes"][k].as_u64().unwrap());
        assert!(least <= real && real <= most, "{least} {real} {most}");
        assert_eq!(least == most, !options.contains(&"4") || options.contains(&"--rest"), "{options:?}");
    }
    let shown = trellis(&["quantize", s(&source), "-o", "x", "--dry-run", "--axis", "in"]);
    let shown = text(&shown.stdout);
    assert!(shown.contains("kept: an embedding") && shown.contains("bytes of tensors in all"), "{shown}");
}

#[test]
fn shards_have_a_limit_and_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 3);
    let output = folder.path().join("out");
    run(&["quantize", s(&source), "-o", s(&output), "--max-shard-bytes", "60000", "--json"]);
    let index: Value =
        serde_json::from_slice(&std::fs::read(output.join("model.safetensors.index.json")).unwrap()).unwrap();
    let tensors = Tensors::open(&output).unwrap();
    let total: usize = tensors.iter().map(|(_, t)| t.bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    // One tensor is larger than the limit and has a shard to itself.
    for (name, content) in files(&output).iter().filter(|(n, _)| n.ends_with(".safetensors")) {
        let single = safetensors::SafeTensors::deserialize(content).unwrap().len() == 1;
        assert!(single || content.len() < 60_000 + 4096, "{name}: {}", content.len());
    }
    assert_eq!(files(&output)["tokenizer.json"], b"{}");
    let artifact = Artifact::open(&output).unwrap();
    assert_eq!(artifact.config()["model_type"], "toy");
    assert_eq!(artifact.modules().len(), 9);
}

#[test]
fn each_tensor_can_have_its_own_rule() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 2);
    let output = folder.path().join("out");
    let map = folder.path().join("map.json");
    std::fs::write(&map, r#"{"*.q_proj": 4, "*.layers.1.*": "2,out,32", "*embed*": "affine:8:64"}"#).unwrap();
    let report = folder.path().join("report.json");
    run(&[
        &["quantize", s(&source), "-o", s(&output), "--map", s(&map), "--report", s(&report), "--json"][..],
        &["--set", "*.layers.1.self_attn.q_proj.weight=1,in", "--set", "*.0.mlp.down_proj=keep"],
    ]
    .concat());
    let report: Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    let row = |module: &str| {
        let rows = report["quantized"].as_array().unwrap();
        rows.iter().find(|r| r["module"] == module).unwrap_or_else(|| panic!("{module}: {report}")).clone()
    };
    assert_eq!(row("model.layers.0.self_attn.q_proj")["bits"], 4);
    assert_eq!(row("model.layers.0.mlp.up_proj")["bits"], 3);
    let up = row("model.layers.1.mlp.up_proj");
    assert_eq!((&up["bits"], &up["axis"], &up["block"]), (&json!(2), &json!(0), &json!(32)));
    let q = row("model.layers.1.self_attn.q_proj");
    assert_eq!((&q["bits"], &q["axis"]), (&json!(1), &json!(1)));
    assert_eq!(row("model.embed_tokens")["method"], "affine");
    for r in report["quantized"].as_array().unwrap() {
        assert!(r["relative_mse"].as_f64().unwrap() > 0.0 && r["seconds"].is_number(), "{r}");
        let weights = r["out_features"].as_f64().unwrap() * r["in_features"].as_f64().unwrap();
        assert_eq!(r["bits_per_weight"], r["bytes"].as_f64().unwrap() * 8.0 / weights);
    }
    let kept: Vec<(&Value, &Value)> =
        report["kept"].as_array().unwrap().iter().map(|k| (&k["tensor"], &k["reason"])).collect();
    assert!(
        kept.contains(&(&json!("model.layers.0.mlp.down_proj.weight"), &json!("set to be kept"))),
        "{kept:?}"
    );

    let artifact = Artifact::open(&output).unwrap();
    assert_eq!(artifact.entry("model.layers.0.mlp.down_proj"), Entry::NotQuantized);
    assert_eq!(artifact.entry("model.embed_tokens"), Entry::Default);
    assert_eq!(artifact.default_quantization().unwrap().bits, Some(8));

    for (args, expected) in [
        (&["--set", "*nothing*=2"][..], "matches no tensor"),
        (&["--include", "*nothing*"], "matches no tensor"),
        (&["--set", "*q_proj=9"], "expected 1 to 4"),
        (&["--set", "*q_proj=2,sideways"], "sideways"),
        (&["--set", "*q_proj"], "GLOB=SPEC"),
        (&["--set", "*q_proj=affine:7:64"], "expected 2, 3, 4, 5, 6 or 8"),
        (&["--bits", "5"], "expected 1 to 4"),
        (&["--method", "affine", "--axis", "in"], "no meaning"),
        (&["--rest", "half"], "affine:BITS:GROUP"),
    ] {
        let error = fails(&[&["quantize", s(&source), "-o", "x"], args].concat());
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

#[test]
fn the_rest_can_be_affine() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let output = folder.path().join("out");
    let report = run(&["quantize", s(&source), "-o", s(&output), "--rest", "affine:4:32", "--json"]);
    let embed = &report["quantized"][0];
    assert_eq!((&embed["method"], &embed["instead_of_trellis"]), (&json!("affine"), &json!("an embedding")));
    assert_eq!(embed["bits_per_weight"], 5.0, "float16 scales and biases");
    let odd = report["kept"].as_array().unwrap().iter().find(|k| k["tensor"] == "model.odd.weight").unwrap();
    assert!(
        odd["reason"].as_str().unwrap().contains("50 inputs are no multiple of the group of 32"),
        "{odd}"
    );
    let artifact = Artifact::open(&output).unwrap();
    assert_eq!(artifact.entry("model.odd"), Entry::NotQuantized);
    assert_eq!(artifact.config()["quantization"]["mode"], "affine");
    assert_eq!(artifact.modules().len(), 3);
}

#[test]
fn affine_is_what_mlx_makes_and_can_be_quantized_anew() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let dense = Tensors::open(&source).unwrap();
    let name = "model.layers.0.mlp.up_proj";
    let weight = mlx_trellis::artifact::to_array(&dense.get(&format!("{name}.weight")).unwrap()).unwrap();
    let weight = weight.as_dtype(mlx_rs::Dtype::Float16).unwrap();
    for bits in [2, 3, 4] {
        let output = folder.path().join(format!("affine{bits}"));
        let text = bits.to_string();
        let args =
            ["quantize", s(&source), "-o", s(&output), "--method", "affine", "--bits", &text, "--json"];
        let report = run(&args);
        assert_eq!(report["bits_per_weight"], f64::from(bits) + 0.5);
        let (codes, scales, biases) = mlx_rs::ops::quantize(&weight, 64, bits).unwrap();
        let tensors = Tensors::open(&output).unwrap();
        let codes: Vec<u32> = codes.to_vec_exact().unwrap();
        let codes: Vec<u8> = codes.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(tensors.get(&format!("{name}.weight")).unwrap().bytes, codes);
        for (suffix, array) in [("scales", scales), ("biases", biases)] {
            let (dtype, bytes) = mlx_trellis::artifact::to_bytes(&array).unwrap();
            let found = tensors.get(&format!("{name}.{suffix}")).unwrap();
            assert_eq!((found.dtype, found.bytes), (dtype, &bytes[..]));
        }
        let config: Value =
            serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
        let section = &config["quantization"];
        assert_eq!((&section["bits"], &section["group_size"]), (&json!(bits), &json!(64)));
        // 160 inputs are no multiple of 64.
        assert_eq!(section["model.layers.0.mlp.down_proj"], false);
        assert_eq!(section["model.embed_tokens"], false);
        assert_eq!(section.get(name), None);
    }

    let affine = folder.path().join("affine4");
    let anew = folder.path().join("anew");
    let error = fails(&["quantize", s(&affine), "-o", s(&anew)]);
    assert!(
        error.contains("MLX affine, 4 bits in groups of 64") && error.contains("--requantize"),
        "{error}"
    );
    run(&["quantize", s(&affine), "-o", s(&anew), "--requantize", "--json"]);
    let artifact = Artifact::open(&anew).unwrap();
    assert_eq!(artifact.modules().len(), 3);
    assert!(artifact.tensors().names().all(|n| !n.ends_with(".biases")));
    assert_eq!(artifact.config()["quantization"].get("bits"), None);

    // The same as decoding first.
    let (decoded, through) = (folder.path().join("decoded"), folder.path().join("through"));
    run(&["dequantize", s(&affine), "-o", s(&decoded), "--json"]);
    run(&["quantize", s(&decoded), "-o", s(&through), "--json"]);
    let (a, b) = (Tensors::open(&anew).unwrap(), Tensors::open(&through).unwrap());
    for (name, tensor) in a.iter().filter(|(n, _)| n.contains("_proj")) {
        assert_eq!(b.get(name).unwrap().bytes, tensor.bytes, "{name}");
    }
}

#[test]
fn inputs_can_be_rotated() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let output = folder.path().join("out");
    let report = run(&[
        &["quantize", s(&source), "-o", s(&output), "--bits", "4", "--axis", "in", "--json", "--rotate"][..],
        &["--set", "*.up_proj=4,rotate:64,rms", "--set", "*.q_proj=4,unrotated"],
    ]
    .concat());
    let artifact = Artifact::open(&output).unwrap();
    let found: Vec<_> = artifact
        .modules()
        .iter()
        .map(|m| (m.path.rsplit('.').next().unwrap(), m.rotation.map(|r| (r.block(), r.seed()))))
        .collect();
    // The largest power of two that divides 160 inputs is 32.
    assert_eq!(found, [("q_proj", None), ("up_proj", Some((64, 1))), ("down_proj", Some((32, 1)))]);
    assert_eq!(report["quantized"][1]["rotation"], json!({ "block": 64, "seed": 1 }));

    // Decoded, it is the original but for the error reported.
    let decoded = folder.path().join("decoded");
    run(&["dequantize", s(&output), "-o", s(&decoded), "--json"]);
    let (before, after) = (Tensors::open(&source).unwrap(), Tensors::open(&decoded).unwrap());
    for row in report["quantized"].as_array().unwrap() {
        let read = |tensors: &Tensors| -> Vec<f64> {
            let name = format!("{}.weight", row["module"].as_str().unwrap());
            let bytes = tensors.read(&name).unwrap();
            bytes.as_chunks().0.iter().map(|&c| f32::from_le_bytes(c).into()).collect()
        };
        let (a, b) = (read(&before), read(&after));
        let error: f64 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
        let measured = error / a.iter().map(|a| a * a).sum::<f64>();
        let reported = row["relative_mse"].as_f64().unwrap();
        assert!((measured / reported - 1.0).abs() < 1e-3, "{row}: {measured}");
    }
    let error = fails(&["quantize", s(&source), "-o", "x", "--rotate", "48"]);
    assert!(error.contains("48"), "{error}");
}

#[test]
fn errors_are_fed_back_by_a_calibration() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let file = folder.path().join("moments");
    let modules = [("self_attn.q_proj", 256), ("mlp.up_proj", 256), ("mlp.down_proj", 160)];
    let write = |count: usize| {
        let _ = std::fs::remove_dir_all(&file);
        let mut writer = ArtifactWriter::create(&file, WriteOptions::default()).unwrap();
        for &(module, n) in &modules[..count] {
            // Inputs that go up and down together: neighbours weigh on each other by 0.9 to the distance.
            let moment = |i: usize| 0.9f32.powi((i / n).abs_diff(i % n) as i32).to_le_bytes();
            let bytes: Vec<u8> = (0..n * n).flat_map(moment).collect();
            let raw = RawTensor { dtype: Dtype::F32, shape: &[n, n], bytes: &bytes };
            writer.add_tensor(&format!("model.layers.0.{module}.hessian"), raw).unwrap();
        }
        writer.finish().unwrap();
    };
    write(2);
    let moments = file.join("model.safetensors");
    let output = folder.path().join("out");
    let args = ["quantize", s(&source), "-o", s(&output), "--bits", "2", "--calibration", s(&moments)];
    let error = fails(&args);
    assert!(
        error.contains("tensor model.layers.0.mlp.down_proj.hessian") && error.contains("plain"),
        "{error}"
    );
    assert!(!output.exists() && !folder.path().join(".out.quantize").exists());
    let report = run(&[&args[..], &["--json", "--set", "*.down_proj=2,plain"]].concat());
    let rows = report["quantized"].as_array().unwrap();
    for row in &rows[..2] {
        let [loss, plain] = ["proxy_loss", "plain_proxy_loss"].map(|k| row["feedback"][k].as_f64().unwrap());
        assert!(loss < 0.7 * plain, "{row}");
        assert_eq!(row["feedback"]["fallback"], Value::Null);
    }
    assert_eq!(rows[2].get("feedback"), None);

    write(3);
    let report = run(&[&args[..], &["--json", "--overwrite", "--rotate"]].concat());
    assert!(report["quantized"][2]["feedback"]["proxy_loss"].is_number());
    let error = fails(&[&args[..], &["--set", "*.down_proj=2", "--method", "affine"]].concat());
    assert!(error.contains("no meaning with --method affine"), "{error}");
}

#[test]
fn trellis_codes_are_decoded_and_other_schemes_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = model(folder.path(), 1);
    let (coded, decoded) = (folder.path().join("coded"), folder.path().join("decoded"));
    run(&["quantize", s(&source), "-o", s(&coded), "--bits", "4", "--json"]);
    run(&["dequantize", s(&coded), "-o", s(&decoded), "--json"]);
    let artifact = Artifact::open(&coded).unwrap();
    let dense = Tensors::open(&decoded).unwrap();
    for module in artifact.modules() {
        let data = artifact.module(&module.path).unwrap();
        let g = &data.geometry;
        let oracle = trellis_codec::reference::decode(
            g,
            &data.codes,
            &data.scales,
            trellis_codec::reference::Contract::Expanded,
            trellis_codec::reference::Dtype::F32,
        )
        .unwrap();
        let found = dense.get(&format!("{}.weight", module.path)).unwrap();
        assert_eq!(found.shape, [g.out_features(), g.in_features()]);
        let found: Vec<f64> =
            found.bytes.as_chunks().0.iter().map(|&c| f32::from_le_bytes(c).into()).collect();
        let stored = |i: usize| match g.axis() {
            trellis_codec::Axis::Input => i,
            trellis_codec::Axis::Output => (i % g.in_features()) * g.out_features() + i / g.in_features(),
        };
        for (i, x) in found.iter().enumerate() {
            assert_eq!(*x, oracle[stored(i)], "{} {i}", module.path);
        }
    }
    assert_eq!(files(&decoded)["tokenizer.json"], b"{}");
    let config: Value = serde_json::from_slice(&files(&decoded)["config.json"]).unwrap();
    assert_eq!((&config["torch_dtype"], config.get("quantization")), (&json!("float32"), None));

    std::fs::write(
        source.join("config.json"),
        r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#,
    )
    .unwrap();
    for extra in [&[][..], &["--requantize"]] {
        let error = fails(&[&["quantize", s(&source), "-o", "x"], extra].concat());
        assert!(error.contains("config.json") && error.contains("gptq"), "{error}");
    }
}

#[test]
fn memory_is_bounded_by_the_largest_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dense");
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    let (vector, matrix) = (vec![0x3c; 4 << 20], vec![0x3c; 2 << 18]);
    for i in 0..100 {
        let shape = [2 << 20];
        writer
            .add_tensor(&format!("v{i}"), RawTensor { dtype: Dtype::F16, shape: &shape, bytes: &vector })
            .unwrap();
    }
    let shape = [512, 512];
    writer.add_tensor("m.weight", RawTensor { dtype: Dtype::F16, shape: &shape, bytes: &matrix }).unwrap();
    writer.finish().unwrap();
    let output = folder.path().join("out");
    let report = run(&["quantize", s(&path), "-o", s(&output), "--json"]);
    let peak = report["peak_bytes"].as_u64().unwrap() as f64 / 1e6;
    println!("peak {peak:.0} MB for a model of 420 MB");
    assert!(peak < 210.0, "{peak} MB");
}
