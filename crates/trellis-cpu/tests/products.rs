//! Every level this machine has against the oracle, over geometries, types and contracts drawn at random.
//!
//! `TRELLIS_FULL=1 cargo test --release -p trellis-cpu full_size -- --nocapture` adds the size the crate is for.
//! NEON runs on another machine's Linux with qemu-user and a cross linker (minutes):
//!
//! ```text
//! rustup target add aarch64-unknown-linux-gnu
//! CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
//! CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
//! cargo test -p trellis-cpu --target aarch64-unknown-linux-gnu --tests
//! ```

use half::slice::HalfFloatSliceExt;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, Geometry, Layout, bf16, f16};
use trellis_cpu::{CpuError, Element, Level, Matrix, contract_for, decode_packed, expand, matmul};

const CONTRACTS: [Contract; 3] = [Contract::Packed, Contract::Factored, Contract::Expanded];

struct Stored {
    geometry: Geometry,
    codes: Vec<u32>,
    scales: Vec<f16>,
}

impl Stored {
    fn random(geometry: Geometry, rng: &mut SmallRng) -> Self {
        let scale = |_| match rng.random_range(0..10) {
            0 => f16::ZERO,
            1 => f16::from_bits(rng.random_range(1..8)), // subnormal
            _ => f16::from_f32(rng.random_range(0.001..0.1)),
        };
        let scales = (0..geometry.rows()).map(scale).collect();
        Self { geometry, codes: (0..geometry.words()).map(|_| rng.random()).collect(), scales }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.geometry, &self.codes, &self.scales).unwrap()
    }

    fn product(&self, x: &[f32], m: usize, contract: Contract, dtype: Dtype) -> reference::Product {
        reference::matmul(&self.geometry, &self.codes, &self.scales, x, m, contract, dtype).unwrap()
    }
}

/// The product in `E`, widened.
fn multiply<E: Element>(
    stored: &Stored,
    x: &[E],
    m: usize,
    contract: Contract,
    level: Level,
    widen: fn(&[E]) -> Vec<f32>,
) -> Vec<f32> {
    let mut out = vec![E::default(); m * stored.geometry.out_features()];
    matmul(&stored.matrix(), x, m, contract, level, &mut out).unwrap();
    widen(&out)
}

/// Rounds `x` to the type in place and gives the product.
fn multiply_as(
    dtype: Dtype,
    stored: &Stored,
    x: &mut [f32],
    m: usize,
    contract: Contract,
    level: Level,
) -> Vec<f32> {
    for x in x.iter_mut() {
        *x = dtype.round(*x);
    }
    match dtype {
        Dtype::F32 => multiply::<f32>(stored, x, m, contract, level, <[f32]>::to_vec),
        Dtype::F16 => {
            let x: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
            multiply(stored, &x, m, contract, level, |out| out.to_f32_vec())
        }
        Dtype::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            multiply(stored, &x, m, contract, level, |out| out.to_f32_vec())
        }
    }
}

fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Every legal pair of `k` and `T` among small `T`, those smaller than a group and a word's ring included.
fn blocks() -> Vec<(u32, usize)> {
    let ts = [8, 16, 24, 32, 40, 64, 96, 128, 256];
    (1..=4u32)
        .flat_map(|k| ts.map(|t| (k, t)))
        .filter(|&(k, t)| (k as usize * t).is_multiple_of(32))
        .collect()
}

prop_compose! {
    fn geometries()(
        (bits, block) in prop::sample::select(blocks()),
        state_bits in 2u32..=16,
        rows in 1usize..70,
        blocks in 1usize..5,
        output in any::<bool>(),
        interleaved in prop::bool::weighted(0.2),
    ) -> Geometry {
        let axis = if output { Axis::Output } else { Axis::Input };
        if interleaved {
            let row_major = Geometry::new(Axis::Output, 3, 12, 256, rows, 512 * blocks.div_ceil(2));
            return row_major.unwrap().with_layout(Layout::Interleaved).unwrap();
        }
        Geometry::new(axis, bits, state_bits.max(bits + 1), block, rows, blocks * block).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn products_are_within_the_bound(
        geometry in geometries(),
        m in prop::sample::select(vec![0usize, 1, 2, 4, 5, 8, 9, 33, 66]),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]),
        contract in prop::sample::select(CONTRACTS.to_vec()),
        seed in any::<u64>(),
    ) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let stored = Stored::random(geometry, &mut rng);
        let mut x: Vec<f32> = (0..m * geometry.in_features()).map(|_| rng.random_range(-2.0..2.0)).collect();
        x.iter_mut().for_each(|x| *x = dtype.round(*x));
        let product = stored.product(&x, m, contract, dtype);
        for level in Level::available() {
            let found = multiply_as(dtype, &stored, &mut x, m, contract, level);
            let (ratio, at) = product.worst(&found, dtype, false);
            prop_assert!(ratio <= 1.0, "{} m={} {:?} {:?} {} output {}: {} of the allowance",
                geometry, m, dtype, contract, level, at, ratio);
        }
    }

    #[test]
    fn weights_are_bit_equal(geometry in geometries(), seed in any::<u64>()) {
        let stored = Stored::random(geometry, &mut SmallRng::seed_from_u64(seed));
        let expected = |contract, dtype| {
            let weights = reference::decode(&geometry, &stored.codes, &stored.scales, contract, dtype);
            bits(weights.unwrap().into_iter().map(|w| w as f32))
        };
        let packed = expected(Contract::Packed, Dtype::F32);
        let expanded = [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|d| expected(Contract::Expanded, d));
        let (matrix, len) = (stored.matrix(), geometry.rows() * geometry.cols());
        for level in Level::available() {
            let mut wide = vec![0f32; len];
            decode_packed(&matrix, level, &mut wide).unwrap();
            prop_assert!(bits(wide.clone()) == packed, "{} {} packed", geometry, level);
            expand(&matrix, level, &mut wide).unwrap();
            prop_assert!(bits(wide) == expanded[0], "{} {} f32", geometry, level);
            let mut half = vec![f16::ZERO; len];
            expand(&matrix, level, &mut half).unwrap();
            prop_assert!(bits(half.to_f32_vec()) == expanded[1], "{} {} f16", geometry, level);
            let mut half = vec![bf16::ZERO; len];
            expand(&matrix, level, &mut half).unwrap();
            prop_assert!(bits(half.to_f32_vec()) == expanded[2], "{} {} bf16", geometry, level);
        }
    }
}

/// Geometries large enough to be cut into tasks and run in parallel.
fn large() -> Vec<Geometry> {
    let row_major = |axis, k| Geometry::new(axis, k, 12, 256, 2051, 1024).unwrap();
    vec![
        row_major(Axis::Output, 3),
        row_major(Axis::Output, 3).with_layout(Layout::Interleaved).unwrap(),
        row_major(Axis::Output, 4),
        row_major(Axis::Input, 3),
    ]
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut rng = SmallRng::seed_from_u64(2);
    for geometry in large() {
        let stored = Stored::random(geometry, &mut rng);
        let m = 9;
        let mut x: Vec<f32> = (0..m * geometry.in_features()).map(|_| rng.random_range(-1.0..1.0)).collect();
        for level in Level::available() {
            for m in [1, 9] {
                let x = &mut x[..m * geometry.in_features()];
                let contract = contract_for(m);
                let mut run = |threads| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    bits(pool.install(|| multiply_as(Dtype::F32, &stored, x, m, contract, level)))
                };
                assert!(run(1) == run(3), "{geometry} {level} m={m}");
            }
        }
    }
}

#[test]
fn large_products_are_within_the_bound() {
    let mut rng = SmallRng::seed_from_u64(3);
    for geometry in large() {
        let stored = Stored::random(geometry, &mut rng);
        for (m, contract) in [(1, Contract::Packed), (3, Contract::Factored), (6, Contract::Expanded)] {
            let mut x: Vec<f32> =
                (0..m * geometry.in_features()).map(|_| rng.random_range(-1.0..1.0)).collect();
            let product = stored.product(&x, m, contract, Dtype::F32);
            for level in Level::available() {
                let found = multiply_as(Dtype::F32, &stored, &mut x, m, contract, level);
                let (ratio, at) = product.worst(&found, Dtype::F32, false);
                println!("{level:>6} {geometry} {contract:?} m={m}: {ratio:.4} of the allowance");
                assert!(ratio <= 1.0, "{geometry} {level} {contract:?} output {at}: {ratio}");
            }
        }
    }
}

/// The size the crate is for, against the oracle at a sample of outputs.
#[test]
fn full_size() {
    if std::env::var_os("TRELLIS_FULL").is_none() {
        println!("skipped: set TRELLIS_FULL=1");
        return;
    }
    let (rows, cols) = (17408, 5120);
    let mut rng = SmallRng::seed_from_u64(4);
    for (axis, k, layout) in [
        (Axis::Output, 3, Layout::RowMajor),
        (Axis::Output, 3, Layout::Interleaved),
        (Axis::Output, 4, Layout::RowMajor),
        (Axis::Input, 2, Layout::RowMajor),
        (Axis::Input, 3, Layout::RowMajor),
    ] {
        let geometry = Geometry::new(axis, k, 12, 256, rows, cols).unwrap().with_layout(layout).unwrap();
        let stored = Stored::random(geometry, &mut rng);
        let (n, outputs) = (geometry.in_features(), geometry.out_features());
        for (m, contract) in [(1, Contract::Packed), (1, Contract::Factored), (8, Contract::Expanded)] {
            let mut x: Vec<f32> =
                (0..m * n).map(|_| Dtype::Bf16.round(rng.random_range(-1.0..1.0))).collect();
            let sample: Vec<(usize, usize)> = (0..64)
                .map(|i| {
                    (
                        rng.random_range(0..m),
                        if i < 2 { i * (outputs - 1) } else { rng.random_range(0..outputs) },
                    )
                })
                .collect();
            let mut product = reference::Product {
                y: vec![0.0; 64],
                magnitude: vec![0.0; 64],
                square: vec![0.0; 64],
                terms: n,
            };
            for (i, &(row, output)) in sample.iter().enumerate() {
                for input in 0..n {
                    let (r, c) = if axis == Axis::Output { (input, output) } else { (output, input) };
                    let y = trellis_codec::codebook::y(reference::state(&geometry, &stored.codes, r, c));
                    let weight = reference::weight(contract, Dtype::Bf16, y, stored.scales[r]);
                    let term = weight * f64::from(x[row * n + input]);
                    product.y[i] += term;
                    product.magnitude[i] += term.abs();
                }
            }
            for level in Level::available() {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    if (contract, dtype) == (Contract::Expanded, Dtype::F32) {
                        continue; // other weights than the sample's
                    }
                    let found = multiply_as(dtype, &stored, &mut x, m, contract, level);
                    let found: Vec<f32> = sample.iter().map(|&(row, o)| found[row * outputs + o]).collect();
                    let (ratio, _) = product.worst(&found, dtype, false);
                    println!(
                        "{level:>6} {geometry} {contract:?} m={m} {dtype:?}: {ratio:.4} of the allowance"
                    );
                    assert!(ratio <= 1.0, "{geometry} {level} {contract:?} {dtype:?}: {ratio}");
                }
            }
        }
    }
}

#[test]
fn nan_infinity_and_a_zero_scale_propagate() {
    let mut rng = SmallRng::seed_from_u64(5);
    for axis in [Axis::Output, Axis::Input] {
        let geometry = Geometry::new(axis, 3, 12, 256, 6, 256).unwrap();
        let mut stored = Stored::random(geometry, &mut rng);
        stored.scales.fill(f16::from_f32(0.01));
        stored.scales[2] = f16::ZERO;
        let n = geometry.in_features();
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0] {
            for at in [2, 5] {
                let mut x = vec![0.5; n];
                x[at] = special;
                for contract in CONTRACTS {
                    let product = stored.product(&x, 1, contract, Dtype::F32);
                    for level in Level::available() {
                        let found = multiply_as(Dtype::F32, &stored, &mut x, 1, contract, level);
                        let (ratio, output) = product.worst(&found, Dtype::F32, false);
                        assert!(
                            ratio <= 1.0,
                            "{axis:?} {special} at {at} {contract:?} {level}: output {output} is {}, expected {}",
                            found[output],
                            product.y[output],
                        );
                    }
                }
            }
        }
        // Any scale, NaN and infinity too, gives a number or a NaN and never another number.
        stored.scales =
            vec![f16::NAN, f16::from_bits(0x7FFF), f16::from_bits(0xFFFF), f16::INFINITY, f16::MAX, f16::ONE];
        for level in Level::available() {
            let mut out = vec![bf16::ZERO; 6 * 256];
            expand(&stored.matrix(), level, &mut out).unwrap();
            assert!(out[..3 * 256].iter().all(|w| w.is_nan()), "{level}");
            assert!(out[3 * 256..4 * 256].iter().all(|w| !w.is_finite()), "{level}");
            assert!(out[4 * 256..].iter().all(|w| w.is_finite()), "{level}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let geometry = Geometry::new(Axis::Input, 3, 12, 256, 4, 512).unwrap();
    let (codes, scales) = (vec![0u32; geometry.words()], vec![f16::ONE; 4]);
    let length =
        |what, found, expected| CpuError::Length { what, found, expected, geometry: Box::new(geometry) };

    assert_eq!(Matrix::new(geometry, &codes[1..], &scales).unwrap_err(), length("codes", 191, 192));
    assert_eq!(Matrix::new(geometry, &codes, &scales[1..]).unwrap_err(), length("scales", 3, 4));

    let matrix = Matrix::new(geometry, &codes, &scales).unwrap();
    let run = |x: usize, m, out: usize| {
        matmul(&matrix, &vec![0f32; x], m, Contract::Packed, Level::Scalar, &mut vec![0f32; out])
    };
    assert_eq!(run(1023, 2, 8), Err(length("x", 1023, 1024)));
    assert_eq!(run(1024, 2, 7), Err(length("out", 7, 8)));
    assert_eq!(run(0, usize::MAX, 0), Err(length("x", 0, usize::MAX)));
    assert_eq!(run(0, 0, 0), Ok(()));
    assert_eq!(decode_packed(&matrix, Level::Scalar, &mut [0.0; 5]).unwrap_err(), length("out", 5, 2048),);
    assert_eq!(
        run(1, 2, 8).unwrap_err().to_string(),
        "x: 1 elements, expected 1024 for a matrix of 4x512 axis 1 k=3 L=12 T=256",
    );

    for level in Level::ALL {
        let found = matmul(&matrix, &[0f32; 512], 1, Contract::Packed, level, &mut [0f32; 4]);
        assert_eq!(found.is_ok(), level.is_available());
        assert_eq!(level.is_available(), Level::available().contains(&level));
        if !level.is_available() {
            assert_eq!(found, Err(CpuError::Unavailable { level }));
            assert_eq!(expand(&matrix, level, &mut [0f32; 2048]), Err(CpuError::Unavailable { level }));
        }
        assert_eq!(level.to_string().parse(), Ok(level));
    }
    assert!(Level::best().is_available());
    assert_eq!("sse".parse::<Level>(), Err(CpuError::UnknownLevel { found: "sse".into() }));
}

#[test]
fn contracts_by_rows() {
    assert_eq!([0, 1, 4].map(contract_for), [Contract::Packed; 3]);
    assert_eq!([5, 8, 1000].map(contract_for), [Contract::Expanded; 3]);
}
