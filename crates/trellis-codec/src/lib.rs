//! The trellis-coded weight format (QTIP's "1MAD" code), in pure Rust.
//!
//! [`format`](mod@format) states it; [`pack`] turns trellis states into words and back; [`codebook`] gives a
//! state its value; [`reference`] is the float64 oracle every back end is tested against; [`cases`] reads folders
//! of reference cases.
#![forbid(unsafe_code)]

pub mod cases;
pub mod codebook;
mod error;
pub mod format;
pub mod pack;
pub mod reference;

pub use error::{GeometryError, PackError};
pub use format::{Axis, Geometry, Layout};
pub use half::{bf16, f16};
