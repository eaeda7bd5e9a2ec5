//! One suite for every back end: decode bit for bit, products within the bound, on golden and on random matrices.

use mlx_trellis::dispatch::{Device, Kernel, Problem, choose_cuda};
use mlx_trellis::{
    Axis, Geometry, Layout, MatmulOptions, dequantize, trellis_matmul, trellis_matmul_by, trellis_matmul_with,
};
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
        backend.run(|| golden().iter().for_each(|case| golden_case(backend, case)));
    }
}

fn golden_case(backend: Backend, case: &trellis_codec::cases::Case) {
    let matrix = Matrix::of_case(case);
    let what = format!("{} {}", backend.name(), case.name);
    assert_eq!(bits(&stored(&matrix, Dtype::F32)), bits(&case.expanded), "{what}");
    assert_eq!(bits(&stored(&matrix, Dtype::Bf16)), bits(&case.expanded_bf16), "{what}");
    let x = array(&case.x, &[case.m as i32, case.geometry.in_features() as i32], Dtype::Bf16);
    let y = values(&trellis_matmul(&x, &matrix.weights()).unwrap());
    let choice = chosen(&case.geometry, case.m, Dtype::Bf16, MatmulOptions::default());
    let mut product = matrix.product(&case.x, case.m, choice.contract, Dtype::Bf16);
    // The independent program's numbers, not our oracle's, where it has them.
    match choice.contract {
        Contract::Packed => product.y = case.y_packed.clone(),
        Contract::Expanded => product.y = case.y_expanded_bf16.clone(),
        Contract::Factored => {}
    }
    let worst = assert_within(&y, &product, Dtype::Bf16, choice.kernel.takes_tf32_allowance(), &what);
    println!("{what} by {}: worst {worst:.3} of the allowance", choice.kernel);
}

fn check(matrix: &Matrix, m: usize, dtype: Dtype, seed: u64) {
    let g = &matrix.geometry;
    let x = activations(m * g.in_features(), dtype, seed);
    let x_array = array(&x, &[m as i32, g.in_features() as i32], dtype);
    for (factored, packed) in [(false, false), (true, false), (false, true)] {
        let options = MatmulOptions { factored, packed, ..MatmulOptions::default() };
        let y = trellis_matmul_with(&x_array, &matrix.weights(), options).unwrap();
        assert_eq!(y.dtype(), mlx_dtype(dtype));
        assert_eq!(y.shape(), [m as i32, g.out_features() as i32]);
        check_product(&values(&y), matrix, &x, m, dtype, options);
    }
}

/// The back ends that a random case runs on: a GPU's kernels are compiled for each geometry, which takes a second or
/// more, so it gets every eighth.
fn backends(seed: u64) -> impl Iterator<Item = Backend> {
    BACKENDS.into_iter().filter(move |&b| b == Backend::Cpu || seed.is_multiple_of(8) && b.present())
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
        for backend in backends(seed) {
            backend.run(|| {
                check(&matrix, m, dtype, seed);
                let expected = matrix.decoded(Contract::Expanded, dtype);
                assert_eq!(bits(&stored(&matrix, dtype)), bits(&expected), "{backend:?}");
            });
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
        for backend in backends(seed) {
            backend.run(|| {
                check(&matrix, m, dtype, seed);
                assert_eq!(bits(&stored(&matrix, dtype)), bits(&stored(&plain, dtype)));
                // The layout changes where codes lie, not what is computed.
                let x = array(&activations(m * rows, dtype, seed), &[m as i32, rows as i32], dtype);
                let y = |m: &Matrix| bits(&values(&trellis_matmul(&x, &m.weights()).unwrap()));
                assert_eq!(y(&matrix), y(&plain), "{backend:?}");
            });
        }
    }
}

/// Every kernel of a GPU at each side of every border of M, on shapes that the tensor-core kernels take and on one that
/// they leave, twice: two runs give the same bits.
#[rstest]
fn every_cuda_kernel(
    #[values(Axis::Output, Axis::Input)] axis: Axis,
    #[values(1, 2, 3, 4)] k: u32,
    #[values((12, 256, 129, 768), (9, 64, 33, 256), (16, 96, 40, 192))] shape: (u32, usize, usize, usize),
) {
    if !Backend::Cuda.present() {
        return;
    }
    let (l, t, rows, cols) = shape;
    let matrix = Matrix::random(Geometry::new(axis, k, l, t, rows, cols).unwrap(), u64::from(k));
    Backend::Cuda.run(|| {
        for (i, m) in [1, 2, 3, 4, 5, 8, 9, 17].into_iter().enumerate() {
            let dtype = DTYPES[i % DTYPES.len()];
            let x = activations(m * matrix.geometry.in_features(), dtype, 11);
            let x_array = array(&x, &[m as i32, matrix.geometry.in_features() as i32], dtype);
            for kernel in [Kernel::CudaExact, Kernel::CudaFloat, Kernel::CudaPacked, Kernel::CudaExpand] {
                // MLX's matmul would round these to tf32.
                if kernel == Kernel::CudaExpand && dtype == Dtype::F32 {
                    continue;
                }
                let problem = Problem::new(matrix.geometry, m, dtype);
                let Ok(choice) = choose_cuda(kernel, &problem, &Device::current()).unwrap() else { continue };
                let run = || {
                    let y = trellis_matmul_by(&x_array, &matrix.weights(), MatmulOptions::default(), &choice);
                    values(&y.unwrap())
                };
                let y = run();
                let product = matrix.product(&x, m, choice.contract, dtype);
                let what = format!("{kernel} {problem:?}");
                assert_within(&y, &product, dtype, kernel.takes_tf32_allowance(), &what);
                assert_eq!(bits(&y), bits(&run()), "{what}: two runs");
            }
        }
    });
}

/// The shape people use, every product path on it; outputs are checked on a slice of columns, so that the oracle ends.
#[rstest]
fn full_size(#[values(2, 3, 4)] k: u32) {
    if !full() {
        return;
    }
    let whole = Matrix::random(qwen(k), u64::from(k));
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        backend.run(|| full_size_on(&whole));
    }
}

fn full_size_on(whole: &Matrix) {
    let g = whole.geometry;
    for m in [1, 4, 5, 8, 64] {
        let x = activations(m * g.in_features(), Dtype::Bf16, 7);
        let y = values(
            &trellis_matmul(&array(&x, &[m as i32, g.in_features() as i32], Dtype::Bf16), &whole.weights())
                .unwrap(),
        );
        let choice = chosen(&g, m, Dtype::Bf16, MatmulOptions::default());
        for block in [0, g.blocks_per_row() / 2, g.blocks_per_row() - 1] {
            let (part, columns) = column_block(whole, block);
            let found: Vec<f32> =
                (0..m).flat_map(|row| y[row * g.out_features()..][columns.clone()].to_vec()).collect();
            let product = part.product(&x, m, choice.contract, Dtype::Bf16);
            let what = format!("{} {g} m={m} block {block}", choice.kernel);
            let worst =
                assert_within(&found, &product, Dtype::Bf16, choice.kernel.takes_tf32_allowance(), &what);
            println!("{what}: worst {worst:.3} of the allowance");
        }
    }
}

/// Expansion and MLX's matmul together, over shapes for which MLX takes different matmuls: each output is rounded once.
#[test]
fn expanded_products_round_once() {
    if !full() {
        return;
    }
    let mut failed = Vec::new();
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        for (out, n) in [
            (64, 1024),
            (70, 1024),
            (71, 1024),
            (72, 1024),
            (100, 4096),
            (128, 4096),
            (256, 17408),
            (512, 17408),
            (576, 1536),
            (1536, 576),
            (2048, 2048),
            (4096, 4096),
            (1024, 5120),
            (5120, 17408),
        ] {
            let g = Geometry::new(Axis::Input, 3, 12, 32, out, n).unwrap();
            let matrix = Matrix::random(g, n as u64);
            for m in [17, 33, 64, 128, 512] {
                for dtype in [Dtype::Bf16, Dtype::F16] {
                    let x = activations(m * n, dtype, 1);
                    let y = backend.run(|| {
                        let x = array(&x, &[m as i32, n as i32], dtype);
                        values(&trellis_matmul(&x, &matrix.weights()).unwrap())
                    });
                    let choice = backend.run(|| chosen(&g, m, dtype, MatmulOptions::default()));
                    // Rows of activations and outputs at both ends.
                    let mut worst: f64 = 0.0;
                    for (row, first) in [(0, 0), (m - 1, out.saturating_sub(64)), (m / 2, out / 2)] {
                        let outputs = first..out.min(first + 64);
                        let product = trellis_codec::reference::matmul_outputs(
                            &g,
                            &matrix.codes,
                            &matrix.scales,
                            &x[row * n..][..n],
                            1,
                            choice.contract,
                            dtype,
                            outputs.clone(),
                        )
                        .unwrap();
                        worst = worst.max(product.worst(&y[row * out..][outputs], dtype, false).0);
                    }
                    println!("{} {g} m={m} {dtype:?} by {}: worst {worst:.3}", backend.name(), choice.kernel);
                    if worst > 1.0 {
                        failed.push(format!("{} {out}x{n} m={m} {dtype:?}: {worst:.3}", backend.name()));
                    }
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
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

/// Arrays that are parts of larger ones start anywhere: their memory is aligned to an element and no more.
#[test]
fn views_may_start_anywhere() {
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        for axis in [Axis::Output, Axis::Input] {
            for (i, m) in [1usize, 4, 5, 8].into_iter().enumerate() {
                let geometry = Geometry::new(axis, 1 + i as u32, 12, 256, 256, 512).unwrap();
                let matrix = Matrix::random(geometry, i as u64);
                let x = activations(m * geometry.in_features(), Dtype::Bf16, 3);
                backend.run(|| {
                    let codes = [&[0][..], &matrix.codes].concat();
                    let codes = mlx_rs::Array::from_slice(&codes, &[codes.len() as i32]);
                    let codes = second_part(&codes).reshape(matrix.weights().codes().shape()).unwrap();
                    let scales = [&[mlx_trellis::f16::ONE][..], &matrix.scales].concat();
                    let scales = mlx_rs::Array::from_slice(&scales, &[scales.len() as i32]);
                    let weights =
                        mlx_trellis::TrellisWeights::new(codes, second_part(&scales), geometry).unwrap();
                    let shifted = [&[0.0][..], &x].concat();
                    let x_array = second_part(&array(&shifted, &[shifted.len() as i32], Dtype::Bf16));
                    let x_array = x_array.reshape(&[m as i32, geometry.in_features() as i32]).unwrap();
                    let y = values(&trellis_matmul(&x_array, &weights).unwrap());
                    check_product(&y, &matrix, &x, m, Dtype::Bf16, MatmulOptions::default());
                });
            }
        }
    }
}

/// All but the first element.
fn second_part(array: &mlx_rs::Array) -> mlx_rs::Array {
    array.split_at_indices(&[1], 0).unwrap().swap_remove(1)
}

#[test]
fn nan_infinity_and_zero_scales_propagate() {
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        backend.run(special_values);
    }
}

fn special_values() {
    let mut matrix = Matrix::random(Geometry::new(Axis::Output, 3, 12, 256, 4, 256).unwrap(), 1);
    matrix.scales =
        vec![mlx_trellis::f16::ZERO, mlx_trellis::f16::ONE, mlx_trellis::f16::ONE, mlx_trellis::f16::ONE];
    for m in [1usize, 5] {
        let run = |row: [f32; 4]| {
            let x: Vec<f32> = row.repeat(m);
            let x_array = array(&x, &[m as i32, 4], Dtype::F32);
            let y = values(&trellis_matmul(&x_array, &matrix.weights()).unwrap());
            check_product(&y, &matrix, &x, m, Dtype::F32, MatmulOptions::default());
            y
        };
        assert!(run([1.0, 0.0, 0.0, 0.0]).iter().all(|&y| y == 0.0));
        assert!(run([f32::INFINITY, 1.0, 1.0, 1.0]).iter().all(|y| y.is_nan()));
        assert!(run([0.0, f32::NAN, 1.0, 1.0]).iter().all(|y| y.is_nan()));
        assert!(run([0.0, f32::INFINITY, 1.0, 1.0]).iter().all(|y| !y.is_finite()));
    }
}
