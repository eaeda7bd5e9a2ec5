//! Trellis-coded linear layers for MLX in Rust: weights stay as 2-, 3- or 4-bit codes (QTIP's "1MAD" code) and are
//! multiplied without ever being unpacked. Every product is a lazy MLX array.
//!
//! [`TrellisLinear`] is the layer; [`trellis_matmul`] the product it is made of; [`quantize_weight`] the way from a
//! dense weight to codes. The format and its oracle are in [`trellis_codec`], the CPU's kernels in [`trellis_cpu`].
#![deny(unsafe_code)]

pub mod artifact;
mod backend;
pub mod dispatch;
mod error;
pub mod export;
mod ffi;
mod linear;
mod maybe;
mod quantize;
mod rotation;
mod weights;

pub use error::{CudaError, Error};
pub use linear::TrellisLinear;
pub use maybe::{MaybeTrellis, TrellisQuantizable};
pub use quantize::{
    AUTO_SAMPLE_ROWS, AxisChoice, QuantizeOptions, choose_axis, quantize_weight, quantize_weight_with,
};
pub use trellis_codec::{
    Axis, DEFAULT_DAMPING, EncodeReport, Encoded, Fallback, FeedbackReport, Geometry, HessianError, Layout,
    Rotation, RotationError, ScaleRule, bf16, f16,
};
pub use trellis_kernels::{Cuda, Gpu, Variant};
pub use weights::{
    MatmulOptions, TrellisWeights, dequantize, problem, trellis_matmul, trellis_matmul_by,
    trellis_matmul_with,
};

/// The version of the MLX library that is linked, such as `0.32.2`.
pub fn mlx_version() -> String {
    ffi::mlx_version()
}

/// Whether MLX has a Metal device here.
pub fn metal_is_available() -> bool {
    ffi::device::metal_is_available()
}

/// Whether MLX has a CUDA device here.
pub fn cuda_is_available() -> bool {
    ffi::device::cuda_is_available()
}

/// Whether CUDA kernels can be compiled and run here. Products on CUDA look by themselves; this is for whoever wants to
/// know before.
///
/// # Errors
/// What is missing: MLX's CUDA back end, the driver or a GPU, or CUDA's headers.
pub fn cuda_preflight() -> Result<(), CudaError> {
    backend::cuda::preflight()
}

/// A lazy float32 `[1]` that occupies the CUDA GPU for a time: what is launched behind it then runs without waiting for
/// the host, which is how kernels are timed.
///
/// # Errors
/// As [`cuda_preflight`].
pub fn cuda_hold(microseconds: u16) -> Result<mlx_rs::Array, Error> {
    backend::cuda::hold(microseconds)
}

/// On CUDA, makes this process end without running destructors of libraries, whatever its exit code: for a program to call
/// once, after it has looked for a GPU. MLX 0.32.2 otherwise aborts at times while it exits ("driver shutting down"),
/// because it destroys CUDA graphs when the driver has already gone. Exit handlers registered before this call do not
/// run. Elsewhere it does nothing.
pub fn skip_cuda_teardown() {
    if cuda_is_available() {
        ffi::device::skip_teardown();
    }
}

/// What MLX calls the GPU, such as `NVIDIA H200`, if it has one.
pub fn gpu_name() -> Option<String> {
    ffi::device::info(c"device_name")
}

/// The README's example, compiled and run with the documentation's own.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
