//! The encoder: weights to codes and scales.
//!
//! Each stored row gets one binary16 scale, `rms(row) / LUT_RMS`, and each block of `row / scale` the trellis
//! path that the search in `viterbi.rs` finds (QTIP, arXiv 2406.11235, sections 3 and 4). [`LUT_RMS`] is the
//! code's rms at `L` = 12 and is used for every `L`, as the format says. A block's codes depend on its own
//! weights and its row's scale alone, and floating point is used one rounded operation at a time in a fixed
//! order, so the same weights give the same bytes at every level, with any number of threads, and however the
//! rows are handed over.

mod viterbi;

use std::ops::Range;

use half::f16;
use pulp::Simd;
use rayon::prelude::*;

use crate::codebook;
use crate::error::{EncodeError, PackError};
use crate::format::{Axis, Geometry, LUT_RMS};
use crate::pack;
use viterbi::{Scratch, Search, Trellis};

/// The instructions the search uses. All give the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum EncodeLevel {
    /// The fastest that this machine has.
    #[default]
    Best,
    /// Four blocks at a time in plain Rust. Works everywhere.
    Scalar,
    /// Eight blocks at a time (x86-64 with AVX2 and FMA).
    Avx2,
    /// Sixteen blocks at a time (x86-64 with AVX-512 F, BW, CD, DQ and VL).
    Avx512,
    /// Four blocks at a time (AArch64).
    Neon,
}

impl EncodeLevel {
    /// The levels that this machine has, slowest first, without [`EncodeLevel::Best`].
    pub fn available() -> Vec<Self> {
        [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|&level| Runner::new(level).is_some())
            .collect()
    }
}

/// How to encode. `EncodeOptions { tensor: "...", ..Default::default() }`.
#[derive(Clone, Copy, Default)]
pub struct EncodeOptions<'a> {
    /// The tensor's name, for error messages.
    pub tensor: &'a str,
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
    runner: Runner,
    trellis: Trellis,
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
        let runner =
            Runner::new(options.level).ok_or(EncodeError::LevelUnavailable { level: options.level })?;
        Ok(Self {
            geometry: *geometry,
            options: *options,
            runner,
            trellis: Trellis::new(geometry),
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
        let (g, trellis) = (self.geometry, &self.trellis);
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
            .map(|(i, row)| RowScale::new(row, self.options.tensor, first + i))
            .collect::<Result<Vec<_>, _>>()?;

        let progress = |weights| {
            if let Some(f) = self.options.progress.filter(|_| weights != 0) {
                f(weights);
            }
        };
        let blocks: Vec<usize> = (0..weights.len() / g.block())
            .filter(|block| rows[block / g.blocks_per_row()].scale != f16::ZERO)
            .collect();
        progress(weights.len() - blocks.len() * g.block());
        let job = Job { geometry: &g, trellis, weights, rows: &rows, blocks: &blocks, progress: &progress };
        let coded = match self.runner {
            Runner::Scalar => job.run(pulp::Scalar128b),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx2(simd) => job.run(simd),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx512(simd) => job.run(simd),
            #[cfg(target_arch = "aarch64")]
            Runner::Neon(simd) => job.run(simd),
        };

        // Errors are summed block by block in order: a batch's size depends on the level, so its sum would
        // too.
        let mut coded = coded
            .iter()
            .flat_map(|batch| batch.squared_errors.iter().zip(batch.codes.chunks_exact(g.words_per_block())));
        for (i, row) in rows.iter().enumerate() {
            self.report.energy += row.energy;
            self.scales.push(row.scale);
            if row.scale == f16::ZERO {
                self.report.squared_error += row.energy;
                self.report.zero_rows += usize::from(row.energy == 0.0);
                self.report.underflowed_rows += usize::from(row.energy != 0.0);
                continue;
            }
            for (block, (error, codes)) in coded.by_ref().take(g.blocks_per_row()).enumerate() {
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
        Ok(Encoded { geometry: g, codes: self.codes, scales: self.scales, report: self.report })
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

/// A level that was found on this machine.
#[derive(Clone, Copy)]
enum Runner {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
}

impl Runner {
    fn new(level: EncodeLevel) -> Option<Self> {
        match level {
            EncodeLevel::Best => [EncodeLevel::Avx512, EncodeLevel::Avx2, EncodeLevel::Neon]
                .into_iter()
                .find_map(Self::new)
                .or(Some(Self::Scalar)),
            EncodeLevel::Scalar => Some(Self::Scalar),
            #[cfg(target_arch = "x86_64")]
            EncodeLevel::Avx2 => pulp::x86::V3::try_new().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            EncodeLevel::Avx512 => pulp::x86::V4::try_new().map(Self::Avx512),
            #[cfg(target_arch = "aarch64")]
            EncodeLevel::Neon => pulp::aarch64::Neon::try_new().map(Self::Neon),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
}

/// A row's scale, and the sum of its squares.
struct RowScale {
    scale: f16,
    energy: f64,
}

impl RowScale {
    fn new(weights: &[f32], tensor: &str, row: usize) -> Result<Self, EncodeError> {
        if let Some(col) = weights.iter().position(|w| !w.is_finite()) {
            return Err(EncodeError::NotFinite { tensor: tensor.into(), row, col, value: weights[col] });
        }
        let energy: f64 = weights.iter().map(|&w| f64::from(w) * f64::from(w)).sum();
        let rms = (energy / weights.len() as f64).sqrt();
        let scale = half_from_f64(rms / LUT_RMS);
        if scale.is_infinite() {
            return Err(EncodeError::ScaleOverflow { tensor: tensor.into(), row, rms });
        }
        Ok(Self { scale, energy })
    }
}

/// A non-negative number rounded once to binary16, to nearest even. (`f16::from_f64` rounds to binary32 on
/// the way, or not, depending on the machine.) The step through binary32 rounds to odd, which keeps the
/// second rounding exact.
fn half_from_f64(value: f64) -> f16 {
    let nearest = value as f32;
    let below = if f64::from(nearest) > value { nearest.next_down() } else { nearest };
    let exact = f64::from(below) == value;
    f16::from_f32(f32::from_bits(below.to_bits() | u32::from(!exact)))
}

/// The blocks of one [`Encoder::push_rows`].
struct Job<'a> {
    geometry: &'a Geometry,
    trellis: &'a Trellis,
    weights: &'a [f32],
    rows: &'a [RowScale],
    /// Which blocks of `weights` to encode.
    blocks: &'a [usize],
    progress: &'a (dyn Fn(usize) + Sync),
}

/// As many blocks as a register has lanes.
struct Batch {
    codes: Vec<u32>,
    squared_errors: Vec<f64>,
}

impl Job<'_> {
    fn run<S: Simd>(&self, simd: S) -> Vec<Batch> {
        self.blocks
            .par_chunks(S::F32_LANES)
            .map_init(
                || Scratch::new(self.trellis, S::F32_LANES),
                |scratch, blocks| {
                    let batch = self.batch(simd, scratch, blocks);
                    (self.progress)(blocks.len() * self.geometry.block());
                    batch
                },
            )
            .collect()
    }

    fn batch<S: Simd>(&self, simd: S, scratch: &mut Scratch, blocks: &[usize]) -> Batch {
        let g = self.geometry;
        let block_weights = |block: usize| {
            (
                &self.weights[block * g.block()..][..g.block()],
                self.rows[block / g.blocks_per_row()].scale.to_f32(),
            )
        };
        // The last batch may leave lanes over; what is in them is searched and thrown away.
        for (lane, &block) in blocks.iter().enumerate() {
            let (weights, scale) = block_weights(block);
            for (x, &w) in scratch.x.get()[lane..].iter_mut().step_by(S::F32_LANES).zip(weights) {
                *x = w / scale;
            }
        }
        simd.vectorize(Search { trellis: self.trellis, scratch });

        let mut codes = vec![0; blocks.len() * g.words_per_block()];
        let paths = scratch.states.chunks_exact(g.block());
        let squared_errors = paths
            .zip(codes.chunks_exact_mut(g.words_per_block()))
            .zip(blocks)
            .map(|((states, ring), &block)| {
                pack::pack_block(g, states, ring).expect("the path starts and ends in the same overlap");
                let (weights, scale) = block_weights(block);
                let error = |(&w, &s): (&f32, &u32)| {
                    let error = f64::from(w) - f64::from(codebook::exact(codebook::y(s)) * scale);
                    error * error
                };
                weights.iter().zip(states).map(error).sum()
            })
            .collect();
        Batch { codes, squared_errors }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_is_rounded_once() {
        let ulp = 2f64.powi(-10);
        // A hair off a tie, below what binary32 can tell from it.
        let hair = 2f64.powi(-40);
        for (value, expected) in [
            (0.0, 0x0000),
            (1.0, 0x3C00),
            (1.0 + ulp / 2.0 - hair, 0x3C00),
            (1.0 + ulp / 2.0, 0x3C00),
            (1.0 + ulp / 2.0 + hair, 0x3C01),
            (1.0 + ulp * 1.5 - hair, 0x3C01),
            (1.0 + ulp * 1.5, 0x3C02),
            (2f64.powi(-24), 0x0001),
            (2f64.powi(-25), 0x0000),
            (2f64.powi(-25) * (1.0 + hair), 0x0001),
            (1e-300, 0x0000),
            (65504.0, 0x7BFF),
            (65520.0 * (1.0 - hair), 0x7BFF),
            (65520.0, 0x7C00),
            (1e300, 0x7C00),
        ] {
            assert_eq!(half_from_f64(value).to_bits(), expected, "{value:e}");
        }
    }
}
