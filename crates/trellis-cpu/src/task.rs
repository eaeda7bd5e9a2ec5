//! What a level is asked to do: the parts that a call is cut into, and nothing about how a level does them.

use std::ops::Range;

use half::f16;
use trellis_codec::reference::{Contract, Dtype};

use crate::Matrix;
use crate::element::Slots;

/// How a weight follows from `y` and its row's scale (`codebook` in `trellis-codec` has the forms).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weights {
    /// Contract P: `fl(unrefined(y) * scale)`.
    Packed,
    /// Contract F: `y` itself. Whoever makes the task applies `scale/d`, to x or to the sums.
    Factored,
    /// Contract E: `exact(y) * scale` rounded to the type.
    Expanded(Dtype),
}

impl Weights {
    pub(crate) fn new(contract: Contract, dtype: Dtype) -> Self {
        match contract {
            Contract::Packed => Weights::Packed,
            Contract::Factored => Weights::Factored,
            Contract::Expanded => Weights::Expanded(dtype),
        }
    }
}

/// What all tasks of one call share.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) matrix: Matrix<'a>,
    /// The scales, widened.
    pub(crate) scales: &'a [f32],
    pub(crate) weights: Weights,
    /// Activations `[m, in]`; empty for a decode.
    pub(crate) x: &'a [f32],
    pub(crate) m: usize,
}

impl Job<'_> {
    /// The words of one block.
    pub(crate) fn ring(&self, row: usize, block: usize) -> &[u32] {
        let g = &self.matrix.geometry;
        &self.matrix.codes[g.block_offset(row, block)..][..g.words_per_block()]
    }
}

/// Axis 0: adds `x[m, rows] * stored[rows, blocks]` to `sums [m, blocks.len() * T]`.
pub(crate) struct OutputTask<'a> {
    pub(crate) job: Job<'a>,
    pub(crate) rows: Range<usize>,
    pub(crate) blocks: Range<usize>,
    pub(crate) sums: &'a mut [f32],
}

/// Axis 1: writes `stored[rows, :] * xᵀ` to `sums [rows.len(), m]`.
pub(crate) struct InputTask<'a> {
    pub(crate) job: Job<'a>,
    pub(crate) rows: Range<usize>,
    pub(crate) sums: &'a mut [f32],
}

/// Writes the weights of `rows`, contract P's as f32 or contract E's as its type, to `out [rows.len(), cols]`.
pub(crate) struct DecodeTask<'a> {
    pub(crate) job: Job<'a>,
    pub(crate) rows: Range<usize>,
    pub(crate) out: Slots<'a>,
}

/// Scales as binary32. A NaN becomes the plain one, since rounding to bfloat16 by integer addition could carry
/// another's payload into its sign.
pub(crate) fn widen_scales(scales: &[f16]) -> Vec<f32> {
    let widen = |scale: &f16| if scale.is_nan() { f32::NAN } else { scale.to_f32() };
    scales.iter().map(widen).collect()
}
