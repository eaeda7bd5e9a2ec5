//! What `trellis quantize` reads: safetensors, or the GGUF types that mlx-rs reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use mlx_rs::io::GgufFile;
use mlx_rs::{Array, Dtype as MlxDtype, ops};
use mlx_trellis::artifact::to_bytes;
use mlx_trellis::{bf16, f16};
use trellis_codec::artifact::{Dtype, RawTensor, Tensors};

/// Weights in a group of the GGUF types that MLX keeps quantized (Q4_0, Q4_1, Q8_0).
const GGUF_GROUP: usize = 32;

/// A model's tensors.
pub(crate) enum Source {
    /// A safetensors file, or a folder of them.
    Safetensors { tensors: Tensors, folder: Option<PathBuf> },
    /// A GGUF file; MLX's affine triples are one tensor each here.
    Gguf(BTreeMap<String, GgufTensor>),
}

/// A tensor of a GGUF file as MLX loads it.
pub(crate) enum GgufTensor {
    /// Loaded as numbers.
    Dense(Array),
    /// Loaded as MLX's affine codes.
    Affine { weight: Array, scales: Array, biases: Array, bits: i32 },
}

/// The numbers of a tensor in its own type.
pub(crate) enum Values<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    Bf16(Cow<'a, [bf16]>),
}

impl Source {
    /// Opens a `.gguf` file, a `.safetensors` file or a folder.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|e| e == "gguf") {
            return Ok(Self::Gguf(read_gguf(path).with_context(|| format!("{}", path.display()))?));
        }
        let tensors = Tensors::open(path)?;
        Ok(Self::Safetensors { tensors, folder: path.is_dir().then(|| path.to_owned()) })
    }

    /// Names and shapes, in the order they are written.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        match self {
            Self::Safetensors { tensors, .. } => {
                tensors.iter().map(|(name, t)| (name.to_owned(), t.shape.to_vec())).collect()
            }
            Self::Gguf(tensors) => tensors.iter().map(|(name, t)| (name.clone(), t.shape())).collect(),
        }
    }

    /// The folder whose `config.json` and other files go with the weights.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match self {
            Self::Safetensors { folder, .. } => folder.as_deref(),
            Self::Gguf(_) => None,
        }
    }

    /// Whether a tensor holds floating-point numbers that can be coded.
    pub(crate) fn is_float(&self, name: &str) -> bool {
        match self {
            Self::Safetensors { tensors, .. } => {
                tensors.get(name).is_some_and(|t| matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16))
            }
            Self::Gguf(tensors) => match tensors.get(name) {
                Some(GgufTensor::Dense(array)) => array.dtype().is_float(),
                Some(GgufTensor::Affine { .. }) => true,
                None => false,
            },
        }
    }

    /// The numbers of a floating-point tensor, row-major.
    pub(crate) fn values(&self, name: &str) -> Result<Values<'_>> {
        match self {
            Self::Safetensors { tensors, .. } => {
                let tensor = tensors.get(name).with_context(|| format!("tensor {name} is missing"))?;
                Ok(match tensor.dtype {
                    Dtype::F32 => Values::F32(numbers(tensor.bytes, f32::from_le_bytes)),
                    Dtype::F16 => Values::F16(numbers(tensor.bytes, f16::from_le_bytes)),
                    Dtype::BF16 => Values::Bf16(numbers(tensor.bytes, bf16::from_le_bytes)),
                    found => bail!("tensor {name} is {found}, expected F32, F16 or BF16"),
                })
            }
            Self::Gguf(tensors) => {
                let tensor = tensors.get(name).with_context(|| format!("tensor {name} is missing"))?;
                let dense = tensor.dense()?.as_dtype(MlxDtype::Float32)?.contiguous()?;
                Ok(Values::F32(Cow::Owned(dense.to_vec_exact()?)))
            }
        }
    }

    /// Hands a tensor's dtype, shape and bytes to `f`, as they are in the source; the affine types of a GGUF file are
    /// decoded to the float16 that MLX computes with.
    pub(crate) fn with_raw<T>(&self, name: &str, f: impl FnOnce(RawTensor<'_>) -> Result<T>) -> Result<T> {
        match self {
            Self::Safetensors { tensors, .. } => {
                f(tensors.get(name).with_context(|| format!("tensor {name} is missing"))?)
            }
            Self::Gguf(tensors) => {
                let tensor = tensors.get(name).with_context(|| format!("tensor {name} is missing"))?;
                let (dtype, bytes) = to_bytes(&tensor.dense()?).with_context(|| format!("tensor {name}"))?;
                f(RawTensor { dtype, shape: &tensor.shape(), bytes: &bytes })
            }
        }
    }
}

impl GgufTensor {
    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Dense(array) => array.shape().iter().map(|&d| d as usize).collect(),
            Self::Affine { weight, bits, .. } => {
                let mut shape: Vec<usize> = weight.shape().iter().map(|&d| d as usize).collect();
                if let Some(last) = shape.last_mut() {
                    *last = *last * 32 / *bits as usize;
                }
                shape
            }
        }
    }

    fn dense(&self) -> Result<Array> {
        Ok(match self {
            Self::Dense(array) => array.clone(),
            Self::Affine { weight, scales, biases, bits } => {
                ops::dequantize(weight, scales, biases, GGUF_GROUP as i32, *bits)?
            }
        })
    }
}

/// MLX loads Q4_0, Q4_1 and Q8_0 as `NAME.weight`, `NAME.scales` and `NAME.biases` of its affine quantization, and
/// everything else as numbers.
fn read_gguf(path: &Path) -> Result<BTreeMap<String, GgufTensor>> {
    let mut arrays = GgufFile::load(path)?.arrays()?;
    let names: Vec<String> = arrays.keys().cloned().collect();
    let mut tensors = BTreeMap::new();
    for name in names {
        let stem = name.strip_suffix(".weight").map(|s| (format!("{s}.scales"), format!("{s}.biases")));
        if let Some((scales, biases)) = stem.filter(|(s, b)| arrays.contains_key(s) && arrays.contains_key(b))
        {
            let take = |arrays: &mut std::collections::HashMap<String, Array>, n: &str| {
                arrays.remove(n).with_context(|| format!("tensor {n} is missing"))
            };
            let (weight, scales) = (take(&mut arrays, &name)?, take(&mut arrays, &scales)?);
            let biases = take(&mut arrays, &biases)?;
            let (words, groups) = (weight.dim(-1) as usize, scales.dim(-1) as usize);
            let bits = (words * 32).checked_div(groups * GGUF_GROUP).unwrap_or(0);
            ensure!(
                bits * groups * GGUF_GROUP == words * 32 && [4, 8].contains(&bits),
                "tensor {name} has {words} words and {groups} groups a row, expected 4 or 8 bits in groups of 32"
            );
            tensors.insert(name, GgufTensor::Affine { weight, scales, biases, bits: bits as i32 });
        }
    }
    tensors.extend(arrays.into_iter().map(|(name, array)| (name, GgufTensor::Dense(array))));
    Ok(tensors)
}

/// Little-endian numbers of a mapped file, which need not be aligned.
fn numbers<const N: usize, T: Clone>(bytes: &[u8], from: fn([u8; N]) -> T) -> Cow<'_, [T]> {
    Cow::Owned(bytes.as_chunks().0.iter().map(|&c| from(c)).collect())
}
