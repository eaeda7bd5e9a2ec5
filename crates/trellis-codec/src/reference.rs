//! The oracle: decode and multiply, in float64, one weight at a time. Slow on purpose; nothing here is ever
//! sped up.

use std::ops::Range;

use half::f16;

use crate::codebook;
use crate::error::PackError;
use crate::format::{Axis, Geometry};
use crate::pack;

/// How a contract forms a weight from `y` and the row's scale (`format.md`, "Numerical contracts").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Contract {
    /// P: `fl(unrefined(y) * scale)` in binary32.
    Packed,
    /// F: `y / d * scale` with `1/d` and the scale applied outside the sum; its real-number weight here.
    Factored,
    /// E: `exact(y) * scale` rounded to the activations' type.
    Expanded,
}

/// The types of activations and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// `value` rounded to this type, to nearest even, as a binary32.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Dtype::F32 => value,
            Dtype::F16 => f16::from_f32(value).to_f32(),
            Dtype::Bf16 => half::bf16::from_f32(value).to_f32(),
        }
    }

    /// Half an ulp of this type at `value`'s magnitude: the most that one rounding moves a number.
    pub fn half_ulp(self, value: f64) -> f64 {
        let (mantissa, least) = match self {
            Dtype::F32 => (23, -126),
            Dtype::F16 => (10, -14),
            Dtype::Bf16 => (7, -126),
        };
        if value == 0.0 || !value.is_finite() {
            return 2f64.powi(least - mantissa - 1);
        }
        let exponent = (value.abs().log2().floor() as i32).max(least);
        2f64.powi(exponent - mantissa - 1)
    }
}

/// State of the weight in row `row` and column `col` of the stored matrix, in constant time.
///
/// # Panics
/// If `row`, `col` or the codes' length do not fit the geometry.
pub fn state(geometry: &Geometry, codes: &[u32], row: usize, col: usize) -> u32 {
    let at = geometry.block_offset(row, col / geometry.block());
    let ring = &codes[at..at + geometry.words_per_block()];
    pack::window(ring, geometry.window_offset(col % geometry.block()), geometry.state_bits())
}

/// The weight a contract assigns to `y` and `scale`; `dtype` is the activations' type, which contract E rounds
/// to. Exact in float64 for P and E; F is the float64 quotient.
pub fn weight(contract: Contract, dtype: Dtype, y: i32, scale: f16) -> f64 {
    match contract {
        Contract::Packed => f64::from(codebook::unrefined(y) * scale.to_f32()),
        Contract::Factored => f64::from(y) / f64::from(crate::format::CODE_DIVISOR) * scale.to_f64(),
        Contract::Expanded => f64::from(dtype.round(codebook::exact(y) * scale.to_f32())),
    }
}

/// The stored matrix `[rows, cols]` in float64.
///
/// # Errors
/// Codes or scales of the wrong length.
pub fn decode(
    geometry: &Geometry,
    codes: &[u32],
    scales: &[f16],
    contract: Contract,
    dtype: Dtype,
) -> Result<Vec<f64>, PackError> {
    check(geometry, codes, scales)?;
    let mut out = Vec::with_capacity(geometry.rows() * geometry.cols());
    for (row, &scale) in scales.iter().enumerate() {
        for col in 0..geometry.cols() {
            out.push(weight(contract, dtype, codebook::y(state(geometry, codes, row, col)), scale));
        }
    }
    Ok(out)
}

/// A product in float64, and how far a computed one may be from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// `y [m, out]`.
    pub y: Vec<f64>,
    /// `sum(|w*x|)` for each output.
    pub magnitude: Vec<f64>,
    /// `sum((w*x)^2)` for each output.
    pub square: Vec<f64>,
    /// Input features, the terms of each sum.
    pub terms: usize,
}

impl Product {
    /// The error allowed at output `i` when results are rounded to `dtype`: `2^-24 * (n+8) * sum|w*x| / 4` plus
    /// half an ulp (`format.md`, "Error bound"). `tf32` adds what contract F through tensor cores may.
    pub fn allowance(&self, i: usize, dtype: Dtype, tf32: bool) -> f64 {
        let sum = 2f64.powi(-24) * (self.terms as f64 + 8.0) * self.magnitude[i] / 4.0;
        let rounding = if tf32 { 2f64.powi(-11) * self.square[i].sqrt() } else { 0.0 };
        // The result may sit one binade up from y64, so take the ulp at the far end of what is allowed.
        sum + rounding + dtype.half_ulp(self.y[i].abs() + sum + rounding)
    }

    /// The worst error of `found [m, out]` as a share of its allowance, and where; `(0, 0)` for no outputs. A NaN
    /// or infinity that the oracle does not have counts as infinitely wrong.
    pub fn worst(&self, found: &[f32], dtype: Dtype, tf32: bool) -> (f64, usize) {
        assert_eq!(found.len(), self.y.len(), "number of outputs");
        let mut worst = (0.0, 0);
        for (i, &f) in found.iter().enumerate() {
            let expected = self.y[i];
            let ratio = if !expected.is_finite() || !f.is_finite() {
                let same = (expected.is_nan() && f.is_nan()) || f64::from(f) == expected;
                if same { 0.0 } else { f64::INFINITY }
            } else {
                let error = (f64::from(f) - expected).abs();
                if error == 0.0 { 0.0 } else { error / self.allowance(i, dtype, tf32) }
            };
            if ratio > worst.0 {
                worst = (ratio, i);
            }
        }
        worst
    }
}

/// `x [m, in]` times the layer's weight, `[m, out]`, in float64 with the contract's weights.
///
/// # Errors
/// Codes, scales or x of the wrong length.
pub fn matmul(
    geometry: &Geometry,
    codes: &[u32],
    scales: &[f16],
    x: &[f32],
    m: usize,
    contract: Contract,
    dtype: Dtype,
) -> Result<Product, PackError> {
    matmul_outputs(geometry, codes, scales, x, m, contract, dtype, 0..geometry.out_features())
}

/// [`matmul`] for the output features in `outputs` alone, `[m, outputs.len()]`: full-size products are checked on a few
/// of their outputs.
///
/// # Errors
/// Codes, scales or x of the wrong length, or outputs beyond the last.
#[allow(clippy::too_many_arguments)]
pub fn matmul_outputs(
    geometry: &Geometry,
    codes: &[u32],
    scales: &[f16],
    x: &[f32],
    m: usize,
    contract: Contract,
    dtype: Dtype,
    outputs: Range<usize>,
) -> Result<Product, PackError> {
    check(geometry, codes, scales)?;
    let n = geometry.in_features();
    if x.len() != m * n {
        return Err(PackError::Length { what: "x", found: x.len(), expected: m * n });
    }
    if outputs.end > geometry.out_features() {
        return Err(PackError::Length {
            what: "outputs",
            found: outputs.end,
            expected: geometry.out_features(),
        });
    }
    let count = outputs.len();
    let mut product = Product {
        y: vec![0.0; m * count],
        magnitude: vec![0.0; m * count],
        square: vec![0.0; m * count],
        terms: n,
    };
    for (at, output) in outputs.enumerate() {
        for input in 0..n {
            let (row, col) = match geometry.axis() {
                Axis::Output => (input, output),
                Axis::Input => (output, input),
            };
            let y = codebook::y(state(geometry, codes, row, col));
            let w = weight(contract, dtype, y, scales[row]);
            for r in 0..m {
                let term = w * f64::from(x[r * n + input]);
                product.y[r * count + at] += term;
                product.magnitude[r * count + at] += term.abs();
                product.square[r * count + at] += term * term;
            }
        }
    }
    Ok(product)
}

fn check(geometry: &Geometry, codes: &[u32], scales: &[f16]) -> Result<(), PackError> {
    if codes.len() != geometry.words() {
        return Err(PackError::Length { what: "codes", found: codes.len(), expected: geometry.words() });
    }
    if scales.len() != geometry.rows() {
        return Err(PackError::Length { what: "scales", found: scales.len(), expected: geometry.rows() });
    }
    Ok(())
}
