//! GPU kernels for trellis-coded matrices, as data: what each computes, which problems it takes, and how it is
//! launched. No MLX and no device here; `mlx-trellis` hands a [`Launch`] to MLX's custom kernels, and the tests run
//! it on the CPU with `msl-emu`.
//!
//! One folder is one family: `mod.rs` holds the idea, the eligibility and the launch, `*.metal` the bodies,
//! `tests.rs` their proof; `cuda.rs` and `*.cu` are the same for CUDA. [`prelude`] writes the headers that all bodies
//! share from the constants of `trellis-codec`. A new kernel is a folder and a line in [`ALL`] or [`cuda::ALL`].
//!
//! ```
//! use trellis_codec::reference::Dtype;
//! use trellis_codec::{Axis, Geometry};
//! use trellis_kernels::{Problem, scatter};
//!
//! let geometry = Geometry::new(Axis::Output, 3, 12, 256, 17408, 5120)?;
//! let launch = scatter::launch(&Problem::new(geometry, 1, Dtype::Bf16))?;
//! assert_eq!(launch.name, "trellis_scatter_balanced");
//! assert_eq!(launch.grid, [128, 5, 128]);
//! assert!(scatter::launch(&Problem::new(geometry, 5, Dtype::Bf16)).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod cuda;
#[cfg(any(test, feature = "emulator"))]
pub mod emulator;
mod launch;
pub mod prelude;
mod problem;

pub mod expand;
pub mod reduce;
pub mod scatter;
pub mod splitk;

#[cfg(test)]
mod support;
#[cfg(test)]
mod tests;

pub use launch::{Array, Launch, TemplateValue, Type};
pub use problem::{Cuda, Gpu, Problem, Reason, Unsupported, Variant, VariantError};

/// Lanes of a SIMD group.
pub const SIMD_LANES: usize = 32;

/// Every Metal kernel; [`cuda::ALL`] has those of CUDA.
pub static ALL: [&Kernel; 8] = [
    &scatter::GENERIC,
    &scatter::BALANCED,
    &scatter::GENERIC_SHARED,
    &scatter::BALANCED_SHARED,
    &splitk::PARTIAL,
    &splitk::REDUCTION,
    &expand::PLAIN,
    &expand::VECTORISED,
];

/// One kernel: its name, the problems it takes, and its launch for one of them.
#[derive(Debug)]
pub struct Kernel {
    /// The name it is registered and cached under; no two kernels share one.
    pub name: &'static str,
    check: fn(&Problem) -> Result<(), Reason>,
    build: fn(&Problem) -> Launch,
}

impl Kernel {
    /// Whether this kernel takes the problem.
    ///
    /// # Errors
    /// The first rule of the kernel that the problem breaks.
    pub fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        (self.check)(problem).map_err(|reason| Unsupported {
            kernel: self.name,
            problem: Box::new(*problem),
            reason,
        })
    }

    /// The launch that computes the problem.
    ///
    /// # Errors
    /// As [`Kernel::supports`], and none besides.
    pub fn launch(&self, problem: &Problem) -> Result<Launch, Unsupported> {
        self.supports(problem)?;
        Ok((self.build)(problem))
    }
}
