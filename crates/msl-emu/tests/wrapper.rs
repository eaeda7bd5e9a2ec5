//! The source around a body is MLX's, byte for byte. `fixtures/make.cpp` wrote the fixtures with MLX 0.32.2.

use std::fs;
use std::path::Path;

use msl_emu::{Array, Dtype, Kernel, TemplateArg, source};

fn dtype(name: &str) -> Dtype {
    Dtype::ALL
        .into_iter()
        .find(|d| format!("{d:?}").to_lowercase() == name)
        .unwrap_or_else(|| panic!("element type {name}"))
}

fn read(text: &str) -> Kernel {
    let (facts, rest) = text.split_once("----\n").expect("a separator");
    let (header, body) = rest.split_once("----\n").expect("two separators");
    let mut kernel = Kernel::new("", body).header(header);
    for line in facts.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let array = || {
            let shape: Vec<usize> = words[3..].iter().map(|d| d.parse().expect("an extent")).collect();
            Array::new(words[1], dtype(words[2]), shape)
        };
        match words[0] {
            "name" => kernel.name = words[1].to_owned(),
            "input" => kernel.inputs.push(array()),
            "output" => kernel.outputs.push(array()),
            "template" => {
                let value = match words[2] {
                    "int" => TemplateArg::Int(words[3].parse().expect("an integer")),
                    "bool" => TemplateArg::Bool(words[3] == "true"),
                    _ => TemplateArg::Dtype(dtype(words[3])),
                };
                kernel.template.push((words[1].to_owned(), value));
            }
            "atomic_outputs" => kernel.atomic_outputs = true,
            "init_value" => kernel.init_value = words[1].parse().ok(),
            "host_name" => {}
            other => panic!("unknown fact {other}"),
        }
    }
    kernel
}

#[test]
fn source_is_that_of_mlx() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut seen = 0;
    for entry in fs::read_dir(&folder).expect("fixtures") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "case") {
            continue;
        }
        let kernel = read(&fs::read_to_string(&path).expect("a case"));
        let expected = fs::read_to_string(path.with_extension("metal")).expect("its source");
        assert_eq!(source(&kernel), expected, "{}", kernel.name);
        seen += 1;
    }
    assert!(seen >= 22, "{seen} fixtures");
}
