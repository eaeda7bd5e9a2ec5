//! Reduce on CUDA: axis 1.
//!
//! The tensor-core kernels give a warp 128 columns: it keeps their activations as B fragments in registers and walks
//! down the rows of its split, 16 a step, decoding straight into A fragments, so each weight is decoded once for all
//! rows of activations. The warps of a block meet in shared memory once every `GROUPS` steps, blocks of other
//! columns in [`crate::cuda`]'s second launch. Scale and 1/d multiply the sum. Activations are digits of integers
//! ([`EXACT`]) or floating-point numbers ([`FLOAT`]).
//!
//! Inputs `x [M, C]`, `codes`, `scales [R]` float16; output `partial [PARTS, M, R]` float32, written whole, or, of
//! [`PACKED`], `out [M, R]` in x's type.

use trellis_codec::Axis;

use crate::cuda::{
    EXACT_ROWS, PACKED_ROWS, PACKED_THREADS, SHARED_BYTES, STEP_ROWS, TILE_COLS, check_grid, check_tensor,
    parameters, partial, product, slots,
};
use crate::{Kernel, Launch, Problem, Reason};

/// Tensor cores on integers, M = 1..=4.
pub static EXACT: Kernel =
    Kernel { name: "trellis_cuda_reduce_exact", check: |p| check(p, true), build: |p| build(p, true) };
/// Tensor cores on floating-point numbers, M = 1..=8.
pub static FLOAT: Kernel =
    Kernel { name: "trellis_cuda_reduce_float", check: |p| check(p, false), build: |p| build(p, false) };
/// One fma a weight, any geometry, any M; a warp for a stored row.
pub static PACKED: Kernel =
    Kernel { name: "trellis_cuda_reduce_packed", check: check_packed, build: build_packed };

const PACKED_WARPS: usize = 4;

/// Warps of a block, stages of the copy pipeline, blocks on a multiprocessor.
struct Tuning {
    warps: usize,
    stages: usize,
    blocks: usize,
}

impl Tuning {
    /// Tuned at 17408 x 5120 on one H200 (CUDA 13.0, 2026-12-01); other shapes take the same and were not tried.
    fn of(exact: bool) -> Self {
        Tuning { warps: if exact { 5 } else { 4 }, stages: 3, blocks: 4 }
    }

    fn threads(&self) -> usize {
        32 * self.warps
    }

    /// Parts of the columns, and as many splits of the rows as fill the GPU once.
    fn grid(&self, problem: &Problem) -> [usize; 3] {
        let g = &problem.geometry;
        let parts = (g.cols() / TILE_COLS).div_ceil(self.warps);
        [parts, (slots(problem, self.blocks) / parts).clamp(1, g.rows().div_ceil(STEP_ROWS)), 1]
    }

    /// Steps between two meetings of a block's warps: as few meetings as shared memory allows, evenly spaced.
    fn groups(&self, problem: &Problem, exact: bool, splits: usize) -> usize {
        let steps = problem.geometry.rows().div_ceil(STEP_ROWS).div_ceil(splits);
        let most =
            (1..=steps).rev().find(|&n| self.shared(problem, exact, splits, n) <= SHARED_BYTES).unwrap_or(1);
        steps.div_ceil(steps.div_ceil(most))
    }

    /// Bytes of shared memory that the body declares.
    fn shared(&self, problem: &Problem, exact: bool, splits: usize, groups: usize) -> usize {
        let words_of_a_row = if problem.geometry.bits() <= 2 { 12 } else { 20 };
        let ring = self.stages * STEP_ROWS * words_of_a_row * 4;
        let tiles = if exact && problem.m > EXACT_ROWS / 2 { 2 } else { 1 };
        let (digits, places) = if exact { (4 * 33 * 8 * tiles, 4 * tiles) } else { (0, 8) };
        let results = (groups * STEP_ROWS * places * 4).max(digits.next_multiple_of(16));
        let rows = problem.geometry.rows().div_ceil(STEP_ROWS).div_ceil(splits) * STEP_ROWS;
        let scales = if rows <= 1024 { 4 * rows } else { 4 };
        // Exponents and factors: 8 rows of activations in each warp.
        self.warps * (ring + results + 8 * 4 + 8 * 8) + scales + 64
    }
}

fn check(problem: &Problem, exact: bool) -> Result<(), Reason> {
    problem.check_axis(Axis::Input)?;
    check_tensor(problem, exact)?;
    let tuning = Tuning::of(exact);
    check_grid(tuning.grid(problem), tuning.threads())
}

fn build(problem: &Problem, exact: bool) -> Launch {
    let tuning = Tuning::of(exact);
    let grid = tuning.grid(problem);
    let name = if exact { EXACT.name } else { FLOAT.name };
    let launch = Launch::cuda_bounded(name, include_str!("mma.cu"), tuning.threads(), tuning.blocks);
    let launch = partial(product(launch, problem), problem, grid[0]);
    parameters(launch, problem)
        .integers([
            ("SPLITS", grid[1]),
            ("WARPS", tuning.warps),
            ("STAGES", tuning.stages),
            ("GROUPS", tuning.groups(problem, exact, grid[1])),
        ])
        .booleans([("EXACT", exact)])
        .blocks(grid, tuning.threads())
}

fn packed_grid(problem: &Problem) -> [usize; 3] {
    [problem.geometry.rows().div_ceil(PACKED_WARPS), problem.m.div_ceil(PACKED_ROWS), 1]
}

fn check_packed(problem: &Problem) -> Result<(), Reason> {
    problem.check_axis(Axis::Input)?;
    problem.check_m(1, i32::MAX as usize)?;
    problem.check_size()?;
    problem.cuda()?;
    check_grid(packed_grid(problem), PACKED_THREADS)
}

fn build_packed(problem: &Problem) -> Launch {
    let launch = product(Launch::cuda(PACKED.name, include_str!("packed.cu")), problem);
    let launch = launch.output("out", problem.dtype, &[problem.m, problem.geometry.rows()]);
    parameters(launch, problem).blocks(packed_grid(problem), PACKED_THREADS)
}

#[cfg(test)]
mod tests {
    use trellis_codec::Geometry;
    use trellis_codec::reference::Dtype;

    use super::*;
    use crate::{Cuda, Gpu};

    #[test]
    fn shared_memory_fits_and_steps_are_covered() {
        for (rows, cols) in [(1, 256), (17408, 5120), (5120, 17408), (151_936, 5120), (17, 131_072)] {
            for (bits, exact, m) in [(1, true, 1), (3, true, 2), (4, true, 4), (3, false, 1), (4, false, 8)] {
                let geometry = Geometry::new(Axis::Input, bits, 12, 256, rows, cols).expect("a geometry");
                let gpu = Gpu::Cuda(Cuda { multiprocessors: 132, capability: (9, 0) });
                let problem = Problem::new(geometry, m, Dtype::F32).on(gpu);
                let tuning = Tuning::of(exact);
                let splits = tuning.grid(&problem)[1];
                let groups = tuning.groups(&problem, exact, splits);
                assert!(
                    groups >= 1 && tuning.shared(&problem, exact, splits, groups) <= SHARED_BYTES,
                    "{problem}"
                );
            }
        }
    }
}
