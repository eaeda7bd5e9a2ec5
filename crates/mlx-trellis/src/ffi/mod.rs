//! All of this crate's unsafe code: C++ primitives made into lazy arrays, custom kernels, and what mlx-rs does not wrap.
#![allow(unsafe_code)]

mod cpu_primitive;
pub(crate) mod cuda_kernel;
pub(crate) mod device;
mod export;
mod gradient;
mod launch;
mod message;
pub(crate) mod metal_kernel;

pub(crate) use cpu_primitive::{expand, matmul};
pub(crate) use export::{export, placeholder_gpu};
pub(crate) use gradient::{is_traced, with_gradient};

/// The version of the MLX library that is linked.
pub(crate) fn mlx_version() -> String {
    // SAFETY: makes an empty string handle; it has no precondition.
    let mut version = unsafe { mlx_sys::mlx_string_new() };
    // SAFETY: `version` is the handle made above.
    let status = unsafe { mlx_sys::mlx_version(&mut version) };
    let text = if status == 0 {
        // SAFETY: the handle holds a NUL-terminated string that lives until it is freed below.
        unsafe { std::ffi::CStr::from_ptr(mlx_sys::mlx_string_data(version)) }.to_string_lossy().into_owned()
    } else {
        "unknown".to_owned()
    };
    // SAFETY: freed once, after its last use.
    unsafe { mlx_sys::mlx_string_free(version) };
    text
}
