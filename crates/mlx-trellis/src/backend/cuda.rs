//! The CUDA back end: launches of `trellis-kernels` as MLX custom kernels, and the MLX operations around them. Every
//! result is lazy.
//!
//! A dense weight that is decoded for a product waits for the product's activations, and each slice of a large one for
//! the product of the slice before: a graph of many layers, which MLX may order as it likes, then holds one slice or a
//! few at a time, without anything being evaluated early.

use std::env;
use std::path::PathBuf;
use std::sync::OnceLock;

use mlx_rs::{Array, Dtype as MlxDtype, ops};
use trellis_codec::reference::Dtype;
use trellis_codec::{Axis, Geometry, Layout};
use trellis_kernels::{Cuda, Gpu, cuda, expand};

use crate::dispatch::{Kernel, Problem, cuda_kernel, passes};
use crate::error::{CudaError, Error};
use crate::ffi;
use crate::ffi::cuda_kernel::{after, apply};
use crate::weights::{MatmulOptions, TrellisWeights, output_shape};

/// Most bytes of dense weight that a product decodes at a time: large enough that a slice fills a GPU, small beside
/// what one has.
const SLICE_BYTES: usize = 256 << 20;

/// 16-bit numbers in 16 bytes, to which cuBLAS's usual kernels want rows aligned.
const ALIGNED: usize = 8;

/// A header that MLX's run-time compilation of any kernel includes, in the toolkit's include folder.
const HEADER: &str = "cuda_fp16.h";

/// GPUs looked at once: more than a host has.
const MAX_GPUS: i32 = 64;

/// The CUDA GPU that operations built now on this thread go to, if they do.
pub(crate) fn current() -> Option<Cuda> {
    static GPUS: OnceLock<Vec<Cuda>> = OnceLock::new();
    if !ffi::device::cuda_is_available() {
        return None;
    }
    let index = ffi::device::gpu()?;
    let gpus = GPUS.get_or_init(|| (0..MAX_GPUS).map_while(|i| ffi::device::cuda(i).ok()).collect());
    gpus.get(usize::try_from(index).ok()?).copied()
}

/// Whether kernels can be compiled and run; names what is missing. Looks once.
pub(crate) fn preflight() -> Result<(), CudaError> {
    static VERDICT: OnceLock<Result<(), CudaError>> = OnceLock::new();
    VERDICT.get_or_init(look).clone()
}

fn look() -> Result<(), CudaError> {
    if !ffi::cuda_kernel::is_built() {
        return Err(CudaError::NotBuilt { mlx: crate::mlx_version() });
    }
    ffi::device::cuda(0).map_err(|reason| CudaError::Driver { reason })?;
    if !ffi::device::cuda_is_available() {
        return Err(CudaError::Driver { reason: "MLX finds no CUDA device".to_owned() });
    }
    let folders = header_folders();
    if folders.iter().any(|folder| folder.join(HEADER).is_file()) {
        Ok(())
    } else {
        Err(CudaError::Headers { header: HEADER, looked: folders })
    }
}

/// Where MLX looks for the toolkit's headers: in NVIDIA's wheels beside its own, then where the environment says, then
/// in the usual place.
fn header_folders() -> Vec<PathBuf> {
    let wheels = ffi::device::mlx_library().into_iter().flat_map(|library| {
        let site = library.parent().and_then(|lib| lib.parent()).and_then(|mlx| mlx.parent());
        let nvidia = site.map(|site| site.join("nvidia"));
        nvidia.into_iter().flat_map(|n| ["cu13", "cuda_runtime"].map(|wheel| n.join(wheel).join("include")))
    });
    let set = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(|home| PathBuf::from(home).join("include"));
    wheels.chain(set).chain([PathBuf::from("/usr/local/cuda/include")]).collect()
}

/// The lazy product `[..., out]` of checked activations by one of the CUDA kernels.
pub(crate) fn matmul(
    x: &Array,
    weights: &TrellisWeights,
    problem: &Problem,
    kernel: Kernel,
    gpu: Gpu,
) -> Result<Array, Error> {
    preflight()?;
    let g = &problem.geometry;
    let rows = x.reshape(&[problem.m as i32, g.in_features() as i32])?;
    let y = match kernel {
        Kernel::CudaExpand => expanded(&rows, weights, problem, gpu)?,
        _ => packed(&rows, weights, problem, kernel, gpu)?,
    };
    let shape = output_shape(x, g);
    let y = if y.shape() == shape { y } else { y.reshape(&shape)? };
    if !ffi::is_traced(x) {
        return Ok(y);
    }
    let options = MatmulOptions {
        factored: problem.factored,
        packed: problem.packed,
        variant: problem.variant,
        shared_codebook: problem.shared_codebook,
        device: None,
    };
    Ok(ffi::with_gradient(&y, x, weights, options)?)
}

/// By kernels that read the codes, in passes over the rows of activations.
fn packed(
    rows: &Array,
    weights: &TrellisWeights,
    problem: &Problem,
    kernel: Kernel,
    gpu: Gpu,
) -> Result<Array, Error> {
    let passes = passes(kernel, problem.m);
    let parts =
        if passes.len() == 1 { vec![rows.clone()] } else { rows.split_at_indices(&ends(&passes), 0)? };
    let on = problem.on(gpu);
    let mut results = Vec::new();
    for (m, part) in std::iter::zip(passes, parts) {
        let launches = cuda::launches(cuda_kernel(kernel, &on), &trellis_kernels::Problem { m, ..on })?;
        let [product, sums @ ..] = launches.as_slice() else { return Err(nothing()) };
        let mut y = one(apply(product, &[&part, weights.codes(), weights.scales()])?)?;
        for sum in sums {
            y = one(apply(sum, &[&y])?)?;
        }
        results.push(y);
    }
    if results.len() == 1 { results.pop().ok_or_else(nothing) } else { Ok(ops::concatenate(&results, 0)?) }
}

/// By expansion and MLX's matmul, in slices of the outputs.
///
/// Of matrices whose rows are not aligned to 16 bytes, cuBLAS adds up parts that it has already rounded to 16 bits (MLX
/// 0.32.2 on an H200: up to 7 times the allowance at 70 or 100 outputs, none at multiples of 8; test
/// `expanded_products_round_once`). Those go through float32, where its tf32 products are exact, since the numbers have
/// no more bits than that.
fn expanded(rows: &Array, weights: &TrellisWeights, problem: &Problem, gpu: Gpu) -> Result<Array, Error> {
    let g = &problem.geometry;
    let aligned = [g.in_features(), g.out_features()].iter().all(|n| n.is_multiple_of(ALIGNED));
    let float32 = if aligned { None } else { Some(rows.as_dtype(MlxDtype::Float32)?) };
    let widened = float32.as_ref();
    let mut results: Vec<Array> = Vec::new();
    for slice in slices(weights, problem, SLICE_BYTES)? {
        let codes = after(slice.codes(), results.last().unwrap_or(rows))?;
        let part = Problem { geometry: *slice.geometry(), ..*problem };
        let stored = one(apply(&expand::cuda::EXPAND.launch(&part.on(gpu))?, &[&codes, slice.scales()])?)?;
        let (x, stored) = match widened {
            Some(x) => (x, stored.as_dtype(MlxDtype::Float32)?),
            None => (rows, stored),
        };
        let y = match problem.geometry.axis() {
            Axis::Output => ops::matmul(x, &stored)?,
            Axis::Input => ops::matmul(x, stored.t())?,
        };
        results.push(if widened.is_some() { y.as_dtype(rows.dtype())? } else { y });
    }
    if results.len() == 1 { results.pop().ok_or_else(nothing) } else { Ok(ops::concatenate(&results, 1)?) }
}

/// The matrix cut along its outputs into parts whose dense weight is at most `most` bytes, or one unit of its layout.
fn slices(weights: &TrellisWeights, problem: &Problem, most: usize) -> Result<Vec<TrellisWeights>, Error> {
    let g = &problem.geometry;
    let (outputs, inputs) = (g.out_features(), g.in_features());
    let unit = match (g.axis(), g.layout()) {
        (Axis::Input, Layout::RowMajor) => 1,
        (Axis::Output, Layout::RowMajor) => g.block(),
        // Pairs of blocks lie together; of an interleaved matrix taken the other way round they run along the inputs.
        (Axis::Output, Layout::Interleaved) => 2 * g.block(),
        (Axis::Input, Layout::Interleaved) => outputs,
    };
    let width = if problem.dtype == Dtype::F32 { 4 } else { 2 };
    let each = (most / (inputs * width) / unit * unit).max(unit);
    if each >= outputs {
        return Ok(vec![weights.clone()]);
    }
    let counts: Vec<usize> = (0..outputs).step_by(each).map(|first| each.min(outputs - first)).collect();
    let in_codes =
        |each: fn(&Geometry, usize) -> usize| ends(&counts.iter().map(|&n| each(g, n)).collect::<Vec<_>>());
    // The codes' dimension that runs along the outputs, and where the parts end in it.
    let (cuts, axis) = match (g.axis(), g.layout()) {
        (Axis::Input, _) => (ends(&counts), 0),
        (Axis::Output, Layout::RowMajor) => (in_codes(|g, n| n / g.block() * g.words_per_block()), 1),
        (Axis::Output, Layout::Interleaved) => (in_codes(|g, n| n / (2 * g.block())), 0),
    };
    let codes = weights.codes().split_at_indices(&cuts, axis)?;
    let scales = match g.axis() {
        Axis::Input => weights.scales().split_at_indices(&ends(&counts), 0)?,
        Axis::Output => vec![weights.scales().clone(); counts.len()],
    };
    std::iter::zip(counts, std::iter::zip(codes, scales))
        .map(|(n, (codes, scales))| {
            let (rows, cols) = match g.axis() {
                Axis::Input => (n, g.cols()),
                Axis::Output => (g.rows(), n),
            };
            let part = Geometry::new(g.axis(), g.bits(), g.state_bits(), g.block(), rows, cols)
                .and_then(|part| part.with_layout(g.layout()))?;
            TrellisWeights::new(codes, scales, part)
        })
        .collect()
}

/// Where all parts but the last end.
fn ends(counts: &[usize]) -> Vec<i32> {
    let mut at = 0;
    let ends = counts.iter().map(|&n| {
        at += n as i32;
        at
    });
    ends.take(counts.len().saturating_sub(1)).collect()
}

/// The lazy stored matrix `[rows, cols]`.
pub(crate) fn stored(weights: &TrellisWeights, problem: &Problem, gpu: Gpu) -> Result<Array, Error> {
    preflight()?;
    one(apply(&expand::cuda::EXPAND.launch(&problem.on(gpu))?, &[weights.codes(), weights.scales()])?)
}

/// A lazy float32 that a GPU takes this long for.
pub(crate) fn hold(microseconds: u16) -> Result<Array, Error> {
    preflight()?;
    one(apply(&cuda::hold(microseconds), &[])?)
}

fn one(outputs: Vec<Array>) -> Result<Array, Error> {
    outputs.into_iter().next().ok_or_else(nothing)
}

fn nothing() -> Error {
    mlx_rs::error::Exception::custom("a kernel gave no output").into()
}

#[cfg(test)]
mod tests {
    use trellis_codec::{f16, pack};

    use super::*;

    /// Slices decoded on the CPU, put together again, are the whole.
    #[test]
    fn slices_cover_the_matrix() {
        let plain = Geometry::new(Axis::Output, 3, 12, 256, 5, 2048).expect("a geometry");
        let codes: Vec<u32> = (0..plain.words() as u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
        let (interleaved, folded) = pack::relayout(&plain, &codes, Layout::Interleaved).expect("a layout");
        let turned = Geometry::new(Axis::Input, 3, 12, 256, 5, 2048).expect("a geometry");
        for (geometry, codes) in [(plain, &codes), (folded, &interleaved), (turned, &codes)] {
            let scales: Vec<f16> = (0..5).map(|i| f16::from_f32(1.0 + i as f32)).collect();
            let weights = TrellisWeights::from_slices(codes, &scales, geometry).expect("weights");
            let problem = Problem::new(geometry, 1, Dtype::F32);
            let whole = crate::dequantize(&weights, mlx_rs::Dtype::Float32).expect("a weight");
            let mut counts = Vec::new();
            for most in [1, 20_000, 1 << 20] {
                let slices = slices(&weights, &problem, most).expect("slices");
                let parts: Vec<Array> = slices
                    .iter()
                    .map(|s| crate::dequantize(s, mlx_rs::Dtype::Float32).expect("a part"))
                    .collect();
                let joined = ops::concatenate(&parts, 0).expect("the whole");
                assert_eq!(joined.shape(), whole.shape());
                let values =
                    |a: &Array| a.contiguous().expect("a copy").to_vec_exact::<f32>().expect("values");
                assert_eq!(values(&joined), values(&whole));
                counts.push(slices.len());
            }
            assert!(counts[0] >= counts[1] && counts[1] > counts[2] && counts[2] == 1, "{counts:?}");
        }
    }

    #[test]
    fn without_cuda_the_preflight_says_so() {
        if ffi::device::cuda_is_available() {
            println!("skipped: this machine has CUDA");
            return;
        }
        let error = preflight().expect_err("no CUDA").to_string();
        assert!(error.contains("CUDA") || error.contains("cuda"), "{error}");
        assert_eq!(current(), None);
    }
}
