//! The trellis-coded weight format (QTIP's "1MAD" code), in pure Rust.
//!
//! [`format`](mod@format) states it; [`pack`] turns trellis states into words and back; [`codebook`] gives a
//! state its value; [`mod@reference`] is the float64 oracle every back end is tested against; [`artifact`] reads
//! and writes files; [`rotation`] turns a layer's input; [`cases`] reads folders of reference cases.
#![deny(unsafe_code)]

pub mod artifact;
pub mod cases;
pub mod codebook;
mod encode;
mod error;
mod ffi {
    pub(crate) mod map;
}
pub mod format;
pub mod pack;
pub mod reference;
pub mod rotation;

pub use encode::{
    DEFAULT_DAMPING, EncodeLevel, EncodeOptions, EncodeReport, Encoded, Encoder, Fallback, FeedbackReport,
    Hessian, ScaleRule, encode, encode_with_feedback, stored_rows,
};
pub use error::{ArtifactError, EncodeError, GeometryError, HessianError, PackError, RotationError};
pub use format::{Axis, Geometry, Layout};
pub use half::{bf16, f16};
pub use rotation::Rotation;
