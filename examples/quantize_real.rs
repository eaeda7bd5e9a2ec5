//! Quantizes two matrices of a real language model (SmolLM2-135M-Instruct, from a GGUF file) at 2, 3 and 4 bits and
//! prints what is lost, in the weights and in products with Gaussian activations, beside MLX's own affine quantizer at
//! the same or more bits.
//!
//! ```sh
//! cargo xtask fetch smollm2
//! cargo run --release -p mlx-trellis-examples --example quantize_real -- target/data/NAME.gguf
//! ```

use anyhow::{Context, Result};
use mlx_rs::io::GgufFile;
use mlx_rs::module::Param;
use mlx_rs::nn::Linear;
use mlx_rs::{Array, Dtype, ops};
use mlx_trellis::{Axis, AxisChoice, QuantizeOptions, TrellisLinear};
use mlx_trellis_examples::{gaussian, worst_error};

/// Group of the GGUF file's own Q4_1 weights.
const GGUF_GROUP: i32 = 32;
/// Rows of Gaussian activations.
const ROWS: usize = 16;

fn main() -> Result<()> {
    let path = std::env::args()
        .nth(1)
        .context("usage: quantize_real FILE.gguf (cargo xtask fetch smollm2 gets one)")?;
    let file = GgufFile::load(&path).with_context(|| path.clone())?;
    for name in ["blk.0.ffn_down", "blk.0.ffn_gate"] {
        let weight = dense(&file, name)?;
        let &[out, n] = weight.shape() else { anyhow::bail!("{name} has shape {:?}", weight.shape()) };
        println!("{name}: {out} x {n}");
        println!("  {:<26} {:>10} {:>14} {:>14}", "", "bits", "relative mse", "output error");
        let x = Array::from_slice(&gaussian(ROWS * n as usize, 1), &[ROWS as i32, n]);
        let y = ops::matmul(&x, weight.t())?;
        for bits in [2, 3, 4] {
            for axis in [AxisChoice::Input, AxisChoice::Output] {
                trellis(&weight, &x, &y, bits, axis)?;
            }
            for group in [64, 32] {
                affine(&weight, &x, &y, bits as i32, group)?;
            }
        }
    }
    Ok(())
}

/// A tensor of the file as float32; MLX loads Q4_1 as its own affine codes.
fn dense(file: &GgufFile, name: &str) -> Result<Array> {
    let get = |part: &str| -> Result<Option<Array>> { Ok(file.get_array(&format!("{name}.{part}"))?) };
    let weight = get("weight")?.with_context(|| format!("no tensor {name}.weight in the file"))?;
    let weight = match (get("scales")?, get("biases")?) {
        (Some(scales), Some(biases)) => {
            let bits = weight.dim(-1) * 32 / (scales.dim(-1) * GGUF_GROUP);
            ops::dequantize(weight, scales, &biases, GGUF_GROUP, bits)?
        }
        _ => weight,
    };
    let weight = weight.as_dtype(Dtype::Float32)?;
    weight.eval()?;
    Ok(weight)
}

fn trellis(weight: &Array, x: &Array, y: &Array, bits: u32, axis: AxisChoice) -> Result<()> {
    let linear = Linear { weight: Param::new(weight.clone()), bias: Param::new(None) };
    let options = QuantizeOptions { axis, ..QuantizeOptions::with_bits(bits) };
    let layer = TrellisLinear::quantize(&linear, &options)?;
    let g = *layer.geometry();
    let product = layer.try_forward(x)?;
    worst_error(x, &layer.weights()?, &product, 0..g.out_features().min(64))?;
    let along = if g.axis() == Axis::Input { "inputs" } else { "outputs" };
    let name = format!("trellis k={bits} along {along} T={}", g.block());
    let stored = g.bytes() as f64 * 8.0 / (g.rows() * g.cols()) as f64;
    row(&name, stored, relative(weight, &layer.dequantize(Dtype::Float32)?)?, relative(y, &product)?);
    Ok(())
}

fn affine(weight: &Array, x: &Array, y: &Array, bits: i32, group: i32) -> Result<()> {
    let (w, scales, biases) = ops::quantize(weight, group, bits)?;
    let product = ops::quantized_matmul(x, &w, &scales, &biases, true, group, bits)?;
    let back = ops::dequantize(&w, &scales, &biases, group, bits)?;
    // A 16-bit scale and bias for each group, as models are stored.
    let stored = f64::from(bits) + 32.0 / f64::from(group);
    row(&format!("MLX affine {bits}-bit g{group}"), stored, relative(weight, &back)?, relative(y, &product)?);
    Ok(())
}

/// `|a - b|² / |a|²`.
fn relative(a: &Array, b: &Array) -> Result<f32> {
    let error = a.subtract(b)?.square()?.sum(None)?;
    Ok(error.try_item_exact::<f32>()? / a.square()?.sum(None)?.try_item_exact::<f32>()?)
}

fn row(name: &str, bits: f64, mse: f32, output: f32) {
    println!("  {name:<26} {bits:>10.3} {mse:>14.5} {output:>14.5}");
}
