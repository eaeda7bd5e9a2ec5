//! Error feedback: weights coded one after the other, each corrected for what the earlier ones lost.
//!
//! What counts is not the error of the weights, `E = W - decoded`, but that of the layer's outputs over the inputs it
//! sees: `tr(E H Eᵀ)` with `H` the mean of `x xᵀ`. With `H = M D Mᵀ`, `M` unit lower triangular, this is the sum of
//! `D[i]` times the squares of column `i` of `E M`; so if input features are coded from the last to the first, and
//!
//! ```text
//! target[i] = W[i] + sum over j > i of M[j][i] * E[j]
//! ```
//!
//! is coded in the place of feature `i`, column `i` of `E M` is just what coding the target lost. This is LDLQ (QuIP,
//! arXiv 2307.13304, section 3.1), which rounds as GPTQ does (arXiv 2210.17323), here with the trellis search as
//! the rounding, as in QTIP (arXiv 2406.11235, section 4).
//!
//! - Axis 0: a stored row is one input feature, and its scale is chosen for its target. Features go in the order of
//!   falling second moment, which a file does not show.
//! - Axis 1: a block holds `T` neighbouring input features of one output, so `M` is triangular in blocks of `T` (QuIP#,
//!   arXiv 2402.04396, section 4.1), scales are those of plain coding, and the last block goes first.
//!
//! The search's bytes are the same on every machine; those of the matrix products here depend on the instructions a
//! machine has, so with feedback the same bytes are promised for any number of threads of one machine only.

use half::f16;
use ndarray::{Array2, ArrayView2, s};

use super::coder::{Block, Coder};
use super::hessian::{Hessian, add_product};
use super::scale::RowScale;
use super::{EncodeOptions, EncodeReport, Encoded, encode};
use crate::error::{EncodeError, HessianError};
use crate::format::{Axis, Geometry};
use crate::{codebook, pack};

/// Part of the mean of `H`'s diagonal that is added to it unless asked otherwise (GPTQ, arXiv 2210.17323, section 3.3).
pub const DEFAULT_DAMPING: f64 = 0.01;

/// Input features of axis 0 whose feedback to the features beyond them is added up in one product, so that it is not
/// bound by memory (GPTQ's lazy batches, arXiv 2210.17323, section 3.3).
const LAZY: usize = 64;

/// Squared error, against plain coding's, that feedback may add; beyond, it is taken to have blown up.
const MAX_ERROR_RATIO: f64 = 16.0;

/// What error feedback did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeedbackReport {
    /// `tr(E H Eᵀ) / tr(W H Wᵀ)` of what was kept; 0 for a weight or inputs of zeros.
    pub proxy_loss: f64,
    /// The same of plain coding.
    pub plain_proxy_loss: f64,
    /// Why plain coding was kept, if it was.
    pub fallback: Option<Fallback>,
}

/// Why a weight was coded without feedback although it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// `H` is zero: no input was ever seen.
    NoInputs,
    /// The damped `H` is not positive definite.
    NotPositiveDefinite,
    /// The targets outgrew what can be coded, or the weights' error grew out of proportion.
    BlowUp,
    /// Plain coding has no greater proxy loss.
    NoGain,
}

impl std::fmt::Display for Fallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoInputs => "the Hessian is zero",
            Self::NotPositiveDefinite => "the Hessian is not positive definite",
            Self::BlowUp => "the error blew up",
            Self::NoGain => "plain coding loses no more",
        })
    }
}

/// [`encode`] with error feedback for inputs of the given second moments, those of the rotated input for a rotated
/// weight. `damping` times the mean of their diagonal is added to it ([`DEFAULT_DAMPING`] is usual).
///
/// Plain coding is worked out too and kept where feedback does not help; the report's
/// [`feedback`](EncodeReport::feedback) says so. Takes several copies of the weight in memory and, for `n` input
/// features, about `32 * n^2` bytes. May be called from several threads, rayon's among them.
///
/// # Errors
/// As [`encode`], and moments of another number of input features.
pub fn encode_with_feedback(
    geometry: &Geometry,
    weights: &[f32],
    hessian: &Hessian,
    damping: f64,
    options: &EncodeOptions<'_>,
) -> Result<Encoded, EncodeError> {
    let n = geometry.in_features();
    if hessian.in_features() != n {
        let reason = HessianError::Features { found: hessian.in_features(), in_features: n };
        return Err(EncodeError::Hessian { tensor: options.tensor.into(), reason });
    }
    let quiet = EncodeOptions { progress: None, ..*options };
    let mut plain = encode(geometry, weights, &quiet)?;
    let energy = hessian.loss(by_input(geometry, weights));
    let loss = |encoded: &Encoded| {
        let errors = errors(geometry, weights, &encoded.codes, &encoded.scales);
        let loss = hessian.loss(by_input(geometry, &errors));
        if energy > 0.0 { loss / energy } else { 0.0 }
    };
    let plain_proxy_loss = loss(&plain);
    let mut done = 0;
    let coder = Coder::new(geometry, options.level)?;
    let coder = match geometry.axis() {
        Axis::Output => coder.for_few(geometry.blocks_per_row()),
        Axis::Input => coder,
    };
    let fallback = match feed(coder, geometry, weights, hessian, damping, options, &mut done) {
        Err(fallback) => fallback,
        Ok(mut fed) => {
            let errors = errors(geometry, weights, &fed.codes, &fed.scales);
            fed.report.squared_error = errors.iter().map(|&e| f64::from(e) * f64::from(e)).sum();
            fed.report.energy = plain.report.energy;
            let proxy_loss = loss(&fed);
            fed.report.feedback = Some(FeedbackReport { proxy_loss, plain_proxy_loss, fallback: None });
            if fed.report.squared_error > MAX_ERROR_RATIO * plain.report.squared_error {
                Fallback::BlowUp
            } else if proxy_loss >= plain_proxy_loss {
                Fallback::NoGain
            } else {
                return Ok(fed);
            }
        }
    };
    if let Some(progress) = options.progress.filter(|_| done < weights.len()) {
        progress(weights.len() - done);
    }
    let proxy_loss = plain_proxy_loss;
    plain.report.feedback = Some(FeedbackReport { proxy_loss, plain_proxy_loss, fallback: Some(fallback) });
    Ok(plain)
}

/// Codes with feedback; `done` counts the weights that `options.progress` was told of.
fn feed(
    coder: Coder,
    geometry: &Geometry,
    weights: &[f32],
    hessian: &Hessian,
    damping: f64,
    options: &EncodeOptions<'_>,
    done: &mut usize,
) -> Result<Encoded, Fallback> {
    if hessian.is_zero() {
        return Err(Fallback::NoInputs);
    }
    let mut feed = Feed {
        geometry,
        options,
        coder,
        codes: vec![0; geometry.words()],
        scales: vec![f16::ZERO; geometry.rows()],
        report: EncodeReport::default(),
        done,
    };
    let factor = |order: &[usize], block| {
        hessian.unit_factor(order, block, damping).ok_or(Fallback::NotPositiveDefinite)
    };
    match geometry.axis() {
        Axis::Output => {
            let order = hessian.order();
            feed.rows(weights, &order, &factor(&order, 1)?)?;
        }
        Axis::Input => {
            let order: Vec<usize> = (0..geometry.cols()).collect();
            feed.blocks(weights, &factor(&order, geometry.block())?)?;
        }
    }
    let Feed { codes, scales, report, .. } = feed;
    Ok(Encoded { geometry: *geometry, rotation: None, codes, scales, report })
}

struct Feed<'a> {
    geometry: &'a Geometry,
    options: &'a EncodeOptions<'a>,
    coder: Coder,
    codes: Vec<u32>,
    scales: Vec<f16>,
    report: EncodeReport,
    done: &'a mut usize,
}

impl Feed<'_> {
    /// Axis 0: row after row.
    fn rows(&mut self, weights: &[f32], order: &[usize], m: &Array2<f32>) -> Result<(), Fallback> {
        let (n, out) = (self.geometry.rows(), self.geometry.cols());
        // By place in the order: feedback while a feature is to come, its error once it is coded.
        let mut feedback = Array2::<f32>::zeros((n, out));
        let mut scratch = self.coder.scratch();
        let mut target = vec![0.0; out];
        for end in (1..=n).rev().step_by(LAZY) {
            let start = end.saturating_sub(LAZY);
            let (mut rest, mut batch) = feedback.view_mut().split_at(ndarray::Axis(0), start);
            for place in (start..end).rev() {
                let row = order[place];
                let weights = &weights[row * out..][..out];
                let (mut before, mut here) = batch.view_mut().split_at(ndarray::Axis(0), place - start);
                let error = here.row_mut(0).into_slice().expect("row-major");
                target.iter_mut().zip(weights).zip(&*error).for_each(|((t, w), f)| *t = w + f);
                error.copy_from_slice(weights);
                let scale = self.row_scale(&target, row)?;
                if scale != f16::ZERO {
                    let block = |weights| Block { weights, scale };
                    let blocks: Vec<Block<'_>> =
                        target.chunks_exact(self.geometry.block()).map(block).collect();
                    let mut at = 0;
                    for batch in self.coder.code_with(&mut scratch, &blocks) {
                        for (codes, _) in batch.blocks(self.geometry) {
                            self.take(row, at, codes, &mut error[at * self.geometry.block()..]);
                            at += 1;
                        }
                    }
                }
                self.advance(out);
                for (mut feedback, &m) in before.rows_mut().into_iter().zip(m.slice(s![place, start..])) {
                    for (f, e) in feedback.iter_mut().zip(&*error) {
                        *f += m * e;
                    }
                }
            }
            let errors = batch.slice(s![..end - start, ..]);
            add_product(m.slice(s![start..end, ..start]).t(), errors, rest.view_mut());
        }
        Ok(())
    }

    /// Axis 1: block after block of every row.
    fn blocks(&mut self, weights: &[f32], m: &Array2<f32>) -> Result<(), Fallback> {
        let g = self.geometry;
        let (rows, cols, block) = (g.rows(), g.cols(), g.block());
        for row in 0..rows {
            self.row_scale(&weights[row * cols..][..cols], row)?;
        }
        let mut errors = Array2::from_shape_vec((rows, cols), weights.to_vec()).expect("rows of cols");
        for at in (0..g.blocks_per_row()).rev() {
            let (start, end) = (at * block, (at + 1) * block);
            let (left, later) = errors.view_mut().split_at(ndarray::Axis(1), end);
            let mut target = left.slice(s![.., start..]).to_owned();
            add_product(later.view(), m.slice(s![end.., start..end]), target.view_mut());
            if target.iter().any(|t| !t.is_finite()) {
                return Err(Fallback::BlowUp);
            }
            let targets = target.as_slice().expect("row-major").chunks_exact(block);
            let (coded, blocks): (Vec<usize>, Vec<Block<'_>>) = targets
                .zip(&self.scales)
                .map(|(weights, &scale)| Block { weights, scale })
                .enumerate()
                .filter(|(_, block)| block.scale != f16::ZERO)
                .unzip();
            let batches = self.coder.code(&blocks, &|_| {});
            for (row, (codes, _)) in coded.into_iter().zip(batches.iter().flat_map(|b| b.blocks(g))) {
                let mut error = errors.row_mut(row);
                self.take(row, at, codes, &mut error.as_slice_mut().expect("row-major")[start..]);
            }
            self.advance(rows * block);
        }
        Ok(())
    }

    fn row_scale(&mut self, weights: &[f32], row: usize) -> Result<f16, Fallback> {
        let scale = RowScale::new(weights, self.geometry.bits(), self.options.scale, "", row);
        let RowScale { scale, energy } = scale.map_err(|_| Fallback::BlowUp)?;
        self.report.zero_rows += usize::from(energy == 0.0);
        self.report.underflowed_rows += usize::from(scale == f16::ZERO && energy != 0.0);
        self.scales[row] = scale;
        Ok(scale)
    }

    /// Keeps a block's codes and subtracts what they decode to from `error`, which starts with the block's weights.
    fn take(&mut self, row: usize, block: usize, codes: &[u32], error: &mut [f32]) {
        let at = self.geometry.block_offset(row, block);
        self.codes[at..at + codes.len()].copy_from_slice(codes);
        subtract(self.geometry, codes, self.scales[row], error);
    }

    fn advance(&mut self, weights: usize) {
        *self.done += weights;
        if let Some(progress) = self.options.progress {
            progress(weights);
        }
    }
}

/// Subtracts a block's decoded weights (contract E in binary32).
fn subtract(geometry: &Geometry, codes: &[u32], scale: f16, from: &mut [f32]) {
    for (t, from) in from[..geometry.block()].iter_mut().enumerate() {
        let state = pack::window(codes, geometry.window_offset(t), geometry.state_bits());
        *from -= codebook::exact(codebook::y(state)) * scale.to_f32();
    }
}

/// `E`, laid out as the stored matrix.
fn errors(geometry: &Geometry, weights: &[f32], codes: &[u32], scales: &[f16]) -> Vec<f32> {
    let mut errors = weights.to_vec();
    for (i, error) in errors.chunks_exact_mut(geometry.block()).enumerate() {
        let (row, block) = (i / geometry.blocks_per_row(), i % geometry.blocks_per_row());
        let codes = &codes[geometry.block_offset(row, block)..][..geometry.words_per_block()];
        subtract(geometry, codes, scales[row], error);
    }
    errors
}

/// A stored matrix as `[in, out]`.
fn by_input<'a>(geometry: &Geometry, stored: &'a [f32]) -> ArrayView2<'a, f32> {
    let stored =
        ArrayView2::from_shape((geometry.rows(), geometry.cols()), stored).expect("a checked length");
    match geometry.axis() {
        Axis::Output => stored,
        Axis::Input => stored.reversed_axes(),
    }
}
