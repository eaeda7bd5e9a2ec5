//! Asks MLX and the CUDA driver about devices.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use mlx_rs::Stream;
use trellis_kernels::Cuda;

use super::message::{self, Message};

unsafe extern "C" {
    fn trellis_cuda_attributes(
        index: c_int,
        multiprocessors: *mut c_int,
        major: *mut c_int,
        minor: *mut c_int,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;

    fn trellis_mlx_library(path: *mut c_char, path_len: u64);
}

/// Whether MLX has a Metal device.
pub(crate) fn metal_is_available() -> bool {
    let mut available = false;
    // SAFETY: writes a bool to a live place; it has no other precondition.
    unsafe { mlx_sys::mlx_metal_is_available(&mut available) == 0 && available }
}

/// Whether MLX has a CUDA device.
pub(crate) fn cuda_is_available() -> bool {
    let mut available = false;
    // SAFETY: writes a bool to a live place; it has no other precondition.
    unsafe { mlx_sys::mlx_cuda_is_available(&mut available) == 0 && available }
}

/// The index of the GPU that operations built now on this thread go to, if they go to one.
pub(crate) fn gpu() -> Option<i32> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: makes an empty handle, which the next call fills.
    let mut device = unsafe { mlx_sys::mlx_device_new() };
    let (mut kind, mut index) = (mlx_sys::mlx_device_type__MLX_CPU, 0);
    // SAFETY: `stream` is live and `device` the handle made above.
    let known = unsafe {
        mlx_sys::mlx_stream_get_device(&mut device, stream.as_ptr()) == 0
            && mlx_sys::mlx_device_get_type(&mut kind, device) == 0
            && mlx_sys::mlx_device_get_index(&mut index, device) == 0
    };
    // SAFETY: freed once, not used after.
    unsafe { mlx_sys::mlx_device_free(device) };
    (known && kind == mlx_sys::mlx_device_type__MLX_GPU).then_some(index)
}

/// The GPU's architecture, such as `applegpu_g13s`, or nothing if MLX does not say.
pub(crate) fn architecture() -> Option<String> {
    info(c"architecture")
}

/// A text that MLX has about the GPU.
pub(crate) fn info(key: &CStr) -> Option<String> {
    // SAFETY: makes a device handle; it has no precondition.
    let device = unsafe { mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0) };
    // SAFETY: makes an empty handle, which the next call fills.
    let mut info = unsafe { mlx_sys::mlx_device_info_new() };
    let mut value = std::ptr::null();
    // SAFETY: the handles are live, the key is NUL-terminated, and `value` is read only when the call says that it
    // points to a string, which lives as long as `info`.
    let text = unsafe {
        let found = mlx_sys::mlx_device_info_get(&mut info, device) == 0
            && mlx_sys::mlx_device_info_get_string(&mut value, info, key.as_ptr()) == 0;
        (found && !value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
    };
    // SAFETY: each freed once, not used after.
    unsafe {
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(device);
    }
    text
}

/// What launches depend on, as the driver has it for GPU `index`, or why it does not say.
pub(crate) fn cuda(index: i32) -> Result<Cuda, String> {
    let (mut multiprocessors, mut major, mut minor) = (0, 0, 0);
    message::status(|Message { text, len }| {
        // SAFETY: writes to live places; C++ catches its exceptions.
        unsafe { trellis_cuda_attributes(index, &mut multiprocessors, &mut major, &mut minor, text, len) }
    })?;
    let natural = |n: c_int| u32::try_from(n).unwrap_or(0);
    Ok(Cuda { multiprocessors: natural(multiprocessors), capability: (natural(major), natural(minor)) })
}

/// The path of the library that holds MLX, where it is a library of its own.
pub(crate) fn mlx_library() -> Option<PathBuf> {
    let mut path = [0 as c_char; 4096];
    // SAFETY: C++ writes with snprintf within the length.
    unsafe { trellis_mlx_library(path.as_mut_ptr(), path.len() as u64) };
    // SAFETY: `path` was zeroed and snprintf ends what it writes with a NUL.
    let text = unsafe { CStr::from_ptr(path.as_ptr()) }.to_string_lossy();
    (!text.is_empty()).then(|| PathBuf::from(text.into_owned()))
}

/// Makes the process end without MLX's and CUDA's destructors, whatever its exit code.
#[cfg(target_os = "linux")]
pub(crate) fn skip_teardown() {
    use std::ffi::c_void;

    unsafe extern "C" {
        // glibc's, which MLX's Linux builds need anyway: an exit handler that is told the exit code.
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        fn fflush(stream: *mut c_void) -> c_int;
        fn _exit(status: c_int) -> !;
    }
    extern "C" fn leave(status: c_int, _: *mut c_void) {
        // SAFETY: a null stream means all of them; neither call has another precondition.
        unsafe {
            fflush(std::ptr::null_mut());
            _exit(status)
        }
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    // SAFETY: the handler takes no argument and does not return.
    ONCE.call_once(|| unsafe {
        on_exit(leave, std::ptr::null_mut());
    });
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn skip_teardown() {}
