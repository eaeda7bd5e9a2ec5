//! Safetensors with their `config.json`: dense, MLX affine or trellis.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use mlx_rs::{Array, Dtype as MlxDtype, ops};
use mlx_trellis::{TrellisWeights, bf16, dequantize, f16};
use serde_json::{Map, Value};
use trellis_codec::artifact::{Artifact, Dtype, Entry, Tensors};

use super::{Stored, TensorInfo, Values};

const CONFIG: &str = "config.json";
/// The sections of `config.json` that describe a quantization.
const SECTIONS: [&str; 2] = ["quantization", "quantization_config"];
/// The key by which a section of a scheme that is not MLX's is known.
const FOREIGN_KEY: &str = "quant_method";

/// A folder of safetensors, or one file.
pub(crate) struct Folder {
    opened: Opened,
    /// Where `config.json` and the other files are; `None` for a single file.
    folder: Option<PathBuf>,
    tensors: Vec<TensorInfo>,
}

enum Opened {
    /// With a `config.json`.
    Artifact(Box<Artifact>),
    /// Without.
    Tensors(Tensors),
}

impl Folder {
    /// Opens a folder or a file and finds out what each tensor is.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let folder = path.is_dir().then(|| path.to_owned());
        let opened = match &folder {
            Some(folder) if folder.join(CONFIG).exists() => {
                refuse_foreign(folder)?;
                Opened::Artifact(Box::new(Artifact::open(path)?))
            }
            _ => Opened::Tensors(Tensors::open(path)?),
        };
        let mut found = Self { opened, folder, tensors: Vec::new() };
        found.tensors = found.list()?;
        Ok(found)
    }

    pub(crate) fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files_tensors(&self) -> &Tensors {
        match &self.opened {
            Opened::Artifact(artifact) => artifact.tensors(),
            Opened::Tensors(tensors) => tensors,
        }
    }

    /// One entry for each tensor, and for each quantized module one for its weight.
    fn list(&self) -> Result<Vec<TensorInfo>> {
        let all = self.files_tensors();
        let mut quantized = HashMap::new();
        let mut parts = HashSet::new();
        let mut affine = Vec::new();
        if let Opened::Artifact(artifact) = &self.opened {
            for module in artifact.modules() {
                let g = &module.geometry;
                let name = format!("{}.weight", module.path);
                let shape = vec![g.out_features(), g.in_features()];
                quantized.insert(
                    name.clone(),
                    TensorInfo { name, shape, dtype: Dtype::F32, stored: Stored::Trellis },
                );
                parts.insert(format!("{}.scales", module.path));
            }
        }
        for (name, weight) in all.iter().filter(|(name, w)| {
            w.dtype == Dtype::U32 && name.ends_with(".weight") && !quantized.contains_key(*name)
        }) {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            if all.get(&format!("{module}.scales")).is_some() {
                parts.extend([format!("{module}.scales"), format!("{module}.biases")]);
                let info = self
                    .affine(module, weight.shape)
                    .with_context(|| format!("{}: tensor {name}", all.file_of(name).display()))?;
                affine.push(info);
            }
        }
        quantized.extend(affine.into_iter().map(|info| (info.name.clone(), info)));
        Ok(all
            .iter()
            .filter(|(name, _)| !parts.contains(*name))
            .map(|(name, tensor)| match quantized.remove(name) {
                Some(info) => info,
                None => TensorInfo {
                    name: name.to_owned(),
                    shape: tensor.shape.to_vec(),
                    dtype: tensor.dtype,
                    stored: Stored::Plain,
                },
            })
            .collect())
    }

    /// What `config.json` says of a module whose weight is codes of MLX's.
    fn affine(&self, module: &str, words: &[usize]) -> Result<TensorInfo> {
        let Opened::Artifact(artifact) = &self.opened else {
            bail!("found codes with scales but no config.json, which says what they mean: give the folder");
        };
        let quantization = match artifact.entry(module) {
            Entry::Other(quantization) => quantization,
            Entry::Default => artifact
                .default_quantization()
                .cloned()
                .context("found codes with scales, but config.json has no quantization for them")?,
            entry => bail!("found codes with scales, but config.json says {entry}"),
        };
        let mode = quantization.mode.as_deref().unwrap_or("affine");
        ensure!(mode == "affine", "quantized by {mode:?}, expected affine");
        let (Some(bits), Some(group)) = (quantization.bits, quantization.group_size) else {
            bail!("config.json has no bits or no group_size for it");
        };
        let all = artifact.tensors();
        let part = |suffix: &str| {
            all.get(&format!("{module}.{suffix}"))
                .with_context(|| format!("tensor {module}.{suffix} is missing"))
        };
        let (scales, biases) = (part("scales")?, part("biases")?);
        let mut shape = scales.shape.to_vec();
        let columns = shape.last_mut().context("the scales are a scalar")?;
        *columns = columns.checked_mul(usize::try_from(group)?).context("too many columns")?;
        let columns = *columns;
        let mut expected = shape.clone();
        if let Some(last) = expected.last_mut() {
            *last = columns.checked_mul(usize::try_from(bits)?).context("too many columns")? / 32;
        }
        ensure!(
            expected == words && biases.shape == scales.shape && biases.dtype == scales.dtype,
            "codes of shape {words:?}, scales {:?}, biases {:?}: not {bits} bits in groups of {group}",
            scales.shape,
            biases.shape
        );
        ensure!(
            matches!(scales.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16),
            "scales are {}, expected F32, F16 or BF16",
            scales.dtype
        );
        let stored = Stored::Affine { bits: i32::try_from(bits)?, group: i32::try_from(group)? };
        Ok(TensorInfo { name: format!("{module}.weight"), shape, dtype: scales.dtype, stored })
    }

    /// The bytes of a tensor as it is stored.
    pub(crate) fn raw(&self, name: &str) -> Result<Vec<u8>> {
        Ok(self.files_tensors().read(name)?)
    }

    /// The numbers of tensor `index`.
    pub(crate) fn values(&self, index: usize) -> Result<Values> {
        let info = &self.tensors[index];
        let name = &info.name;
        match info.stored {
            Stored::Affine { bits, group } => {
                let module = info.module().unwrap_or(name);
                let values =
                    self.dequantize_affine(module, bits, group).with_context(|| format!("tensor {name}"))?;
                Ok(Values::F32(values))
            }
            Stored::Trellis => {
                let Opened::Artifact(artifact) = &self.opened else { bail!("tensor {name} has no entry") };
                let module = artifact.module(info.module().unwrap_or(name))?;
                let weights = TrellisWeights::from_module(&module)?;
                let dense = dequantize(&weights, MlxDtype::Float32)?.contiguous()?;
                Ok(Values::F32(dense.to_vec_exact()?))
            }
            Stored::Plain | Stored::Gguf(_) => {
                let bytes = self.raw(name)?;
                Ok(match info.dtype {
                    Dtype::F32 => Values::F32(numbers(&bytes, f32::from_le_bytes)),
                    Dtype::F16 => Values::F16(numbers(&bytes, f16::from_le_bytes)),
                    Dtype::BF16 => Values::Bf16(numbers(&bytes, bf16::from_le_bytes)),
                    found => bail!("tensor {name} is {found}, expected F32, F16 or BF16"),
                })
            }
        }
    }

    /// Decoded in binary32, where code times scale plus bias loses nothing to the scales' own type.
    fn dequantize_affine(&self, module: &str, bits: i32, group: i32) -> Result<Vec<f32>> {
        let array = |suffix: &str| -> Result<Array> {
            let name = format!("{module}.{suffix}");
            let tensor =
                self.files_tensors().get(&name).with_context(|| format!("tensor {name} is missing"))?;
            let shape = tensor.shape.iter().map(|&d| Ok(i32::try_from(d)?)).collect::<Result<Vec<_>>>()?;
            let bytes = self.raw(&name)?;
            // Flat first: mlx-rs multiplies the dimensions of a shape in 32 bits.
            let len = [i32::try_from(tensor.shape.iter().product::<usize>())?];
            let flat = match tensor.dtype {
                Dtype::U32 => Array::from_slice(&numbers(&bytes, u32::from_le_bytes), &len),
                Dtype::F32 => Array::from_slice(&numbers(&bytes, f32::from_le_bytes), &len),
                Dtype::F16 => Array::from_slice(&numbers(&bytes, f16::from_le_bytes), &len),
                _ => Array::from_slice(&numbers(&bytes, bf16::from_le_bytes), &len),
            };
            Ok(flat.reshape(&shape)?)
        };
        let (scales, biases) = (array("scales")?, array("biases")?);
        let biases = biases.as_dtype(MlxDtype::Float32)?;
        let dense =
            ops::dequantize(array("weight")?, scales.as_dtype(MlxDtype::Float32)?, &biases, group, bits)?;
        Ok(dense.contiguous()?.to_vec_exact()?)
    }

    pub(crate) fn has_config(&self) -> bool {
        matches!(self.opened, Opened::Artifact(_))
    }

    /// `config.json` without its quantization.
    pub(crate) fn dense_config(&self) -> Map<String, Value> {
        let Opened::Artifact(artifact) = &self.opened else { return Map::new() };
        let mut config = artifact.config().clone();
        config.retain(|key, _| !SECTIONS.contains(&key.as_str()));
        config
    }

    /// Every file of the folder but the weights, their index, `config.json` and hidden ones.
    pub(crate) fn companions(&self) -> Result<Vec<PathBuf>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let mut files: Vec<PathBuf> = fs::read_dir(folder)
            .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect())
            .with_context(|| format!("{}", folder.display()))?;
        files.sort();
        files.retain(|file| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let written =
                name == CONFIG || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
            file.is_file() && !written && !name.starts_with('.')
        });
        Ok(files)
    }

    /// Every file that is read.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let all = self.files_tensors();
        let mut files: Vec<PathBuf> = all.names().map(|name| all.file_of(name).to_owned()).collect();
        files.sort();
        files.dedup();
        if let (Some(folder), true) = (&self.folder, self.has_config()) {
            files.push(folder.join(CONFIG));
        }
        files.extend(self.companions()?);
        Ok(files)
    }
}

/// Another scheme's weights would be taken for dense ones.
fn refuse_foreign(folder: &Path) -> Result<()> {
    let file = folder.join(CONFIG);
    let at = || format!("{}", file.display());
    let bytes = fs::read(&file).with_context(at)?;
    let config: Value = serde_json::from_slice(&bytes).with_context(at)?;
    let absent = config.get(SECTIONS[0]).is_none_or(Value::is_null);
    if let Some(method) = config.get(SECTIONS[1]).and_then(|s| s.get(FOREIGN_KEY)).filter(|_| absent) {
        bail!(
            "{}: {FOREIGN_KEY} is {method}, expected a model that is not quantized, MLX affine or trellis",
            at()
        );
    }
    Ok(())
}

fn numbers<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&c| from(c)).collect()
}
