//! Runs the down projection of a 27B Qwen (17408 inputs, 5120 outputs) at 2, 3 and 4 bits a weight inside an MLX graph:
//! shows that nothing is computed before MLX evaluates, checks the result against float64 and against a dense
//! dequantize-matmul, and prints how long a product takes.
//!
//! ```sh
//! cargo run --release -p mlx-trellis-examples --example qwen_down_proj
//! ```

use std::time::Instant;

use anyhow::{Result, ensure};
use mlx_rs::{Array, Dtype, memory, ops};
use mlx_trellis::dispatch::{self, Device};
use mlx_trellis::{Axis, Geometry, MatmulOptions, TrellisWeights, dequantize, f16, problem, trellis_matmul};
use mlx_trellis_examples::{gaussian, worst_error};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const IN_FEATURES: usize = 17408;
const OUT_FEATURES: usize = 5120;
/// Outputs checked against float64.
const CHECKED: usize = 256;
const RUNS: usize = 9;

fn main() -> Result<()> {
    println!("MLX {}, CPU {}", mlx_trellis::mlx_version(), Device::current().cpu);
    for bits in [2, 3, 4] {
        let weights = random_weights(bits)?;
        println!("{} ({:.1} MB)", weights.geometry(), weights.geometry().bytes() as f64 / 1e6);
        // The dense weight that a layer never makes; here it is the independent check.
        let dense = dequantize(&weights, Dtype::Float32)?;
        dense.eval()?;
        for m in [1, 4, 8] {
            run(&weights, &dense, m)?;
        }
    }
    Ok(())
}

/// Any words are valid codes, so random ones are a matrix; a real one comes from `quantize_real`.
fn random_weights(bits: u32) -> Result<TrellisWeights> {
    let geometry = Geometry::for_linear(Axis::Output, bits, 12, 256, OUT_FEATURES, IN_FEATURES)?;
    let mut rng = SmallRng::seed_from_u64(u64::from(bits));
    let codes: Vec<u32> = (0..geometry.words()).map(|_| rng.random()).collect();
    let scales: Vec<f16> =
        (0..geometry.rows()).map(|_| f16::from_f32(rng.random_range(0.005..0.02))).collect();
    Ok(TrellisWeights::from_slices(&codes, &scales, geometry)?)
}

fn run(weights: &TrellisWeights, dense: &Array, m: usize) -> Result<()> {
    let x = Array::from_slice(&gaussian(m * IN_FEATURES, m as u64), &[m as i32, IN_FEATURES as i32]);
    let x = x.as_dtype(Dtype::Bfloat16)?;
    mlx_rs::transforms::eval([&x, weights.codes(), weights.scales()])?;

    // Laziness: a graph around the product, built in no time and without memory, then evaluated as one.
    let before = memory::active_memory()?;
    let start = Instant::now();
    let y = trellis_matmul(&x, weights)?;
    let wide = y.as_dtype(Dtype::Float32)?;
    let norm = ops::sqrt((&wide * &wide).sum(None)?)?;
    let built = start.elapsed();
    ensure!(memory::active_memory()? == before, "building the graph took memory");
    norm.eval()?;
    let evaluated = start.elapsed();
    ensure!(built < evaluated / 2, "building the graph took {built:?} of {evaluated:?}");

    let worst = worst_error(&x, weights, &y, 0..CHECKED)?;
    let expected = ops::matmul(x.as_dtype(Dtype::Float32)?, dense.t())?;
    let off = ops::max(ops::abs(y.as_dtype(Dtype::Float32)?.subtract(&expected)?)?, None)?
        .try_item_exact::<f32>()?;
    let scale = ops::max(ops::abs(&expected)?, None)?.try_item_exact::<f32>()?;
    ensure!(off <= scale * 0.01, "the dense product differs by {off} where the largest output is {scale}");

    let mut times: Vec<f64> = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let start = Instant::now();
        trellis_matmul(&x, weights)?.eval()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let choice =
        dispatch::choose(&problem(&x, weights.geometry(), MatmulOptions::default())?, &Device::current());
    println!(
        "  M={m}: {} ({}), {:.2} ms, worst error {worst:.3} of the allowance; graph built in {:.3} ms, norm {:.3}",
        choice.kernel,
        choice.level,
        times[RUNS / 2] * 1e3,
        built.as_secs_f64() * 1e3,
        norm.try_item_exact::<f32>()?
    );
    Ok(())
}
