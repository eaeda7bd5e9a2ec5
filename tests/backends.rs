//! One suite for every back end: decode bit for bit, products within the bound, on golden and on random matrices.

use mlx_trellis::{Axis, Geometry, Layout, MatmulOptions, dequantize, trellis_matmul, trellis_matmul_with};
use mlx_trellis_tests::*;
use proptest::prelude::*;
use rstest::rstest;
use trellis_codec::reference::{Contract, Dtype};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The stored matrix of a dequantized weight: `W` itself for axis 1, its transpose for axis 0.
fn stored(matrix: &Matrix, dtype: Dtype) -> Vec<f32> {
    let w = dequantize(&matrix.weights(), mlx_dtype(dtype)).unwrap();
    assert_eq!(w.shape(), [matrix.geometry.out_features() as i32, matrix.geometry.in_features() as i32]);
    values(&match matrix.geometry.axis() {
        Axis::Output => w.transpose().unwrap(),
        Axis::Input => w,
    })
}

#[test]
fn golden_cases() {
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        for case in golden() {
            let matrix = Matrix::of_case(&case);
            assert_eq!(bits(&stored(&matrix, Dtype::F32)), bits(&case.expanded), "{backend:?} {}", case.name);
            assert_eq!(
                bits(&stored(&matrix, Dtype::Bf16)),
                bits(&case.expanded_bf16),
                "{backend:?} {}",
                case.name
            );
            let x = array(&case.x, &[case.m as i32, case.geometry.in_features() as i32], Dtype::Bf16);
            let y = values(&trellis_matmul(&x, &matrix.weights()).unwrap());
            let contract = contract(case.m);
            let mut product = matrix.product(&case.x, case.m, contract, Dtype::Bf16);
            // The independent program's numbers, not our oracle's.
            product.y = if contract == Contract::Packed {
                case.y_packed.clone()
            } else {
                case.y_expanded_bf16.clone()
            };
            let worst = assert_within(&y, &product, Dtype::Bf16, &case.name);
            println!("{} {}: worst {worst:.3} of the allowance", backend.name(), case.name);
        }
    }
}

fn check(matrix: &Matrix, m: usize, dtype: Dtype, seed: u64) -> f64 {
    let g = &matrix.geometry;
    let x = activations(m * g.in_features(), dtype, seed);
    let x_array = array(&x, &[m as i32, g.in_features() as i32], dtype);
    let y = trellis_matmul(&x_array, &matrix.weights()).unwrap();
    assert_eq!(y.dtype(), mlx_dtype(dtype));
    assert_eq!(y.shape(), [m as i32, g.out_features() as i32]);
    let what = format!("{g} m={m} {dtype:?}");
    let worst = assert_within(&values(&y), &matrix.product(&x, m, contract(m), dtype), dtype, &what);
    let options = MatmulOptions { factored: true, ..MatmulOptions::default() };
    let y = values(&trellis_matmul_with(&x_array, &matrix.weights(), options).unwrap());
    let factored = assert_within(&y, &matrix.product(&x, m, Contract::Factored, dtype), dtype, &what);
    worst.max(factored)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_geometries(
        axis in prop::sample::select(vec![Axis::Output, Axis::Input]),
        k in 1u32..=4,
        l in 8u32..=16,
        t in prop::sample::select(vec![32usize, 64, 96, 128, 256]),
        rows in 1usize..70,
        blocks in 1usize..4,
        m in prop::sample::select(vec![0usize, 1, 2, 4, 5, 8, 9, 33]),
        dtype in prop::sample::select(DTYPES.to_vec()),
        seed in any::<u64>(),
    ) {
        let matrix = Matrix::random(Geometry::new(axis, k, l, t, rows, blocks * t).unwrap(), seed);
        for backend in BACKENDS.into_iter().filter(|b| b.present()) {
            check(&matrix, m, dtype, seed);
            let expected = matrix.decoded(Contract::Expanded, dtype);
            prop_assert_eq!(bits(&stored(&matrix, dtype)), bits(&expected), "{:?}", backend);
        }
    }

    #[test]
    fn random_interleaved(
        rows in 1usize..70,
        pairs in 1usize..3,
        m in prop::sample::select(vec![0usize, 1, 2, 4, 5, 8, 9, 33]),
        dtype in prop::sample::select(DTYPES.to_vec()),
        seed in any::<u64>(),
    ) {
        let g = Geometry::new(Axis::Output, 3, 12, 256, rows, pairs * 512).unwrap();
        let plain = Matrix::random(g, seed);
        let matrix = plain.clone().with_layout(Layout::Interleaved);
        check(&matrix, m, dtype, seed);
        prop_assert_eq!(bits(&stored(&matrix, dtype)), bits(&stored(&plain, dtype)));
        // The layout changes where codes lie, not what is computed.
        let x = array(&activations(m * rows, dtype, seed), &[m as i32, rows as i32], dtype);
        let y = |m: &Matrix| bits(&values(&trellis_matmul(&x, &m.weights()).unwrap()));
        prop_assert_eq!(y(&matrix), y(&plain));
    }
}

/// The shape people use, every product path on it; outputs are checked on a slice of columns, so that the oracle ends.
#[rstest]
fn full_size(#[values(2, 3, 4)] k: u32) {
    if !full() {
        return;
    }
    let whole = Matrix::random(qwen(k), u64::from(k));
    let g = whole.geometry;
    for m in [1, 4, 5, 8] {
        let x = activations(m * g.in_features(), Dtype::Bf16, 7);
        let y = values(
            &trellis_matmul(&array(&x, &[m as i32, g.in_features() as i32], Dtype::Bf16), &whole.weights())
                .unwrap(),
        );
        for block in [0, g.blocks_per_row() / 2, g.blocks_per_row() - 1] {
            let (part, columns) = column_block(&whole, block);
            let found: Vec<f32> =
                (0..m).flat_map(|row| y[row * g.out_features()..][columns.clone()].to_vec()).collect();
            let product = part.product(&x, m, contract(m), Dtype::Bf16);
            let worst = assert_within(&found, &product, Dtype::Bf16, &format!("{g} m={m} block {block}"));
            println!("{g} m={m} block {block}: worst {worst:.3} of the allowance");
        }
    }
}

/// One block of columns of an axis-0 matrix as a matrix of its own, and which outputs it makes.
fn column_block(whole: &Matrix, block: usize) -> (Matrix, std::ops::Range<usize>) {
    let g = whole.geometry;
    let wpb = g.words_per_block();
    let codes = (0..g.rows()).flat_map(|r| whole.codes[g.block_offset(r, block)..][..wpb].to_vec()).collect();
    let geometry = Geometry::new(g.axis(), g.bits(), g.state_bits(), g.block(), g.rows(), g.block()).unwrap();
    let columns = block * g.block()..(block + 1) * g.block();
    (Matrix { geometry, codes, scales: whole.scales.clone() }, columns)
}

#[test]
fn nan_infinity_and_zero_scales_propagate() {
    let mut matrix = Matrix::random(Geometry::new(Axis::Output, 3, 12, 256, 4, 256).unwrap(), 1);
    matrix.scales =
        vec![mlx_trellis::f16::ZERO, mlx_trellis::f16::ONE, mlx_trellis::f16::ONE, mlx_trellis::f16::ONE];
    for m in [1usize, 5] {
        let run = |row: [f32; 4]| {
            let x: Vec<f32> = row.repeat(m);
            let x_array = array(&x, &[m as i32, 4], Dtype::F32);
            let y = values(&trellis_matmul(&x_array, &matrix.weights()).unwrap());
            assert_within(&y, &matrix.product(&x, m, contract(m), Dtype::F32), Dtype::F32, "special values");
            y
        };
        assert!(run([1.0, 0.0, 0.0, 0.0]).iter().all(|&y| y == 0.0));
        assert!(run([f32::INFINITY, 1.0, 1.0, 1.0]).iter().all(|y| y.is_nan()));
        assert!(run([0.0, f32::NAN, 1.0, 1.0]).iter().all(|y| y.is_nan()));
        assert!(run([0.0, f32::INFINITY, 1.0, 1.0]).iter().all(|y| !y.is_finite()));
    }
}
