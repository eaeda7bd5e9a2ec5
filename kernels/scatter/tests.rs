use trellis_codec::Geometry;
use trellis_codec::reference::Contract;

use super::*;
use crate::TemplateValue;
use crate::support::*;

const KERNELS: [&Kernel; 4] = [&GENERIC, &BALANCED, &GENERIC_SHARED, &BALANCED_SHARED];

/// Runs the kernel that takes the problem; its partials are bit-equal to the mirror's.
fn check_bits(problem: &Problem, data: &Data, look: Look) -> Vec<f32> {
    let found = run(&launch(problem).expect("a scatter problem"), problem, data, look);
    assert_bits(&found, &scatter_mirror(problem, data), problem);
    found
}

fn bf16(geometry: Geometry, m: usize) -> Problem {
    Problem::new(geometry, m, Dtype::Bf16)
}

/// The default variant, and the first of contract P, which has the generic one-row kernel alone.
#[test]
fn golden_cases() {
    let mut kernels = std::collections::HashSet::new();
    for case in golden().iter().filter(|c| c.geometry.axis() == Axis::Output) {
        for (m, variant) in
            [(case.m.min(4), Variant::DEFAULT), (1, Variant::DEFAULT), (2, Variant::UNREFINED)]
        {
            let problem = bf16(case.geometry, m).with_variant(variant);
            let mut data = Data::of(case);
            data.x.resize(m * case.geometry.rows(), 0.0);
            let partial = check_bits(&problem, &data, Look::Checked);
            let y = sum_splits(&partial, m, case.geometry.cols(), problem.dtype);
            let share = worst(&problem, &data, Contract::Packed, &y);
            println!("{} M={m} variant {variant}: worst error {share:.3} of the allowance", case.name);
            assert!(share <= 1.0, "{}", case.name);
            kernels.insert(pick(&problem).expect("a kernel").name);
        }
    }
    assert_eq!(kernels.len(), KERNELS.len());
}

#[test]
fn variants_agree() {
    for (geometry, m) in [
        (geometry(2, 12, 256, 129, 512), 1),
        (geometry(3, 12, 256, 129, 256), 1),
        (geometry(4, 12, 256, 129, 256), 3),
        (interleaved(129, 512), 2),
    ] {
        let data = Data::random(&bf16(geometry, m));
        let results: Vec<_> = variants(0..=13)
            .map(|v| check_bits(&bf16(geometry, m).with_variant(v), &data, Look::Fast))
            .collect();
        for v in 0..=3 {
            assert_bits(&results[v], &results[0], format!("{geometry} M={m} variant {v} against 0"));
        }
        for v in 6..=13 {
            assert_bits(&results[v], &results[6], format!("{geometry} M={m} variant {v} against 6"));
        }
        assert_ne!(results[0], results[6]);
        assert_ne!(results[5], results[6]);
    }
}

#[test]
fn every_k_layout_m_and_dtype() {
    let row_major = (1..=4).map(|k| geometry(k, 12, 256, 130, 768));
    for geometry in row_major.chain([interleaved(130, 1024)]) {
        for m in 1..=4 {
            for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                if dtype != Dtype::Bf16 && m > 2 {
                    continue;
                }
                let problem = Problem::new(geometry, m, dtype);
                let data = Data::random(&problem);
                let partial = check_bits(&problem, &data, Look::Fast);
                let y = sum_splits(&partial, m, geometry.cols(), dtype);
                let share = worst(&problem, &data, Contract::Packed, &y);
                assert!(share <= 1.0, "{problem}: {share}");
            }
        }
    }
}

#[test]
fn odd_sizes() {
    for rows in [1, 3, 127, 128, 129, 257] {
        for geometry in [
            geometry(2, 12, 256, rows, 256),
            geometry(3, 12, 256, rows, 256),
            geometry(4, 9, 256, rows, 768),
            interleaved(rows, 3 * 512),
        ] {
            for m in [1, 3] {
                let problem = bf16(geometry, m);
                check_bits(&problem, &Data::random(&problem), Look::Fast);
            }
        }
    }
}

/// Every legal block length, with states from the smallest to the largest, one block more than a threadgroup takes,
/// inputs of a few elements, and idle lanes in most: each access checked, each element written once.
#[test]
fn every_block() {
    let mut state_bits = 0;
    let mut count = 0;
    for (k, block) in blocks(SIMD_LANES) {
        state_bits = state_bits % (16 - k) + 1;
        let words = block * k as usize / 32;
        let rows = 1 + count % 3;
        let cols = (SIMD_LANES / words * 4 + 1) * block;
        let problem = bf16(geometry(k, k + state_bits, block, rows, cols), 1 + count % 2);
        check_bits(&problem, &Data::random(&problem), Look::Checked);
        count += 1;
    }
    assert_eq!(count, 32 + 32 + 10 + 32);
    // One word in all: every input has fewer than 8 elements.
    let problem = bf16(geometry(1, 2, 32, 1, 32), 1);
    check_bits(&problem, &Data::random(&problem), Look::Checked);
}

/// The columns each lane writes, from the bodies' index arithmetic and a launch's own integers: every column of every
/// plane exactly once, for every legal block and every number of blocks up to two threadgroups and one.
#[test]
fn launches_cover_every_output_once() {
    let check = |problem: &Problem, launch: &Launch| {
        let int = |name: &str| match launch.template.iter().find(|(n, _)| n == name) {
            Some((_, TemplateValue::Int(v))) => *v as usize,
            _ => panic!("no integer {name}"),
        };
        let (c, bt, k, per_threadgroup) = (int("C"), int("BT"), int("K"), int("SG_TG"));
        let (words, blocks) = (bt * k / 32, c / bt);
        assert_eq!(launch.threadgroup, [int("THREADS") as u32, 1, 1]);
        assert_eq!(launch.grid[0] as usize, per_threadgroup * SIMD_LANES);
        // Planes: z = sample * SPLITS + split; a shared kernel writes M samples at each z.
        let planes = launch.grid[2] as usize * if launch.grid[2] as usize == SPLITS { int("M") } else { 1 };
        assert_eq!(planes, launch.outputs[0].shape[0] * launch.outputs[0].shape[1]);
        let mut written = vec![0u32; c];
        for group in 0..launch.grid[1] as usize * per_threadgroup {
            for lane in 0..SIMD_LANES {
                if is_balanced(problem) {
                    let columns = 0..if group < blocks { bt / SIMD_LANES } else { 0 };
                    columns.for_each(|j| written[group * bt + bt - 1 - lane * (bt / SIMD_LANES) - j] += 1);
                    continue;
                }
                let per_group = SIMD_LANES / words;
                let (block, word) = (group * per_group + lane / words, lane % words);
                if lane < per_group * words && block < blocks {
                    let start = (k - word * 32 % k) % k;
                    for j in (0..int("NP")).filter(|j| start + j * k < 32) {
                        written[block * bt + bt - 1 - (word * 32 + start) / k - j] += 1;
                    }
                }
            }
        }
        assert!(written.iter().all(|&n| n == 1), "{problem}: {:?}", launch.grid);
    };
    for (k, block) in blocks(SIMD_LANES) {
        let per_threadgroup = SIMD_LANES / (block * k as usize / 32) * 4;
        for n in (1..=2 * per_threadgroup + 1).filter(|n| *n < 20 || n % per_threadgroup < 2) {
            for (m, variant) in [(1, 13), (2, 13), (4, 9)] {
                let variant = Variant::new(variant).expect("a variant");
                let problem = bf16(geometry(k, 12, block, 5, n * block), m).with_variant(variant);
                check(&problem, &launch(&problem).expect("a scatter problem"));
                if block == 256 && k > 1 {
                    let choices = Choices { float_codebook: true, ..Choices::default() };
                    check(&problem, &build(&problem, GENERIC.name, choices));
                }
            }
        }
    }
}

#[test]
fn choices_change_no_bit() {
    let flags = [(true, false), (false, true), (true, true)];
    for geometry in
        [interleaved(130, 17 * 512), geometry(2, 12, 256, 130, 5 * 256), geometry(4, 12, 256, 130, 9 * 256)]
    {
        let problem = bf16(geometry, 1);
        let data = Data::random(&problem);
        let expected = check_bits(&problem, &data, Look::Fast);
        for (bits_y, float_codebook) in flags {
            let choices = Choices { bits_y, float_codebook, codebook: false };
            let found = run(
                &build(&problem, pick(&problem).expect("a kernel").name, choices),
                &problem,
                &data,
                Look::Checked,
            );
            assert_bits(&found, &expected, format!("{problem} {choices:?}"));
        }
    }
    for m in [3, 4] {
        let problem = Problem { shared_codebook: true, ..bf16(interleaved(130, 1024), m) };
        assert!(Choices::of(&problem).codebook);
        check_bits(&problem, &Data::random(&problem), Look::Checked);
    }
}

#[test]
fn choices_are_allowed_as_specified() {
    let g13s = Gpu::from_architecture("applegpu_g13s");
    let full = |k| geometry(k, 12, 256, 17408, 5120);
    let both = Choices { bits_y: true, float_codebook: true, codebook: false };
    for problem in [bf16(interleaved(17408, 5120), 1), bf16(full(2), 1), bf16(full(4), 1)] {
        assert_eq!(Choices::of(&problem.on(g13s)), both, "{problem}");
        for other in [
            problem,
            problem.on(Gpu::from_architecture("applegpu_g14s")),
            Problem { m: 2, ..problem }.on(g13s),
            Problem { dtype: Dtype::F16, ..problem }.on(g13s),
            Problem { shared_codebook: true, ..problem },
            problem.on(g13s).with_variant(Variant::SPLIT_K),
        ] {
            assert_eq!(Choices::of(&other), Choices::default(), "{other}");
        }
    }
    for geometry in [
        full(1),
        full(3),
        geometry(2, 11, 256, 17408, 5120),
        geometry(2, 12, 128, 17408, 5120),
        geometry(2, 12, 256, 17407, 5120),
        geometry(2, 12, 256, 17408, 4864),
    ] {
        assert_eq!(Choices::of(&bf16(geometry, 1).on(g13s)), Choices::default(), "{geometry}");
    }
    let asked = |geometry, m| Problem { shared_codebook: true, ..bf16(geometry, m) };
    for (problem, codebook) in [
        (asked(interleaved(8, 512), 3), true),
        (asked(interleaved(8, 512), 4), true),
        (asked(interleaved(8, 512), 2), false),
        (asked(interleaved(8, 512), 1), false),
        (asked(geometry(3, 12, 256, 8, 512), 3), false),
        (asked(geometry(2, 12, 256, 8, 512), 3), false),
        (asked(interleaved(8, 512), 3).with_variant(Variant::SPLIT_K), false),
        (Problem { dtype: Dtype::F32, ..asked(interleaved(8, 512), 3) }, false),
        (bf16(interleaved(8, 512), 3), false),
    ] {
        assert_eq!(Choices::of(&problem), Choices { codebook, ..Choices::default() }, "{problem}");
    }
}

/// Launch shapes as specified, at full size.
#[test]
fn launch_shapes() {
    let g13s = Gpu::AppleG13s;
    let full = |k| bf16(geometry(k, 12, 256, 17408, 5120), 1);
    let weave = bf16(interleaved(17408, 5120), 1);
    for (problem, grid, threads, np) in [
        (full(1), [128, 2, 128], 128, 32),
        (full(2), [128, 3, 128], 128, 16),
        (full(3), [128, 5, 128], 128, 11),
        (full(4), [128, 5, 128], 128, 8),
        (Problem { m: 4, ..full(3) }, [128, 5, 128], 128, 11),
        (Problem { m: 4, ..full(3) }.with_variant(Variant::BALANCED), [128, 5, 512], 128, 11),
        (weave, [128, 5, 128], 128, 11),
        (weave.on(g13s), [512, 2, 128], 512, 11),
        (full(4).on(g13s), [256, 3, 128], 256, 8),
        (full(2).on(g13s), [128, 3, 128], 128, 16),
    ] {
        let launch = launch(&problem).expect("a scatter problem");
        assert_eq!((launch.grid, launch.threadgroup), (grid, [threads, 1, 1]), "{problem}");
        let names: Vec<&str> = launch.template.iter().map(|(n, _)| n.as_ref()).collect();
        assert_eq!(
            names.join(" "),
            "T M R C BT K L SG_TG SPLITS NP VARIANT INTERLEAVE CODEBOOK BITS_Y FLOAT_CODEBOOK THREADS"
        );
        assert!(launch.template.contains(&("NP".into(), TemplateValue::Int(np))), "{problem}");
        assert_eq!(launch.outputs[0].shape, [problem.m, 128, 5120]);
    }
}

#[test]
fn eligibility() {
    let refusal = |kernel: &Kernel, p: &Problem| kernel.supports(p).map_err(|u| u.reason);
    let at = |v: u8, p: Problem| p.with_variant(Variant::new(v).expect("a variant"));
    let three = |m| bf16(geometry(3, 12, 256, 8, 512), m);
    let two = |m| bf16(geometry(2, 12, 256, 8, 512), m);
    let shares = |v: u8, m| Err(Reason::Shares { variant: Variant::new(v).expect("a variant"), m });
    let older = |v: u8| {
        Err(Reason::Variant { found: Variant::new(v).expect("a variant"), least: Variant::SHARED_SCATTER })
    };
    let m = |found, least| Err(Reason::Activations { found, least, most: 4 });
    for (kernel, problem, expected) in [
        (&GENERIC, two(1), Ok(())),
        (&GENERIC, two(0), m(0, 1)),
        (&GENERIC, two(5), m(5, 1)),
        (&GENERIC, two(2), shares(13, 2)),
        (&GENERIC, at(10, two(4)), shares(10, 4)),
        (&GENERIC, at(9, two(4)), Ok(())),
        (&GENERIC, three(1), Err(Reason::Balanced)),
        (&GENERIC, at(8, three(1)), Err(Reason::Balanced)),
        (&GENERIC, at(7, three(1)), Ok(())),
        (&GENERIC, bf16(geometry(3, 13, 256, 8, 512), 1), Ok(())),
        (&GENERIC, bf16(geometry(3, 12, 128, 8, 512), 1), Ok(())),
        (&GENERIC, bf16(two(1).geometry.transposed(), 1), Err(Reason::Axis { found: 1, expected: 0 })),
        (&GENERIC, bf16(geometry(4, 12, 256, 8, 512), 1), Ok(())),
        (&GENERIC, bf16(geometry(4, 12, 264, 8, 528), 1), Err(Reason::BlockTooWide { words: 33 })),
        (
            &GENERIC,
            at(2, bf16(geometry(2, 13, 256, 8, 512), 1)),
            Err(Reason::Table { variant: Variant::LOCAL_TABLE, found: 13 }),
        ),
        (
            &GENERIC,
            at(3, bf16(geometry(2, 13, 256, 8, 512), 1)),
            Err(Reason::Table { variant: Variant::DEVICE_TABLE, found: 13 }),
        ),
        (&GENERIC, at(1, bf16(geometry(2, 13, 256, 8, 512), 1)), Ok(())),
        (&GENERIC, bf16(geometry(1, 12, 32, 1 << 31, 32), 1), Err(Reason::TooLarge { found: 1 << 31 })),
        (&BALANCED, three(1), Ok(())),
        (&BALANCED, at(8, three(1)), Ok(())),
        (&BALANCED, at(9, three(4)), Ok(())),
        (&BALANCED, at(7, three(1)), Err(Reason::NotBalanced)),
        (&BALANCED, three(2), shares(13, 2)),
        (&BALANCED, two(1), Err(Reason::NotBalanced)),
        (&BALANCED, bf16(geometry(3, 13, 256, 8, 512), 1), Err(Reason::NotBalanced)),
        (&BALANCED, bf16(geometry(3, 4, 256, 8, 512), 1), Ok(())),
        (&BALANCED, bf16(geometry(3, 12, 128, 8, 512), 1), Err(Reason::NotBalanced)),
        (&GENERIC_SHARED, two(2), Ok(())),
        (&GENERIC_SHARED, at(10, two(4)), Ok(())),
        (&GENERIC_SHARED, at(9, two(4)), older(9)),
        (&GENERIC_SHARED, two(1), m(1, 2)),
        (&GENERIC_SHARED, two(5), m(5, 2)),
        (&GENERIC_SHARED, three(2), Err(Reason::Balanced)),
        (&BALANCED_SHARED, three(2), Ok(())),
        (&BALANCED_SHARED, at(10, three(4)), Ok(())),
        (&BALANCED_SHARED, at(9, three(4)), older(9)),
        (&BALANCED_SHARED, three(1), m(1, 2)),
        (&BALANCED_SHARED, two(2), Err(Reason::NotBalanced)),
    ] {
        assert_eq!(refusal(kernel, &problem), expected, "{} and {problem}", kernel.name);
    }
    let error = BALANCED_SHARED.launch(&two(2)).expect_err("not balanced").to_string();
    assert!(
        error.starts_with(
            "trellis_scatter_balanced_shared does not take 8x512 axis 0 k=2 L=12 T=256 M=2 Bf16"
        ),
        "{error}"
    );
}

/// One of the four takes whatever the family takes, and the family's launch is that one's.
#[test]
fn exactly_one_kernel_takes_a_problem() {
    for (k, block) in [(1, 256), (2, 128), (3, 256), (3, 128), (4, 256), (4, 264)] {
        for state_bits in [11, 12, 13] {
            for m in 0..=5 {
                for variant in variants(0..=13) {
                    let problem = bf16(geometry(k, state_bits, block, 3, block), m).with_variant(variant);
                    let takers: Vec<_> =
                        KERNELS.iter().filter(|kernel| kernel.supports(&problem).is_ok()).collect();
                    match pick(&problem) {
                        Ok(kernel) => {
                            assert_eq!(takers.len(), 1, "{problem}");
                            assert_eq!(takers[0].name, kernel.name);
                            assert_eq!(launch(&problem).map(|l| l.name), Ok(kernel.name.into()));
                        }
                        Err(refusal) => {
                            assert!(takers.is_empty(), "{problem}: {refusal}");
                            assert_eq!(launch(&problem), Err(refusal));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn infinities_and_nan_propagate() {
    for geometry in [geometry(2, 12, 64, 129, 64), geometry(3, 12, 256, 129, 256)] {
        let problem = bf16(geometry, 1);
        let mut data = Data::random(&problem);
        // Row 7 has scale zero; splits hold two rows each.
        for (row, value) in [(7, f32::INFINITY), (20, f32::NAN), (41, f32::NEG_INFINITY)] {
            data.x[row] = value;
        }
        let found = run(&launch(&problem).expect("a scatter problem"), &problem, &data, Look::Fast);
        let expected = scatter_mirror(&problem, &data);
        let same = |(f, e): (&f32, &f32)| f.to_bits() == e.to_bits() || (f.is_nan() && e.is_nan());
        assert!(found.iter().zip(&expected).all(same));
        let cols = geometry.cols();
        let plane = |split: usize| &found[split * cols..][..cols];
        assert!(plane(3).iter().all(|v| v.is_nan()) && plane(10).iter().all(|v| v.is_nan()));
        assert!(plane(20).iter().all(|v| !v.is_finite()) && plane(0).iter().all(|v| v.is_finite()));
    }
}

/// The loads that the table at the top of the module states.
#[test]
fn loads_are_as_documented() {
    for (k, m, loads_a_row, weights) in
        [(2, 1, 3.0, 16.0), (4, 1, 3.0, 8.0), (2, 3, 5.0, 16.0), (3, 1, 4.0, 8.0), (3, 4, 7.0, 8.0)]
    {
        let problem = bf16(geometry(k, 12, 256, 256, 1024), m);
        let found = loads_per_weight(&launch(&problem).expect("a scatter problem"), &problem);
        assert!((found - loads_a_row / weights).abs() < 1e-9, "{problem}: {found}");
    }
}

#[test]
fn full_size_products() {
    if !full_size("scatter at 17408 x 5120") {
        return;
    }
    let full = |k| geometry(k, 12, 256, 17408, 5120);
    for geometry in [interleaved(17408, 5120), full(3), full(2), full(4)] {
        for m in [1, 4] {
            for gpu in [Gpu::Other, Gpu::AppleG13s] {
                let problem = bf16(geometry, m).on(gpu);
                if Choices::of(&problem) == Choices::default() && gpu == Gpu::AppleG13s {
                    continue;
                }
                check_bits(&problem, &Data::random(&problem), Look::Fast);
            }
        }
    }
}
