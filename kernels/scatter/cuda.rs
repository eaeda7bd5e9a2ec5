//! Scatter on CUDA: axis 0. A stored row holds one input's weights to all outputs, so a thread keeps its columns and
//! walks down the rows; splits of the rows go to different blocks and meet in [`crate::cuda`]'s second launch.
//!
//! The tensor-core kernels give a block 256 columns and `RANGES` ranges of rows: a warp decodes 16 rows of 128 columns
//! a step straight into its A fragments, so each weight is decoded once for all rows of activations. Scales and
//! 1/d go into the activations. Activations are digits of integers ([`EXACT`]) or floating-point
//! numbers with what rounding them left over ([`FLOAT`]).
//!
//! Inputs `x [M, R]`, `codes`, `scales [R]` float16; output `partial [SPLITS, M, C]` float32, written whole.

use trellis_codec::Axis;

use crate::cuda::{
    PACKED_ROWS, PACKED_THREADS, STEP_ROWS, TILE_COLS, check_grid, check_tensor, parameters, partial,
    product, slots,
};
use crate::{Kernel, Launch, Problem, Reason};

/// Tensor cores on integers, M = 1..=4.
pub static EXACT: Kernel =
    Kernel { name: "trellis_cuda_scatter_exact", check: |p| check(p, true), build: |p| build(p, true) };
/// Tensor cores on floating-point numbers, M = 1..=8.
pub static FLOAT: Kernel =
    Kernel { name: "trellis_cuda_scatter_float", check: |p| check(p, false), build: |p| build(p, false) };
/// One fma a weight, any geometry, any M.
pub static PACKED: Kernel =
    Kernel { name: "trellis_cuda_scatter_packed", check: check_packed, build: build_packed };

/// Ranges of rows in a block, stages of the copy pipeline, blocks on a multiprocessor.
struct Tuning {
    ranges: usize,
    stages: usize,
    blocks: usize,
}

impl Tuning {
    /// Tuned at 17408 x 5120 on one H200 (CUDA 13.0, 2026-12-01): two waves of blocks, or 8 of them with the registers
    /// that leaves, are slower. Other shapes take the same and were not tried.
    fn of(problem: &Problem, exact: bool) -> Self {
        match (exact, problem.m) {
            (true, 3..) => Tuning { ranges: 2, stages: 2, blocks: 4 },
            _ => Tuning { ranges: 2, stages: 2, blocks: 6 },
        }
    }

    fn threads(&self) -> usize {
        64 * self.ranges
    }

    /// As many splits as fill the GPU once, none without a step of rows for each of its ranges.
    fn grid(&self, problem: &Problem) -> [usize; 3] {
        let g = &problem.geometry;
        let pairs = g.cols() / (2 * TILE_COLS);
        let most = g.rows().div_ceil(STEP_ROWS).div_ceil(self.ranges);
        [pairs, (slots(problem, self.blocks) / pairs).clamp(1, most), 1]
    }
}

fn check(problem: &Problem, exact: bool) -> Result<(), Reason> {
    problem.check_axis(Axis::Output)?;
    check_tensor(problem, exact)?;
    let tuning = Tuning::of(problem, exact);
    check_grid(tuning.grid(problem), tuning.threads())
}

fn build(problem: &Problem, exact: bool) -> Launch {
    let tuning = Tuning::of(problem, exact);
    let grid = tuning.grid(problem);
    let name = if exact { EXACT.name } else { FLOAT.name };
    let launch = Launch::cuda_bounded(name, include_str!("mma.cu"), tuning.threads(), tuning.blocks);
    let launch = partial(product(launch, problem), problem, grid[1]);
    parameters(launch, problem)
        .integers([("SPLITS", grid[1]), ("RANGES", tuning.ranges), ("STAGES", tuning.stages)])
        .booleans([("EXACT", exact)])
        .blocks(grid, tuning.threads())
}

/// Blocks of 128 columns, enough splits of at least 32 rows for 16 blocks on each multiprocessor.
fn packed_grid(problem: &Problem) -> [usize; 3] {
    let g = &problem.geometry;
    let (across, passes) = (g.cols().div_ceil(PACKED_THREADS), problem.m.div_ceil(PACKED_ROWS));
    let splits = (slots(problem, 16) / (across * passes)).clamp(1, g.rows().div_ceil(32));
    [across, splits, passes]
}

fn check_packed(problem: &Problem) -> Result<(), Reason> {
    problem.check_axis(Axis::Output)?;
    problem.check_m(1, i32::MAX as usize)?;
    problem.check_size()?;
    problem.cuda()?;
    check_grid(packed_grid(problem), PACKED_THREADS)?;
    // The launch that adds the splits has a thread for each output.
    check_grid([(problem.m * problem.geometry.cols()).div_ceil(PACKED_THREADS), 1, 1], PACKED_THREADS)
}

fn build_packed(problem: &Problem) -> Launch {
    let grid = packed_grid(problem);
    let launch = product(Launch::cuda(PACKED.name, include_str!("packed.cu")), problem);
    parameters(partial(launch, problem, grid[1]), problem)
        .integers([("SPLITS", grid[1])])
        .blocks(grid, PACKED_THREADS)
}
