//! What `trellis quantize` and `trellis dequantize` read: a Hugging Face, MLX or trellis folder, one safetensors file,
//! or a GGUF file. Names, shapes and types are known once it is open; numbers are read a tensor at a time.

mod folder;
mod gguf;
mod gguf_model;
mod tokenizer;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use mlx_trellis::{bf16, f16};
use serde_json::{Map, Value};
use trellis_codec::artifact::Dtype;

use folder::Folder;
use gguf_model::Model;
pub(crate) use gguf_model::set_dtype;

/// A model's tensors and what goes with them.
pub(crate) enum Source {
    /// Safetensors.
    Folder(Folder),
    /// GGUF, under the names of Hugging Face.
    Gguf { path: PathBuf, model: Model },
}

/// A tensor as it is multiplied: a quantized one counts once, by its dense shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The type of its numbers; for a quantized one the type it is decoded to.
    pub(crate) dtype: Dtype,
    pub(crate) stored: Stored,
}

/// How a tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As they are.
    Plain,
    /// In a quantized type of GGUF, by its name.
    Gguf(&'static str),
    /// In MLX's affine codes.
    Affine { bits: i32, group: i32 },
    /// In trellis codes.
    Trellis,
}

impl TensorInfo {
    /// Whether it holds floating-point numbers that can be coded.
    pub(crate) fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The path of the module whose weight it is.
    pub(crate) fn module(&self) -> Option<&str> {
        self.name.strip_suffix(".weight")
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain => f.write_str("not quantized"),
            Self::Gguf(name) => write!(f, "GGUF {name}"),
            Self::Affine { bits, group } => write!(f, "MLX affine, {bits} bits in groups of {group}"),
            Self::Trellis => f.write_str("trellis"),
        }
    }
}

/// The numbers of a tensor, row-major, in one of the types that can be coded.
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// A file that the size and time of its last change identify.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Identity {
    file: String,
    bytes: u64,
    modified_ns: u128,
}

impl Source {
    /// Opens a `.gguf` file, a `.safetensors` file or a folder.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|e| e == "gguf") {
            return Ok(Self::Gguf { path: path.to_owned(), model: Model::open(path)? });
        }
        Ok(Self::Folder(Folder::open(path)?))
    }

    /// The tensors, in the order in which they are written.
    pub(crate) fn tensors(&self) -> &[TensorInfo] {
        match self {
            Self::Folder(folder) => folder.tensors(),
            Self::Gguf { model, .. } => model.tensors(),
        }
    }

    /// The numbers of tensor `index` of [`Source::tensors`], a floating-point one; quantized ones are decoded.
    pub(crate) fn values(&self, index: usize) -> Result<Values> {
        match self {
            Self::Folder(folder) => folder.values(index),
            Self::Gguf { model, .. } => model.values(index),
        }
    }

    /// The bytes of tensor `index` in `dtype`, which a tensor that is not floating point must have already.
    pub(crate) fn bytes(&self, index: usize, dtype: Dtype) -> Result<Vec<u8>> {
        let info = &self.tensors()[index];
        match self {
            Self::Folder(folder) if info.stored == Stored::Plain && info.dtype == dtype => {
                folder.raw(&info.name)
            }
            _ => self.values(index)?.into_bytes(dtype).with_context(|| format!("tensor {}", info.name)),
        }
    }

    /// `config.json` without any quantization; empty where the source has none.
    pub(crate) fn config(&self) -> Map<String, Value> {
        match self {
            Self::Folder(folder) => folder.dense_config(),
            Self::Gguf { model, .. } => model.config().clone(),
        }
    }

    /// Whether there is a `config.json`, or what makes one.
    pub(crate) fn has_config(&self) -> bool {
        match self {
            Self::Folder(folder) => folder.has_config(),
            Self::Gguf { .. } => true,
        }
    }

    /// Files to copy beside the weights: tokenizer, chat template, licence.
    pub(crate) fn companions(&self) -> Result<Vec<PathBuf>> {
        match self {
            Self::Folder(folder) => folder.companions(),
            Self::Gguf { .. } => Ok(Vec::new()),
        }
    }

    /// Files to write beside the weights, made from the metadata: name and content.
    pub(crate) fn files(&self) -> &[(String, Vec<u8>)] {
        match self {
            Self::Folder(_) => &[],
            Self::Gguf { model, .. } => model.files(),
        }
    }

    /// Every file that is read.
    pub(crate) fn identity(&self) -> Result<Vec<Identity>> {
        let files = match self {
            Self::Folder(folder) => folder.files()?,
            Self::Gguf { path, .. } => vec![path.clone()],
        };
        files.iter().map(|file| Identity::of(file)).collect()
    }
}

impl Identity {
    /// Of one file.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            let metadata = path.metadata()?;
            let since = metadata.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let file = path.canonicalize()?.to_string_lossy().into_owned();
            Ok(Self { file, bytes: metadata.len(), modified_ns: since.as_nanos() })
        };
        read().with_context(|| format!("{}", path.display()))
    }
}

impl Values {
    /// Bytes of a file's tensor in `dtype`, each number rounded once.
    ///
    /// # Errors
    /// A dtype that is not float32, float16 or bfloat16, or a finite number that overflows it.
    pub(crate) fn into_bytes(self, dtype: Dtype) -> Result<Vec<u8>> {
        match (self, dtype) {
            (Self::F32(v), Dtype::F32) => Ok(le(&v, f32::to_le_bytes)),
            (Self::F16(v), Dtype::F16) => Ok(le(&v, f16::to_le_bytes)),
            (Self::Bf16(v), Dtype::BF16) => Ok(le(&v, bf16::to_le_bytes)),
            (values, dtype) => {
                let wide = values.into_f32();
                match dtype {
                    Dtype::F32 => Ok(le(&wide, f32::to_le_bytes)),
                    Dtype::F16 => narrow(&wide, "float16", |x| {
                        let y = f16::from_f32(x);
                        (y.to_le_bytes(), y.is_finite())
                    }),
                    Dtype::BF16 => narrow(&wide, "bfloat16", |x| {
                        let y = bf16::from_f32(x);
                        (y.to_le_bytes(), y.is_finite())
                    }),
                    other => bail!("cannot be written as {other}, expected F32, F16 or BF16"),
                }
            }
        }
    }

    /// The numbers in binary32, exact.
    pub(crate) fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(v) => v,
            Self::F16(v) => v.into_iter().map(f16::to_f32).collect(),
            Self::Bf16(v) => v.into_iter().map(bf16::to_f32).collect(),
        }
    }
}

fn le<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to(x)).collect()
}

fn narrow(values: &[f32], name: &str, to: impl Fn(f32) -> ([u8; 2], bool)) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() * 2);
    for (i, &x) in values.iter().enumerate() {
        let (encoded, finite) = to(x);
        if x.is_finite() && !finite {
            bail!("element {i} is {x}, which overflows {name}");
        }
        bytes.extend_from_slice(&encoded);
    }
    Ok(bytes)
}
