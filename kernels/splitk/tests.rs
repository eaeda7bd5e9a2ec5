use trellis_codec::Geometry;
use trellis_codec::reference::Contract;

use super::*;
use crate::TemplateValue;
use crate::support::*;

fn problem(geometry: Geometry, m: usize) -> Problem {
    Problem::new(geometry, m, Dtype::Bf16)
}

/// `[splits, m, outputs]`: within a split one fma an input, inputs ascending, from zero. The emulator's 8 x 8 product
/// adds in this order, so that 8 inputs at a time is the same chain as one at a time; inputs past the end add zero.
fn mirror_partial(p: &Problem, data: &Data) -> Vec<f32> {
    let (inputs, outputs) = (p.geometry.rows(), p.geometry.cols());
    let weights = expanded(&p.geometry, data, p.dtype);
    let Splits { count, partition } = splits(p);
    let mut partial = vec![0f32; count * p.m * outputs];
    for (i, plane) in partial.chunks_exact_mut(outputs).enumerate() {
        let (split, sample) = (i / p.m, i % p.m);
        let end = if split + 1 == count { inputs } else { (split + 1) * partition };
        for input in split * partition..end {
            let x = data.x[sample * inputs + input];
            for (sum, &weight) in plane.iter_mut().zip(&weights[input * outputs..]) {
                *sum = x.mul_add(weight, *sum);
            }
        }
    }
    partial
}

fn mirror_reduction(p: &Problem, partial: &[f32]) -> Vec<f32> {
    let size = p.m * p.geometry.cols();
    (0..size)
        .map(|i| p.dtype.round(partial.iter().skip(i).step_by(size).fold(0.0, |sum, &v| sum + v)))
        .collect()
}

/// Runs both kernels; each is bit-equal to its mirror.
fn check_bits(p: &Problem, data: &Data, look: Look) -> Vec<f32> {
    let [first, second] = launch(p).expect("a split-K problem");
    let partial = run(&first, p, data, look);
    assert_bits(&partial, &mirror_partial(p, data), p);
    let y = run_bytes(&second, &[encode(&partial, Dtype::F32)], look);
    assert_bits(&y, &mirror_reduction(p, &partial), p);
    y
}

#[test]
fn products() {
    // Inputs: whole tiles and splits, a tail of the last split, a tail of the last tile, both.
    for (inputs, cols) in [(512, 512), (1024 + 16, 256), (512 + 8, 512), (1001, 256)] {
        let row_major = (2..=4).map(|k| geometry(k, 12, 256, inputs, cols));
        for g in row_major.chain((cols == 512).then(|| interleaved(inputs, cols))) {
            for m in (5..=8).filter(|m| inputs == 1001 || matches!(m, 5 | 8)) {
                let p = problem(g, m);
                let data = Data::random(&p);
                let y = check_bits(&p, &data, Look::Checked);
                let share = worst(&p, &data, Contract::Expanded, &y);
                assert!(share <= 1.0, "{p}: {share}");
            }
        }
    }
}

#[test]
fn splits_follow_mlx() {
    for (m, outputs, inputs, count, partition) in [
        (5, 5120, 17408, 8, 2176),
        (8, 5120, 17408, 8, 2176),
        (5, 256, 256, 2, 128),
        (5, 256, 1001, 8, 112),
        (5, 256, 1 << 20, 32, 1 << 15),
        // A ratio that is a power of two stays, one more goes to the next.
        (5, 256, 16 * 8 * 4, 4, 128),
        (5, 256, 16 * 8 * 5, 8, 80),
    ] {
        assert_eq!(Splits::new(m, outputs, inputs), Splits { count, partition }, "{m} {outputs} {inputs}");
    }
}

#[test]
fn eligibility() {
    let ok = geometry(3, 12, 256, 512, 512);
    let m = |found| Err(Reason::Activations { found, least: 5, most: 8 });
    let few = |found, least| Err(Reason::TooFewInputs { found, least });
    for (p, expected) in [
        (problem(ok, 5), Ok(())),
        (problem(ok, 8), Ok(())),
        (problem(ok, 4), m(4)),
        (problem(ok, 9), m(9)),
        (problem(ok, 0), m(0)),
        (problem(interleaved(512, 512), 5), Ok(())),
        (problem(ok.transposed(), 5), Err(Reason::Axis { found: 1, expected: 0 })),
        (
            Problem { dtype: Dtype::F16, ..problem(ok, 5) },
            Err(Reason::Dtype { found: Dtype::F16, expected: Dtype::Bf16 }),
        ),
        (problem(ok, 5).with_variant(Variant::SPLIT_K), Ok(())),
        (
            problem(ok, 5).with_variant(Variant::SHARED_SCATTER),
            Err(Reason::Variant { found: Variant::SHARED_SCATTER, least: Variant::SPLIT_K }),
        ),
        (problem(geometry(3, 12, 128, 512, 512), 5), Err(Reason::Block { found: 128, expected: 256 })),
        (problem(geometry(3, 13, 256, 512, 512), 5), Err(Reason::StateBits { found: 13, expected: 12 })),
        (problem(geometry(1, 12, 256, 512, 512), 5), Err(Reason::Bits { found: 1, least: 2, most: 4 })),
        (problem(geometry(2, 12, 256, 512, 512), 5), Ok(())),
        (problem(geometry(4, 12, 256, 511, 512), 5), few(511, 512)),
        (problem(geometry(4, 12, 256, 127, 256), 5), few(127, 256)),
        (problem(geometry(4, 12, 256, 256, 256), 5), Ok(())),
        (problem(geometry(4, 12, 256, 16384, 16384), 8), Ok(())),
        (
            problem(geometry(4, 12, 256, 16640, 16640), 8),
            Err(Reason::TooManyTiles { found: 1040, most: 1024 }),
        ),
    ] {
        assert_eq!(supports(&p).map_err(|u| u.reason), expected, "{p}");
        assert_eq!(launch(&p).is_ok(), expected.is_ok());
        assert_eq!(REDUCTION.supports(&p).is_ok(), expected.is_ok());
    }
}

#[test]
fn launch_shapes() {
    let [first, second] = launch(&problem(interleaved(17408, 5120), 5)).expect("a split-K problem");
    assert_eq!((first.grid, first.threadgroup), ([20480, 1, 8], [128, 1, 1]));
    assert_eq!((second.grid, second.threadgroup), ([25600, 1, 1], [256, 1, 1]));
    assert_eq!((&first.outputs[0].shape, &second.outputs[0].shape), (&vec![8, 5, 5120], &vec![5, 5120]));
    let names: Vec<&str> = first.template.iter().map(|(n, _)| n.as_ref()).collect();
    assert_eq!(names.join(" "), "T M N KC C BITS L BT BM BN BK SPLITS PARTITION INTERLEAVE");
    assert!(first.template.contains(&("PARTITION".into(), TemplateValue::Int(2176))));
}

/// Splits partition the inputs, tiles the outputs, and a tile's lanes its 8 x 8 matrices.
#[test]
fn launches_cover_every_output_once() {
    for (k, blocks) in [(2, 1), (3, 2), (4, 5)] {
        for inputs in (blocks * 256..blocks * 256 + 40).chain([4096, 17408]) {
            for m in 5..=8 {
                let p = problem(geometry(k, 12, 256, inputs, blocks * 256), m);
                let [launch, reduction] = launch(&p).expect("a split-K problem");
                let Splits { count, partition } = splits(&p);
                assert!(
                    partition > 0 && partition % TILE_INPUTS == 0 && (count - 1) * partition < inputs,
                    "{p}"
                );
                assert_eq!(launch.grid[2] as usize, count);
                assert_eq!(launch.grid[0] as usize / THREADS * TILE_COLS, blocks * 256);
                assert_eq!(reduction.grid[0] as usize, m * blocks * 256);
            }
        }
    }
    let mut held = [[0; 8]; 8];
    for lane in 0..32usize {
        let quad = lane / 4;
        let (row, column) = ((quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2);
        held[row][column] += 1;
        held[row][column + 1] += 1;
    }
    assert_eq!(held, [[1; 8]; 8]);
}

#[test]
fn full_size_products() {
    if !full_size("split-K at 17408 x 5120") {
        return;
    }
    let full = |k| geometry(k, 12, 256, 17408, 5120);
    for g in [interleaved(17408, 5120), full(3), full(2), full(4)] {
        for m in [5, 8] {
            let p = problem(g, m);
            check_bits(&p, &Data::random(&p), Look::Fast);
        }
    }
}
