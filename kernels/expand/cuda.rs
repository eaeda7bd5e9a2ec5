//! Expand on CUDA: a thread decodes 8 neighbours from two words and stores them at once; every geometry (a block is
//! always a multiple of 8 long). Inputs `codes`, `scales [R]` float16; output `out [R, C]`.

use crate::cuda::{check_grid, stored};
use crate::{Kernel, Launch, Problem, Reason, Type};

/// The stored matrix in a dtype.
pub static EXPAND: Kernel = Kernel { name: "trellis_cuda_expand", check, build };

const NEIGHBOURS: usize = 8;
const THREADS: usize = 256;

fn grid(problem: &Problem) -> [usize; 3] {
    let g = &problem.geometry;
    [(g.rows() * (g.cols() / NEIGHBOURS)).div_ceil(THREADS), 1, 1]
}

fn check(problem: &Problem) -> Result<(), Reason> {
    problem.check_size()?;
    problem.cuda()?;
    check_grid(grid(problem), THREADS)
}

fn build(problem: &Problem) -> Launch {
    let g = &problem.geometry;
    let launch = Launch::cuda(EXPAND.name, include_str!("expand.cu"))
        .input("codes", Type::Uint32, &g.codes_shape())
        .input("scales", Type::Float16, &[g.rows()])
        .output("out", problem.dtype, &[g.rows(), g.cols()])
        .template_type(problem.dtype);
    stored(launch, problem).blocks(grid(problem), THREADS)
}
