//! Scatter: axis 0, M = 1..=4, contract P. `partial[m, split, c]` is the sum over the split's rows `r` of
//! `weight[r, c] * x[m, r]`, in float32, rows ascending, one fma a row; summing over the splits and rounding to x's
//! type is left to MLX, where it stays lazy.
//!
//! A stored row of an axis-0 matrix holds one input's weights to all outputs, so a lane keeps the sums of the columns
//! whose windows it holds and walks down the rows: no reduction across lanes, and a generic lane reads
//! each code word once.
//!
//! | kernel | a lane's work | reads a row and lane | taken when |
//! |---|---|---|---|
//! | [`GENERIC`] | the windows that start in one word of a block, up to `NP = ceil(32/k)`; the ring's next word by shuffle | 1 word, x, scale | not balanced, one row |
//! | [`BALANCED`] | 8 consecutive symbols of a block, from a word and the next: all 32 lanes work where 24 would | 2 words, x, scale | k=3, T=256, L <= 12, variant 8.., one row |
//! | [`GENERIC_SHARED`] | as generic, each weight used for all M rows | 1 word, M x, scale | M = 2..=4, variant 10.. |
//! | [`BALANCED_SHARED`] | as balanced, for all M rows | 2 words, M x, scale | both |
//!
//! "One row" is M = 1, and M = 2..=4 below variant 10, which launches the kernel once a row. Exactly one kernel takes
//! a problem that any takes.
//!
//! Inputs: `x [M, R]` of x's type, `codes` uint32 in either layout, `scales [R]` float16, `lut [2^L]` float32 (the
//! exact values in state order, `codebook::table`). Output: `partial [M, 128, C]` float32, written whole; a split past
//! the last row is zeros. Grid `[threads, ceil(groups/SG_TG), samples * 128]`; a threadgroup is always full.

use trellis_codec::format::{DEFAULT_BLOCK, DEFAULT_STATE_BITS, MAX_PACKED_ROWS};
use trellis_codec::reference::Dtype;
use trellis_codec::{Axis, Layout};

use crate::{Gpu, Kernel, Launch, Problem, Reason, SIMD_LANES, Type, Unsupported, Variant};

pub mod cuda;
#[cfg(test)]
mod tests;

/// Splits of the rows, each `ceil(rows/128)` of them.
pub const SPLITS: usize = 128;

const GENERIC_SOURCE: &str = include_str!("generic.metal");
const BALANCED_SOURCE: &str = include_str!("balanced.metal");

/// The generic kernel, one row of activations at a time.
pub static GENERIC: Kernel = Kernel {
    name: "trellis_scatter_generic",
    check: |p| check(p, false, false),
    build: |p| build(p, GENERIC.name, Choices::of(p)),
};
/// The balanced 3-bit kernel, one row of activations at a time.
pub static BALANCED: Kernel = Kernel {
    name: "trellis_scatter_balanced",
    check: |p| check(p, true, false),
    build: |p| build(p, BALANCED.name, Choices::of(p)),
};
/// The generic kernel for 2 to 4 rows of activations at once.
pub static GENERIC_SHARED: Kernel = Kernel {
    name: "trellis_scatter_generic_shared",
    check: |p| check(p, false, true),
    build: |p| build(p, GENERIC_SHARED.name, Choices::of(p)),
};
/// The balanced 3-bit kernel for 2 to 4 rows of activations at once.
pub static BALANCED_SHARED: Kernel = Kernel {
    name: "trellis_scatter_balanced_shared",
    check: |p| check(p, true, true),
    build: |p| build(p, BALANCED_SHARED.name, Choices::of(p)),
};

/// The kernel of this family that takes the problem.
///
/// # Errors
/// The rule that keeps all four from taking it: axis, M, block width, table or size.
pub fn pick(problem: &Problem) -> Result<&'static Kernel, Unsupported> {
    let refuse = |reason| Unsupported { kernel: "trellis_scatter", problem: Box::new(*problem), reason };
    // The family's rules before those of the kernel that M leads to.
    problem.check_axis(Axis::Output).and_then(|()| problem.check_m(1, MAX_PACKED_ROWS)).map_err(refuse)?;
    let kernel = match (is_balanced(problem), shares(problem)) {
        (false, false) => &GENERIC,
        (true, false) => &BALANCED,
        (false, true) => &GENERIC_SHARED,
        (true, true) => &BALANCED_SHARED,
    };
    match kernel.supports(problem) {
        Ok(()) => Ok(kernel),
        Err(refusal) => Err(refuse(refusal.reason)),
    }
}

/// Whether some scatter kernel takes the problem.
///
/// # Errors
/// As [`pick`].
pub fn supports(problem: &Problem) -> Result<(), Unsupported> {
    pick(problem).map(|_| ())
}

/// The launch of the kernel that takes the problem; each kernel's own [`Kernel::launch`] takes nothing but its own.
///
/// # Errors
/// As [`pick`].
pub fn launch(problem: &Problem) -> Result<Launch, Unsupported> {
    pick(problem)?.launch(problem)
}

/// How exact values are represented: each changes speed, none a bit of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Choices {
    /// `BITS_Y`: y from the bits of 2^23 + y.
    pub bits_y: bool,
    /// `FLOAT_CODEBOOK`: 4096 unrefined values in threadgroup memory, in larger threadgroups.
    pub float_codebook: bool,
    /// `CODEBOOK`: 4096 y as int16 in threadgroup memory, in the balanced shared kernel.
    pub codebook: bool,
}

impl Choices {
    /// What is allowed for a problem, and so taken. `BITS_Y` and `FLOAT_CODEBOOK`: one row of the 17408 x 5120
    /// projection on `applegpu_g13s`, the shapes and the GPU that the TypeScript original takes them for. `CODEBOOK`:
    /// three or four rows of interleaved codes, where the layer asks for it.
    pub fn of(problem: &Problem) -> Self {
        let g = &problem.geometry;
        let default = problem.variant == Variant::DEFAULT
            && problem.dtype == Dtype::Bf16
            && g.block() == DEFAULT_BLOCK
            && g.state_bits() == DEFAULT_STATE_BITS;
        let listed = matches!((g.bits(), g.layout()), (3, Layout::Interleaved) | (2 | 4, Layout::RowMajor))
            && (g.rows(), g.cols()) == (17408, 5120)
            && problem.gpu == Gpu::AppleG13s;
        let one = default && problem.m == 1 && listed;
        let codebook = default
            && problem.shared_codebook
            && matches!(problem.m, 3 | 4)
            && (g.bits(), g.layout()) == (3, Layout::Interleaved);
        Choices { bits_y: one, float_codebook: one, codebook }
    }
}

fn is_balanced(problem: &Problem) -> bool {
    let g = &problem.geometry;
    g.bits() == 3
        && g.block() == DEFAULT_BLOCK
        && g.state_bits() <= DEFAULT_STATE_BITS
        && problem.variant >= Variant::BALANCED
}

fn shares(problem: &Problem) -> bool {
    problem.m > 1 && problem.variant >= Variant::SHARED_SCATTER
}

fn check(problem: &Problem, balanced: bool, shared: bool) -> Result<(), Reason> {
    let (g, variant) = (&problem.geometry, problem.variant);
    problem.check_axis(Axis::Output)?;
    problem.check_m(if shared { 2 } else { 1 }, MAX_PACKED_ROWS)?;
    problem.check_size()?;
    if g.words_per_block() > SIMD_LANES {
        return Err(Reason::BlockTooWide { words: g.words_per_block() });
    }
    if variant.has_table() && g.state_bits() > DEFAULT_STATE_BITS {
        return Err(Reason::Table { variant, found: g.state_bits() });
    }
    if shared {
        problem.check_variant(Variant::SHARED_SCATTER)?;
    } else if shares(problem) {
        return Err(Reason::Shares { variant, m: problem.m });
    }
    match (balanced, is_balanced(problem)) {
        (false, true) => Err(Reason::Balanced),
        (true, false) => Err(Reason::NotBalanced),
        _ => Ok(()),
    }
}

fn build(problem: &Problem, name: &'static str, choices: Choices) -> Launch {
    let g = &problem.geometry;
    let (m, rows, cols, bits) = (problem.m, g.rows(), g.cols(), g.bits() as usize);
    let threads = match bits {
        3 if choices.float_codebook => 512,
        4 if choices.float_codebook => 256,
        _ => 128,
    };
    let groups = g.blocks_per_row().div_ceil(SIMD_LANES / g.words_per_block());
    let per_threadgroup = threads / SIMD_LANES;
    let samples = if shares(problem) { 1 } else { m };
    Launch::new(name, if is_balanced(problem) { BALANCED_SOURCE } else { GENERIC_SOURCE })
        .input("x", problem.dtype, &[m, rows])
        .input("codes", Type::Uint32, &g.codes_shape())
        .input("scales", Type::Float16, &[rows])
        .input("lut", Type::Float32, &[g.states()])
        .output("partial", Type::Float32, &[m, SPLITS, cols])
        .template_type(problem.dtype)
        .integers([
            ("M", m),
            ("R", rows),
            ("C", cols),
            ("BT", g.block()),
            ("K", bits),
            ("L", g.state_bits() as usize),
            ("SG_TG", per_threadgroup),
            ("SPLITS", SPLITS),
            ("NP", SIMD_LANES.div_ceil(bits)),
            ("VARIANT", usize::from(problem.variant.number())),
            ("INTERLEAVE", problem.interleave()),
            ("CODEBOOK", usize::from(choices.codebook)),
            ("BITS_Y", usize::from(choices.bits_y)),
            ("FLOAT_CODEBOOK", usize::from(choices.float_codebook)),
            ("THREADS", threads),
        ])
        .over([threads, groups.div_ceil(per_threadgroup), samples * SPLITS], [threads, 1, 1])
}
