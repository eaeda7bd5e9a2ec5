//! Products with trellis-coded matrices on the CPU, without unpacking them: `y = x · Wᵀ` straight from the codes.
//!
//! The format and the numerical contracts are `trellis-codec`'s; this crate computes contracts P, E and F for any
//! geometry it allows, on the widest instructions the machine has ([`Level::best`]) or on those asked for.
//!
//! ```
//! use trellis_codec::{Axis, Geometry, f16};
//! use trellis_cpu::{Level, Matrix, contract_for, matmul};
//!
//! let geometry = Geometry::new(Axis::Input, 3, 12, 256, 4, 256)?; // W is [out 4, in 256]
//! let codes = vec![0x1234_5678; geometry.words()]; // any words are valid codes
//! let scales = vec![f16::ONE; 4];
//! let matrix = Matrix::new(geometry, &codes, &scales)?;
//! let (m, x) = (2, vec![1f32; 2 * 256]);
//! let mut y = vec![0f32; 2 * 4];
//! matmul(&matrix, &x, m, contract_for(m), Level::best(), &mut y)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it is laid out
//! This file checks arguments, cuts a call into tasks and adds up their results. A task is done by one level:
//! `scalar.rs` in plain Rust, or `simd.rs`, one driver for all vector levels, over the few operations that
//! `avx2.rs`, `avx512.rs` and `neon.rs` implement. Those four files hold the crate's only unsafe code.
//!
//! # Same bits whatever the number of threads
//! Tasks are cut by shape alone and their results added in a fixed order, so a level's result for given arguments
//! never depends on the thread pool. Small calls run on the calling thread.

#![deny(unsafe_code)]

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512;
mod element;
mod error;
mod level;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
#[allow(unsafe_code)]
mod neon;
mod scalar;
#[allow(unsafe_code)]
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod simd;
mod task;

use std::borrow::Cow;

use half::f16;
use rayon::prelude::*;
use trellis_codec::format::{CODE_DIVISOR, MAX_PACKED_ROWS};
use trellis_codec::reference::Contract;
use trellis_codec::{Axis, Geometry, Layout};

pub use element::Element;
pub use error::CpuError;
pub use level::Level;

use task::{DecodeTask, InputTask, Job, OutputTask, Weights};

/// Weights below which a call is not worth a thread pool's wake-up (tens of microseconds of work).
const SERIAL_WEIGHTS: usize = 1 << 18;
/// Weights that a task should have at least, so that its start costs nothing.
const TASK_WEIGHTS: usize = 1 << 19;
/// Most parts that the rows of an axis-0 matrix are cut into: each has its own sums, to be added up after.
const MAX_ROW_PARTS: usize = 16;
/// Bytes of an axis-0 task's sums that stay in the first-level cache beside the codes.
const SUMS_BYTES: usize = 32 << 10;
/// Rows of x multiplied in one pass over the codes; more would push the sums out of the second-level cache.
const PASS_ROWS: usize = 64;

/// A stored matrix: codes in the geometry's layout and a scale for each stored row.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    geometry: Geometry,
    codes: &'a [u32],
    scales: &'a [f16],
}

impl<'a> Matrix<'a> {
    /// A matrix over borrowed `codes` (of [`Geometry::codes_shape`], flat) and `scales [rows]`.
    ///
    /// # Errors
    /// [`CpuError::Length`] for codes or scales that do not fit the geometry.
    pub fn new(geometry: Geometry, codes: &'a [u32], scales: &'a [f16]) -> Result<Self, CpuError> {
        check_len("codes", codes.len(), geometry.words(), &geometry)?;
        check_len("scales", scales.len(), geometry.rows(), &geometry)?;
        Ok(Self { geometry, codes, scales })
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }
}

/// The contract that `m` rows of x are computed with unless there is a reason: P for `m` up to
/// [`MAX_PACKED_ROWS`], E above.
pub const fn contract_for(m: usize) -> Contract {
    if m <= MAX_PACKED_ROWS { Contract::Packed } else { Contract::Expanded }
}

/// `out = x · Wᵀ` for `x [m, in]`, giving `out [m, out]`, both row-contiguous and of one type.
///
/// Sums are accumulated in binary32, one fma a weight, and rounded once. Any contract goes with any `m`, 0 too. NaN
/// and infinities in x propagate as IEEE arithmetic says. Contract F on axis 1 sums `x * y` before it scales, so an
/// x beyond `f32::MAX / 510 / in` may overflow there where P and E would not.
///
/// # Errors
/// [`CpuError::Length`] for x or out of the wrong length, [`CpuError::Unavailable`] for a level this machine lacks.
pub fn matmul<E: Element>(
    matrix: &Matrix<'_>,
    x: &[E],
    m: usize,
    contract: Contract,
    level: Level,
    out: &mut [E],
) -> Result<(), CpuError> {
    let g = &matrix.geometry;
    let (n, outputs) = (g.in_features(), g.out_features());
    check_len("x", x.len(), m.saturating_mul(n), g)?;
    check_len("out", out.len(), m.saturating_mul(outputs), g)?;
    let backend = Backend::new(level, g)?;
    let scales = task::widen_scales(matrix.scales);
    let weights = Weights::new(contract, E::DTYPE);
    let product = match g.axis() {
        Axis::Output => output::<E>,
        Axis::Input => input::<E>,
    };
    for (x, out) in x.chunks(PASS_ROWS * n).zip(out.chunks_mut(PASS_ROWS * outputs)) {
        let job = Job { matrix: *matrix, scales: &scales, weights, x: &E::widen(x), m: x.len() / n };
        product(backend, job, out);
    }
    Ok(())
}

/// The stored matrix with contract E's weights: `out [rows, cols]`, each `exact(y) * scale` rounded to the type.
///
/// # Errors
/// [`CpuError::Length`] for out of the wrong length, [`CpuError::Unavailable`] for a level this machine lacks.
pub fn expand<E: Element>(matrix: &Matrix<'_>, level: Level, out: &mut [E]) -> Result<(), CpuError> {
    decode(matrix, Weights::Expanded(E::DTYPE), level, out)
}

/// The stored matrix with contract P's weights, `out [rows, cols]`: what products with that contract multiply by.
///
/// # Errors
/// [`CpuError::Length`] for out of the wrong length, [`CpuError::Unavailable`] for a level this machine lacks.
pub fn decode_packed(matrix: &Matrix<'_>, level: Level, out: &mut [f32]) -> Result<(), CpuError> {
    decode(matrix, Weights::Packed, level, out)
}

fn check_len(what: &'static str, found: usize, expected: usize, geometry: &Geometry) -> Result<(), CpuError> {
    if found == expected {
        Ok(())
    } else {
        Err(CpuError::Length { what, found, expected, geometry: Box::new(*geometry) })
    }
}

/// A level that the machine has: the vector levels' values can only be made where their instructions were found.
#[derive(Clone, Copy)]
enum Backend {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon(neon::Neon),
}

impl Backend {
    fn new(level: Level, geometry: &Geometry) -> Result<Self, CpuError> {
        let _ = geometry;
        let found = match level {
            Level::Scalar => Some(Backend::Scalar),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::Avx2::new().map(Backend::Avx2),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::Avx512::new().and_then(|lanes| {
                let whole_groups = geometry.block().is_multiple_of(<avx512::Avx512 as simd::Lanes>::LANES);
                if whole_groups { Some(Backend::Avx512(lanes)) } else { avx2::Avx2::new().map(Backend::Avx2) }
            }),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Level::Neon => neon::Neon::new().map(Backend::Neon),
            #[allow(unreachable_patterns)]
            _ => None,
        };
        found.ok_or(CpuError::Unavailable { level })
    }

    fn output(self, task: OutputTask<'_>) {
        match self {
            Backend::Scalar => scalar::output(task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx2(lanes) => simd::output(lanes, task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx512(lanes) => simd::output(lanes, task),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Backend::Neon(lanes) => simd::output(lanes, task),
        }
    }

    fn input(self, task: InputTask<'_>) {
        match self {
            Backend::Scalar => scalar::input(task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx2(lanes) => simd::input(lanes, task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx512(lanes) => simd::input(lanes, task),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Backend::Neon(lanes) => simd::input(lanes, task),
        }
    }

    fn decode(self, task: DecodeTask<'_>) {
        match self {
            Backend::Scalar => scalar::decode(task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx2(lanes) => simd::decode(lanes, task),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx512(lanes) => simd::decode(lanes, task),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Backend::Neon(lanes) => simd::decode(lanes, task),
        }
    }
}

/// Calls `each(i, part)` for the parts of `len` elements that `all` is cut into (the last may be shorter).
fn for_each_part<T: Send>(
    geometry: &Geometry,
    all: &mut [T],
    len: usize,
    each: impl Fn(usize, &mut [T]) + Sync,
) {
    if geometry.rows() * geometry.cols() < SERIAL_WEIGHTS {
        all.chunks_mut(len).enumerate().for_each(|(i, part)| each(i, part));
    } else {
        all.par_chunks_mut(len).enumerate().for_each(|(i, part)| each(i, part));
    }
}

/// Axis 0. A task is a panel of blocks by a part of the rows. A panel is as wide as its sums fit the cache, so that
/// each row's codes are read in long runs, but no wider than a pair if interleaved: there a pair's rows follow each
/// other.
fn output<E: Element>(backend: Backend, job: Job<'_>, out: &mut [E]) {
    let (g, m) = (&job.matrix.geometry, job.m);
    let x = match job.weights {
        Weights::Factored => fold_scales(&job),
        _ => Cow::Borrowed(job.x),
    };
    let job = Job { x: &x, ..job };

    let all_blocks = g.blocks_per_row();
    let most = (SUMS_BYTES / (4 * m * g.block())).max(1);
    let blocks = match g.layout() {
        Layout::Interleaved => most.min(2),
        Layout::RowMajor => all_blocks.div_ceil(all_blocks.div_ceil(most)),
    };
    let panels = all_blocks.div_ceil(blocks);
    let width = blocks * g.block();
    let parts = (g.rows() * width / TASK_WEIGHTS).clamp(1, MAX_ROW_PARTS);
    let rows = g.rows().div_ceil(parts).next_multiple_of(8);
    let parts = g.rows().div_ceil(rows);

    let mut sums = vec![0f32; panels * parts * m * width];
    for_each_part(g, &mut sums, m * width, |i, sums| {
        let (panel, part) = (i / parts, i % parts);
        let blocks = panel * blocks..((panel + 1) * blocks).min(all_blocks);
        let rows = part * rows..((part + 1) * rows).min(g.rows());
        let sums = &mut sums[..m * blocks.len() * g.block()];
        backend.output(OutputTask { job, rows, blocks, sums });
    });

    for_each_part(g, out, g.cols(), |i, out| {
        let mut total = vec![0f32; width];
        for (panel, out) in out.chunks_mut(width).enumerate() {
            let total = &mut total[..out.len()];
            total.fill(0.0);
            for part in 0..parts {
                let at = (panel * parts + part) * m * width + i * out.len();
                total.iter_mut().zip(&sums[at..]).for_each(|(total, sum)| *total += sum);
            }
            E::narrow(total, out);
        }
    });
}

/// Axis 1. A task is a run of rows.
fn input<E: Element>(backend: Backend, job: Job<'_>, out: &mut [E]) {
    let (g, m) = (&job.matrix.geometry, job.m);
    let rows = TASK_WEIGHTS.div_ceil(g.cols()).next_multiple_of(8);
    let mut sums = vec![0f32; g.rows() * m];
    for_each_part(g, &mut sums, rows * m, |i, sums| {
        let first = i * rows;
        backend.input(InputTask { job, rows: first..first + sums.len() / m, sums });
    });

    let mut column = vec![0f32; g.rows()];
    for (i, out) in out.chunks_exact_mut(g.rows()).enumerate() {
        for (row, value) in column.iter_mut().enumerate() {
            let sum = sums[row * m + i];
            *value = match job.weights {
                Weights::Factored => times_unit(sum, job.scales[row]),
                _ => sum,
            };
        }
        E::narrow(&column, out);
    }
}

fn decode<E: Element>(
    matrix: &Matrix<'_>,
    weights: Weights,
    level: Level,
    out: &mut [E],
) -> Result<(), CpuError> {
    let g = &matrix.geometry;
    check_len("out", out.len(), g.rows().saturating_mul(g.cols()), g)?;
    let backend = Backend::new(level, g)?;
    let scales = task::widen_scales(matrix.scales);
    let job = Job { matrix: *matrix, scales: &scales, weights, x: &[], m: 0 };
    let rows = TASK_WEIGHTS.div_ceil(g.cols());
    for_each_part(g, out, rows * g.cols(), |i, out| {
        let first = i * rows;
        let rows = first..first + out.len() / g.cols();
        backend.decode(DecodeTask { job, rows, out: E::slots(out) });
    });
    Ok(())
}

/// `value * scale / d` rounded once.
fn times_unit(value: f32, scale: f32) -> f32 {
    (f64::from(value) * f64::from(scale) / f64::from(CODE_DIVISOR)) as f32
}

/// Contract F on axis 0: x with each element multiplied by its stored row's `scale / d`.
fn fold_scales<'a>(job: &Job<'_>) -> Cow<'a, [f32]> {
    let rows = job.scales.len();
    Cow::Owned(job.x.iter().enumerate().map(|(i, &x)| times_unit(x, job.scales[i % rows])).collect())
}
