//! The crate's errors.

use mlx_rs::Dtype;
use mlx_rs::error::Exception;
use thiserror::Error;
use trellis_codec::{ArtifactError, EncodeError, GeometryError, PackError, RotationError};
use trellis_kernels::Unsupported;

/// What can go wrong with a trellis layer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The last dimension of x is not the layer's input features.
    #[error("x has shape {shape:?}, expected {in_features} as its last dimension")]
    Shape {
        /// The shape of x.
        shape: Vec<i32>,
        /// The layer's input features.
        in_features: usize,
    },
    /// A scalar where rows of activations are wanted.
    #[error("x is a scalar, expected at least one dimension of {in_features}")]
    Scalar {
        /// The layer's input features.
        in_features: usize,
    },
    /// A dtype the products do not take.
    #[error("{what} is {found:?}, expected float32, float16 or bfloat16")]
    Dtype {
        /// Which array or argument.
        what: &'static str,
        /// Its dtype.
        found: Dtype,
    },
    /// A tensor of a file whose dtype no array of MLX's is made of here.
    #[error("tensor is {found:?}, expected F32, F16, BF16 or U32")]
    TensorDtype {
        /// Its dtype in the file.
        found: trellis_codec::artifact::Dtype,
    },
    /// Codes, scales or bias that are not what the geometry asks for.
    #[error(
        "{what} is {found_dtype:?} {found_shape:?}, expected {expected_dtype} {expected_shape:?} for {geometry}"
    )]
    Parameter {
        /// `weight`, `scales` or `bias`.
        what: &'static str,
        /// Dtype found.
        found_dtype: Dtype,
        /// Shape found.
        found_shape: Vec<i32>,
        /// Dtype expected.
        expected_dtype: &'static str,
        /// Shape expected.
        expected_shape: Vec<usize>,
        /// The layer's geometry.
        geometry: Box<trellis_codec::Geometry>,
    },
    /// A dimension that MLX cannot hold.
    #[error("{what} has a dimension of {found}, expected at most 2147483647 (MLX shapes are 32-bit)")]
    TooLarge {
        /// Which array.
        what: &'static str,
        /// The dimension.
        found: usize,
    },
    /// A weight that is no matrix.
    #[error("weight has shape {shape:?}, expected [out_features, in_features]")]
    NotAMatrix {
        /// Its shape.
        shape: Vec<i32>,
    },
    /// Neither axis of a weight divides into blocks.
    #[error("weight [{out_features}, {in_features}] divides into no legal block along {axis}")]
    NoBlock {
        /// Rows of `W`.
        out_features: usize,
        /// Columns of `W`.
        in_features: usize,
        /// The axis or axes tried.
        axis: &'static str,
    },
    /// A geometry outside the format.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A rotation outside the format, or one that does not fit its layer.
    #[error(transparent)]
    Rotation(#[from] RotationError),
    /// A slice that does not fit its geometry.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A weight that cannot be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A file that cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A product that the chosen GPU kernel does not take.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// CUDA kernels that cannot run here.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A path that MLX cannot open.
    #[error("{}: found a path with a NUL byte or invalid UTF-8, expected one that MLX can open", path.display())]
    Path {
        /// The path.
        path: std::path::PathBuf,
    },
    /// An error of MLX's own.
    #[error(transparent)]
    Mlx(#[from] Exception),
}

/// What CUDA kernels lack on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// MLX without a CUDA back end.
    #[error("MLX {mlx} was built without CUDA; `cargo xtask mlx --backend cuda13` sets up one that was")]
    NotBuilt {
        /// MLX's version.
        mlx: String,
    },
    /// No driver, no GPU, or a driver that does not answer.
    #[error("no CUDA device: {reason}")]
    Driver {
        /// What the driver or the loader said.
        reason: String,
    },
    /// No headers for the compilation of kernels at run time.
    #[error(
        "CUDA's headers are missing: no {header} in {}; set CUDA_HOME to a CUDA toolkit",
        looked.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Headers {
        /// The header looked for.
        header: &'static str,
        /// The folders looked in.
        looked: Vec<std::path::PathBuf>,
    },
}

impl From<Error> for Exception {
    fn from(error: Error) -> Self {
        match error {
            Error::Mlx(exception) => exception,
            other => Exception::custom(other.to_string()),
        }
    }
}
