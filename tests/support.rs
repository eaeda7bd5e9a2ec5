//! What the integration tests share: the back ends to run, cases to run on them, and the comparison with the oracle.

use std::path::{Path, PathBuf};

use mlx_rs::{Array, Dtype as MlxDtype};
use mlx_trellis::dispatch::{Choice, Problem};
use mlx_trellis::{Axis, Geometry, Layout, MatmulOptions, TrellisWeights, bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use trellis_codec::reference::{Contract, Dtype, Product};
use trellis_codec::{cases, pack, reference};

/// Where products can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The CPU, on any machine.
    Cpu,
    /// A CUDA GPU that MLX was built for.
    Cuda,
}

/// Every back end of the suite; a new one is one more name here.
pub const BACKENDS: [Backend; 2] = [Backend::Cpu, Backend::Cuda];

impl Backend {
    /// The name used by `TRELLIS_REQUIRE`.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda => "cuda",
        }
    }

    /// Whether this machine has it. A missing one prints that it is skipped, or fails the test if `TRELLIS_REQUIRE`
    /// (a comma-separated list) names it.
    pub fn present(self) -> bool {
        let present = match self {
            Backend::Cpu => true,
            Backend::Cuda => mlx_trellis::cuda_is_available(),
        };
        if !present {
            let required = std::env::var("TRELLIS_REQUIRE").unwrap_or_default();
            assert!(
                !required.split(',').any(|name| name == self.name()),
                "TRELLIS_REQUIRE names {}, which this machine lacks",
                self.name()
            );
            println!("skipped: no {} on this machine", self.name());
        }
        present
    }

    /// Runs `f` with what it builds going to this back end.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> T {
        match self {
            Backend::Cpu => mlx_rs::with_device(mlx_rs::Device::cpu(), f),
            Backend::Cuda => {
                mlx_trellis::skip_cuda_teardown();
                mlx_rs::with_device(mlx_rs::Device::gpu(), f)
            }
        }
    }
}

/// The folder of golden cases; `TRELLIS_GOLDEN` says where it is on a machine that has no copy of the sources.
pub fn golden_dir() -> PathBuf {
    let given = std::env::var_os("TRELLIS_GOLDEN").map(PathBuf::from);
    given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"))
}

/// The golden cases.
pub fn golden() -> Vec<cases::Case> {
    cases::read_cases(&golden_dir()).expect("the golden cases are part of the repository")
}

/// Whether the large, opt-in tests run (`cargo xtask test --full`).
pub fn full() -> bool {
    let full = std::env::var_os("TRELLIS_FULL").is_some();
    if !full {
        println!("skipped: set TRELLIS_FULL=1 (cargo xtask test --full) to run it");
    }
    full
}

/// A stored matrix of random code words and scales around 1, some of them zero, subnormal or negative.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Shape and coding.
    pub geometry: Geometry,
    /// Code words.
    pub codes: Vec<u32>,
    /// Scales.
    pub scales: Vec<f16>,
}

impl Matrix {
    /// Random words: any bit pattern is a valid matrix.
    pub fn random(geometry: Geometry, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let codes = (0..geometry.words()).map(|_| rng.random()).collect();
        let scales = (0..geometry.rows())
            .map(|row| match row % 17 {
                5 => f16::ZERO,
                9 => f16::from_bits(0x0123),
                11 => f16::from_f32(-0.75),
                _ => f16::from_f32(rng.random_range(0.01..2.0)),
            })
            .collect();
        Self { geometry, codes, scales }
    }

    /// The matrix of a golden case.
    pub fn of_case(case: &cases::Case) -> Self {
        Self { geometry: case.geometry, codes: case.codes.clone(), scales: case.scales.clone() }
    }

    /// The same matrix in another layout.
    pub fn with_layout(self, layout: Layout) -> Self {
        let (codes, geometry) = pack::relayout(&self.geometry, &self.codes, layout).expect("a legal layout");
        Self { geometry, codes, scales: self.scales }
    }

    /// As MLX arrays.
    pub fn weights(&self) -> TrellisWeights {
        TrellisWeights::from_slices(&self.codes, &self.scales, self.geometry)
            .expect("slices fit the geometry")
    }

    /// The oracle's product.
    pub fn product(&self, x: &[f32], m: usize, contract: Contract, dtype: Dtype) -> Product {
        reference::matmul(&self.geometry, &self.codes, &self.scales, x, m, contract, dtype)
            .expect("slices fit the geometry")
    }

    /// The oracle's weights, `[rows, cols]`, as binary32 (they are for contracts P and E).
    pub fn decoded(&self, contract: Contract, dtype: Dtype) -> Vec<f32> {
        reference::decode(&self.geometry, &self.codes, &self.scales, contract, dtype)
            .expect("slices fit the geometry")
            .iter()
            .map(|&w| w as f32)
            .collect()
    }
}

/// `n` activations that `dtype` holds exactly, in [-1, 1).
pub fn activations(n: usize, dtype: Dtype, seed: u64) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed ^ 0x5EED);
    (0..n).map(|_| dtype.round(rng.random_range(-1.0..1.0))).collect()
}

/// Numbers as an MLX array of `dtype`, which holds them exactly.
pub fn array(values: &[f32], shape: &[i32], dtype: Dtype) -> Array {
    match dtype {
        Dtype::F32 => Array::from_slice(values, shape),
        Dtype::F16 => Array::from_slice(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>(), shape),
        Dtype::Bf16 => {
            Array::from_slice(&values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>(), shape)
        }
    }
}

/// The numbers of an array in row-major order, as binary32.
pub fn values(array: &Array) -> Vec<f32> {
    array.eval().expect("an evaluation");
    // mlx-rs cannot borrow an empty array's data.
    if array.size() == 0 {
        return Vec::new();
    }
    let array = array.as_dtype(MlxDtype::Float32).and_then(|a| a.contiguous()).expect("a graph node");
    array.to_vec_exact::<f32>().expect("a contiguous float32 array")
}

/// MLX's name for a dtype.
pub fn mlx_dtype(dtype: Dtype) -> MlxDtype {
    match dtype {
        Dtype::F32 => MlxDtype::Float32,
        Dtype::F16 => MlxDtype::Float16,
        Dtype::Bf16 => MlxDtype::Bfloat16,
    }
}

/// Fails unless `found` is within the bound of `product`, with tf32's allowance if it went that way; returns the worst
/// error as a share of its allowance.
pub fn assert_within(found: &[f32], product: &Product, dtype: Dtype, tf32: bool, what: &str) -> f64 {
    let (worst, at) = product.worst(found, dtype, tf32);
    assert!(
        worst <= 1.0,
        "{what}: output {at} is {}, expected {}: {worst:.3} of the allowance",
        found[at],
        product.y[at]
    );
    worst
}

/// How a product is computed where operations built now on this thread run.
pub fn chosen(geometry: &Geometry, m: usize, dtype: Dtype, options: MatmulOptions) -> Choice {
    let problem = Problem {
        factored: options.factored,
        packed: options.packed,
        variant: options.variant,
        shared_codebook: options.shared_codebook,
        ..Problem::new(*geometry, m, dtype)
    };
    options.choose(&problem)
}

/// Compares outputs with the oracle for the kernel that is chosen on this thread.
pub fn check_product(
    found: &[f32],
    matrix: &Matrix,
    x: &[f32],
    m: usize,
    dtype: Dtype,
    options: MatmulOptions,
) -> f64 {
    let choice = chosen(&matrix.geometry, m, dtype, options);
    let product = matrix.product(x, m, choice.contract, dtype);
    let what = format!("{} {} m={m} {dtype:?}", choice.kernel, matrix.geometry);
    assert_within(found, &product, dtype, choice.kernel.takes_tf32_allowance(), &what)
}

/// A matmul on the CPU: a GPU's may round float32 to tf32.
pub fn exact_matmul(a: &Array, b: &Array) -> Array {
    Backend::Cpu.run(|| mlx_rs::ops::matmul(a, b)).expect("a graph node")
}

/// The Qwen-shaped projection: 17408 inputs, 5120 outputs, coded along the outputs.
pub fn qwen(bits: u32) -> Geometry {
    Geometry::new(Axis::Output, bits, 12, 256, 17408, 5120).expect("a legal geometry")
}
