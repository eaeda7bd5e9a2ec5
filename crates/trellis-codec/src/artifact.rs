//! Artifacts: safetensors files with their `config.json`; a strict reader and an atomic writer.
//!
//! A module at `path` is `path.weight` (uint32 codes `[rows, cols*k/32]`, or `[cols/512, rows, 48]` when
//! interleaved: the shape alone tells), `path.scales` (float16 `[rows]`) and, if it has one, `path.bias`
//! (`[out_features]`, any dtype, passed through). `config.json` gives each its parameters:
//!
//! ```json
//! "quantization": { "bits": 3, "group_size": 64, "mode": "affine",
//!   "model.layers.0.mlp.down_proj": { "bits": 3, "group_size": 256, "mode": "trellis",
//!                                      "trellis": { "L": 12, "code": "1mad", "axis": 0 } } }
//! ```
//!
//! A module whose input is rotated ([`rotation`](crate::rotation)) has another code, and its rotation, both required:
//!
//! ```json
//! "trellis": { "L": 12, "code": "1mad-hadamard", "axis": 0, "rotation": { "block": 512, "seed": 1 } }
//! ```
//!
//! Where the format leaves room, this is what the reader does:
//!
//! - A path that starts with `model.language_model.` may also be spelled `language_model.model.`, in tensor names
//!   and in config keys each on its own. Both spellings of one entry must say the same; tensors of one module may
//!   not be spread over both.
//! - `quantization` counts; its twin `quantization_config` is read only in its absence. When both are there, every
//!   trellis entry of the twin must be in `quantization` too and say the same.
//! - In a trellis entry `group_size` defaults to 256 and `L` to 12; `bits`, `code` and `axis` are required. A key
//!   it does not know, in an entry or its `trellis` object, is refused, and so is a tensor under a trellis module's
//!   path that it does not know: either may change what the weights mean.
//! - Codes, scales and shapes are checked when the artifact is opened. Of the tensors' data only scales are read
//!   then, to refuse NaN and infinity; codes need no check, since every bit pattern is valid.
//!
//! Files are mapped, not read. See [`Artifact::open`] for what that assumes.
//!
//! ```
//! use trellis_codec::artifact::{Artifact, ArtifactWriter, WriteOptions};
//! use trellis_codec::{Axis, Geometry, f16};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model");
//! let geometry = Geometry::new(Axis::Input, 3, 12, 256, 2, 512)?;
//! let codes: Vec<u32> = (0..geometry.words() as u32).collect();
//! let scales = [f16::ONE, f16::from_f32(0.5)];
//!
//! let mut writer = ArtifactWriter::create(&path, WriteOptions::default())?;
//! writer.add_module("model.layers.0.mlp.down_proj", &geometry, &codes, &scales, None)?;
//! writer.finish()?;
//!
//! let artifact = Artifact::open(&path)?;
//! let module = artifact.module("model.layers.0.mlp.down_proj")?;
//! assert_eq!(module.geometry, geometry);
//! assert_eq!(module.codes, codes);
//! assert_eq!(module.scales, scales.as_slice());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod durable;
mod tensors;
mod writer;

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::path::Path;

use half::f16;
pub use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::error::ArtifactError;
use crate::format::{Geometry, INTERLEAVE_WORDS, Layout, WORD_BITS};
use crate::rotation::Rotation;
use config::{Config, canonical, twin};
pub use config::{Entry, KeySpace, Quantization, TrellisEntry};
pub use durable::NewFile;
pub use tensors::{RawTensor, Tensors};
pub use writer::{ARTIFACT_FOLDER, ArtifactWriter, REPLACED_FOLDER, Summary, WriteOptions};

const CONFIG_FILE: &str = "config.json";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
const METADATA_KEY: &str = "__metadata__";

/// A trellis-coded module as [`Artifact::modules`] lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleInfo {
    /// The module's path, as its tensors spell it.
    pub path: String,
    /// Shape, coding parameters and layout.
    pub geometry: Geometry,
    /// How its input is rotated, if it is: the codes are those of the rotated weight.
    pub rotation: Option<Rotation>,
    /// Whether it has a bias.
    pub has_bias: bool,
}

/// The data of a trellis-coded module, borrowed from the map wherever the file's alignment allows it.
#[derive(Debug, Clone)]
pub struct TrellisModule<'a> {
    /// The module's path, as its tensors spell it.
    pub path: &'a str,
    /// Shape, coding parameters and layout.
    pub geometry: Geometry,
    /// How the layer's input is rotated, if it is: the codes are those of the rotated weight.
    pub rotation: Option<Rotation>,
    /// Code words, [`Geometry::words`] of them, of shape [`Geometry::codes_shape`].
    pub codes: Cow<'a, [u32]>,
    /// Scales `[rows]`, all finite; zero and negative ones are valid.
    pub scales: Cow<'a, [f16]>,
    /// Bias `[out_features]`, in whatever dtype it has.
    pub bias: Option<RawTensor<'a>>,
}

/// An opened artifact: every tensor, the config, and the trellis modules, all of them checked.
#[derive(Debug)]
pub struct Artifact {
    tensors: Tensors,
    config: Config,
    modules: Vec<ModuleInfo>,
    /// Index into `modules` of a canonical path.
    lookup: HashMap<String, usize>,
}

impl Artifact {
    /// Opens a `.safetensors` file with its `config.json` beside it, or a folder (see [`Tensors::open`]) with
    /// `config.json` in it.
    ///
    /// The files are mapped: as long as the artifact lives, nobody may truncate them or write into them. Replacing
    /// them by rename is fine, and is what [`ArtifactWriter`] does.
    ///
    /// # Errors
    /// As [`Tensors::open`]; an unreadable or malformed `config.json`; a trellis entry with unknown keys, a code
    /// that this version does not know, `k`, `L`, `T` out of range, or a rotation out of range or whose block
    /// does not divide the input features; entries that contradict each other; a trellis entry
    /// without codes or scales; codes that are not uint32 or whose shape contradicts the entry; scales that are
    /// not float16, not one for each stored row, or not finite; a bias that is not one number for each output
    /// feature; any other tensor under a trellis module's path.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ArtifactError> {
        let path = path.as_ref();
        let tensors = Tensors::open(path)?;
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let config_file = folder.join(CONFIG_FILE);
        let config = Config::read(&config_file)?;
        let mut modules = Vec::new();
        let mut lookup = HashMap::new();
        for (key, entry) in &config.entries {
            let Entry::Trellis(entry) = entry else { continue };
            lookup.insert(canonical(key), modules.len());
            let info = module_info(&tensors, key, entry)?;
            if let Some(rotation) = &info.rotation {
                check_rotation(&config_file, key, rotation, &info.geometry)?;
            }
            modules.push(info);
        }
        let artifact = Self { tensors, config, modules, lookup };
        let unknown = artifact.tensors.names().find_map(|name| artifact.owner(name).filter(|o| !o.known));
        if let Some(owner) = unknown {
            return Err(artifact.unknown(&owner));
        }
        Ok(artifact)
    }

    /// The trellis modules, in the order of their config entries.
    pub fn modules(&self) -> &[ModuleInfo] {
        &self.modules
    }

    /// The data of one trellis module; `path` may be in either key space.
    ///
    /// Codes and scales are borrowed unless a file aligns them worse than their type, which no file of
    /// [`ArtifactWriter`] does; then they are copied.
    ///
    /// # Errors
    /// [`ArtifactError::NoModule`] when there is no such trellis module.
    pub fn module(&self, path: &str) -> Result<TrellisModule<'_>, ArtifactError> {
        let bytes = |name: &str| self.tensors.exact(name).map(|t| t.bytes);
        let found = self.lookup.get(&canonical(path)).and_then(|&i| {
            let ModuleInfo { path, geometry, rotation, .. } = &self.modules[i];
            Some(TrellisModule {
                path,
                geometry: *geometry,
                rotation: *rotation,
                codes: numbers(bytes(&codes_name(path))?, u32::from_le_bytes),
                scales: numbers(bytes(&scales_name(path))?, f16::from_le_bytes),
                bias: self.tensors.exact(&bias_name(path)),
            })
        });
        found.ok_or_else(|| ArtifactError::NoModule {
            file: self.tensors.location().to_owned(),
            module: path.to_owned(),
            found: self.modules.len(),
        })
    }

    /// What `config.json` says of the module at `path`, in either key space.
    pub fn entry(&self, path: &str) -> Entry {
        self.config.entry(path)
    }

    /// The model's default for modules without an entry; `None` when such modules are not quantized.
    pub fn default_quantization(&self) -> Option<&Quantization> {
        self.config.default.as_ref()
    }

    /// The whole of `config.json`.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config.json
    }

    /// Every tensor, those of trellis modules among them.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Every tensor that belongs to no trellis module, in the order of [`Tensors::names`].
    pub fn others(&self) -> impl Iterator<Item = (&str, RawTensor<'_>)> {
        self.tensors.iter().filter(|(name, _)| self.owner(name).is_none())
    }

    /// The trellis module under whose path a tensor lies, in either key space.
    fn owner<'a>(&'a self, name: &'a str) -> Option<Owner<'a>> {
        let canonical = canonical(name);
        let module = canonical.rmatch_indices('.').find_map(|(dot, _)| self.lookup.get(&canonical[..dot]))?;
        let module = &self.modules[*module].path;
        let known = [codes_name(module), scales_name(module), bias_name(module)].iter().any(|n| n == name);
        Some(Owner { tensor: name, module, known })
    }

    fn unknown(&self, owner: &Owner<'_>) -> ArtifactError {
        ArtifactError::UnknownTensor {
            file: self.tensors.file_of(owner.tensor).to_owned(),
            tensor: owner.tensor.to_owned(),
            module: owner.module.to_owned(),
            expected: format!("{}.weight, .scales and .bias", owner.module),
        }
    }
}

struct Owner<'a> {
    tensor: &'a str,
    module: &'a str,
    known: bool,
}

fn module_info(tensors: &Tensors, key: &str, entry: &TrellisEntry) -> Result<ModuleInfo, ArtifactError> {
    let path = match twin(key) {
        Some(twin) if tensors.exact(&codes_name(key)).is_none() => twin,
        _ => key.to_owned(),
    };
    let Some(codes) = tensors.exact(&codes_name(&path)) else {
        let (file, tensor) = (tensors.location().to_owned(), codes_name(key));
        return Err(ArtifactError::MissingCodes { file, tensor });
    };
    let geometry = geometry(tensors, codes_name(&path), &codes, entry)?;
    let scales = scales_name(&path);
    let Some(found) = tensors.exact(&scales) else {
        let file = tensors.file_of(&codes_name(&path)).to_owned();
        return Err(ArtifactError::MissingScales { file, tensor: scales, expected: geometry.rows() });
    };
    check_scales(tensors.file_of(&scales), &scales, &found, geometry.rows())?;
    let bias = tensors.exact(&bias_name(&path));
    if let Some(bias) = &bias {
        let name = bias_name(&path);
        check_bias(tensors.file_of(&name), &name, bias.shape, &geometry)?;
    }
    Ok(ModuleInfo { path, geometry, rotation: entry.rotation, has_bias: bias.is_some() })
}

/// The geometry that follows from the codes' shape and the entry's parameters.
fn geometry(
    tensors: &Tensors,
    tensor: String,
    codes: &RawTensor<'_>,
    entry: &TrellisEntry,
) -> Result<Geometry, ArtifactError> {
    let &TrellisEntry { bits, block, state_bits, axis, .. } = entry;
    let (file, found) = (tensors.file_of(&tensor).to_owned(), codes.shape.to_vec());
    if codes.dtype != Dtype::U32 {
        return Err(ArtifactError::CodesDtype { file, tensor, found: codes.dtype });
    }
    // Only an empty shape can saturate, its size being that of its data, and an empty matrix is refused.
    let (rows, cols, layout) = match *codes.shape {
        [rows, words] => {
            let total = words.saturating_mul(WORD_BITS);
            if !total.is_multiple_of(bits as usize) {
                return Err(ArtifactError::CodesBits { file, tensor, found, bits });
            }
            let cols = total / bits as usize;
            if !cols.is_multiple_of(block) {
                return Err(ArtifactError::CodesBlocks { file, tensor, found, cols, bits, block });
            }
            (rows, cols, Layout::RowMajor)
        }
        [pairs, rows, INTERLEAVE_WORDS] => (rows, pairs.saturating_mul(2 * block), Layout::Interleaved),
        [_, _, _] => {
            return Err(ArtifactError::CodesInterleave {
                file,
                tensor,
                found,
                parameters: entry.to_string(),
            });
        }
        _ => return Err(ArtifactError::CodesRank { file, tensor, found }),
    };
    match Geometry::new(axis, bits, state_bits, block, rows, cols) {
        Ok(geometry) => geometry.with_layout(layout).map_err(|_| ArtifactError::CodesInterleave {
            file,
            tensor,
            found,
            parameters: entry.to_string(),
        }),
        Err(reason) => Err(ArtifactError::CodesGeometry { file, tensor, found, reason }),
    }
}

fn check_scales(file: &Path, tensor: &str, scales: &RawTensor<'_>, rows: usize) -> Result<(), ArtifactError> {
    let (file, tensor) = (|| file.to_owned(), || tensor.to_owned());
    if scales.dtype != Dtype::F16 {
        return Err(ArtifactError::ScalesDtype { file: file(), tensor: tensor(), found: scales.dtype });
    }
    if scales.shape != [rows] {
        let found = scales.shape.to_vec();
        return Err(ArtifactError::ScalesShape { file: file(), tensor: tensor(), found, expected: rows });
    }
    let scales = scales.bytes.as_chunks().0.iter().map(|&c| f16::from_le_bytes(c));
    match scales.enumerate().find(|(_, scale)| !scale.is_finite()) {
        Some((row, found)) => {
            Err(ArtifactError::ScaleNotFinite { file: file(), tensor: tensor(), row, found })
        }
        None => Ok(()),
    }
}

fn check_bias(file: &Path, tensor: &str, shape: &[usize], geometry: &Geometry) -> Result<(), ArtifactError> {
    let expected = geometry.out_features();
    if shape == [expected] {
        return Ok(());
    }
    let (file, tensor, found) = (file.to_owned(), tensor.to_owned(), shape.to_vec());
    Err(ArtifactError::BiasShape { file, tensor, found, expected })
}

fn check_rotation(
    file: &Path,
    module: &str,
    rotation: &Rotation,
    geometry: &Geometry,
) -> Result<(), ArtifactError> {
    rotation.check(geometry.in_features()).map_err(|reason| {
        let (file, module) = (file.to_owned(), module.to_owned());
        ArtifactError::Rotation { file, module, reason }
    })
}

fn codes_name(path: &str) -> String {
    format!("{path}.weight")
}

fn scales_name(path: &str) -> String {
    format!("{path}.scales")
}

fn bias_name(path: &str) -> String {
    format!("{path}.bias")
}

/// Little-endian numbers, borrowed where the machine and the alignment allow it.
fn numbers<const N: usize, T: bytemuck::AnyBitPattern>(bytes: &[u8], from: fn([u8; N]) -> T) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) if cfg!(target_endian = "little") => Cow::Borrowed(numbers),
        _ => Cow::Owned(bytes.as_chunks().0.iter().map(|&c| from(c)).collect()),
    }
}

fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> ArtifactError {
    let path = path.to_owned();
    move |reason| ArtifactError::Io { path, action, reason }
}
