//! What the examples share: numbers to multiply, and the comparison with the float64 oracle.

use anyhow::{Context, Result, ensure};
use mlx_rs::{Array, Dtype};
use mlx_trellis::dispatch::{self, Device};
use mlx_trellis::{MatmulOptions, TrellisWeights, f16, problem};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, StandardNormal};
use trellis_codec::reference;

/// `n` standard normal numbers.
pub fn gaussian(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..n).map(|_| StandardNormal.sample(&mut rng)).collect()
}

/// The worst error of `y = x · Wᵀ` as a share of what the format allows, on the outputs in `outputs`, against the float64
/// oracle.
///
/// # Errors
/// An evaluation that fails, or a worst error beyond the allowance.
pub fn worst_error(
    x: &Array,
    weights: &TrellisWeights,
    y: &Array,
    outputs: std::ops::Range<usize>,
) -> Result<f64> {
    let geometry = weights.geometry();
    let problem = problem(x, geometry, MatmulOptions::default())?;
    let contract = dispatch::choose(&problem, &Device::current()).contract;
    let codes = weights.codes().to_vec_exact::<u32>()?;
    let scales = weights.scales().to_vec_exact::<f16>()?;
    let x = x.as_dtype(Dtype::Float32)?.to_vec_exact::<f32>()?;
    let out = geometry.out_features();
    let y = y.as_dtype(Dtype::Float32)?.to_vec_exact::<f32>().context("y is not contiguous")?;
    let found: Vec<f32> = y.chunks_exact(out).flat_map(|row| row[outputs.clone()].to_vec()).collect();
    let expected = reference::matmul_outputs(
        geometry,
        &codes,
        &scales,
        &x,
        problem.m,
        contract,
        problem.dtype,
        outputs,
    )?;
    let (worst, at) = expected.worst(&found, problem.dtype, false);
    ensure!(
        worst <= 1.0,
        "output {} differs from {} by {worst:.2} of the allowance",
        found[at],
        expected.y[at]
    );
    Ok(worst)
}
