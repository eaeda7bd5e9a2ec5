//! Writes a function of arrays to a file that Python, Swift and Rust can import, without evaluating anything.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use mlx_rs::error::Exception;
use mlx_rs::{Array, Stream};

use crate::error::Error;

type Callback =
    unsafe extern "C" fn(*mut c_void, mlx_sys::mlx_vector_array, *mut mlx_sys::mlx_array) -> c_int;

unsafe extern "C" {
    fn trellis_mlx_placeholder_gpu(stream: mlx_sys::mlx_stream);

    fn trellis_mlx_export(
        path: *const c_char,
        args: mlx_sys::mlx_vector_array,
        f: Callback,
        payload: *mut c_void,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;
}

/// A stream of a GPU that need not exist: kernels can be recorded on it, nothing can be evaluated.
pub(crate) fn placeholder_gpu() -> Stream {
    let stream = Stream::cpu();
    // SAFETY: the handle is the fresh one made above, which owns its stream object.
    unsafe { trellis_mlx_placeholder_gpu(stream.as_ptr()) };
    stream
}

/// What the trampoline needs and leaves behind.
struct Call<'a> {
    f: &'a mut dyn FnMut(&[Array]) -> Result<Array, Error>,
    outcome: Option<std::thread::Result<Error>>,
}

/// Writes `f`, traced on arguments of the shapes and dtypes of `args`, to `path`.
pub(crate) fn export(
    path: &CString,
    args: &[Array],
    mut f: impl FnMut(&[Array]) -> Result<Array, Error>,
) -> Result<(), Error> {
    // SAFETY: makes an empty vector; it has no precondition.
    let vector = unsafe { mlx_sys::mlx_vector_array_new() };
    for arg in args {
        // SAFETY: both handles are live; the vector takes a reference of its own.
        if unsafe { mlx_sys::mlx_vector_array_append_value(vector, arg.as_ptr()) } != 0 {
            // SAFETY: freed once, not used after.
            unsafe { mlx_sys::mlx_vector_array_free(vector) };
            return Err(Exception::custom("MLX could not take an argument").into());
        }
    }
    let mut call = Call { f: &mut f, outcome: None };
    let mut message = [0 as c_char; 512];
    // SAFETY: `path`, `vector`, `call` and `message` outlive the call, which does not keep them; `trampoline` takes a
    // `Call` and does not unwind.
    let status = unsafe {
        trellis_mlx_export(
            path.as_ptr(),
            vector,
            trampoline,
            (&raw mut call).cast(),
            message.as_mut_ptr(),
            message.len() as u64,
        )
    };
    // SAFETY: freed once, not used after.
    unsafe { mlx_sys::mlx_vector_array_free(vector) };
    match (status, call.outcome) {
        (0, _) => Ok(()),
        (_, Some(Ok(error))) => Err(error),
        (_, Some(Err(panic))) => resume_unwind(panic),
        (_, None) => {
            // SAFETY: `message` was zeroed and C++ writes with snprintf within its length, so a NUL ends it.
            let text = unsafe { CStr::from_ptr(message.as_ptr()) };
            Err(Exception::custom(text.to_string_lossy()).into())
        }
    }
}

/// # Safety
/// `payload` is the [`Call`] of [`export`], `inputs` a live vector and `output` an empty handle.
unsafe extern "C" fn trampoline(
    payload: *mut c_void,
    inputs: mlx_sys::mlx_vector_array,
    output: *mut mlx_sys::mlx_array,
) -> c_int {
    // SAFETY: the caller's promise.
    let call = unsafe { &mut *payload.cast::<Call<'_>>() };
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `inputs` is live; each handle is a fresh one that `get` fills with a reference of its own.
        let inputs: Vec<Array> = unsafe {
            (0..mlx_sys::mlx_vector_array_size(inputs))
                .map(|i| {
                    let mut array = mlx_sys::mlx_array_new();
                    mlx_sys::mlx_vector_array_get(&mut array, inputs, i);
                    Array::from_ptr(array)
                })
                .collect()
        };
        (call.f)(&inputs)
    }));
    match result {
        Ok(Ok(array)) => {
            // SAFETY: `output` is an empty handle of the caller's, which frees what is put there.
            c_int::from(unsafe { mlx_sys::mlx_array_set(output, array.as_ptr()) } != 0)
        }
        Ok(Err(error)) => {
            call.outcome = Some(Ok(error));
            1
        }
        Err(panic) => {
            call.outcome = Some(Err(panic));
            1
        }
    }
}
