//! Derivatives of a product by custom kernels, which have none of their own.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_rs::Array;
use mlx_rs::error::Exception;

use super::message::{self, Message};
use crate::error::Error;
use crate::weights::{MatmulOptions, TrellisWeights, trellis_matmul_with};

type Build = unsafe extern "C" fn(
    payload: *const c_void,
    back: bool,
    x: mlx_sys::mlx_array,
    codes: mlx_sys::mlx_array,
    scales: mlx_sys::mlx_array,
    result: *mut mlx_sys::mlx_array,
    message: *mut c_char,
    message_len: u64,
) -> c_int;

unsafe extern "C" {
    fn trellis_mlx_is_traced(x: mlx_sys::mlx_array) -> bool;

    fn trellis_mlx_with_gradient(
        result: *mut mlx_sys::mlx_array,
        y: mlx_sys::mlx_array,
        x: mlx_sys::mlx_array,
        codes: mlx_sys::mlx_array,
        scales: mlx_sys::mlx_array,
        payload: *mut c_void,
        build: Build,
        drop: unsafe extern "C" fn(*mut c_void),
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;
}

/// Whether a transformation of MLX's, such as a gradient, is looking at `x`.
pub(crate) fn is_traced(x: &Array) -> bool {
    // SAFETY: the handle is borrowed from a live array.
    unsafe { trellis_mlx_is_traced(x.as_ptr()) }
}

/// What a derivative needs to be built, on whichever thread asks for it.
struct Payload {
    geometry: trellis_codec::Geometry,
    options: MatmulOptions,
}

/// `y`, which is the product of `x` and `weights`, with derivatives for x: products with the same matrix.
pub(crate) fn with_gradient(
    y: &Array,
    x: &Array,
    weights: &TrellisWeights,
    options: MatmulOptions,
) -> Result<Array, Exception> {
    let payload = Box::into_raw(Box::new(Payload { geometry: *weights.geometry(), options }));
    // SAFETY: makes an empty handle; it has no precondition.
    let mut result = unsafe { mlx_sys::mlx_array_new() };
    let status = message::status(|Message { text, len }| {
        // SAFETY: the handles are borrowed from live arrays and `result` is the empty one made above; C++ owns
        // `payload` from here on, gives it to `build` while it lives and to `drop_payload` once; it catches its
        // exceptions.
        unsafe {
            trellis_mlx_with_gradient(
                &mut result,
                y.as_ptr(),
                x.as_ptr(),
                weights.codes().as_ptr(),
                weights.scales().as_ptr(),
                payload.cast(),
                build,
                drop_payload,
                text,
                len,
            )
        }
    });
    match status {
        // SAFETY: on success C++ stored a new array in `result`, which nobody else owns.
        Ok(()) => Ok(unsafe { Array::from_ptr(result) }),
        Err(message) => {
            // SAFETY: on failure `result` is still the empty handle made above; freed once.
            unsafe { mlx_sys::mlx_array_free(result) };
            Err(Exception::custom(message))
        }
    }
}

/// # Safety
/// `payload` came from [`with_gradient`] and is not used after.
unsafe extern "C" fn drop_payload(payload: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(payload.cast::<Payload>()) });
}

/// # Safety
/// `payload` is a live [`Payload`], the arrays are live, `result` is an empty handle, `message` has `message_len` bytes.
unsafe extern "C" fn build(
    payload: *const c_void,
    back: bool,
    x: mlx_sys::mlx_array,
    codes: mlx_sys::mlx_array,
    scales: mlx_sys::mlx_array,
    result: *mut mlx_sys::mlx_array,
    message: *mut c_char,
    message_len: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let payload = unsafe { &*payload.cast::<Payload>() };
    let product = || -> Result<Array, Error> {
        let [x, codes, scales] = [x, codes, scales].map(|array| {
            // SAFETY: a fresh handle takes a reference of its own to a live array.
            unsafe {
                let mut own = mlx_sys::mlx_array_new();
                mlx_sys::mlx_array_set(&mut own, array);
                Array::from_ptr(own)
            }
        });
        let geometry = if back { payload.geometry.transposed() } else { payload.geometry };
        trellis_matmul_with(&x, &TrellisWeights::new(codes, scales, geometry)?, payload.options)
    };
    let text = match catch_unwind(AssertUnwindSafe(product)) {
        Ok(Ok(y)) => {
            // SAFETY: `result` is an empty handle, which takes a reference of its own.
            return c_int::from(unsafe { mlx_sys::mlx_array_set(result, y.as_ptr()) } != 0);
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => "a derivative of the product panicked".to_owned(),
    };
    let room = usize::try_from(message_len).unwrap_or(0).saturating_sub(1);
    let n = text.len().min(room);
    if room > 0 {
        // SAFETY: `message` has room for `n` bytes and a NUL.
        unsafe {
            message.copy_from_nonoverlapping(text.as_ptr().cast(), n);
            message.add(n).write(0);
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use mlx_rs::ops::matmul;
    use mlx_rs::transforms;
    use trellis_codec::{Axis, Geometry, f16};

    use super::*;
    use crate::weights::{dequantize, trellis_matmul};

    /// Wrapped round a product that hides its own gradient, as custom kernels do.
    #[test]
    fn derivatives_are_products() {
        let geometry = Geometry::new(Axis::Output, 2, 12, 256, 3, 256).expect("a geometry");
        let codes: Vec<u32> = (0..geometry.words() as u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
        let weights = TrellisWeights::from_slices(&codes, &[f16::ONE; 3], geometry).expect("weights");
        let f = {
            let weights = weights.clone();
            move |args: &[Array]| {
                assert!(is_traced(&args[0]));
                let y = mlx_rs::stop_gradient(trellis_matmul(&args[0], &weights).expect("y")).expect("y");
                vec![with_gradient(&y, &args[0], &weights, MatmulOptions::default()).expect("y")]
            }
        };
        let x = Array::from_slice(&[0.5f32, -1.0, 2.0], &[1, 3]);
        assert!(!is_traced(&x));
        let dy = mlx_rs::ops::ones::<f32>(&[1, 256]).expect("ones");
        let (_, dx) = transforms::vjp(f.clone(), from_ref(&x), from_ref(&dy)).expect("a gradient");
        let dense = dequantize(&weights, mlx_rs::Dtype::Float32).expect("a weight");
        let expected = matmul(&dy, &dense).expect("a product");
        for (a, b) in
            std::iter::zip(dx[0].to_vec_exact::<f32>().unwrap(), expected.to_vec_exact::<f32>().unwrap())
        {
            assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{a} {b}");
        }
        let (y, tangent) = transforms::jvp(f, from_ref(&x), from_ref(&x)).expect("a derivative");
        assert_eq!(y[0].to_vec_exact::<f32>().unwrap(), tangent[0].to_vec_exact::<f32>().unwrap());
    }
}
