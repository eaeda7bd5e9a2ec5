//! Expand: the stored matrix `[rows, cols]` in a dtype, contract E; any axis, any M. The variant's arithmetic does
//! not count: the refined form equals the exact quotient for every y.
//!
//! | kernel | a thread's work | reads a weight | taken when |
//! |---|---|---|---|
//! | [`PLAIN`] | one weight | 2 words, scale | always |
//! | [`VECTORISED`] | four neighbours from one 64-bit window, one store | half a word, a quarter of a scale | bfloat16, T=256, L=12, variant 13 |
//!
//! Rejected: an order of threads by tiles of rows for interleaved codes. It reads the same words as often; only
//! locality could change, and a threadgroup of the vectorised kernel already covers a whole pair of blocks.
//!
//! Inputs: `codes` uint32 in either layout, `scales [rows]` float16. Output: `out [rows, cols]`. Grid
//! `[cols, rows, 1]` with threadgroups of `min(256, cols)`, or `[cols/4, rows, 1]` with 128: neither needs a full
//! threadgroup.

use trellis_codec::format::DEFAULT_BLOCK;
use trellis_codec::reference::Dtype;

use crate::{Kernel, Launch, Problem, Reason, Type, Unsupported, Variant};

pub mod cuda;
#[cfg(test)]
mod tests;

const NEIGHBOURS: usize = 4;

/// One thread a weight.
pub static PLAIN: Kernel =
    Kernel { name: "trellis_expand_plain", check: |p| p.check_size(), build: |p| build(p, false) };
/// One thread four neighbours.
pub static VECTORISED: Kernel =
    Kernel { name: "trellis_expand_vectorised", check: check_vectorised, build: |p| build(p, true) };

/// The faster kernel that takes the problem.
///
/// # Errors
/// A matrix with a dimension beyond MLX's 32-bit shapes.
pub fn pick(problem: &Problem) -> Result<&'static Kernel, Unsupported> {
    let kernel = if VECTORISED.supports(problem).is_ok() { &VECTORISED } else { &PLAIN };
    kernel.supports(problem).map(|()| kernel)
}

/// Whether the matrix can be expanded.
///
/// # Errors
/// As [`pick`].
pub fn supports(problem: &Problem) -> Result<(), Unsupported> {
    pick(problem).map(|_| ())
}

/// The launch of the faster kernel that takes the problem.
///
/// # Errors
/// As [`pick`].
pub fn launch(problem: &Problem) -> Result<Launch, Unsupported> {
    pick(problem)?.launch(problem)
}

fn check_vectorised(problem: &Problem) -> Result<(), Reason> {
    problem.check_size()?;
    problem.check_variant(Variant::DEFAULT)?;
    problem.check_dtype(Dtype::Bf16)?;
    problem.check_block(DEFAULT_BLOCK)?;
    problem.check_default_states()
}

fn build(problem: &Problem, vectorised: bool) -> Launch {
    let g = &problem.geometry;
    let (rows, cols) = (g.rows(), g.cols());
    let launch = if vectorised {
        Launch::new(VECTORISED.name, include_str!("vectorised.metal"))
            .over([cols / NEIGHBOURS, rows, 1], [128, 1, 1])
    } else {
        Launch::new(PLAIN.name, include_str!("plain.metal")).over([cols, rows, 1], [cols.min(256), 1, 1])
    };
    launch
        .input("codes", Type::Uint32, &g.codes_shape())
        .input("scales", Type::Float16, &[rows])
        .output("out", problem.dtype, &[rows, cols])
        .template_type(problem.dtype)
        .integers([
            ("R", rows),
            ("C", cols),
            ("BT", g.block()),
            ("K", g.bits() as usize),
            ("L", g.state_bits() as usize),
            ("INTERLEAVE", problem.interleave()),
        ])
}
