//! Artifacts: what is written reads back, what is wrong is refused by name, and nothing half-written stays.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;
use trellis_codec::artifact::{
    ARTIFACT_FOLDER, Artifact, ArtifactWriter, Dtype, Entry, KeySpace, NewFile, Quantization, RawTensor,
    Tensors, TrellisEntry, WriteOptions,
};
use trellis_codec::{ArtifactError, Axis, EncodeReport, Encoded, Geometry, Layout, Rotation, cases, f16};

const MODULE: &str = "model.layers.0.mlp.down_proj";
const CODES: &str = "model.layers.0.mlp.down_proj.weight";
const SCALES: &str = "model.layers.0.mlp.down_proj.scales";
const BIAS: &str = "model.layers.0.mlp.down_proj.bias";

/// A model as parts, so that a test can break one; its files are laid out here, not by the crate's writer.
struct Source {
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    config: Value,
}

impl Source {
    /// Axis 1, 4 by 256 at three bits, with a bias and an unrelated tensor.
    fn new() -> Self {
        let mut source = Self {
            tensors: vec![("model.norm.weight".to_owned(), Dtype::BF16, vec![3], vec![1, 2, 3, 4, 5, 6])],
            config: json!({ "model_type": "test", "quantization": { "bits": 4, "group_size": 64, "mode": "affine" } }),
        };
        source.set(CODES, Dtype::U32, &[4, 24]);
        source.set(SCALES, Dtype::F16, &[4]);
        source.set(BIAS, Dtype::BF16, &[4]);
        *source.entry(MODULE) = json!({ "bits": 3, "group_size": 256, "mode": "trellis",
            "trellis": { "L": 12, "code": "1mad", "axis": 1 } });
        source
    }

    /// Adds or replaces a tensor; its bytes count up, which no float16 scale finds odd.
    fn set(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        self.remove(name);
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let bytes = (0..bytes).map(|i| (i % 100) as u8).collect();
        self.tensors.push((name.to_owned(), dtype, shape.to_vec(), bytes));
    }

    fn remove(&mut self, name: &str) {
        self.tensors.retain(|t| t.0 != name);
    }

    fn rename(&mut self, from: &str, to: &str) {
        for tensor in &mut self.tensors {
            if let Some(rest) = tensor.0.strip_prefix(from) {
                tensor.0 = format!("{to}{rest}");
            }
        }
    }

    fn entry(&mut self, module: &str) -> &mut Value {
        &mut self.config["quantization"][module]
    }

    fn trellis(&mut self) -> &mut Value {
        &mut self.entry(MODULE)["trellis"]
    }

    fn rotate(&mut self, rotation: Value) {
        self.trellis()["code"] = json!("1mad-hadamard");
        self.trellis()["rotation"] = rotation;
    }

    fn scale(&mut self, row: usize, scale: f16) {
        let scales = self.tensors.iter_mut().find(|t| t.0 == SCALES).unwrap();
        scales.3[row * 2..row * 2 + 2].copy_from_slice(&scale.to_le_bytes());
    }

    fn write(&self, folder: &Path) {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), file_bytes(&self.tensors)).unwrap();
    }

    fn open(&self) -> Result<Artifact, ArtifactError> {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        Artifact::open(folder.path())
    }
}

fn file_bytes(tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The error is of the variant, and its message has every part: file, tensor, found, expected.
#[track_caller]
fn assert_refused(result: Result<impl std::fmt::Debug, ArtifactError>, variant: &str, parts: &[&str]) {
    let error = result.expect_err("it should be refused");
    let debug = format!("{error:?}");
    assert_eq!(debug.split([' ', '{']).next(), Some(variant), "{error}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert!(!message.contains("  "), "{message}");
}

fn codes(geometry: &Geometry) -> Vec<u32> {
    (0..geometry.words() as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

fn scales(geometry: &Geometry) -> Vec<f16> {
    (0..geometry.rows()).map(|i| f16::from_f32(i as f32 / 8.0 - 0.25)).collect()
}

fn names(folder: &Path) -> Vec<String> {
    files(folder).into_keys().collect()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default())
    };
    fs::read_dir(folder).unwrap().map(|entry| read(entry.unwrap())).collect()
}

fn destination() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    (folder, path)
}

fn tiny() -> Geometry {
    Geometry::new(Axis::Input, 1, 2, 32, 1, 32).unwrap()
}

#[test]
fn opens_what_is_right() {
    let mut source = Source::new();
    source.scale(1, f16::ZERO);
    source.scale(2, f16::from_f32(-2.0));
    let artifact = source.open().unwrap();
    let [info] = artifact.modules() else { panic!("one module") };
    assert_eq!((info.path.as_str(), info.has_bias), (MODULE, true));
    assert_eq!(info.geometry, Geometry::new(Axis::Input, 3, 12, 256, 4, 256).unwrap());
    let module = artifact.module(MODULE).unwrap();
    assert_eq!(module.codes.len(), 96);
    assert_eq!(module.codes[1], u32::from_le_bytes([4, 5, 6, 7]));
    assert_eq!(module.scales[1..3], [f16::ZERO, f16::from_f32(-2.0)]);
    assert_eq!(module.bias.unwrap().shape, [4]);
    let others: Vec<_> = artifact.others().collect();
    assert_eq!(others.len(), 1);
    let expected = RawTensor { dtype: Dtype::BF16, shape: &[3], bytes: &[1, 2, 3, 4, 5, 6] };
    assert_eq!(others[0], ("model.norm.weight", expected));
    assert_eq!(artifact.tensors().names().collect::<Vec<_>>(), ["model.norm.weight", CODES, SCALES, BIAS]);
    assert_eq!(artifact.config()["model_type"], "test");
    assert_refused(artifact.module("model.norm").map(|_| ()), "NoModule", &["model.norm", "1 trellis"]);
}

#[test]
fn a_misaligned_file_is_copied() {
    let mut source = Source::new();
    for offset in 0..4 {
        source.set("pad", Dtype::U8, &[offset]);
        source.tensors.rotate_right(1);
        let artifact = source.open().unwrap();
        let module = artifact.module(MODULE).unwrap();
        assert_eq!(module.codes[1], u32::from_le_bytes([4, 5, 6, 7]));
        assert_eq!(module.scales[1].to_bits(), u16::from_le_bytes([2, 3]));
    }
}

#[test]
fn a_single_file_finds_its_config() {
    let folder = tempfile::tempdir().unwrap();
    Source::new().write(folder.path());
    let path = folder.path().join("other.safetensors");
    fs::rename(folder.path().join("model.safetensors"), &path).unwrap();
    assert_eq!(Artifact::open(&path).unwrap().modules().len(), 1);
    assert_refused(Artifact::open(folder.path()), "NoWeights", &["other.safetensors", "model.safetensors"]);
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert_refused(Artifact::open(&path), "Io", &["config.json", "read"]);
    assert_eq!(Tensors::open(&path).unwrap().len(), 4);
    assert_refused(Artifact::open(folder.path().join("absent")), "Io", &["absent", "open"]);
}

#[test]
fn entries_say_what_the_config_says() {
    let mut source = Source::new();
    *source.entry("a") = json!(false);
    *source.entry("b") = json!(true);
    *source.entry("c") = json!({ "bits": 8, "group_size": 32 });
    let artifact = source.open().unwrap();
    let trellis = TrellisEntry { bits: 3, block: 256, state_bits: 12, axis: Axis::Input, rotation: None };
    assert_eq!(artifact.entry(MODULE), Entry::Trellis(trellis));
    assert_eq!(artifact.entry("a"), Entry::NotQuantized);
    assert_eq!(artifact.entry("b"), Entry::Default);
    assert_eq!(artifact.entry("nowhere"), Entry::Default);
    let other = Quantization { bits: Some(8), group_size: Some(32), mode: None };
    assert_eq!(artifact.entry("c"), Entry::Other(other));
    let default = Quantization { bits: Some(4), group_size: Some(64), mode: Some("affine".to_owned()) };
    assert_eq!(artifact.default_quantization(), Some(&default));
}

#[test]
fn absent_parameters_take_their_defaults() {
    let mut source = Source::new();
    *source.entry(MODULE) = json!({ "bits": 3, "mode": "trellis", "trellis": { "code": "1mad", "axis": 1 } });
    for key in ["bits", "group_size", "mode"] {
        source.config["quantization"].as_object_mut().unwrap().shift_remove(key);
    }
    let artifact = source.open().unwrap();
    assert_eq!(artifact.modules()[0].geometry, Geometry::new(Axis::Input, 3, 12, 256, 4, 256).unwrap());
    assert_eq!(artifact.default_quantization(), None);
}

#[test]
fn a_model_without_trellis_modules_opens() {
    let mut source = Source::new();
    source.config = json!({ "quantization": null, "quantization_config":
        { "quant_method": "gptq", "bits": 4, "modules": ["a"], "meta": { "damp": 0.1 } } });
    let artifact = source.open().unwrap();
    assert!(artifact.modules().is_empty());
    assert_eq!(artifact.default_quantization(), None);
    assert_eq!(artifact.others().count(), 4);
}

#[rstest]
#[case::unknown_key("EntryKey", |s: &mut Source| s.entry(MODULE)["rotation"] = json!("h"),
    &["config.json", MODULE, "\"rotation\"", "bits, group_size, mode, trellis"])]
#[case::unknown_trellis_key("EntryKey", |s: &mut Source| s.trellis()["T"] = json!(256),
    &["config.json", MODULE, "\"T\"", "L, code, axis"])]
#[case::rotation_of_a_plain_code("EntryKey", |s: &mut Source| s.trellis()["rotation"] = json!({ "block": 64, "seed": 1 }),
    &["config.json", MODULE, "\"rotation\"", "L, code, axis in trellis"])]
#[case::no_rotation("EntryValue", |s: &mut Source| s.trellis()["code"] = json!("1mad-hadamard"),
    &["config.json", MODULE, "rotation: found nothing", "an object"])]
#[case::rotation_kind("EntryValue", |s: &mut Source| s.rotate(json!(64)),
    &["config.json", MODULE, "rotation: found a number", "an object"])]
#[case::rotation_key("EntryKey", |s: &mut Source| s.rotate(json!({ "block": 64, "seed": 1, "axis": 0 })),
    &["config.json", MODULE, "\"axis\"", "block, seed in rotation"])]
#[case::rotation_without_block("EntryValue", |s: &mut Source| s.rotate(json!({ "seed": 1 })),
    &["config.json", MODULE, "block: found nothing", "whole number"])]
#[case::rotation_seed_text("EntryValue", |s: &mut Source| s.rotate(json!({ "block": 64, "seed": "1" })),
    &["config.json", MODULE, "seed: found \"1\"", "whole number"])]
#[case::rotation_seed_negative("EntryValue", |s: &mut Source| s.rotate(json!({ "block": 64, "seed": -1 })),
    &["config.json", MODULE, "seed: found -1", "whole number"])]
#[case::rotation_block("Rotation", |s: &mut Source| s.rotate(json!({ "block": 96, "seed": 1 })),
    &["config.json", MODULE, "block is 96", "power of two from 2 to 1024"])]
#[case::rotation_seed("Rotation", |s: &mut Source| s.rotate(json!({ "block": 64, "seed": 9007199254740992u64 })),
    &["config.json", MODULE, "seed is 9007199254740992", "at most 9007199254740991"])]
#[case::rotation_does_not_fit("Rotation", |s: &mut Source| s.rotate(json!({ "block": 512, "seed": 1 })),
    &["config.json", MODULE, "block is 512", "divides the 256 input features"])]
#[case::other_code("Code", |s: &mut Source| s.trellis()["code"] = json!("3inst"),
    &["config.json", MODULE, "\"3inst\"", "\"1mad\""])]
#[case::code_number("EntryValue", |s: &mut Source| s.trellis()["code"] = json!(1),
    &["config.json", MODULE, "code: found 1,", "\"1mad\""])]
#[case::axis("EntryValue", |s: &mut Source| s.trellis()["axis"] = json!(2),
    &["config.json", MODULE, "axis: found 2,", "0 or 1"])]
#[case::no_axis("EntryValue", |s: &mut Source| { s.trellis().as_object_mut().unwrap().shift_remove("axis"); },
    &["config.json", MODULE, "axis: found nothing", "whole number"])]
#[case::no_bits("EntryValue",
    |s: &mut Source| { s.entry(MODULE).as_object_mut().unwrap().shift_remove("bits"); },
    &["config.json", MODULE, "bits: found nothing", "whole number"])]
#[case::bits_text("EntryValue", |s: &mut Source| s.entry(MODULE)["bits"] = json!("3"),
    &["config.json", MODULE, "bits: found \"3\"", "whole number"])]
#[case::bits_negative("EntryValue", |s: &mut Source| s.entry(MODULE)["bits"] = json!(-3),
    &["config.json", MODULE, "bits: found -3", "whole number"])]
#[case::no_trellis("EntryValue", |s: &mut Source| *s.trellis() = json!(null),
    &["config.json", MODULE, "trellis: found null", "an object"])]
#[case::trellis_but_affine("EntryValue", |s: &mut Source| s.entry(MODULE)["mode"] = json!("affine"),
    &["config.json", MODULE, "mode: found \"affine\"", "\"trellis\""])]
#[case::trellis_without_mode("EntryValue",
    |s: &mut Source| { s.entry(MODULE).as_object_mut().unwrap().shift_remove("mode"); },
    &["config.json", MODULE, "mode: found nothing", "\"trellis\""])]
#[case::default_is_trellis("EntryValue", |s: &mut Source| s.config["quantization"]["mode"] = json!("trellis"),
    &["config.json", "quantization", "mode: found \"trellis\" as the model's default", "modules only"])]
#[case::section_kind("EntryValue", |s: &mut Source| s.config["quantization"] = json!([3]),
    &["config.json", "quantization", "an array", "an object"])]
#[case::bits_zero("Parameters", |s: &mut Source| s.entry(MODULE)["bits"] = json!(0),
    &["config.json", MODULE, "(k) is 0", "expected 1 to 4"])]
#[case::bits_five("Parameters", |s: &mut Source| s.entry(MODULE)["bits"] = json!(5),
    &["config.json", MODULE, "(k) is 5", "expected 1 to 4"])]
#[case::bits_huge("Parameters", |s: &mut Source| s.entry(MODULE)["bits"] = json!(4_294_967_299u64),
    &["config.json", MODULE, "(k) is 4294967295", "expected 1 to 4"])]
#[case::state_bits_low("Parameters", |s: &mut Source| s.trellis()["L"] = json!(3),
    &["config.json", MODULE, "(L) is 3", "expected 4 to 16"])]
#[case::state_bits_high("Parameters", |s: &mut Source| s.trellis()["L"] = json!(17),
    &["config.json", MODULE, "(L) is 17", "expected 4 to 16"])]
#[case::block("Parameters", |s: &mut Source| s.entry(MODULE)["group_size"] = json!(200),
    &["config.json", MODULE, "(T) is 200", "multiple of 32"])]
#[case::block_zero("Parameters", |s: &mut Source| s.entry(MODULE)["group_size"] = json!(0),
    &["config.json", MODULE, "(T) is 0", "non-zero"])]
#[case::block_huge("Parameters", |s: &mut Source| s.entry(MODULE)["group_size"] = json!(u64::MAX),
    &["config.json", MODULE, "(T) is 18446744073709551615", "multiple of 32"])]
#[case::no_codes("MissingCodes", |s: &mut Source| s.remove(CODES),
    &[CODES, "found no such tensor", "config.json says the module is trellis"])]
#[case::no_scales("MissingScales", |s: &mut Source| s.remove(SCALES),
    &["model.safetensors", SCALES, "found no such tensor", "shape [4]"])]
#[case::codes_signed("CodesDtype", |s: &mut Source| s.set(CODES, Dtype::I32, &[4, 24]),
    &["model.safetensors", CODES, "found dtype I32", "expected U32"])]
#[case::codes_1d("CodesRank", |s: &mut Source| s.set(CODES, Dtype::U32, &[96]),
    &["model.safetensors", CODES, "found shape [96]", "[rows, words] or [cols/512, rows, 48]"])]
#[case::codes_4d("CodesRank", |s: &mut Source| s.set(CODES, Dtype::U32, &[1, 1, 4, 48]),
    &["model.safetensors", CODES, "found shape [1, 1, 4, 48]", "[rows, words]"])]
#[case::words_not_of_bits("CodesBits", |s: &mut Source| s.set(CODES, Dtype::U32, &[4, 25]),
    &["model.safetensors", CODES, "found shape [4, 25]", "multiple of bits 3"])]
#[case::cols_not_of_blocks("CodesBlocks", |s: &mut Source| s.set(CODES, Dtype::U32, &[4, 12]),
    &["model.safetensors", CODES, "found shape [4, 12], which is 128 columns", "multiple of the group size 256"])]
#[case::other_bits("CodesBlocks", |s: &mut Source| s.entry(MODULE)["bits"] = json!(4),
    &["model.safetensors", CODES, "192 columns at bits 4", "multiple of the group size 256"])]
#[case::interleaved_axis_1("CodesInterleave", |s: &mut Source| s.set(CODES, Dtype::U32, &[1, 4, 48]),
    &["model.safetensors", CODES, "found shape [1, 4, 48] with axis 1", "only as [cols/512, rows, 48] with axis 0"])]
#[case::interleaved_words("CodesInterleave", |s: &mut Source| s.set(CODES, Dtype::U32, &[1, 4, 47]),
    &["model.safetensors", CODES, "found shape [1, 4, 47]", "[cols/512, rows, 48]"])]
#[case::interleaved_state_bits("CodesInterleave",
    |s: &mut Source| {
        s.set(CODES, Dtype::U32, &[1, 4, 48]);
        *s.trellis() = json!({ "L": 10, "code": "1mad", "axis": 0 });
    },
    &["model.safetensors", CODES, "axis 0, bits 3, group_size 256, L 10", "L 12"])]
#[case::interleaved_bits("CodesInterleave",
    |s: &mut Source| {
        s.set(CODES, Dtype::U32, &[1, 4, 48]);
        s.trellis()["axis"] = json!(0);
        s.entry(MODULE)["bits"] = json!(2);
    },
    &["model.safetensors", CODES, "axis 0, bits 2, group_size 256, L 12", "bits 3"])]
#[case::no_rows("CodesGeometry", |s: &mut Source| s.set(CODES, Dtype::U32, &[0, 24]),
    &["model.safetensors", CODES, "found shape [0, 24]", "expected at least one row"])]
#[case::no_words("CodesGeometry", |s: &mut Source| s.set(CODES, Dtype::U32, &[4, 0]),
    &["model.safetensors", CODES, "found shape [4, 0]", "one block of columns"])]
#[case::empty_and_huge("CodesBlocks", |s: &mut Source| s.set(CODES, Dtype::U32, &[0, 3 << 59]),
    &["model.safetensors", CODES, "found shape [0,", "multiple of the group size"])]
#[case::empty_interleaved("CodesGeometry", |s: &mut Source| s.set(CODES, Dtype::U32, &[usize::MAX, 0, 48]),
    &["model.safetensors", CODES, "0, 48]", "at least one row"])]
#[case::scales_wide("ScalesDtype", |s: &mut Source| s.set(SCALES, Dtype::F32, &[4]),
    &["model.safetensors", SCALES, "found dtype F32", "expected F16"])]
#[case::scales_brain("ScalesDtype", |s: &mut Source| s.set(SCALES, Dtype::BF16, &[4]),
    &["model.safetensors", SCALES, "found dtype BF16", "expected F16"])]
#[case::scales_short("ScalesShape", |s: &mut Source| s.set(SCALES, Dtype::F16, &[3]),
    &["model.safetensors", SCALES, "found shape [3]", "expected [4]"])]
#[case::scales_2d("ScalesShape", |s: &mut Source| s.set(SCALES, Dtype::F16, &[4, 1]),
    &["model.safetensors", SCALES, "found shape [4, 1]", "expected [4]"])]
#[case::scale_nan("ScaleNotFinite", |s: &mut Source| s.scale(2, f16::NAN),
    &["model.safetensors", SCALES, "row 2", "found scale NaN", "expected a finite number"])]
#[case::scale_infinite("ScaleNotFinite", |s: &mut Source| s.scale(3, f16::NEG_INFINITY),
    &["model.safetensors", SCALES, "row 3", "found scale -inf", "expected a finite number"])]
#[case::bias_short("BiasShape", |s: &mut Source| s.set(BIAS, Dtype::BF16, &[3]),
    &["model.safetensors", BIAS, "found shape [3]", "expected [4]"])]
#[case::bias_contradicts_bits("BiasShape",
    |s: &mut Source| {
        s.trellis()["axis"] = json!(0);
        s.set(BIAS, Dtype::F32, &[256]);
        s.entry(MODULE)["bits"] = json!(1);
    },
    &["model.safetensors", BIAS, "found shape [256]", "expected [768]"])]
#[case::zero_points("UnknownTensor",
    |s: &mut Source| s.set("model.layers.0.mlp.down_proj.biases", Dtype::F16, &[4, 1]),
    &["model.safetensors", "down_proj.biases", MODULE, ".weight, .scales and .bias"])]
#[case::deeper_tensor("UnknownTensor",
    |s: &mut Source| s.set("model.layers.0.mlp.down_proj.rotation.weight", Dtype::F16, &[4, 1]),
    &["model.safetensors", "down_proj.rotation.weight", MODULE, ".weight, .scales and .bias"])]
#[case::twin_section("EntriesDisagree",
    |s: &mut Source| {
        s.config["quantization_config"] = s.config["quantization"].clone();
        s.entry(MODULE)["group_size"] = json!(128);
    },
    &["config.json", MODULE, "group_size 256, L 12 in quantization_config", "expected mode trellis, axis 1, bits 3, group_size 128"])]
#[case::only_in_twin_section("EntriesDisagree",
    |s: &mut Source| {
        s.config["quantization_config"] = s.config["quantization"].clone();
        s.config["quantization"].as_object_mut().unwrap().shift_remove(MODULE);
    },
    &["config.json", MODULE, "in quantization_config", "expected the default"])]
fn refusals(#[case] variant: &str, #[case] damage: fn(&mut Source), #[case] parts: &[&str]) {
    let mut source = Source::new();
    damage(&mut source);
    assert_refused(source.open(), variant, parts);
}

#[rstest]
#[case::empty("Safetensors", vec![], &["found 0 bytes", "expected at least the 8"])]
#[case::short("Safetensors", vec![0; 7], &["found 7 bytes", "expected at least the 8"])]
#[case::header_past_end("Safetensors", with_header("{}", &[])[..9].to_vec(),
    &["a header of 2 bytes", "at most 1, what is left of the file"])]
#[case::header_huge("Safetensors", vec![255; 64], &["a header of 18446744073709551615", "at most 100000000"])]
#[case::header_kind("Safetensors", with_header("[]", &[]), &["expected an object of tensors", "a JSON object"])]
#[case::header_json("Safetensors", with_header("{\"a\":", &[]), &["EOF", "a JSON object"])]
#[case::header_trailing("Safetensors", with_header("{}x", &[]), &["trailing", "a JSON object"])]
#[case::header_utf8("Safetensors", [&[4, 0, 0, 0, 0, 0, 0, 0][..], b"{\"\xff\""].concat(), &["a JSON object"])]
#[case::header_deep("Safetensors", with_header(&format!("{{\"a\":{}", "[".repeat(100_000)), &[]), &["recursion"])]
#[case::metadata_kind("TensorHeader", with_header(r#"{"__metadata__":{"a":1}}"#, &[]),
    &["__metadata__", "{\"a\":1}", "an object of strings"])]
#[case::no_offsets("TensorHeader", with_header(r#"{"t":{"dtype":"U8","shape":[1]}}"#, &[0]),
    &["tensor t", "missing field `data_offsets`", "dtype, shape and data_offsets"])]
#[case::unknown_dtype("TensorHeader", with_header(r#"{"t":{"dtype":"Q3","shape":[1],"data_offsets":[0,1]}}"#, &[0]),
    &["tensor t", "unknown variant `Q3`", "dtype, shape and data_offsets"])]
#[case::negative("TensorHeader", with_header(r#"{"t":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, &[0]),
    &["tensor t", "-1", "dtype, shape and data_offsets"])]
#[case::size("TensorHeader", with_header(r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,3]}}"#, &[0; 3]),
    &["tensor t", "[0, 3]", "4 bytes for F32 of shape [1]"])]
#[case::backwards("TensorHeader", with_header(r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}"#, &[0]),
    &["tensor t", "[1, 0]", "1 bytes"])]
#[case::half_a_byte("TensorHeader", with_header(r#"{"t":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#, &[0]),
    &["tensor t", "F4 of shape [1]", "a whole number of bytes"])]
#[case::overflow("TensorHeader",
    with_header(&format!(r#"{{"t":{{"dtype":"U64","shape":[{0},{0},{0}],"data_offsets":[0,0]}}}}"#, u64::MAX), &[]),
    &["tensor t", "U64 of shape", "of a size that a file can have"])]
#[case::hole("TensorHeader", with_header(r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, &[0; 2]),
    &["tensor t", "from byte 1", "byte 0"])]
#[case::overlap("TensorHeader",
    with_header(r#"{"s":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"t":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#, &[0; 3]),
    &["tensor t", "from byte 1", "byte 2"])]
#[case::twice("TensorHeader",
    with_header(r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, &[0; 2]),
    &["tensor t", "a second one", "each name once"])]
#[case::truncated("Safetensors", with_header(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, &[0; 3]),
    &["3 bytes of data", "the header's 4"])]
#[case::trailing("Safetensors", with_header(r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, &[0; 5]),
    &["5 bytes of data", "the header's 4"])]
#[case::sum_overflows("Safetensors", eight_huge_tensors(), &["0 bytes of data", "the header's 18446744073709551608"])]
fn malformed_files(#[case] variant: &str, #[case] bytes: Vec<u8>, #[case] parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.safetensors");
    fs::write(&path, bytes).unwrap();
    let parts = [&["bad.safetensors", "found", "expected"], parts].concat();
    assert_refused(Tensors::open(&path), variant, &parts);
}

/// Offsets that end eight bytes below 2^64, so that the header's length no longer fits on top.
fn eight_huge_tensors() -> Vec<u8> {
    let size = (1u64 << 61) - 1;
    let tensor = |i: u64| {
        format!(r#""{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{},{}]}}"#, i * size, (i + 1) * size)
    };
    with_header(&format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(",")), &[])
}

#[rstest]
#[case::not_json("{", "expected JSON")]
#[case::not_an_object("[]", "found an array, expected an object")]
fn malformed_configs(#[case] text: &str, #[case] part: &str) {
    let folder = tempfile::tempdir().unwrap();
    Source::new().write(folder.path());
    fs::write(folder.path().join("config.json"), text).unwrap();
    assert_refused(Artifact::open(folder.path()), "Json", &["config.json", "found", part]);
}

/// Two shards, `a` and `b` in the first, `c` in the second.
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

#[rstest]
#[case::missing_shard("MissingShard", json!({ "a": FIRST, "b": FIRST, "c": "gone.safetensors" }),
    &["tensor c", "gone.safetensors", "found no such file", "expected"])]
#[case::listed_but_gone("StaleIndex", json!({ "a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND }),
    &["tensor d", "found it in no shard", "expected it in model-00002-of-00002"])]
#[case::there_but_unlisted("StaleIndex", json!({ "a": FIRST, "c": SECOND }),
    &["tensor b", "found it in model-00001-of-00002", "expected it listed by the index, or absent"])]
#[case::elsewhere("StaleIndex", json!({ "a": FIRST, "b": SECOND, "c": SECOND }),
    &["tensor b", "found it in model-00001-of-00002", "expected it in model-00002-of-00002"])]
#[case::unlisted_shard("UnlistedShard", json!({ "a": FIRST, "b": FIRST }),
    &["found model-00002-of-00002.safetensors", "expected no model shard"])]
#[case::outside("ShardName", json!({ "a": "../model.safetensors" }),
    &["tensor a", "\"../model.safetensors\"", "expected the name of a file in the same folder"])]
#[case::absolute("ShardName", json!({ "a": "/model.safetensors" }),
    &["tensor a", "\"/model.safetensors\"", "expected the name of a file in the same folder"])]
#[case::unnamed("ShardName", json!({ "a": "" }), &["tensor a", "\"\"", "expected the name of a file"])]
#[case::kind("Json", json!({ "a": 1 }), &["found", "expected an object whose weight_map"])]
#[case::no_map("Json", json!(null), &["found", "expected an object whose weight_map"])]
fn indexes(#[case] variant: &str, #[case] weight_map: Value, #[case] parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str| (name.to_owned(), Dtype::U8, vec![1], vec![7]);
    fs::write(folder.path().join(FIRST), file_bytes(&[tensor("a"), tensor("b")])).unwrap();
    fs::write(folder.path().join(SECOND), file_bytes(&[tensor("c")])).unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let write = |weight_map: &Value| {
        fs::write(&index, json!({ "metadata": {}, "weight_map": weight_map }).to_string()).unwrap();
    };
    write(&json!({ "a": FIRST, "b": FIRST, "c": SECOND }));
    assert_eq!(Tensors::open(folder.path()).unwrap().names().collect::<Vec<_>>(), ["a", "b", "c"]);
    write(&weight_map);
    let parts = [&["model.safetensors.index.json"], parts].concat();
    assert_refused(Tensors::open(folder.path()), variant, &parts);
}

#[test]
fn one_tensor_in_two_shards_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = || ("a".to_owned(), Dtype::U8, vec![1], vec![7]);
    fs::write(folder.path().join(FIRST), file_bytes(&[tensor()])).unwrap();
    let both = [tensor(), ("b".to_owned(), Dtype::U8, vec![0], vec![])];
    fs::write(folder.path().join(SECOND), file_bytes(&both)).unwrap();
    let index = json!({ "weight_map": { "a": FIRST, "b": SECOND } });
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let parts = [SECOND, "tensor a", "a second one after", FIRST, "each name once"];
    assert_refused(Tensors::open(folder.path()), "TensorHeader", &parts);
}

const HF: &str = "model.language_model.layers.0.mlp.down_proj";
const MLX: &str = "language_model.model.layers.0.mlp.down_proj";

#[rstest]
fn either_key_space_is_found(#[values(HF, MLX)] tensors: &str, #[values(HF, MLX)] config: &str) {
    let mut source = Source::new();
    source.rename(MODULE, tensors);
    *source.entry(config) = source.entry(MODULE).clone();
    source.config["quantization"].as_object_mut().unwrap().shift_remove(MODULE);
    let artifact = source.open().unwrap();
    assert_eq!(artifact.modules()[0].path, tensors);
    for path in [HF, MLX] {
        assert_eq!(artifact.module(path).unwrap().path, tensors);
        assert!(matches!(artifact.entry(path), Entry::Trellis(_)));
        assert_eq!(artifact.tensors().get(&format!("{path}.scales")).unwrap().shape, [4]);
    }
    assert_eq!(artifact.others().count(), 1);
}

#[test]
fn two_key_spaces_must_agree() {
    let mut source = Source::new();
    source.rename(MODULE, MLX);
    *source.entry(HF) = source.entry(MODULE).clone();
    *source.entry(MLX) = source.entry(MODULE).clone();
    source.config["quantization"].as_object_mut().unwrap().shift_remove(MODULE);
    assert_eq!(source.open().unwrap().modules().len(), 1);

    source.set(&format!("{HF}.scales"), Dtype::F16, &[4]);
    let parts = [&format!("{HF}.scales"), MLX, ".weight, .scales and .bias"];
    assert_refused(source.open(), "UnknownTensor", &parts);
    source.remove(&format!("{HF}.scales"));

    source.entry(HF)["bits"] = json!(1);
    let parts = [
        "config.json",
        HF,
        MLX,
        "found mode trellis, axis 1, bits 3",
        "expected mode trellis, axis 1, bits 1",
    ];
    assert_refused(source.open(), "EntriesDisagree", &parts);
    *source.entry(HF) = json!(false);
    assert_refused(source.open(), "EntriesDisagree", &["config.json", HF, MLX, "expected false"]);
}

#[test]
fn round_trip() {
    let (_folder, path) = destination();
    let plain = Geometry::new(Axis::Input, 2, 12, 256, 3, 512).unwrap();
    let interleaved =
        Geometry::new(Axis::Output, 3, 12, 256, 5, 1024).unwrap().with_layout(Layout::Interleaved).unwrap();
    let bias: Vec<u8> = (0..1024 * 2).map(|i| i as u8).collect();
    let bias = RawTensor { dtype: Dtype::BF16, shape: &[1024], bytes: &bias };
    let norm = RawTensor { dtype: Dtype::BF16, shape: &[2, 2], bytes: &[1, 2, 3, 4, 5, 6, 7, 8] };
    let flag = RawTensor { dtype: Dtype::BOOL, shape: &[], bytes: &[1] };
    let empty = RawTensor { dtype: Dtype::F32, shape: &[0, 3], bytes: &[] };
    let wide = RawTensor { dtype: Dtype::I64, shape: &[1], bytes: &[9; 8] };
    for max_shard_bytes in [u64::MAX, 700, 1] {
        let options = WriteOptions { max_shard_bytes, overwrite: true, ..WriteOptions::default() };
        let mut writer = ArtifactWriter::create(&path, options).unwrap();
        writer.add_tensor("flag", flag).unwrap();
        writer.add_module("a.plain", &plain, &codes(&plain), &scales(&plain), None).unwrap();
        writer.add_tensor("norm", norm).unwrap();
        writer
            .add_module(
                "a.interleaved",
                &interleaved,
                &codes(&interleaved),
                &scales(&interleaved),
                Some(bias),
            )
            .unwrap();
        writer.add_tensor("empty", empty).unwrap();
        writer.add_tensor("wide", wide).unwrap();
        let summary = writer.finish().unwrap();
        let count = match max_shard_bytes {
            1 => 5,
            700 => 3,
            _ => 1,
        };
        assert_eq!(summary.shards.len(), count);
        assert_eq!((summary.modules, summary.tensors, summary.leftover), (2, 9, None));

        let artifact = Artifact::open(&path).unwrap();
        for (path, geometry) in [("a.plain", &plain), ("a.interleaved", &interleaved)] {
            let module = artifact.module(path).unwrap();
            assert_eq!(module.geometry, *geometry);
            assert_eq!(module.codes, codes(geometry));
            assert_eq!(module.scales, scales(geometry));
            assert!(matches!((&module.codes, &module.scales), (Cow::Borrowed(_), Cow::Borrowed(_))));
        }
        assert_eq!(artifact.module("a.interleaved").unwrap().bias, Some(bias));
        for (name, tensor) in [("flag", flag), ("norm", norm), ("empty", empty), ("wide", wide)] {
            assert_eq!(artifact.tensors().get(name), Some(tensor), "{name}");
        }
        assert_eq!(artifact.others().count(), 4);
        let bytes: usize = artifact.tensors().iter().map(|(_, t)| t.bytes.len()).sum();
        assert_eq!(summary.tensor_bytes, bytes as u64);

        let index = path.join("model.safetensors.index.json");
        assert_eq!(index.exists(), count > 1);
        if count > 1 {
            let index: Value = serde_json::from_slice(&fs::read(index).unwrap()).unwrap();
            assert_eq!(index["metadata"]["total_size"], bytes);
            let shard = |name: &str| index["weight_map"][name].as_str().unwrap();
            assert_eq!(shard("a.interleaved.weight"), shard("a.interleaved.bias"));
            assert_eq!(shard("flag"), format!("model-00001-of-{count:05}.safetensors"));
        }
    }
}

#[test]
fn rotated_modules_round_trip() {
    let (_folder, path) = destination();
    let geometry = Geometry::new(Axis::Output, 3, 12, 256, 48, 256).unwrap();
    let encoded = |block| Encoded {
        geometry,
        rotation: Some(Rotation::new(block, 77).unwrap()),
        codes: codes(&geometry),
        scales: scales(&geometry),
        report: EncodeReport::default(),
    };
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    let misfit = writer.add_encoded("a", &encoded(32), None);
    assert_refused(misfit, "Rotation", &["config.json", "module a", "block is 32", "48 input features"]);
    writer.add_encoded("a", &encoded(16), None).unwrap();
    writer.add_module("b", &geometry, &codes(&geometry), &scales(&geometry), None).unwrap();
    writer.finish().unwrap();

    let artifact = Artifact::open(&path).unwrap();
    assert_eq!(artifact.module("a").unwrap().rotation, encoded(16).rotation);
    assert_eq!(artifact.modules()[0].rotation, encoded(16).rotation);
    assert_eq!(artifact.module("b").unwrap().rotation, None);
    assert_eq!(
        artifact.config()["quantization"]["a"].to_string(),
        r#"{"bits":3,"group_size":256,"mode":"trellis","trellis":{"L":12,"code":"1mad-hadamard","axis":0,"rotation":{"block":16,"seed":77}}}"#
    );
    let entry = artifact.entry("a").to_string();
    assert_eq!(entry, "mode trellis, axis 0, bits 3, group_size 256, L 12, rotation block 16 seed 77");
}

#[test]
fn golden_cases_round_trip() {
    let (_folder, path) = destination();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let cases = cases::read_cases(&golden).unwrap();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    for case in &cases {
        writer.add_module(&case.name, &case.geometry, &case.codes, &case.scales, None).unwrap();
    }
    writer.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    assert_eq!(artifact.modules().len(), 14);
    for (case, info) in cases.iter().zip(artifact.modules()) {
        let module = artifact.module(&info.path).unwrap();
        assert_eq!((module.path, module.geometry), (case.name.as_str(), case.geometry));
        assert_eq!(module.codes, case.codes);
        let bits = |scales: &[f16]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&module.scales), bits(&case.scales));
    }
}

/// The file, frozen as literal bytes.
#[test]
fn frozen_file() {
    let (folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.set_config(json!({ "model_type": "tiny", "eps": 1e-6 })).unwrap();
    writer.add_tensor("n", RawTensor { dtype: Dtype::U8, shape: &[3], bytes: b"abc" }).unwrap();
    writer.add_module("m", &tiny(), &[0x8000_0001], &[f16::from_f32(1.5)], None).unwrap();
    writer.finish().unwrap();
    let header = concat!(
        r#"{"__metadata__":{"format":"mlx"},"#,
        r#""m.weight":{"dtype":"U32","shape":[1,1],"data_offsets":[0,4]},"#,
        r#""m.scales":{"dtype":"F16","shape":[1],"data_offsets":[4,6]},"#,
        r#""n":{"dtype":"U8","shape":[3],"data_offsets":[6,9]}} "#,
    );
    let expected =
        [b"\xd0\0\0\0\0\0\0\0".as_slice(), header.as_bytes(), b"\x01\x00\x00\x80", b"\x00\x3e", b"abc"];
    let found = fs::read(path.join("model.safetensors")).unwrap();
    assert_eq!(found, expected.concat());
    let parsed = safetensors::SafeTensors::deserialize(&found).unwrap();
    assert_eq!(parsed.tensor("n").unwrap().data(), b"abc");
    let section = r#"{
    "m": {
      "bits": 1,
      "group_size": 32,
      "mode": "trellis",
      "trellis": {
        "L": 2,
        "code": "1mad",
        "axis": 1
      }
    }
  }"#;
    let config = format!(
        "{{\n  \"model_type\": \"tiny\",\n  \"eps\": 1e-6,\n  \"quantization\": {section},\n  \
         \"quantization_config\": {section}\n}}\n"
    );
    assert_eq!(fs::read_to_string(path.join("config.json")).unwrap(), config);
    assert_eq!(names(&path), ["config.json", "model.safetensors"]);
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn the_same_calls_write_the_same_bytes() {
    let write = || {
        let (folder, path) = destination();
        let metadata = BTreeMap::from_iter(["a", "b", "c", "d"].map(|k| (k.to_owned(), k.to_owned())));
        let options = WriteOptions { max_shard_bytes: 40, metadata, ..WriteOptions::default() };
        let mut writer = ArtifactWriter::create(&path, options).unwrap();
        for i in 0..20 {
            writer.add_module(&format!("m{i}"), &tiny(), &[i], &[f16::ONE], None).unwrap();
        }
        writer.finish().unwrap();
        let files = files(&path);
        drop(folder);
        files
    };
    let files = write();
    assert_eq!(files.len(), 6);
    assert!(files == write());
}

#[rstest]
#[case(KeySpace::AsGiven, HF, HF)]
#[case(KeySpace::AsGiven, MLX, MLX)]
#[case(KeySpace::ModelLanguageModel, MLX, HF)]
#[case(KeySpace::LanguageModelModel, HF, MLX)]
#[case(KeySpace::LanguageModelModel, "lm_head", "lm_head")]
fn config_keys_are_in_the_space_asked_for(
    #[case] key_space: KeySpace,
    #[case] module: &str,
    #[case] key: &str,
) {
    let (_folder, path) = destination();
    let options = WriteOptions { key_space, ..WriteOptions::default() };
    let mut writer = ArtifactWriter::create(&path, options).unwrap();
    // Entries of the base in either space give way, or they would contradict the new one.
    let base = json!({ "bits": 4, "group_size": 64, HF: false, MLX: false, "lm_head": { "bits": 8 }, "kept": false });
    writer.set_config(json!({ "quantization": null, "quantization_config": base })).unwrap();
    writer.add_module(module, &tiny(), &[1], &[f16::ONE], None).unwrap();
    let result = writer.add_module(module, &tiny(), &[1], &[f16::ONE], None);
    assert_refused(result, "Name", &["out", module]);
    writer.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    let section = artifact.config()["quantization"].as_object().unwrap();
    assert_eq!(artifact.config()["quantization_config"], artifact.config()["quantization"]);
    assert_eq!(section[key]["mode"], "trellis");
    assert_eq!(section["kept"], false);
    assert_eq!(section.contains_key(HF), module == "lm_head" || key == HF);
    assert_eq!(artifact.modules()[0].path, module);
    assert_eq!(artifact.default_quantization().unwrap().bits, Some(4));
}

#[test]
fn a_module_is_added_once_in_either_key_space() {
    let (_folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.add_module(HF, &tiny(), &[1], &[f16::ONE], None).unwrap();
    assert_refused(writer.add_module(MLX, &tiny(), &[1], &[f16::ONE], None), "Name", &["out", MLX]);
    writer.finish().unwrap();
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let (_folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    let g = tiny();
    let raw = |dtype, shape, bytes| RawTensor { dtype, shape, bytes };
    let result = writer.add_module("m", &g, &[1, 2], &[f16::ONE], None);
    assert_refused(result, "Length", &["out", "m.weight", "found 8 bytes", "expected 4"]);
    let result = writer.add_module("m", &g, &[1], &[], None);
    assert_refused(result, "Length", &["out", "m.scales", "found 0 bytes", "expected 2"]);
    let result = writer.add_module("m", &g, &[1], &[f16::INFINITY], None);
    assert_refused(result, "ScaleNotFinite", &["out", "m.scales", "row 0", "found scale inf"]);
    let result = writer.add_module("m", &g, &[1], &[f16::ONE], Some(raw(Dtype::F16, &[2], &[0; 4])));
    assert_refused(result, "BiasShape", &["out", "m.bias", "found shape [2]", "expected [1]"]);
    let interleaved =
        Geometry::new(Axis::Output, 3, 12, 256, 1, 512).unwrap().with_layout(Layout::Interleaved).unwrap();
    let gradient = interleaved.transposed();
    let result = writer.add_module("m", &gradient, &codes(&gradient), &[f16::ONE], None);
    assert_refused(result, "CodesGeometry", &["out", "m.weight", "[1, 1, 48]", "expected axis 0"]);
    let result = writer.add_tensor("t", raw(Dtype::F16, &[2], &[0; 3]));
    assert_refused(result, "Length", &["out", "tensor t", "found 3 bytes", "expected 4"]);
    let result = writer.add_tensor("__metadata__", raw(Dtype::U8, &[0], &[]));
    assert_refused(result, "Name", &["out", "__metadata__"]);
    let result = writer.set_config(json!({ "quantization_config": { "quant_method": "fp8" } }));
    assert_refused(result, "ForeignQuantization", &["config.json", "found quant_method \"fp8\"", "expected"]);
    assert_refused(writer.set_config(json!([])), "Json", &["config.json", "an array", "an object"]);
    let result = writer.copy_file(Path::new(env!("CARGO_MANIFEST_DIR")).join("config.json"));
    assert_refused(result, "Name", &["out", "config.json"]);
    let result = writer.copy_file(path.join("absent"));
    assert_refused(result, "Io", &["absent", "open"]);
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    writer.copy_file(&manifest).unwrap();
    assert_refused(writer.copy_file(&manifest), "Name", &["out", "Cargo.toml"]);
    writer.add_tensor("m.weight", raw(Dtype::U8, &[0], &[])).unwrap();
    let result = writer.add_module("m", &g, &[1], &[f16::ONE], None);
    assert_refused(result, "Name", &["out", "m.weight"]);
    // None of it was written, and none of it spoilt the writer.
    let summary = writer.finish().unwrap();
    assert_eq!((summary.modules, summary.tensors), (0, 1));
    assert_eq!(names(&path), ["Cargo.toml", "config.json", "model.safetensors"]);
    assert_eq!(fs::read(path.join("Cargo.toml")).unwrap(), fs::read(manifest).unwrap());
    assert_eq!(fs::read_to_string(path.join("config.json")).unwrap(), "{}\n");
}

#[test]
fn files_can_be_written_from_memory() {
    let (_folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.add_file("tokenizer.json", b"{}").unwrap();
    for name in ["tokenizer.json", "config.json", "model.safetensors", "a/b", ".."] {
        assert_refused(writer.add_file(name, b""), "Name", &["out", name]);
    }
    writer.finish().unwrap();
    assert_eq!(fs::read(path.join("tokenizer.json")).unwrap(), b"{}");
}

#[test]
fn tensors_can_be_read_without_the_map() {
    let (_folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer
        .add_tensor("model.language_model.a", RawTensor { dtype: Dtype::U8, shape: &[3], bytes: &[1, 2, 3] })
        .unwrap();
    writer.add_tensor("b", RawTensor { dtype: Dtype::F16, shape: &[1], bytes: &[4, 5] }).unwrap();
    writer.finish().unwrap();
    let tensors = Tensors::open(&path).unwrap();
    assert_eq!(tensors.read("language_model.model.a").unwrap(), [1, 2, 3]);
    assert_eq!(tensors.read("b").unwrap(), [4, 5]);
    assert_refused(tensors.read("c"), "NoTensor", &["out", "tensor c"]);
    // What a map would answer with a signal.
    let file = fs::File::options().write(true).open(path.join("model.safetensors")).unwrap();
    file.set_len(8).unwrap();
    assert_refused(tensors.read("b"), "Io", &["model.safetensors", "read"]);
}

#[test]
fn staging_is_where_it_was_asked_for() {
    let (folder, path) = destination();
    let staging = folder.path().join("work");
    fs::create_dir_all(staging.join(ARTIFACT_FOLDER)).unwrap();
    fs::write(staging.join("old"), "").unwrap();
    let options = WriteOptions { staging: Some(staging.clone()), ..WriteOptions::default() };
    let mut writer = ArtifactWriter::create(&path, options).unwrap();
    assert_eq!(names(&staging), [ARTIFACT_FOLDER], "what was there is gone");
    writer.add_tensor("a", RawTensor { dtype: Dtype::U8, shape: &[1], bytes: &[1] }).unwrap();
    writer.finish().unwrap();
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let (folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.add_module("m", &tiny(), &[1], &[f16::ONE], None).unwrap();
    assert_eq!(names(folder.path()).len(), 1);
    assert!(!path.exists());
    drop(writer);
    assert_eq!(names(folder.path()), Vec::<String>::new());
}

#[test]
fn a_destination_is_replaced_only_when_asked_and_only_by_a_whole_artifact() {
    let (folder, path) = destination();
    let overwrite = || WriteOptions { overwrite: true, ..WriteOptions::default() };
    let write = |options, code| {
        let mut writer = ArtifactWriter::create(&path, options)?;
        writer.add_module("m", &tiny(), &[code], &[f16::ONE], None)?;
        writer.finish()
    };
    write(WriteOptions::default(), 1).unwrap();
    let before = files(&path);
    assert_refused(write(WriteOptions::default(), 2), "Exists", &["out", "already"]);

    // A config that names a module never added is refused at the very end.
    let mut writer = ArtifactWriter::create(&path, overwrite()).unwrap();
    writer
        .set_config(json!({ "quantization": { "gone": { "bits": 3, "mode": "trellis",
        "trellis": { "code": "1mad", "axis": 0 } } } }))
        .unwrap();
    assert_refused(writer.finish(), "MissingCodes", &["gone.weight"]);
    assert!(files(&path) == before);
    assert_eq!(names(folder.path()), ["out"]);

    // An opened artifact stays readable while another takes its place.
    let old = Artifact::open(&path).unwrap();
    write(overwrite(), 2).unwrap();
    assert_eq!(old.module("m").unwrap().codes[..], [1]);
    assert_eq!(Artifact::open(&path).unwrap().module("m").unwrap().codes[..], [2]);
    assert_eq!(names(folder.path()), ["out"]);

    // A destination that came into being meanwhile is not replaced either.
    fs::remove_dir_all(&path).unwrap();
    let writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    fs::create_dir(&path).unwrap();
    fs::write(path.join("diary.txt"), "dear").unwrap();
    assert_refused(writer.finish(), "Exists", &["out"]);
    assert_refused(
        write(overwrite(), 3),
        "NotAnArtifact",
        &["out", "a folder of other things", "config.json"],
    );
    assert_eq!(names(&path), ["diary.txt"]);
    fs::remove_dir_all(&path).unwrap();
    fs::write(&path, "a file").unwrap();
    assert_refused(write(overwrite(), 3), "NotAnArtifact", &["out", "not a folder", "expected"]);
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn impossible_destinations() {
    let (folder, path) = destination();
    assert_refused(ArtifactWriter::create("/", WriteOptions::default()), "Destination", &["/"]);
    let result = ArtifactWriter::create(path.join("below"), WriteOptions::default());
    assert_refused(result, "Io", &["below", "temporary folder"]);
    fs::write(&path, "a file").unwrap();
    assert_refused(ArtifactWriter::create(path.join("below"), WriteOptions::default()), "Io", &["below"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
    assert_eq!(names(folder.path()), ["out"]);
}

#[cfg(unix)]
#[test]
fn a_read_only_parent() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path) = destination();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.path().join("probe"), "").is_ok() {
        eprintln!("skipped: this user may write into read-only folders");
    } else {
        let result = ArtifactWriter::create(&path, WriteOptions::default());
        assert_refused(result, "Io", &["out", "temporary folder", "denied"]);
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

/// The folder being written disappears, which fails as a full disk does: in the middle of a write.
#[cfg(unix)]
#[test]
fn a_failed_write_is_the_last() {
    let (folder, path) = destination();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    let temporary = folder.path().join(&names(folder.path())[0]);
    fs::remove_dir_all(temporary).unwrap();
    let tensor = RawTensor { dtype: Dtype::U8, shape: &[1], bytes: &[1] };
    assert_refused(writer.add_tensor("t", tensor), "Io", &["part-1", "create"]);
    assert_refused(writer.add_tensor("t", tensor), "Abandoned", &["out"]);
    assert_refused(writer.finish(), "Abandoned", &["out", "fresh writer"]);
    assert_eq!(names(folder.path()), Vec::<String>::new());
}

#[cfg(unix)]
#[test]
fn the_folder_is_as_open_as_any_other() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path) = destination();
    ArtifactWriter::create(&path, WriteOptions::default()).unwrap().finish().unwrap();
    let plain = folder.path().join("plain");
    fs::create_dir(&plain).unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&plain));
}

#[derive(Debug, Clone)]
enum Damage {
    Set(proptest::sample::Index, u8),
    Insert(proptest::sample::Index, u8),
    Remove(proptest::sample::Index),
    Cut(proptest::sample::Index),
    Grow(u8),
}

fn damage() -> impl Strategy<Value = Damage> {
    use proptest::sample::Index;
    // Half of the bytes are ones that mean something in JSON.
    let byte = || prop_oneof![any::<u8>(), proptest::sample::select(b"0123456789\"{}[]:,-.eLTUF".to_vec())];
    prop_oneof![
        (any::<Index>(), byte()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (any::<Index>(), byte()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        any::<Index>().prop_map(Damage::Remove),
        any::<Index>().prop_map(Damage::Cut),
        byte().prop_map(Damage::Grow),
    ]
}

fn apply(damage: &Damage, bytes: &mut Vec<u8>) {
    let at = |index: &proptest::sample::Index, bytes: &Vec<u8>| index.index(bytes.len().max(1));
    match damage {
        Damage::Set(index, byte) => {
            let at = at(index, bytes);
            if let Some(b) = bytes.get_mut(at) {
                *b = *byte;
            }
        }
        Damage::Insert(index, byte) => bytes.insert(at(index, bytes), *byte),
        Damage::Remove(index) => {
            let at = at(index, bytes);
            if at < bytes.len() {
                bytes.remove(at);
            }
        }
        Damage::Cut(index) => bytes.truncate(at(index, bytes)),
        Damage::Grow(byte) => bytes.push(*byte),
    }
}

/// Opens a folder and reads everything in it.
fn read_all(folder: &Path) -> Result<(), ArtifactError> {
    let artifact = Artifact::open(folder)?;
    for info in artifact.modules() {
        let module = artifact.module(&info.path)?;
        assert_eq!(module.codes.len(), info.geometry.words());
        assert_eq!(module.scales.len(), info.geometry.rows());
        trellis_codec::pack::unpack(&info.geometry, &module.codes).unwrap();
    }
    for (name, _) in artifact.others() {
        artifact.entry(name);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// No bytes make the reader panic.
    #[test]
    fn damaged_artifacts_never_panic(
        file in 0usize..3,
        header_only in any::<bool>(),
        damages in prop::collection::vec(damage(), 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let source = Source::new();
        source.write(folder.path());
        let all = source.tensors.iter().map(|t| (t.0.clone(), json!("model.safetensors"))).collect();
        let index = json!({ "weight_map": Value::Object(all) });
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        read_all(folder.path()).unwrap();
        let path = folder.path().join(["model.safetensors", "config.json", "model.safetensors.index.json"][file]);
        let mut bytes = fs::read(&path).unwrap();
        // Damage to a header's length hides all else, so half of the time it is put right again.
        let data = if file == 0 && header_only {
            let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
            let data = bytes.split_off(8 + length);
            bytes.drain(..8);
            Some(data)
        } else {
            None
        };
        for damage in &damages {
            apply(damage, &mut bytes);
        }
        if let Some(data) = data {
            bytes = [&(bytes.len() as u64).to_le_bytes(), &bytes[..], &data].concat();
        }
        fs::write(&path, bytes).unwrap();
        if let Err(error) = read_all(folder.path()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    /// Nor do files of noise.
    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0u64..200) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("noise.safetensors");
        fs::write(&path, &bytes).unwrap();
        let _ = Tensors::open(&path);
        fs::write(&path, [&length.to_le_bytes(), &bytes[..]].concat()).unwrap();
        let _ = Tensors::open(&path);
    }
}

#[test]
fn a_new_file_is_there_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.json");
    let names = || {
        fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect::<Vec<_>>()
    };
    let write = |content: &str| {
        let mut file = NewFile::create(&path).unwrap();
        file.write(content.as_bytes()).unwrap();
        file
    };
    // Under way it has another name; given up, it leaves none.
    let file = write("one");
    let [name] = names().try_into().unwrap();
    assert!(name.starts_with(".f.json.") && name.len() == ".f.json.".len() + 6, "{name}");
    drop(file);
    assert!(names().is_empty());

    write("one").publish_new().unwrap();
    assert_refused(write("two").publish_new(), "Exists", &["f.json", "there already"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "one");
    write("two").publish().unwrap();
    assert_eq!((fs::read_to_string(&path).unwrap(), names()), ("two".to_owned(), vec!["f.json".to_owned()]));

    assert_refused(NewFile::create("/"), "Destination", &["/", "no name"]);
    assert_refused(NewFile::create(folder.path().join("none/f")), "Io", &["none/f", "temporary file"]);
}

#[cfg(unix)]
#[test]
fn a_new_file_has_the_permissions_of_any_other() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let [new, other] = ["new", "other"].map(|name| folder.path().join(name));
    NewFile::create(&new).unwrap().publish().unwrap();
    fs::write(&other, "").unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(new), mode(other));
}
