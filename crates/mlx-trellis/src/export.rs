//! A layer's product as a file that MLX in Python, Swift or Rust can import, with the Metal kernels in it as MLX would
//! compile them. Works on a machine without Metal, where nothing of it can be run.

use std::ffi::CString;
use std::path::Path;

use mlx_rs::{Array, Dtype as MlxDtype, ops, with_stream};

use crate::Gpu;
use crate::dispatch::{Device, Problem};
use crate::error::Error;
use crate::ffi;
use crate::linear::TrellisLinear;
use crate::weights::{MatmulOptions, TrellisWeights, mlx_dtype};

/// Writes a layer's forward `f(x, codes, scales) -> [y]` of a problem as Metal computes it on `gpu` to `path` (`.mlxfn`):
/// x `[m, in]` in the problem's dtype, codes uint32 of the geometry's codes shape, scales float16 `[rows]`, y `[m, out]`.
///
/// Nothing is evaluated, and no array of the weights' size is in the file.
///
/// # Errors
/// [`Error::Path`] for a path that MLX cannot open, [`Error::TooLarge`] for dimensions beyond 31 bits, or an error of
/// MLX's, such as a file that cannot be written.
pub fn export_metal(problem: &Problem, gpu: Gpu, path: &Path) -> Result<(), Error> {
    let file = path.to_str().and_then(|p| CString::new(p).ok());
    let file = file.ok_or_else(|| Error::Path { path: path.to_owned() })?;
    let g = problem.geometry;
    let options = MatmulOptions {
        factored: problem.factored,
        variant: problem.variant,
        shared_codebook: problem.shared_codebook,
        packed: problem.packed,
        device: Some(Device { metal: Some(gpu), ..Device::cpu() }),
    };
    let dim = |d: usize| i32::try_from(d).map_err(|_| Error::TooLarge { what: "weight", found: d });
    let codes_shape = g.codes_shape().into_iter().map(dim).collect::<Result<Vec<_>, _>>()?;
    let args = [
        ops::zeros_dtype(&[dim(problem.m)?, dim(g.in_features())?], mlx_dtype(problem.dtype))?,
        ops::zeros_dtype(&codes_shape, MlxDtype::Uint32)?,
        ops::zeros_dtype(&[dim(g.rows())?], MlxDtype::Float16)?,
    ];
    let stream = ffi::placeholder_gpu();
    with_stream(&stream, || {
        ffi::export(&file, &args, |args: &[Array]| {
            let weights = TrellisWeights::new(args[1].clone(), args[2].clone(), g)?;
            TrellisLinear::new(weights, None)?.with_options(options).try_forward(&args[0])
        })
    })
}
