//! The encoder: weights to codes and scales.
//!
//! Each stored row gets one binary16 scale by [`ScaleRule`], and each block of `row / scale` the trellis path
//! that the search in `viterbi.rs` finds (QTIP, arXiv 2406.11235, sections 3 and 4). `LUT_RMS` is the code's
//! rms at `L` = 12 and is used for every `L`, as the format says. A block's codes depend on its own weights
//! and its row's scale alone, and floating point is used one rounded operation at a time in a fixed
//! order, so the same weights give the same bytes at every level, with any number of threads, and however the
//! rows are handed over.

mod coder;
mod feedback;
mod hessian;
mod scale;
mod viterbi;

use std::ops::Range;

use half::f16;

use crate::error::{EncodeError, PackError};
use crate::format::{Axis, Geometry};
use crate::rotation::Rotation;
pub use coder::EncodeLevel;
use coder::{Block, Coder};
pub use feedback::{DEFAULT_DAMPING, Fallback, FeedbackReport, encode_with_feedback};
pub use hessian::Hessian;
use scale::RowScale;
pub use scale::ScaleRule;

/// How to encode. `EncodeOptions { tensor: "...", ..Default::default() }`.
#[derive(Clone, Copy, Default)]
pub struct EncodeOptions<'a> {
    /// The tensor's name, for error messages.
    pub tensor: &'a str,
    /// How each row's scale is chosen.
    pub scale: ScaleRule,
    /// The instructions to use.
    pub level: EncodeLevel,
    /// Called with a number of weights newly finished, from any thread; the numbers sum to `rows * cols`.
    pub progress: Option<&'a (dyn Fn(usize) + Sync)>,
}

/// An encoded matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// Shape and coding parameters.
    pub geometry: Geometry,
    /// How the weight was rotated before it was encoded, if it was. [`Encoder`] rotates nothing.
    pub rotation: Option<Rotation>,
    /// uint32 codes of shape [`Geometry::codes_shape`].
    pub codes: Vec<u32>,
    /// binary16 scales `[rows]`; 0 for a row of zeros, whose codes are all zero too.
    pub scales: Vec<f16>,
    /// What was lost.
    pub report: EncodeReport,
}

/// What an encoding lost.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EncodeReport {
    /// Sum over all weights of `(weight - decoded)^2`, `decoded` being contract E's binary32 `value * scale`.
    pub squared_error: f64,
    /// Sum over all weights of `weight^2`.
    pub energy: f64,
    /// Rows of nothing but zeros.
    pub zero_rows: usize,
    /// Rows that are not all zero but whose scale rounds to zero in binary16; they decode to zero.
    pub underflowed_rows: usize,
    /// What error feedback did, if it was asked for.
    pub feedback: Option<FeedbackReport>,
}

impl EncodeReport {
    /// `squared_error / energy`; 0 for a matrix of zeros.
    pub fn relative_mse(&self) -> f64 {
        if self.energy == 0.0 { 0.0 } else { self.squared_error / self.energy }
    }
}

/// Encodes a stored matrix: `weights` is `[rows, cols]`, row-major, as [`stored_rows`] makes it from a
/// layer's weight.
///
/// ```
/// use trellis_codec::{Axis, EncodeOptions, Geometry, encode};
/// let geometry = Geometry::new(Axis::Input, 3, 12, 256, 1, 256)?;
/// let weights: Vec<f32> = (0..256).map(|i| (i as f32 * 0.7).sin()).collect();
/// let encoded = encode(&geometry, &weights, &EncodeOptions { tensor: "wave", ..Default::default() })?;
/// assert_eq!(encoded.codes.len(), geometry.words());
/// assert!(encoded.report.relative_mse() < 0.03);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Weights of the wrong number, NaN or infinite weights, a row whose scale is infinite in binary16, or a
/// level that this machine does not have.
pub fn encode(
    geometry: &Geometry,
    weights: &[f32],
    options: &EncodeOptions<'_>,
) -> Result<Encoded, EncodeError> {
    let mut encoder = Encoder::new(geometry, options)?;
    encoder.push_rows(weights)?;
    encoder.finish()
}

/// Encodes a stored matrix that arrives some rows at a time, so that it need never be whole in binary32.
///
/// Threads share the blocks of one [`Encoder::push_rows`]; a few hundred blocks keep them busy.
pub struct Encoder<'a> {
    geometry: Geometry,
    options: EncodeOptions<'a>,
    coder: Coder,
    codes: Vec<u32>,
    scales: Vec<f16>,
    report: EncodeReport,
}

impl<'a> Encoder<'a> {
    /// An encoder that has seen no rows.
    ///
    /// # Errors
    /// A level that this machine does not have.
    pub fn new(geometry: &Geometry, options: &EncodeOptions<'a>) -> Result<Self, EncodeError> {
        Ok(Self {
            geometry: *geometry,
            options: *options,
            coder: Coder::new(geometry, options.level)?,
            codes: vec![0; geometry.words()],
            scales: Vec::with_capacity(geometry.rows()),
            report: EncodeReport::default(),
        })
    }

    /// Encodes the next rows of the stored matrix: `weights` is `[n, cols]`, row-major, for any `n`.
    ///
    /// # Errors
    /// Part of a row or more rows than the geometry has, NaN or infinite weights, or a row whose scale is
    /// infinite in binary16 (the first such, in row order). Nothing of `weights` is taken then.
    pub fn push_rows(&mut self, weights: &[f32]) -> Result<(), EncodeError> {
        let g = self.geometry;
        let first = self.scales.len();
        if !weights.len().is_multiple_of(g.cols()) || weights.len() / g.cols() > g.rows() - first {
            return Err(EncodeError::Weights {
                tensor: self.options.tensor.into(),
                found: first as u128 * g.cols() as u128 + weights.len() as u128,
                rows: g.rows(),
                cols: g.cols(),
            });
        }
        let rows = weights
            .chunks_exact(g.cols())
            .enumerate()
            .map(|(i, row)| RowScale::new(row, g.bits(), self.options.scale, self.options.tensor, first + i))
            .collect::<Result<Vec<_>, _>>()?;

        let progress = |weights| {
            if let Some(f) = self.options.progress.filter(|_| weights != 0) {
                f(weights);
            }
        };
        let blocks: Vec<Block<'_>> = weights
            .chunks_exact(g.block())
            .enumerate()
            .map(|(i, weights)| Block { weights, scale: rows[i / g.blocks_per_row()].scale })
            .filter(|block| block.scale != f16::ZERO)
            .collect();
        progress(weights.len() - blocks.len() * g.block());
        let coded = self.coder.code(&blocks, &progress);

        // Errors are summed block by block in order: a batch's size depends on the level, so its sum would
        // too.
        let mut coded = coded.iter().flat_map(|batch| batch.blocks(&g));
        for (i, row) in rows.iter().enumerate() {
            self.report.energy += row.energy;
            self.scales.push(row.scale);
            if row.scale == f16::ZERO {
                self.report.squared_error += row.energy;
                self.report.zero_rows += usize::from(row.energy == 0.0);
                self.report.underflowed_rows += usize::from(row.energy != 0.0);
                continue;
            }
            for (block, (codes, error)) in coded.by_ref().take(g.blocks_per_row()).enumerate() {
                self.report.squared_error += error;
                let at = g.block_offset(first + i, block);
                self.codes[at..at + codes.len()].copy_from_slice(codes);
            }
        }
        Ok(())
    }

    /// The encoded matrix.
    ///
    /// # Errors
    /// Rows that were never pushed.
    pub fn finish(self) -> Result<Encoded, EncodeError> {
        let g = self.geometry;
        if self.scales.len() != g.rows() {
            return Err(EncodeError::Weights {
                tensor: self.options.tensor.into(),
                found: self.scales.len() as u128 * g.cols() as u128,
                rows: g.rows(),
                cols: g.cols(),
            });
        }
        Ok(Encoded {
            geometry: g,
            rotation: None,
            codes: self.codes,
            scales: self.scales,
            report: self.report,
        })
    }
}

/// Rows `rows` of the stored matrix, `[rows.len(), cols]` row-major in binary32, of the layer's weight
/// `W [out, in]` (row-major; `f32`, `f16`, `bf16` or anything else that widens to `f32`): rows of `W` for
/// [`Axis::Input`], its columns for [`Axis::Output`].
///
/// # Errors
/// A weight of the wrong length.
///
/// # Panics
/// If `rows` does not lie in the stored matrix.
pub fn stored_rows<T: Copy + Into<f32>>(
    geometry: &Geometry,
    weight: &[T],
    rows: Range<usize>,
) -> Result<Vec<f32>, PackError> {
    // A tile of both matrices fits the first-level cache, and each of its lines is used whole.
    const TILE: usize = 32;
    let cols = geometry.cols();
    let expected = geometry.rows() * cols;
    if weight.len() != expected {
        return Err(PackError::Length { what: "weight", found: weight.len(), expected });
    }
    assert!(rows.start <= rows.end && rows.end <= geometry.rows(), "rows {rows:?} of {geometry}");
    if geometry.axis() == Axis::Input {
        return Ok(weight[rows.start * cols..rows.end * cols].iter().map(|&w| w.into()).collect());
    }
    let mut out = vec![0.0; rows.len() * cols];
    for (tile, out) in out.chunks_mut(TILE * cols).enumerate() {
        let first = rows.start + tile * TILE;
        for start in (0..cols).step_by(TILE) {
            for (i, out) in out.chunks_exact_mut(cols).enumerate() {
                for (col, out) in out[start..cols.min(start + TILE)].iter_mut().enumerate() {
                    *out = weight[(start + col) * geometry.rows() + first + i].into();
                }
            }
        }
    }
    Ok(out)
}
