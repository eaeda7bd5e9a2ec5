//! Split-K prefill: axis 0, M = 5..=8, bfloat16, contract E without a dense weight buffer.
//!
//! A threadgroup of four SIMD groups owns 32 columns and one split of the input features. It decodes 16 rows of its
//! columns at a time into a tile of bfloat16 weights in threadgroup memory, four neighbours a thread from one 64-bit
//! window, and each SIMD group multiplies its 8 columns in 8 x 8 float32 matrices, inputs ascending. [`PARTIAL`]
//! writes `[splits, M, N]`; [`REDUCTION`] adds in ascending split order from zero and rounds once.
//!
//! Splits and order are those of MLX's own dense split-K matmul, so that the result is that of expansion followed by
//! it. Within one 8 x 8 x 8 product the order of the eight terms is the hardware's; the tests' is ascending. Which
//! elements of a matrix a lane holds is not in Metal's specification: it is the layout that MLX's matmul relies on.
//!
//! Cost: a word and its next for four weights, once a split; each SIMD group reads x into registers by itself.
//!
//! Inputs: `x [M, K]` bfloat16, `codes` uint32 in either layout, `scales [K]` float16; then `partial
//! [splits, M, N]` float32 and, of the reduction, `out [M, N]` bfloat16. Grid `[N/32 * 128, 1, splits]` with full
//! threadgroups of 128; reduction `[M*N, 1, 1]` with 256.

use trellis_codec::Axis;
use trellis_codec::format::{DEFAULT_BLOCK, MAX_PACKED_ROWS};
use trellis_codec::reference::Dtype;

use crate::{Kernel, Launch, Problem, Reason, Type, Unsupported, Variant};

#[cfg(test)]
mod tests;

const TILE_ROWS: usize = 8;
const TILE_COLS: usize = 32;
const TILE_INPUTS: usize = 16;
const THREADS: usize = 128;
const MAX_TILES: usize = 1024;
const MIN_INPUTS: usize = 128;

/// The product's partial sums, `x`, `codes`, `scales` to `partial`.
pub static PARTIAL: Kernel = Kernel { name: "trellis_splitk_partial", check, build: build_partial };
/// The sum of the splits, `partial` to `out`.
pub static REDUCTION: Kernel = Kernel { name: "trellis_splitk_reduction", check, build: build_reduction };

/// How the input features are split: the number of splits, and the features of each but the last, which runs to the
/// end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Splits {
    count: usize,
    partition: usize,
}

impl Splits {
    /// MLX's rule for `[m, inputs] x [inputs, outputs]`.
    fn new(m: usize, outputs: usize, inputs: usize) -> Self {
        let tiles = m.div_ceil(32) * outputs.div_ceil(32);
        let steps = inputs / TILE_INPUTS;
        let count = (steps / tiles).clamp(1, 32).next_power_of_two().max(2);
        Splits { count, partition: steps / count * TILE_INPUTS }
    }
}

/// Whether the problem can be computed so.
///
/// # Errors
/// The first of the rules that it breaks: bfloat16, M in 5..=8, axis 0, T = 256, L = 12, k in 2..=4, columns a
/// multiple of 256, K >= 128, K >= N, at most 1024 output tiles of 16 x 16, variant 12 or 13.
pub fn supports(problem: &Problem) -> Result<(), Unsupported> {
    PARTIAL.supports(problem)
}

/// Both launches, [`PARTIAL`]'s and then [`REDUCTION`]'s.
///
/// # Errors
/// As [`supports`].
pub fn launch(problem: &Problem) -> Result<[Launch; 2], Unsupported> {
    Ok([PARTIAL.launch(problem)?, REDUCTION.launch(problem)?])
}

fn check(problem: &Problem) -> Result<(), Reason> {
    let g = &problem.geometry;
    problem.check_axis(Axis::Output)?;
    problem.check_m(MAX_PACKED_ROWS + 1, TILE_ROWS)?;
    problem.check_dtype(Dtype::Bf16)?;
    problem.check_variant(Variant::SPLIT_K)?;
    problem.check_block(DEFAULT_BLOCK)?;
    problem.check_default_states()?;
    problem.check_size()?;
    if !(2..=4).contains(&g.bits()) {
        return Err(Reason::Bits { found: g.bits(), least: 2, most: 4 });
    }
    let (inputs, outputs) = (g.rows(), g.cols());
    if !outputs.is_multiple_of(DEFAULT_BLOCK) {
        return Err(Reason::Columns { found: outputs, multiple: DEFAULT_BLOCK });
    }
    let least = outputs.max(MIN_INPUTS);
    if inputs < least {
        return Err(Reason::TooFewInputs { found: inputs, least });
    }
    let tiles = problem.m.div_ceil(16) * outputs.div_ceil(16);
    if tiles > MAX_TILES {
        return Err(Reason::TooManyTiles { found: tiles, most: MAX_TILES });
    }
    Ok(())
}

fn splits(problem: &Problem) -> Splits {
    Splits::new(problem.m, problem.geometry.cols(), problem.geometry.rows())
}

fn build_partial(problem: &Problem) -> Launch {
    let g = &problem.geometry;
    let (m, inputs, outputs) = (problem.m, g.rows(), g.cols());
    let Splits { count, partition } = splits(problem);
    Launch::new(PARTIAL.name, include_str!("partial.metal"))
        .input("x", problem.dtype, &[m, inputs])
        .input("codes", Type::Uint32, &g.codes_shape())
        .input("scales", Type::Float16, &[inputs])
        .output("partial", Type::Float32, &[count, m, outputs])
        .template_type(problem.dtype)
        .integers([
            ("M", m),
            ("N", outputs),
            ("KC", inputs),
            ("C", outputs),
            ("BITS", g.bits() as usize),
            ("L", g.state_bits() as usize),
            ("BT", g.block()),
            ("BM", TILE_ROWS),
            ("BN", TILE_COLS),
            ("BK", TILE_INPUTS),
            ("SPLITS", count),
            ("PARTITION", partition),
            ("INTERLEAVE", problem.interleave()),
        ])
        .over([outputs.div_ceil(TILE_COLS) * THREADS, 1, count], [THREADS, 1, 1])
}

fn build_reduction(problem: &Problem) -> Launch {
    let (m, outputs) = (problem.m, problem.geometry.cols());
    let count = splits(problem).count;
    Launch::new(REDUCTION.name, include_str!("reduction.metal"))
        .input("partial", Type::Float32, &[count, m, outputs])
        .output("out", problem.dtype, &[m, outputs])
        .template_type(problem.dtype)
        .integers([("SIZE", m * outputs), ("SPLITS", count)])
        .over([m * outputs, 1, 1], [256, 1, 1])
}
