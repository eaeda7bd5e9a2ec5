//! What holds for every kernel.

use std::collections::{BTreeMap, HashMap};

use trellis_codec::codebook::CODE_RECIPROCAL;
use trellis_codec::format::{
    CODE_BIAS, CODE_DIVISOR, CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS,
};
use trellis_codec::reference::Dtype;

use crate::support::*;
use crate::{ALL, Gpu, Launch, Problem, Variant, prelude, scatter, splitk};

/// Problems on both sides of every kernel's edges.
fn problems() -> Vec<Problem> {
    let mut all = Vec::new();
    for g in [
        geometry(1, 12, 256, 256, 256),
        geometry(2, 16, 256, 256, 256),
        geometry(3, 12, 256, 256, 256),
        geometry(4, 12, 264, 3, 264),
        geometry(2, 3, 32, 1, 32),
        interleaved(1024, 512),
        geometry(2, 12, 256, 17408, 5120),
        interleaved(17408, 5120).transposed(),
    ] {
        for m in 0..=9 {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                for gpu in [Gpu::Other, Gpu::AppleG13s] {
                    all.extend(variants(0..=13).map(|v| Problem::new(g, m, dtype).with_variant(v).on(gpu)));
                }
            }
        }
    }
    all
}

#[test]
fn a_name_is_one_source_and_a_launch_is_what_is_supported() {
    let mut sources: HashMap<String, (String, String)> = HashMap::new();
    let mut launched = HashMap::new();
    for problem in problems() {
        for kernel in ALL {
            let launch = kernel.launch(&problem);
            assert_eq!(launch.as_ref().err(), kernel.supports(&problem).err().as_ref());
            let Ok(launch) = launch else { continue };
            *launched.entry(kernel.name).or_insert(0) += 1;
            assert_eq!(launch.name, kernel.name);
            let source = (launch.header.to_string(), launch.source.to_string());
            assert_eq!(sources.entry(launch.name.to_string()).or_insert_with(|| source.clone()), &source);
            assert!(launch.grid.iter().chain(&launch.threadgroup).all(|&n| n > 0), "{problem}");
            assert!(launch.ensure_row_contiguous && launch.init_value.is_none());
        }
    }
    assert_eq!(launched.len(), ALL.len(), "every kernel takes something");
    assert_eq!(sources.len(), ALL.len(), "names are unique");
}

/// A body that needs its whole threadgroup never gets part of one.
#[test]
fn threadgroups_are_whole_where_a_body_synchronises() {
    for problem in problems() {
        for launch in ALL.iter().filter_map(|k| k.launch(&problem).ok()) {
            if ["barrier", "simd_", "simdgroup_"].iter().any(|s| launch.source.contains(s)) {
                assert!(launch.grid.iter().zip(&launch.threadgroup).all(|(g, t)| g % t == 0), "{problem}");
            }
        }
    }
}

fn one_of_each() -> Vec<Launch> {
    let mut seen = BTreeMap::new();
    for problem in problems() {
        for launch in ALL.iter().filter_map(|k| k.launch(&problem).ok()) {
            seen.entry(launch.name.to_string()).or_insert(launch);
        }
    }
    seen.into_values().collect()
}

/// MLX puts a small input into another address space, so no pointer type fits both: inputs are only indexed. It adds
/// parameters by substring, so no other word may hold one.
#[test]
fn inputs_are_indexed_and_add_no_parameter() {
    for launch in one_of_each() {
        let source: String = launch.source.lines().filter_map(|l| l.split("//").next()).collect();
        for input in &launch.inputs {
            for suffix in ["shape", "strides", "ndim"] {
                assert!(!launch.source.contains(&format!("{}_{suffix}", input.name)), "{}", launch.name);
            }
            // Whole words that are not members (`position.x`), outside comments.
            let in_word = |c: char| c == '_' || c == '.' || c.is_ascii_alphanumeric();
            let code = source.as_str();
            let uses = code.match_indices(input.name.as_ref()).filter(|(at, name)| {
                !code[..*at].ends_with(in_word) && !code[at + name.len()..].starts_with(in_word)
            });
            let indexed: Vec<bool> =
                uses.map(|(at, name)| code[at + name.len()..].starts_with('[')).collect();
            assert!(indexed.iter().all(|&i| i), "{}: {} is not indexed", launch.name, input.name);
            let unused = input.name == "lut" && launch.name.contains("balanced");
            assert_eq!(indexed.is_empty(), unused, "{}: {}", launch.name, input.name);
        }
    }
}

#[test]
fn no_constant_of_the_format_appears_twice() {
    let number = |text: &str| -> Option<f64> {
        let text = text.trim_end_matches(['u', 'f']);
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(|v| v as f64),
            None => text.parse().ok(),
        }
    };
    let is_literal = |c: char| c == '.' || c.is_ascii_alphanumeric() || c == '_';
    let count = |text: &str, value: f64| {
        let literals = text.split(|c| !is_literal(c)).filter_map(number);
        literals.filter(|&v| v == value || v as f32 == value as f32).count()
    };
    for value in [
        f64::from(CODE_MULTIPLIER),
        f64::from(CODE_INCREMENT),
        f64::from(CODE_BIAS),
        f64::from(CODE_DIVISOR),
        f64::from(CODE_RECIPROCAL),
        f64::from(FLOAT_LIFT_BITS),
        f64::from(FLOAT_LIFT_BIAS),
    ] {
        assert_eq!(count(prelude::header(), value), 1, "{value} in the header");
        for launch in one_of_each() {
            assert_eq!(count(&launch.source, value), 0, "{value} in {}", launch.name);
        }
    }
    assert!(prelude::header().starts_with(prelude::PRAGMA));
}

/// No body leaves the compiler an `a * b + c`: the pragma is a second line of defence.
#[test]
fn contraction_changes_no_bit() {
    let scatter = [0, 5, 13].map(|v| {
        Problem::new(geometry(2, 12, 256, 130, 256), 1, Dtype::Bf16)
            .with_variant(Variant::new(v).expect("a variant"))
    });
    let balanced = Problem::new(interleaved(130, 512), 2, Dtype::F16);
    let prefill = Problem::new(geometry(3, 12, 256, 264, 256), 5, Dtype::Bf16);
    let mut seen = std::collections::HashSet::new();
    for problem in scatter.into_iter().chain([balanced, prefill]) {
        let data = Data::random(&problem);
        for launch in
            ALL.iter().filter_map(|k| k.launch(&problem).ok()).filter(|l| l.name != splitk::REDUCTION.name)
        {
            let found = run(&launch, &problem, &data, Look::Contracted);
            assert_bits(
                &found,
                &run(&launch, &problem, &data, Look::Fast),
                format!("{} {problem}", launch.name),
            );
            seen.insert(launch.name);
        }
    }
    assert_eq!(seen.len(), 5);
}

#[test]
fn a_launch_is_one_json_object() {
    let [launch, _] =
        splitk::launch(&Problem::new(interleaved(1024, 512), 5, Dtype::Bf16)).expect("a launch");
    let json = serde_json::to_value(&launch).expect("JSON");
    let keys: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(
        keys.join(" "),
        "name header source inputs outputs template grid threadgroup init_value ensure_row_contiguous"
    );
    assert_eq!(json["inputs"][1].to_string(), r#"{"name":"codes","dtype":"uint32","shape":[1,1024,48]}"#);
    assert_eq!(json["template"][0].to_string(), r#"["T","bfloat16"]"#);
    assert_eq!(json["template"][1].to_string(), r#"["M",5]"#);
    assert_eq!(json["init_value"], serde_json::Value::Null);
    for launch in one_of_each() {
        let text = serde_json::to_string(&launch).expect("JSON");
        assert_eq!(serde_json::from_str::<Launch>(&text).expect("a launch"), launch);
    }
}

#[test]
fn no_activations_need_no_launch() {
    let problem = Problem::new(geometry(3, 12, 256, 256, 256), 0, Dtype::Bf16);
    assert!(scatter::supports(&problem).is_err() && splitk::supports(&problem).is_err());
}
