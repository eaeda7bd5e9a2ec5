//! What can be shown of CUDA launches without a GPU: eligibility, names, grids, constants. Numbers are compared on a
//! device, by `tests/backends.rs` and `trellis verify --backend cuda`.

use std::collections::HashMap;

use trellis_codec::format::{
    CODE_BIAS, CODE_DIVISOR, CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS,
};
use trellis_codec::{Axis, Geometry, Layout};

use super::*;
use crate::{Cuda, Gpu, TemplateValue, prelude};

const H200: Gpu = Gpu::Cuda(Cuda { multiprocessors: 132, capability: (9, 0) });

fn geometry(axis: Axis, bits: u32, state_bits: u32, block: usize, rows: usize, cols: usize) -> Geometry {
    Geometry::new(axis, bits, state_bits, block, rows, cols).expect("a legal geometry")
}

/// Problems on both sides of every kernel's edges.
fn problems() -> Vec<Problem> {
    let mut all = Vec::new();
    for axis in [Axis::Output, Axis::Input] {
        for g in [
            geometry(axis, 1, 12, 256, 1, 256),
            geometry(axis, 2, 16, 64, 3, 64),
            geometry(axis, 3, 12, 256, 256, 256),
            geometry(axis, 4, 12, 96, 5, 96),
            geometry(axis, 3, 9, 32, 129, 512),
            geometry(axis, 3, 12, 256, 17408, 5120),
            geometry(axis, 3, 12, 256, 5120, 17408),
            geometry(axis, 4, 12, 256, 151_936, 5120),
        ] {
            for m in [0, 1, 2, 3, 4, 5, 8, 9, 17] {
                for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                    for gpu in [Gpu::Other, H200, Gpu::Cuda(Cuda { multiprocessors: 40, capability: (7, 5) })]
                    {
                        all.push(Problem::new(g, m, dtype).on(gpu));
                    }
                }
            }
        }
    }
    let interleaved =
        geometry(Axis::Output, 3, 12, 256, 1024, 512).with_layout(Layout::Interleaved).expect("a layout");
    all.extend((1..=9).map(|m| Problem::new(interleaved, m, Dtype::Bf16).on(H200)));
    all
}

fn integer(launch: &Launch, name: &str) -> Option<usize> {
    launch.template.iter().find(|(n, _)| n == name).map(|(_, value)| match *value {
        TemplateValue::Int(int) => int as usize,
        _ => panic!("{name} is no integer"),
    })
}

#[test]
fn a_name_is_one_source_and_a_launch_is_what_is_supported() {
    let mut sources: HashMap<String, (String, String)> = HashMap::new();
    let mut launched: HashMap<&str, usize> = HashMap::new();
    for problem in problems() {
        for kernel in ALL {
            let launches = launches(kernel, &problem);
            assert_eq!(launches.as_ref().err(), kernel.supports(&problem).err().as_ref());
            let Ok(launches) = launches else { continue };
            *launched.entry(kernel.name).or_default() += 1;
            assert!(launches.len() <= 2, "at most two launches a product");
            assert!(launches[0].name.starts_with(kernel.name));
            let last = launches.last().expect("a launch");
            let g = &problem.geometry;
            let out = [problem.m, g.out_features()];
            let expected = if kernel.name == expand::cuda::EXPAND.name { [g.rows(), g.cols()] } else { out };
            assert_eq!(
                (last.outputs[0].shape.as_slice(), last.outputs[0].dtype),
                (&expected[..], problem.dtype.into())
            );
            for launch in launches {
                let source = (launch.header.to_string(), launch.source.to_string());
                assert_eq!(sources.entry(launch.name.to_string()).or_insert_with(|| source.clone()), &source);
                assert!(launch.ensure_row_contiguous && launch.init_value.is_none());
                assert!(launch.grid.iter().all(|&n| n > 0 && n <= i32::MAX as u32), "{problem}");
                assert!(launch.grid[1..].iter().all(|&n| n <= 65535), "{problem}");
                assert!(launch.grid[0].is_multiple_of(launch.threadgroup[0]), "{problem}: whole blocks");
            }
        }
    }
    assert_eq!(launched.len(), ALL.len(), "every kernel takes something");
}

/// Every output has a block, and every split something to do.
#[test]
fn grids_cover_the_outputs() {
    for problem in problems() {
        let (m, rows, cols) = (problem.m, problem.geometry.rows(), problem.geometry.cols());
        for launch in ALL.iter().filter_map(|k| k.launch(&problem).ok()) {
            let blocks = [
                (launch.grid[0] / launch.threadgroup[0]) as usize,
                launch.grid[1] as usize,
                launch.grid[2] as usize,
            ];
            let threads = launch.threadgroup[0] as usize;
            let base = launch
                .name
                .rsplit_once('_')
                .map_or("", |(base, bound)| if bound.contains('x') { base } else { "" });
            let splits = integer(&launch, "SPLITS");
            if base == scatter::cuda::EXACT.name || base == scatter::cuda::FLOAT.name {
                let ranges = integer(&launch, "RANGES").expect("ranges");
                assert_eq!((blocks[0] * 256, Some(blocks[1]), threads), (cols, splits, 64 * ranges));
                assert!(blocks[1] * ranges < rows.div_ceil(16) + ranges);
            } else if base == reduce::cuda::EXACT.name || base == reduce::cuda::FLOAT.name {
                let warps = integer(&launch, "WARPS").expect("warps");
                assert_eq!(
                    (blocks[0], Some(blocks[1]), threads),
                    ((cols / 128).div_ceil(warps), splits, 32 * warps)
                );
                assert!(blocks[1] <= rows.div_ceil(16));
            } else if launch.name == scatter::cuda::PACKED.name {
                assert!(blocks[0] * threads >= cols && splits == Some(blocks[1]) && blocks[2] * 8 >= m);
            } else if launch.name == reduce::cuda::PACKED.name {
                assert!(blocks[0] * 4 >= rows && blocks[1] * 8 >= m);
            } else {
                assert_eq!(launch.name, expand::cuda::EXPAND.name);
                assert!(blocks[0] * threads * 8 >= rows * cols);
            }
        }
    }
}

/// MLX adds parameters where a name with such an ending appears.
#[test]
fn no_parameter_is_added() {
    for problem in problems() {
        for launch in ALL.iter().filter_map(|k| launches(k, &problem).ok()).flatten() {
            for array in launch.inputs.iter().chain(&launch.outputs) {
                for ending in ["shape", "strides", "ndim"] {
                    assert!(!launch.source.contains(&format!("{}_{ending}", array.name)), "{}", launch.name);
                }
            }
        }
    }
}

#[test]
fn no_constant_of_the_format_appears_twice() {
    let number = |text: &str| -> Option<f64> {
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex.trim_end_matches('u'), 16).ok().map(|v| v as f64),
            None => text.trim_end_matches(['u', 'f']).parse().ok(),
        }
    };
    let is_literal = |c: char| c == '.' || c.is_ascii_alphanumeric() || c == '_';
    let count = |text: &str, value: f64| {
        let code = text.lines().filter_map(|l| l.split("//").next());
        let literals = code.flat_map(|l| l.split(|c| !is_literal(c))).filter_map(number);
        literals.filter(|&v| v == value || v as f32 == value as f32).count()
    };
    let problem = Problem::new(geometry(Axis::Output, 3, 12, 256, 256, 256), 1, Dtype::Bf16).on(H200);
    let transposed = Problem { geometry: problem.geometry.transposed(), ..problem };
    for value in [
        f64::from(CODE_MULTIPLIER),
        f64::from(CODE_INCREMENT),
        f64::from(CODE_BIAS),
        f64::from(CODE_DIVISOR),
        f64::from(FLOAT_LIFT_BITS),
        f64::from(FLOAT_LIFT_BIAS),
    ] {
        assert_eq!(count(prelude::cuda_header(), value), 1, "{value} in the header");
        for launch in ALL.iter().flat_map(|k| [k.launch(&problem), k.launch(&transposed)]).flatten() {
            assert_eq!(count(&launch.source, value), 0, "{value} in {}", launch.name);
        }
    }
}

#[test]
fn what_is_refused_says_why() {
    let g = geometry(Axis::Output, 3, 12, 256, 512, 256);
    let on = |gpu| Problem::new(g, 1, Dtype::Bf16).on(gpu);
    let reason = |kernel: &Kernel, problem: &Problem| {
        kernel.supports(problem).expect_err("refused").reason.to_string()
    };
    assert_eq!(reason(&scatter::cuda::EXACT, &on(Gpu::Other)), "the GPU does not run CUDA");
    let old = Gpu::Cuda(Cuda { multiprocessors: 40, capability: (7, 5) });
    assert_eq!(reason(&scatter::cuda::EXACT, &on(old)), "compute capability is 7.5, expected at least 8.0");
    assert_eq!(reason(&reduce::cuda::FLOAT, &on(H200)), "the matrix is coded along axis 0, expected 1");
    let many = Problem { m: 9, ..on(H200) };
    assert_eq!(reason(&scatter::cuda::FLOAT, &many), "M is 9, expected 1 to 8");
    let blocks = Problem { geometry: geometry(Axis::Output, 3, 12, 96, 512, 768), ..on(H200) };
    assert_eq!(reason(&scatter::cuda::EXACT, &blocks), "T is 96, expected 32, 64, 128 or 256");
    let rows = Problem { m: 65_536 * 8, geometry: g.transposed(), ..on(H200) };
    assert!(reason(&reduce::cuda::PACKED, &rows).contains("blocks in y or z"));
}
