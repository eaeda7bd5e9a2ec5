//! The Rust half of the lazy CPU primitive: makes graph nodes through `cpu_primitive.cpp`, and computes their
//! numbers when MLX's stream thread calls back.

use std::ffi::{CStr, c_char, c_int, c_void};

use mlx_rs::error::Exception;
use mlx_rs::{Array, Stream};
use trellis_codec::reference::{Contract, Dtype};
use trellis_codec::{Axis, Geometry, Layout, bf16, f16};
use trellis_cpu::{CpuError, Element, Level, Matrix};

/// `trellis_problem` of `cpu_primitive.h`.
#[repr(C)]
struct Problem {
    rows: u64,
    cols: u64,
    block: u64,
    axis: u32,
    bits: u32,
    state_bits: u32,
    interleaved: u32,
    contract: u32,
}

/// `trellis_dtype` of `cpu_primitive.h`.
type DtypeCode = u32;

const F32: DtypeCode = 0;
const F16: DtypeCode = 1;
const BF16: DtypeCode = 2;

unsafe extern "C" {
    fn trellis_mlx_matmul(
        result: *mut mlx_sys::mlx_array,
        problem: *const Problem,
        x: mlx_sys::mlx_array,
        codes: mlx_sys::mlx_array,
        scales: mlx_sys::mlx_array,
        stream: mlx_sys::mlx_stream,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;

    fn trellis_mlx_expand(
        result: *mut mlx_sys::mlx_array,
        problem: *const Problem,
        codes: mlx_sys::mlx_array,
        scales: mlx_sys::mlx_array,
        dtype: DtypeCode,
        stream: mlx_sys::mlx_stream,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;
}

impl Problem {
    fn new(geometry: &Geometry, contract: Contract) -> Self {
        Self {
            rows: geometry.rows() as u64,
            cols: geometry.cols() as u64,
            block: geometry.block() as u64,
            axis: geometry.axis().index(),
            bits: geometry.bits(),
            state_bits: geometry.state_bits(),
            interleaved: u32::from(geometry.layout() == Layout::Interleaved),
            contract: match contract {
                Contract::Packed => 0,
                Contract::Factored => 1,
                Contract::Expanded => 2,
            },
        }
    }

    /// The geometry that C++ hands back, and its contract. A gradient's node has its axis turned round, which an
    /// interleaved geometry reaches only through [`Geometry::transposed`].
    fn geometry(&self) -> Option<(Geometry, Contract)> {
        let axis = Axis::from_index(self.axis.into())?;
        let (layout, stored) = if self.interleaved == 0 {
            (Layout::RowMajor, axis)
        } else {
            (Layout::Interleaved, Axis::Output)
        };
        let (rows, cols, block) = (self.rows as usize, self.cols as usize, self.block as usize);
        let geometry = Geometry::new(stored, self.bits, self.state_bits, block, rows, cols)
            .and_then(|g| g.with_layout(layout))
            .ok()?;
        let contract = match self.contract {
            0 => Contract::Packed,
            1 => Contract::Factored,
            2 => Contract::Expanded,
            _ => return None,
        };
        Some((if stored == axis { geometry } else { geometry.transposed() }, contract))
    }
}

/// The lazy product `x · W`, `[..., out]` in x's dtype, on a CPU stream.
///
/// The caller has checked that x is float32, float16 or bfloat16 with `in_features` as its last dimension, that
/// codes and scales fit the geometry, and that dimensions fit 31 bits.
pub(crate) fn matmul(
    x: &Array,
    codes: &Array,
    scales: &Array,
    geometry: &Geometry,
    contract: Contract,
    stream: &Stream,
) -> Result<Array, Exception> {
    let problem = Problem::new(geometry, contract);
    guarded(|result, message, len| {
        // SAFETY: every handle is borrowed from a live mlx-rs object for the length of the call, `result` is a
        // fresh handle, `problem` and `message` outlive the call; C++ catches its exceptions.
        unsafe {
            trellis_mlx_matmul(
                result,
                &problem,
                x.as_ptr(),
                codes.as_ptr(),
                scales.as_ptr(),
                stream.as_ptr(),
                message,
                len,
            )
        }
    })
}

/// The lazy stored matrix `[rows, cols]` in `dtype` (contract E), on a CPU stream. As [`matmul`] for the rest.
pub(crate) fn expand(
    codes: &Array,
    scales: &Array,
    geometry: &Geometry,
    dtype: Dtype,
    stream: &Stream,
) -> Result<Array, Exception> {
    let problem = Problem::new(geometry, Contract::Expanded);
    let dtype = match dtype {
        Dtype::F32 => F32,
        Dtype::F16 => F16,
        Dtype::Bf16 => BF16,
    };
    guarded(|result, message, len| {
        // SAFETY: as in `matmul`.
        unsafe {
            trellis_mlx_expand(
                result,
                &problem,
                codes.as_ptr(),
                scales.as_ptr(),
                dtype,
                stream.as_ptr(),
                message,
                len,
            )
        }
    })
}

fn guarded(f: impl FnOnce(*mut mlx_sys::mlx_array, *mut c_char, u64) -> c_int) -> Result<Array, Exception> {
    let mut message = [0 as c_char; 512];
    // SAFETY: makes an empty handle; it has no precondition.
    let mut result = unsafe { mlx_sys::mlx_array_new() };
    if f(&mut result, message.as_mut_ptr(), message.len() as u64) == 0 {
        // SAFETY: on success C++ stored a new array in `result`, which nobody else owns.
        return Ok(unsafe { Array::from_ptr(result) });
    }
    // SAFETY: on failure `result` is still the empty handle made above; freed once.
    unsafe { mlx_sys::mlx_array_free(result) };
    // SAFETY: `message` was zeroed and C++ writes with snprintf within its length, so a NUL ends it.
    let text = unsafe { CStr::from_ptr(message.as_ptr()) };
    Err(Exception::custom(text.to_string_lossy()))
}

/// Called by C++ on MLX's stream thread.
///
/// # Safety
/// `codes`, `scales`, `x` (`m * in_features` numbers of `dtype`) and `out` (`m * out_features` of them) are valid
/// for what `problem` says, aligned, and `out` overlaps none of them.
#[unsafe(no_mangle)]
unsafe extern "C" fn trellis_cpu_matmul(
    problem: *const Problem,
    codes: *const u32,
    scales: *const u16,
    x: *const c_void,
    m: u64,
    dtype: DtypeCode,
    out: *mut c_void,
) -> c_int {
    // SAFETY: C++ passes a pointer to its own copy of the problem.
    let Some((geometry, contract)) = (unsafe { &*problem }).geometry() else { return 1 };
    // SAFETY: C++'s `check_weights` measured both arrays against this problem.
    let (codes, scales) = unsafe { weights(&geometry, codes, scales) };
    let m = m as usize;
    fn run<E: Element>(
        geometry: Geometry,
        codes: &[u32],
        scales: &[f16],
        x: &[E],
        m: usize,
        contract: Contract,
        out: &mut [E],
    ) -> Result<(), CpuError> {
        trellis_cpu::matmul(&Matrix::new(geometry, codes, scales)?, x, m, contract, Level::best(), out)
    }
    let (n_in, n_out) = (m * geometry.in_features(), m * geometry.out_features());
    // SAFETY: C++ checked that x is row-contiguous with `in_features` as its last dimension and m rows, allocated
    // `out` for m rows of `out_features`, and passes the code of their common dtype.
    let result = unsafe {
        match dtype {
            F32 => {
                let (x, out) = slices::<f32>(x, n_in, out, n_out);
                run(geometry, codes, scales, x, m, contract, out)
            }
            F16 => {
                let (x, out) = slices::<f16>(x, n_in, out, n_out);
                run(geometry, codes, scales, x, m, contract, out)
            }
            BF16 => {
                let (x, out) = slices::<bf16>(x, n_in, out, n_out);
                run(geometry, codes, scales, x, m, contract, out)
            }
            _ => return 1,
        }
    };
    c_int::from(result.is_err())
}

/// Called by C++ on MLX's stream thread.
///
/// # Safety
/// As [`trellis_cpu_matmul`]; `out` holds `rows * cols` numbers of `dtype`.
#[unsafe(no_mangle)]
unsafe extern "C" fn trellis_cpu_expand(
    problem: *const Problem,
    codes: *const u32,
    scales: *const u16,
    dtype: DtypeCode,
    out: *mut c_void,
) -> c_int {
    // SAFETY: C++ passes a pointer to its own copy of the problem.
    let Some((geometry, _)) = (unsafe { &*problem }).geometry() else { return 1 };
    // SAFETY: C++'s `check_weights` measured both arrays against this problem.
    let (codes, scales) = unsafe { weights(&geometry, codes, scales) };
    let Ok(matrix) = Matrix::new(geometry, codes, scales) else { return 1 };
    let n = geometry.rows() * geometry.cols();
    // SAFETY: C++ allocated `out` for `rows * cols` numbers of this dtype, and nothing else refers to it.
    let result = unsafe {
        match dtype {
            F32 => trellis_cpu::expand(
                &matrix,
                Level::best(),
                std::slice::from_raw_parts_mut(out.cast::<f32>(), n),
            ),
            F16 => trellis_cpu::expand(
                &matrix,
                Level::best(),
                std::slice::from_raw_parts_mut(out.cast::<f16>(), n),
            ),
            BF16 => trellis_cpu::expand(
                &matrix,
                Level::best(),
                std::slice::from_raw_parts_mut(out.cast::<bf16>(), n),
            ),
            _ => return 1,
        }
    };
    c_int::from(result.is_err())
}

/// # Safety
/// `codes` holds the words and `scales` the rows of `geometry`, and both outlive their use.
unsafe fn weights<'a>(geometry: &Geometry, codes: *const u32, scales: *const u16) -> (&'a [u32], &'a [f16]) {
    // SAFETY: the caller's promise; f16 is a transparent u16.
    unsafe {
        (
            std::slice::from_raw_parts(codes, geometry.words()),
            std::slice::from_raw_parts(scales.cast::<f16>(), geometry.rows()),
        )
    }
}

/// # Safety
/// `x` holds `n_in` and `out` `n_out` numbers of type `E`; they do not overlap and outlive their use.
unsafe fn slices<'a, E>(
    x: *const c_void,
    n_in: usize,
    out: *mut c_void,
    n_out: usize,
) -> (&'a [E], &'a mut [E]) {
    // SAFETY: the caller's promise.
    unsafe { (std::slice::from_raw_parts(x.cast(), n_in), std::slice::from_raw_parts_mut(out.cast(), n_out)) }
}
