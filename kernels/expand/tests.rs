use trellis_codec::{Axis, Geometry};

use super::*;
use crate::support::*;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Runs every kernel that takes the matrix; each is bit-equal to the oracle. How many there were.
fn check_bits(problem: &Problem, data: &Data, look: Look) -> usize {
    let expected = expanded(&problem.geometry, data, problem.dtype);
    let kernels = [&PLAIN, &VECTORISED].map(|k| k.launch(problem)).into_iter().flatten();
    kernels.map(|launch| assert_bits(&run(&launch, problem, data, look), &expected, &launch.name)).count()
}

fn problem(geometry: Geometry, dtype: Dtype) -> Problem {
    Problem::new(geometry, 0, dtype)
}

#[test]
fn golden_cases() {
    let mut vectorised = 0;
    for case in golden() {
        for dtype in DTYPES {
            vectorised += check_bits(&problem(case.geometry, dtype), &Data::of(&case), Look::Checked) - 1;
        }
        let found = |dtype| {
            let p = problem(case.geometry, dtype);
            run(&launch(&p).expect("an expansion"), &p, &Data::of(&case), Look::Fast)
        };
        assert_bits(&found(Dtype::F32), &case.expanded, &case.name);
        assert_bits(&found(Dtype::Bf16), &case.expanded_bf16, &case.name);
    }
    assert_eq!(vectorised, 9);
}

/// Every block length up to 12 words and some long ones, states of all sizes, tiny inputs, both axes.
#[test]
fn every_block() {
    for (i, (k, block)) in blocks(12).chain([(4, 264), (2, 1040), (1, 4096), (3, 2048)]).enumerate() {
        let state_bits = k + 1 + (i as u32 * 5) % (16 - k);
        let g = geometry(k, state_bits, block, 1 + i % 3, block * (1 + i % 2));
        let g = if i % 2 == 0 { g } else { g.transposed() };
        let p = problem(g, DTYPES[i % 3]);
        check_bits(&p, &Data::random(&p), Look::Checked);
    }
}

#[test]
fn odd_sizes() {
    for rows in [1, 3, 129] {
        let weave = interleaved(rows, 3 * 512);
        let row_major = (1..=4).map(|k| geometry(k, 12, 256, rows, 768));
        for g in row_major.chain([geometry(3, 12, 256, rows, 256), weave, weave.transposed()]) {
            let p = problem(g, Dtype::Bf16);
            assert_eq!(check_bits(&p, &Data::random(&p), Look::Checked), 2, "{p}");
        }
    }
}

#[test]
fn eligibility() {
    let g = geometry(3, 12, 256, 8, 512);
    let p = problem(g, Dtype::Bf16);
    let refusal = |p: &Problem| VECTORISED.supports(p).map_err(|u| u.reason);
    for (p, expected) in [
        (p, Ok(())),
        (problem(g.transposed(), Dtype::Bf16), Ok(())),
        (problem(interleaved(8, 512), Dtype::Bf16), Ok(())),
        (problem(geometry(1, 12, 256, 8, 512), Dtype::Bf16), Ok(())),
        (problem(g, Dtype::F16), Err(Reason::Dtype { found: Dtype::F16, expected: Dtype::Bf16 })),
        (
            problem(geometry(3, 11, 256, 8, 512), Dtype::Bf16),
            Err(Reason::StateBits { found: 11, expected: 12 }),
        ),
        (
            problem(geometry(3, 12, 128, 8, 512), Dtype::Bf16),
            Err(Reason::Block { found: 128, expected: 256 }),
        ),
        (
            p.with_variant(Variant::SPLIT_K),
            Err(Reason::Variant { found: Variant::SPLIT_K, least: Variant::DEFAULT }),
        ),
    ] {
        assert_eq!(refusal(&p), expected, "{p}");
        assert_eq!(pick(&p).map(|k| k.name), Ok(if expected.is_ok() { VECTORISED.name } else { PLAIN.name }));
        assert_eq!(PLAIN.supports(&p), Ok(()));
    }
    let huge = problem(Geometry::new(Axis::Input, 1, 12, 32, 1 << 31, 32).expect("legal"), Dtype::F32);
    assert_eq!(supports(&huge).map_err(|u| u.reason), Err(Reason::TooLarge { found: 1 << 31 }));
}

/// A thread an element, or a thread four: grids and threadgroups as specified.
#[test]
fn launches_cover_every_output_once() {
    for (g, grid, threadgroup) in [
        (geometry(2, 12, 32, 5, 32), [32, 5, 1], [32, 1, 1]),
        (geometry(2, 12, 32, 5, 320), [320, 5, 1], [256, 1, 1]),
        (geometry(2, 12, 256, 5, 256), [256, 5, 1], [256, 1, 1]),
    ] {
        let launch = PLAIN.launch(&problem(g, Dtype::Bf16)).expect("an expansion");
        assert_eq!((launch.grid, launch.threadgroup), (grid, threadgroup));
        assert_eq!(launch.outputs[0].shape, [grid[1] as usize, grid[0] as usize]);
    }
    for cols in [256, 768, 5120] {
        let launch =
            VECTORISED.launch(&problem(geometry(2, 12, 256, 5, cols), Dtype::Bf16)).expect("an expansion");
        assert_eq!((launch.grid, launch.threadgroup), ([cols as u32 / 4, 5, 1], [128, 1, 1]));
    }
}

#[test]
fn loads_are_as_documented() {
    for (kernel, loads) in [(&PLAIN, 3.0), (&VECTORISED, 0.75)] {
        for g in [geometry(3, 12, 256, 16, 512), interleaved(16, 512)] {
            let p = problem(g, Dtype::Bf16);
            let found = loads_per_weight(&kernel.launch(&p).expect("an expansion"), &p);
            assert!((found - loads).abs() < 1e-9, "{}: {found}", kernel.name);
        }
    }
}

#[test]
fn full_size_expansion() {
    if !full_size("expansion of 17408 x 5120") {
        return;
    }
    let full = |k| geometry(k, 12, 256, 17408, 5120);
    for g in [interleaved(17408, 5120), full(3), full(2), full(4)] {
        let p = problem(g, Dtype::Bf16);
        assert_eq!(check_bits(&p, &Data::random(&p), Look::Fast), 2);
    }
}
