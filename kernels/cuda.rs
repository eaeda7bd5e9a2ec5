//! What the CUDA kernels share: their limits, the grid, the second launch that adds partial sums.
//!
//! | kernel | axis | M | computes | contract |
//! |---|---|---|---|---|
//! | [`scatter::cuda::EXACT`], [`reduce::cuda::EXACT`] | 0, 1 | 1..=4 | activations as digits, integer tensor cores: the sum itself is exact | F |
//! | [`scatter::cuda::FLOAT`], [`reduce::cuda::FLOAT`] | 0, 1 | 1..=8 | y times activations on floating-point tensor cores, with what rounding left over | F |
//! | [`scatter::cuda::PACKED`], [`reduce::cuda::PACKED`] | 0, 1 | any | one fma a weight, 8 rows of activations a decode | P |
//! | [`expand::cuda::EXPAND`] | any | — | the stored matrix in a dtype | E |
//!
//! All but the last and axis 1's packed write partial sums, `[parts, M, out]` float32, which `trellis_cuda_sum` adds in
//! ascending order and rounds once: two launches a product, no atomics on results, the same bits every time.

use trellis_codec::reference::Dtype;

use crate::{Kernel, Launch, Problem, Reason, Type, Unsupported, expand, reduce, scatter};

#[cfg(test)]
mod tests;

/// Every CUDA kernel but the one that adds partial sums, which no problem asks for by itself.
pub static ALL: [&Kernel; 7] = [
    &scatter::cuda::EXACT,
    &scatter::cuda::FLOAT,
    &scatter::cuda::PACKED,
    &reduce::cuda::EXACT,
    &reduce::cuda::FLOAT,
    &reduce::cuda::PACKED,
    &expand::cuda::EXPAND,
];

/// Most rows of activations in one launch of a tensor-core kernel: the columns of its B tile.
pub const TENSOR_ROWS: usize = 8;
/// Most rows of activations in one launch of an exact kernel, which needs several digits of each.
pub const EXACT_ROWS: usize = 4;

/// Rows of activations that share one decode in a packed kernel.
pub(crate) const PACKED_ROWS: usize = 8;
pub(crate) const PACKED_THREADS: usize = 128;
/// Stored rows of one step of a tensor-core kernel, the rows of an A tile.
pub(crate) const STEP_ROWS: usize = 16;
/// Columns of a tile, which are a warp's.
pub(crate) const TILE_COLS: usize = 128;
/// Shared memory that a block may declare.
pub(crate) const SHARED_BYTES: usize = 48 * 1024;

/// The first with asynchronous copies, tf32, and byte products of 32 terms.
const TENSOR_CAPABILITY: (u32, u32) = (8, 0);
const MAX_GRID_YZ: usize = 65535;
const SUM_NAME: &str = "trellis_cuda_sum";
const SUM_THREADS: usize = 128;
/// What an output that still has to be summed is called.
const PARTIAL: &str = "partial";

/// A kernel's launch for a problem and, where it leaves partial sums, the launch that adds them.
///
/// # Errors
/// As [`Kernel::launch`].
pub fn launches(kernel: &Kernel, problem: &Problem) -> Result<Vec<Launch>, Unsupported> {
    let launch = kernel.launch(problem)?;
    let sum = sum(&launch, problem.dtype);
    Ok(std::iter::once(launch).chain(sum).collect())
}

/// A launch that keeps a GPU busy for a time, so that what is launched behind it runs without waiting for the host: for
/// timing. Gives one float32.
pub fn hold(microseconds: u16) -> Launch {
    Launch::cuda("trellis_cuda_hold", HOLD)
        .output("out", Type::Float32, &[1])
        .integers([("MICROSECONDS", usize::from(microseconds))])
        .blocks([1, 1, 1], 1)
}

const HOLD: &str = "unsigned long long start, now;
asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(start));
do {
  asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now));
} while (now - start < MICROSECONDS * 1000ull);
out[0] = 0.0f;
";

/// `[parts, M, out]` to `[M, out]` in `dtype`.
fn sum(partial: &Launch, dtype: Dtype) -> Option<Launch> {
    let array = partial.outputs.iter().find(|output| output.name == PARTIAL)?;
    let &[parts, m, out] = array.shape.as_slice() else { return None };
    let size = m * out;
    Some(
        Launch::cuda(SUM_NAME, include_str!("sum.cu"))
            .input(PARTIAL, Type::Float32, &[parts, m, out])
            .output("out", dtype, &[m, out])
            .template_type(dtype)
            .integers([("SIZE", size), ("SPLITS", parts)])
            .blocks([size.div_ceil(SUM_THREADS), 1, 1], SUM_THREADS),
    )
}

impl Launch {
    /// A grid of blocks in one dimension of threads each.
    pub(crate) fn blocks(self, [x, y, z]: [usize; 3], threads: usize) -> Self {
        self.over([x * threads, y, z], [threads, 1, 1])
    }
}

/// Whether a grid of blocks can be launched: MLX counts threads in 32 bits, CUDA y and z in 16.
pub(crate) fn check_grid([x, y, z]: [usize; 3], threads: usize) -> Result<(), Reason> {
    let most = i32::MAX as usize;
    match x.checked_mul(threads) {
        Some(found) if found <= most => {}
        found => return Err(Reason::Grid { what: "threads", found: found.unwrap_or(usize::MAX), most }),
    }
    match y.max(z) {
        found if found > MAX_GRID_YZ => {
            Err(Reason::Grid { what: "blocks in y or z", found, most: MAX_GRID_YZ })
        }
        _ => Ok(()),
    }
}

/// The rules of both tensor-core families.
pub(crate) fn check_tensor(problem: &Problem, exact: bool) -> Result<(), Reason> {
    let g = &problem.geometry;
    problem.check_m(1, if exact { EXACT_ROWS } else { TENSOR_ROWS })?;
    problem.check_size()?;
    let found = problem.cuda()?.capability;
    if found < TENSOR_CAPABILITY {
        return Err(Reason::Capability { found, least: TENSOR_CAPABILITY });
    }
    if !matches!(g.block(), 32 | 64 | 128 | 256) {
        return Err(Reason::NotTiled { found: g.block() });
    }
    if !g.cols().is_multiple_of(2 * TILE_COLS) {
        return Err(Reason::Columns { found: g.cols(), multiple: 2 * TILE_COLS });
    }
    // x and the sums are indexed in 32 bits.
    let largest = problem.m * g.rows().max(g.cols());
    if i32::try_from(largest).is_err() { Err(Reason::TooLarge { found: largest }) } else { Ok(()) }
}

/// The inputs of every product.
pub(crate) fn product(launch: Launch, problem: &Problem) -> Launch {
    let g = &problem.geometry;
    launch
        .input("x", problem.dtype, &[problem.m, g.in_features()])
        .input("codes", Type::Uint32, &g.codes_shape())
        .input("scales", Type::Float16, &[g.rows()])
}

/// The template parameters of every product.
pub(crate) fn parameters(launch: Launch, problem: &Problem) -> Launch {
    stored(launch.template_type(problem.dtype).integers([("M", problem.m)]), problem)
}

/// The template parameters of a stored matrix.
pub(crate) fn stored(launch: Launch, problem: &Problem) -> Launch {
    let g = &problem.geometry;
    launch
        .integers([
            ("R", g.rows()),
            ("C", g.cols()),
            ("BT", g.block()),
            ("K", g.bits() as usize),
            ("L", g.state_bits() as usize),
        ])
        .booleans([("INTERLEAVE", problem.interleave() != 0)])
}

/// `[parts, M, out]` float32.
pub(crate) fn partial(launch: Launch, problem: &Problem, parts: usize) -> Launch {
    launch.output(PARTIAL, Type::Float32, &[parts, problem.m, problem.geometry.out_features()])
}

/// Blocks of a kernel that are resident on the GPU at once.
pub(crate) fn slots(problem: &Problem, blocks: usize) -> usize {
    problem.cuda().map_or(1, |cuda| cuda.multiprocessors as usize) * blocks
}
