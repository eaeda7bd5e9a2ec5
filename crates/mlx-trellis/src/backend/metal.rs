//! The Metal back end: launches of `trellis-kernels` as MLX custom kernels, and the MLX operations around them. Every
//! result is lazy. The same code builds the same graph on a machine without Metal while a function is exported.

use std::cell::RefCell;
use std::collections::HashMap;

use mlx_rs::{Array, ops};
use trellis_codec::{Axis, codebook};
use trellis_kernels::{Gpu, expand, scatter, splitk};

use crate::dispatch::{Kernel, Problem};
use crate::error::Error;
use crate::ffi;
use crate::ffi::metal_kernel::apply;
use crate::weights::{TrellisWeights, mlx_dtype, output_shape};

thread_local! {
    /// The exact values of all states, float32 `[2^L]`, by `L`.
    static TABLES: RefCell<HashMap<u32, Array>> = RefCell::new(HashMap::new());
}

/// The Metal GPU that operations built now on this thread go to, if they do.
pub(crate) fn current() -> Option<Gpu> {
    (ffi::device::metal_is_available() && ffi::device::gpu().is_some())
        .then(|| Gpu::from_architecture(&ffi::device::architecture().unwrap_or_default()))
}

/// The lazy product `[..., out]` of checked activations by one of the Metal kernels.
pub(crate) fn matmul(
    x: &Array,
    weights: &TrellisWeights,
    problem: &Problem,
    kernel: Kernel,
    gpu: Gpu,
) -> Result<Array, Error> {
    let g = &problem.geometry;
    let (codes, scales) = (weights.codes(), weights.scales());
    let rows = x.reshape(&[problem.m as i32, g.in_features() as i32])?;
    let on = problem.on(gpu);
    let y = match kernel {
        Kernel::MetalScatter => {
            let partial =
                one(apply(&scatter::launch(&on)?, &[&rows, codes, scales, &table(g.state_bits())])?)?;
            partial.sum_axis(1, None)?.as_dtype(mlx_dtype(problem.dtype))?
        }
        Kernel::MetalSplitK => {
            let [partial, reduction] = splitk::launch(&on)?;
            let partial = one(apply(&partial, &[&rows, codes, scales])?)?;
            one(apply(&reduction, &[&partial])?)?
        }
        _ => {
            let stored = one(apply(&expand::launch(&on)?, &[codes, scales])?)?;
            match g.axis() {
                Axis::Output => ops::matmul(&rows, &stored)?,
                Axis::Input => ops::matmul(&rows, stored.t())?,
            }
        }
    };
    let shape = output_shape(x, g);
    if y.shape() == shape { Ok(y) } else { Ok(y.reshape(&shape)?) }
}

/// The lazy stored matrix `[rows, cols]`.
pub(crate) fn stored(weights: &TrellisWeights, problem: &Problem, gpu: Gpu) -> Result<Array, Error> {
    one(apply(&expand::launch(&problem.on(gpu))?, &[weights.codes(), weights.scales()])?)
}

fn one(outputs: Vec<Array>) -> Result<Array, Error> {
    outputs
        .into_iter()
        .next()
        .ok_or_else(|| mlx_rs::error::Exception::custom("a kernel gave no output").into())
}

fn table(state_bits: u32) -> Array {
    TABLES.with_borrow_mut(|tables| {
        let new = || Array::from_slice(&codebook::table(state_bits), &[1 << state_bits]);
        tables.entry(state_bits).or_insert_with(new).clone()
    })
}
