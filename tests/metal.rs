//! The Metal back end on a machine without Metal: MLX itself records the graph and writes the source it would compile,
//! and that source is the emulator's, byte for byte.

use mlx_trellis::dispatch::{Device, Kernel, Problem, choose};
use mlx_trellis::export::export_metal;
use mlx_trellis::{Axis, Geometry, Gpu, Layout, Variant};
use mlx_trellis_tests::*;
use rstest::rstest;
use trellis_codec::reference::Dtype;
use trellis_kernels::emulator;

/// The bytes of an exported product.
fn exported(problem: &Problem, gpu: Gpu) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("product.mlxfn");
    export_metal(problem, gpu, &path).unwrap();
    std::fs::read(&path).unwrap()
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

/// Each of `names` after the one before it.
fn assert_in_order(file: &[u8], names: &[&str]) {
    let mut at = 0;
    for name in names {
        match find(&file[at..], name.as_bytes()) {
            Some(found) => at += found + name.len(),
            None => panic!("no {name} after byte {at}, expected {names:?} in order"),
        }
    }
}

fn check(problem: &Problem, gpu: Gpu, kernel: Kernel, nodes: &[&str]) {
    let choice = choose(problem, &Device { metal: Some(gpu), ..Device::cpu() });
    assert_eq!(choice.kernel, kernel);
    let file = exported(problem, gpu);
    assert_in_order(&file, nodes);
    let launches = choice.launches(problem).unwrap();
    assert!(!launches.is_empty());
    for launch in launches {
        let source = msl_emu::source(&emulator::kernel(&launch));
        assert!(
            find(&file, source.as_bytes()).is_some(),
            "{}: MLX writes another source than the emulator runs:\n{source}",
            launch.name
        );
    }
}

fn problem(geometry: Geometry, m: usize) -> Problem {
    Problem::new(geometry, m, Dtype::Bf16)
}

#[rstest]
fn full_size_products_are_recorded(
    #[values(2, 3, 4)] k: u32,
    #[values(Gpu::Other, Gpu::AppleG13s)] gpu: Gpu,
    #[values(false, true)] interleave: bool,
) {
    let mut g = qwen(k);
    if interleave {
        match g.with_layout(Layout::Interleaved) {
            Ok(interleaved) => g = interleaved,
            Err(_) => return,
        }
    }
    let scatter = ["CustomKernel", "Reduce", "Squeeze", "AsType"];
    for m in [1, 4] {
        check(&problem(g, m), gpu, Kernel::MetalScatter, &scatter);
    }
    for m in [5, 8] {
        check(&problem(g, m), gpu, Kernel::MetalSplitK, &["CustomKernel", "CustomKernel"]);
    }
    check(&problem(g, 9), gpu, Kernel::MetalExpand, &["CustomKernel", "Matmul"]);
}

#[test]
fn every_variant_is_recorded() {
    for number in 0..=13 {
        let variant = Variant::new(number).unwrap();
        for m in [1, 3] {
            let problem = Problem { variant, ..problem(qwen(3), m) };
            check(&problem, Gpu::Other, Kernel::MetalScatter, &["CustomKernel", "Reduce"]);
        }
    }
    let g = qwen(3).with_layout(Layout::Interleaved).unwrap();
    let problem = Problem { shared_codebook: true, ..problem(g, 4) };
    check(&problem, Gpu::Other, Kernel::MetalScatter, &["CustomKernel", "Reduce"]);
}

#[rstest]
fn small_and_odd_products_are_recorded(
    #[values(Dtype::F32, Dtype::F16, Dtype::Bf16)] dtype: Dtype,
    #[values(1, 3, 129)] rows: usize,
) {
    // One row: x and the scales have fewer than eight elements, which MLX passes as `constant`.
    let g = Geometry::new(Axis::Output, 2, 10, 64, rows, 128).unwrap();
    let scatter = ["CustomKernel", "Reduce"];
    check(&Problem::new(g, 2, dtype), Gpu::Other, Kernel::MetalScatter, &scatter);
    let g = Geometry::new(Axis::Input, 4, 12, 256, rows, 512).unwrap();
    check(&Problem::new(g, 1, dtype), Gpu::Other, Kernel::MetalExpand, &["CustomKernel", "Matmul"]);
}

#[test]
fn the_file_holds_no_weights() {
    let size = exported(&problem(qwen(3), 1), Gpu::Other).len();
    // The table of 4096 floats is in it; 33 MB of codes are not.
    assert!((16_384..200_000).contains(&size), "{size} bytes");
}

#[test]
fn a_path_that_cannot_be_written_is_an_error() {
    let nowhere = std::path::Path::new("/nonexistent/folder/product.mlxfn");
    assert!(export_metal(&problem(qwen(3), 1), Gpu::Other, nowhere).is_err());
}

#[test]
fn without_a_gpu_products_go_to_the_cpu() {
    if mlx_trellis::metal_is_available() || mlx_trellis::cuda_is_available() {
        println!("skipped: this machine has a GPU");
        return;
    }
    assert_eq!(Device::current(), Device::cpu());
}
