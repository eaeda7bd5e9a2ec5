//! Runs the body of a Metal kernel on the CPU, and catches what a GPU would let pass.
//!
//! For tests on machines without Metal. [`Kernel`] takes what MLX's `fast.metal_kernel` takes;
//! [`Emulator::source`] is the text MLX would hand to Metal's compiler, and [`Emulator::run`] compiles that text
//! as C++ with the system's compiler and runs it over the grid, every GPU thread a fiber, in a process of its
//! own. The same launch is run under several orders of threads, with different bytes in unset memory, and must
//! give the same bits each time.
//!
//! ```
//! use msl_emu::{Dtype, Emulator, Kernel, RunOptions};
//!
//! let kernel = Kernel::new("double", "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
//!     .input("x", Dtype::Float32, [64])
//!     .output("y", Dtype::Float32, [64])
//!     .launch([64, 1, 1], [32, 1, 1]);
//! let x: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_le_bytes()).collect();
//! let outcome = Emulator::new(None)?.run(&kernel, &[&x], &RunOptions::checked())?;
//! assert_eq!(outcome.outputs[0][4..8], 2.0f32.to_le_bytes());
//! # Ok::<(), msl_emu::EmuError>(())
//! ```
//!
//! | caught | [`Mode::Fast`] | [`Mode::Checked`] |
//! |---|---|---|
//! | access outside a buffer or threadgroup variable | by unmapped pages, on the guarded side exact to 16 bytes | exact |
//! | write to an input | yes | yes |
//! | output element never written | yes | yes |
//! | output element written by two threads, or read unset | if bits change | yes |
//! | barrier or SIMD operation under divergence | yes | yes |
//! | SIMD operation naming a lane that is not there, or arguments that must be uniform | yes | yes |
//! | unset threadgroup memory read | if bits change | yes |
//! | race on threadgroup memory | if bits change | yes, with both lines |
//! | misaligned vector access, index outside a known array, shift by the width | no | yes |
//! | small input (`constant`) passed where `device` is declared | yes | yes |
//! | integer division by zero, stack overflow, endless loop | yes | yes |
//!
//! When bits change in fast mode, or an output element holds poison, the launch is run again checked, to name the
//! cause. Lanes of one SIMD group race like any other threads, unless a `simdgroup_barrier` lies between. A barrier
//! orders only the memory its flags name. Accesses are counted in checked mode ([`Cost`]); [`Mode::Cost`] adds
//! arithmetic.
//!
//! Lines of the body are found with binutils' `addr2line` and arithmetic with its `objdump`; without them a fault
//! names no line and the count is absent.
//!
//! Where this differs from Metal:
//! - `a * b + c` rounds twice, where Metal may make it one fma ([`RunOptions::contract`] does so too).
//! - Of the address spaces, only `constant` pointers to scalars are a type of their own; other mixtures compile.
//! - The order in which `simd_sum` and the 8 x 8 products add is this crate's own, as Apple does not document one.
//! - Mathematical functions are the host's, whatever `fast::` or `precise::` says.
//! - `c ? h : 1.0f` with a `half` or `bfloat` h does not compile: write `float(h)`. Nor does `int i = h`.
//! - Textures, quad-group operations and threadgroup parameters are absent.
#![forbid(unsafe_code)]

mod cost;
mod emulator;
mod error;
mod kernel;
mod report;
mod toolchain;
mod translate;
mod wrapper;

pub use cost::{Arithmetic, Cost};
pub use emulator::{Emulator, Mode, Order, Outcome, RunOptions};
pub use error::{Access, Element, EmuError, Fault, FaultKind, Lane, Location, Part};
pub use kernel::{Array, Dtype, Kernel, TemplateArg};

/// The Metal source that MLX 0.32.2 writes for a kernel, without MLX's own header before it.
pub fn source(kernel: &Kernel) -> String {
    wrapper::source(kernel)
}
