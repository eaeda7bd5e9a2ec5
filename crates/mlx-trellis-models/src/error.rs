//! The crate's error.

use std::fmt;
use std::io;
use std::path::PathBuf;

use mlx_rs::error::Exception;
use thiserror::Error;
use trellis_codec::ArtifactError;
use trellis_codec::artifact::Dtype;

/// What can go wrong with a language model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused to read a file.
    #[error("{}: cannot read: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// A file that is not the JSON it should be.
    #[error("{}: found {found}, expected {expected}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What it holds, or what the parser said.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A model that this crate has no decoder for.
    #[error("{}: model_type: found {found}, expected one of {}", file.display(), supported.join(", "))]
    Family {
        /// The `config.json`.
        file: PathBuf,
        /// Its `model_type`.
        found: String,
        /// Every `model_type` there is a decoder for.
        supported: &'static [&'static str],
    },
    /// A setting of a model's that is missing, out of range, or that this crate does not implement.
    #[error("{}: {key}: found {found}, expected {expected}", file.display())]
    Setting {
        /// The file.
        file: PathBuf,
        /// The setting, with the module before it where it is one module's.
        key: String,
        /// Its value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A tensor of the model that is not in the folder.
    #[error("{}: tensor {tensor}: found no such tensor, expected {expected}", location.display())]
    MissingTensor {
        /// The file or folder.
        location: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        expected: String,
    },
    /// A tensor of another type or shape than the model's.
    #[error("{}: tensor {tensor}: found {found} {found_shape:?}, expected {expected}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// Its shape.
        found_shape: Vec<usize>,
        /// Type and shape expected.
        expected: String,
    },
    /// A trellis module of another shape than the model's.
    #[error("{}: module {module}: found trellis codes of {found}, expected {expected}", location.display())]
    Module {
        /// The file or folder.
        location: PathBuf,
        /// The module.
        module: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Tensors that the model does not have.
    #[error("{}: found {count} tensors that no part of the model takes, expected none; the first is {tensor}", file.display())]
    UnknownTensors {
        /// The first one's file.
        file: PathBuf,
        /// The first one.
        tensor: String,
        /// How many there are.
        count: usize,
    },
    /// A tokenizer that cannot be read, or text that it does not take.
    #[error("{}: {reason}", file.display())]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A chat template that is missing or fails.
    #[error("{}: chat template: {reason}", file.display())]
    Template {
        /// The file, or the folder that has none.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Tokens that a model does not take.
    #[error("found {found}, expected {expected}")]
    Tokens {
        /// What was given.
        found: String,
        /// What should have been.
        expected: String,
    },
    /// A sampling parameter out of range.
    #[error("{what}: found {found}, expected {expected}")]
    Sampling {
        /// The parameter.
        what: &'static str,
        /// Its value.
        found: f32,
        /// Its range.
        expected: &'static str,
    },
    /// Logits with no greatest: a model whose weights or activations are NaN.
    #[error("logits: found NaN at token {position}, expected numbers")]
    NotANumber {
        /// The position of the token that was to be sampled, counted from the start of the prompt.
        position: usize,
    },
    /// A folder's weights that cannot be read.
    #[error(transparent)]
    Artifact(Box<ArtifactError>),
    /// A trellis layer that cannot be made.
    #[error(transparent)]
    Trellis(Box<mlx_trellis::Error>),
    /// An error of MLX's.
    #[error(transparent)]
    Mlx(#[from] Exception),
}

impl From<ArtifactError> for Error {
    fn from(error: ArtifactError) -> Self {
        Self::Artifact(Box::new(error))
    }
}

impl From<mlx_trellis::Error> for Error {
    fn from(error: mlx_trellis::Error) -> Self {
        Self::Trellis(Box::new(error))
    }
}

impl Error {
    pub(crate) fn setting(
        file: &std::path::Path,
        key: impl Into<String>,
        found: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Setting {
            file: file.to_owned(),
            key: key.into(),
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}
