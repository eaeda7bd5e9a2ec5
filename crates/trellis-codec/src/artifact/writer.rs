//! Writes an artifact's folder so that it appears whole or not at all.
//!
//! Everything is written into a temporary folder beside the destination, synced, opened once with the strict
//! reader, and renamed into place. Tensors go to disk as they come: a shard under way is one file of data for each
//! alignment, and its header, which must come first but is known last, is written when the shard is full, followed
//! by a copy of those files. So memory holds names and shapes only (the data of a tensor is the caller's), disk
//! holds one shard twice for a moment, and every tensor ends up aligned to its type, since wider types come first.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use half::f16;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::config::{Config, KeySpace, SECTION, TWIN_SECTION, canonical, entry_json, foreign_scheme};
use super::durable::{Folder, parent, temporary_prefix};
use super::tensors::{MAX_HEADER, byte_len};
use super::{
    Artifact, CONFIG_FILE, Dtype, INDEX_FILE, METADATA_KEY, RawTensor, SINGLE_FILE, bias_name, check_bias,
    check_rotation, check_scales, codes_name, io_error, scales_name,
};
use crate::encode::Encoded;
use crate::error::ArtifactError;
use crate::format::Geometry;
use crate::rotation::Rotation;

/// Bytes of a header's length, and what headers are padded to.
const HEADER_UNIT: usize = 8;
/// Tensors are kept apart by alignment until their shard is full, widest first.
const ALIGNMENTS: [usize; 4] = [8, 4, 2, 1];

/// How an artifact is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteOptions {
    /// Bytes of tensors in a shard before another is begun; a single larger tensor or module still goes into one.
    /// 5 GB unless set, as Hugging Face does.
    pub max_shard_bytes: u64,
    /// `__metadata__` of each file; `{"format": "mlx"}` unless set.
    pub metadata: BTreeMap<String, String>,
    /// Under which of its two names `config.json` lists a module that has two.
    pub key_space: KeySpace,
    /// Replace an artifact that is at the destination instead of refusing.
    pub overwrite: bool,
    /// Where the artifact is put together: a folder on the destination's file system, whose parent exists and whose
    /// content is removed first. Unless set, a new one beside the destination, of a random name. Whoever sets it
    /// knows where a killed process left things: until the last step the artifact is in [`ARTIFACT_FOLDER`] of it, and
    /// one that is being overwritten is for an instant in [`REPLACED_FOLDER`].
    pub staging: Option<PathBuf>,
}

/// What the artifact under way is called in [`WriteOptions::staging`].
pub const ARTIFACT_FOLDER: &str = "artifact";
/// What an artifact that is being overwritten is called there.
pub const REPLACED_FOLDER: &str = "replaced";

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            max_shard_bytes: 5_000_000_000,
            metadata: BTreeMap::from([("format".to_owned(), "mlx".to_owned())]),
            key_space: KeySpace::default(),
            overwrite: false,
            staging: None,
        }
    }
}

/// What [`ArtifactWriter::finish`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The artifact's folder.
    pub path: PathBuf,
    /// Names of its safetensors files, in order.
    pub shards: Vec<String>,
    /// Number of trellis modules.
    pub modules: usize,
    /// Number of tensors, those of trellis modules among them.
    pub tensors: usize,
    /// Bytes of all tensors, without headers.
    pub tensor_bytes: u64,
    /// A temporary folder that could not be removed: it holds the artifact that was overwritten, if one was.
    pub leftover: Option<PathBuf>,
}

/// Writes an artifact's folder; dropped before [`ArtifactWriter::finish`] it leaves nothing behind.
///
/// The same calls write the same bytes.
#[derive(Debug)]
pub struct ArtifactWriter {
    destination: PathBuf,
    options: WriteOptions,
    temp: TempDir,
    /// The folder that becomes the artifact: inside the temporary one, which only its owner may enter.
    folder: PathBuf,
    config: Map<String, Value>,
    /// Config entries of the modules added.
    entries: Vec<(String, Value)>,
    names: HashSet<String>,
    module_paths: HashSet<String>,
    files: HashSet<String>,
    closed: Vec<Vec<String>>,
    shard: OpenShard,
    tensor_bytes: u64,
    broken: bool,
}

#[derive(Debug, Default)]
struct OpenShard {
    parts: [Part; ALIGNMENTS.len()],
    bytes: u64,
}

#[derive(Debug, Default)]
struct Part {
    file: Option<(PathBuf, File)>,
    tensors: Vec<(String, Dtype, Vec<usize>, u64)>,
}

impl ArtifactWriter {
    /// Begins an artifact that [`ArtifactWriter::finish`] will put at `destination`, a folder whose parent exists.
    ///
    /// A killed process leaves its temporary folder, `.NAME.` and six characters, beside the destination.
    ///
    /// # Errors
    /// A destination that exists (unless to be overwritten and an artifact's folder), one without a name, or a
    /// parent that is no folder or cannot be written.
    pub fn create(destination: impl AsRef<Path>, options: WriteOptions) -> Result<Self, ArtifactError> {
        let destination = destination.as_ref().to_owned();
        let Some(prefix) = temporary_prefix(&destination) else {
            return Err(ArtifactError::Destination { path: destination });
        };
        check_destination(&destination, options.overwrite)?;
        let temp = match &options.staging {
            Some(staging) => exact_folder(staging)?,
            None => tempfile::Builder::new()
                .prefix(&prefix)
                .tempdir_in(parent(&destination))
                .map_err(io_error(&destination, "create a temporary folder beside it"))?,
        };
        let folder = temp.path().join(ARTIFACT_FOLDER);
        fs::create_dir(&folder).map_err(io_error(&folder, "create"))?;
        Ok(Self {
            destination,
            options,
            temp,
            folder,
            config: Map::new(),
            entries: Vec::new(),
            names: HashSet::new(),
            module_paths: HashSet::new(),
            files: HashSet::new(),
            closed: Vec::new(),
            shard: OpenShard::default(),
            tensor_bytes: 0,
            broken: false,
        })
    }

    /// Sets the `config.json` to start from, an object. Its quantization section stays, except that modules added
    /// replace their entries; [`ArtifactWriter::finish`] writes it as `quantization` and `quantization_config`.
    ///
    /// # Errors
    /// What [`Artifact::open`] would refuse in a config, and one that only another scheme's `quantization_config`
    /// (one with a `quant_method`) describes.
    pub fn set_config(&mut self, config: Value) -> Result<(), ArtifactError> {
        let file = self.destination.join(CONFIG_FILE);
        let parsed = Config::parse(&file, config)?;
        match foreign_scheme(&parsed.json) {
            Some(found) => Err(ArtifactError::ForeignQuantization { file, found }),
            None => {
                self.config = parsed.json;
                Ok(())
            }
        }
    }

    /// Adds a trellis module: codes of the geometry's layout, [`Geometry::words`] of them, finite scales `[rows]`,
    /// and a bias `[out_features]` if it has one. Its tensors go into one shard.
    ///
    /// # Errors
    /// Slices or a bias of the wrong length, a scale that is not finite, a geometry that no file has, a module or
    /// tensor added before (in either key space), or a failure to write.
    pub fn add_module(
        &mut self,
        path: &str,
        geometry: &Geometry,
        codes: &[u32],
        scales: &[f16],
        bias: Option<RawTensor<'_>>,
    ) -> Result<(), ArtifactError> {
        self.add(path, (geometry, None), codes, scales, bias)
    }

    /// [`ArtifactWriter::add_module`] for an encoded weight, with its rotation if it has one.
    ///
    /// # Errors
    /// As [`ArtifactWriter::add_module`], and a rotation whose block does not divide the input features.
    pub fn add_encoded(
        &mut self,
        path: &str,
        encoded: &Encoded,
        bias: Option<RawTensor<'_>>,
    ) -> Result<(), ArtifactError> {
        let Encoded { geometry, rotation, codes, scales, .. } = encoded;
        self.add(path, (geometry, rotation.as_ref()), codes, scales, bias)
    }

    fn add(
        &mut self,
        path: &str,
        (geometry, rotation): (&Geometry, Option<&Rotation>),
        codes: &[u32],
        scales: &[f16],
        bias: Option<RawTensor<'_>>,
    ) -> Result<(), ArtifactError> {
        let (codes_shape, scales_shape) = (geometry.codes_shape(), [geometry.rows()]);
        let (codes, scales) = (le_bytes(codes, u32::to_le_bytes), le_bytes(scales, f16::to_le_bytes));
        let codes = RawTensor { dtype: Dtype::U32, shape: &codes_shape, bytes: &codes };
        let scales = RawTensor { dtype: Dtype::F16, shape: &scales_shape, bytes: &scales };
        let mut tensors = vec![(codes_name(path), codes), (scales_name(path), scales)];
        tensors.extend(bias.map(|bias| (bias_name(path), bias)));

        // The geometry of a product's gradient is not one of a file.
        geometry.with_layout(geometry.layout()).map_err(|reason| ArtifactError::CodesGeometry {
            file: self.destination.clone(),
            tensor: codes_name(path),
            found: codes_shape.clone(),
            reason,
        })?;
        if let Some(rotation) = rotation {
            check_rotation(&self.destination.join(CONFIG_FILE), path, rotation, geometry)?;
        }
        self.check(&tensors)?;
        check_scales(&self.destination, &scales_name(path), &scales, geometry.rows())?;
        if let Some(bias) = bias {
            check_bias(&self.destination, &bias_name(path), bias.shape, geometry)?;
        }
        if !self.module_paths.insert(canonical(path)) {
            return Err(self.name_error(path));
        }
        self.write(tensors)?;
        self.entries.push((self.options.key_space.rename(path), entry_json(geometry, rotation)));
        Ok(())
    }

    /// Adds a tensor that is passed through as it is.
    ///
    /// # Errors
    /// Bytes that are not those of dtype and shape, a name added before, or a failure to write.
    pub fn add_tensor(&mut self, name: &str, tensor: RawTensor<'_>) -> Result<(), ArtifactError> {
        let tensors = vec![(name.to_owned(), tensor)];
        self.check(&tensors)?;
        self.write(tensors)
    }

    /// Copies a file (a tokenizer, a chat template …) into the artifact's folder under its own name.
    ///
    /// # Errors
    /// A name added before or one the writer keeps for itself (`config.json`, the index, any `.safetensors`), or a
    /// failure to read or write.
    pub fn copy_file(&mut self, source: impl AsRef<Path>) -> Result<(), ArtifactError> {
        let source = source.as_ref();
        let Some(name) = source.file_name() else {
            return Err(ArtifactError::Destination { path: source.to_owned() });
        };
        let name = name.to_string_lossy().into_owned();
        self.check_file(&name)?;
        let from = File::open(source).map_err(io_error(source, "open"))?;
        self.copy(name, from)
    }

    /// Writes a file (a tokenizer, a chat template …) into the artifact's folder.
    ///
    /// # Errors
    /// As [`ArtifactWriter::copy_file`], and a name that is more than one, or none.
    pub fn add_file(&mut self, name: &str, content: &[u8]) -> Result<(), ArtifactError> {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(self.name_error(name));
        }
        self.check_file(name)?;
        self.copy(name.to_owned(), content)
    }

    fn check_file(&self, name: &str) -> Result<(), ArtifactError> {
        let reserved = name == CONFIG_FILE || name == INDEX_FILE || name.ends_with(".safetensors");
        if reserved || self.files.contains(name) { Err(self.name_error(name)) } else { Ok(()) }
    }

    fn copy(&mut self, name: String, mut from: impl io::Read) -> Result<(), ArtifactError> {
        self.guarded(|writer| {
            let path = writer.folder.join(&name);
            let mut to = File::create_new(&path).map_err(io_error(&path, "create"))?;
            io::copy(&mut from, &mut to).and_then(|_| to.sync_all()).map_err(io_error(&path, "write"))
        })?;
        self.files.insert(name);
        Ok(())
    }

    /// Writes what is left, checks the whole with [`Artifact::open`], and puts it at the destination:
    /// `model.safetensors`, or several `model-0000I-of-0000N.safetensors` with their index, beside `config.json`
    /// and the files copied.
    ///
    /// The destination changes by renames alone. An artifact to be overwritten is first renamed into the temporary
    /// folder and removed once the new one is in place; between the two renames, an instant, there is nothing at the
    /// destination, and a process killed just then leaves the old artifact in the temporary folder. A rename that
    /// fails puts the old one back.
    ///
    /// # Errors
    /// A writer that failed before, a failure to write, anything [`Artifact::open`] refuses (such as a trellis entry
    /// in the config whose module was not added), or a destination that came into being meanwhile. Whatever was at
    /// the destination is then still there, unless what failed is the last step: to make the rename durable.
    pub fn finish(mut self) -> Result<Summary, ArtifactError> {
        if self.broken {
            return Err(ArtifactError::Abandoned { file: self.destination });
        }
        if self.shard.bytes > 0
            || self.shard.parts.iter().any(|p| !p.tensors.is_empty())
            || self.closed.is_empty()
        {
            self.close_shard()?;
        }
        let shards = self.place_shards()?;
        self.write_config()?;
        Artifact::open(&self.folder)?;
        Folder::open(&self.folder)?.sync()?;
        let leftover = self.swap_in()?;
        Ok(Summary {
            path: self.destination,
            shards,
            modules: self.entries.len(),
            tensors: self.names.len(),
            tensor_bytes: self.tensor_bytes,
            leftover,
        })
    }

    fn name_error(&self, name: &str) -> ArtifactError {
        ArtifactError::Name { file: self.destination.clone(), found: name.to_owned() }
    }

    /// A failure in the middle of a write leaves a shard that is not whole, so it must be the last call.
    fn guarded<T>(
        &mut self,
        write: impl FnOnce(&mut Self) -> Result<T, ArtifactError>,
    ) -> Result<T, ArtifactError> {
        if self.broken {
            return Err(ArtifactError::Abandoned { file: self.destination.clone() });
        }
        let result = write(self);
        self.broken = result.is_err();
        result
    }

    fn check(&self, tensors: &[(String, RawTensor<'_>)]) -> Result<(), ArtifactError> {
        for (name, tensor) in tensors {
            if name == METADATA_KEY || self.names.contains(name) {
                return Err(self.name_error(name));
            }
            let found = tensor.bytes.len() as u128;
            let expected = byte_len(tensor.dtype, tensor.shape).unwrap_or(u128::MAX);
            if found != expected {
                let (file, tensor) = (self.destination.clone(), name.clone());
                return Err(ArtifactError::Length { file, tensor, found, expected });
            }
        }
        Ok(())
    }

    fn write(&mut self, tensors: Vec<(String, RawTensor<'_>)>) -> Result<(), ArtifactError> {
        self.guarded(|writer| {
            let bytes: u64 = tensors.iter().map(|(_, t)| t.bytes.len() as u64).sum();
            if writer.shard.bytes > 0
                && writer.shard.bytes.saturating_add(bytes) > writer.options.max_shard_bytes
            {
                writer.close_shard()?;
            }
            for (name, tensor) in tensors {
                writer.shard.append(writer.temp.path(), &name, &tensor)?;
                writer.names.insert(name);
            }
            writer.tensor_bytes += bytes;
            Ok(())
        })
    }

    fn close_shard(&mut self) -> Result<(), ArtifactError> {
        let shard = std::mem::take(&mut self.shard);
        let path = self.shard_path(self.closed.len());
        let header = shard.header(&self.options.metadata);
        if header.len() as u64 > MAX_HEADER {
            return Err(ArtifactError::Safetensors {
                file: self.destination.clone(),
                found: format!("a header of {} bytes", header.len()),
                expected: format!("at most {MAX_HEADER}"),
            });
        }
        let mut file = File::create_new(&path).map_err(io_error(&path, "create"))?;
        let mut names = Vec::new();
        file.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| file.write_all(&header))
            .map_err(io_error(&path, "write"))?;
        for part in shard.parts {
            if let Some((part, _)) = part.file {
                let mut from = File::open(&part).map_err(io_error(&part, "open"))?;
                io::copy(&mut from, &mut file).map_err(io_error(&path, "write"))?;
                fs::remove_file(&part).map_err(io_error(&part, "remove"))?;
            }
            names.extend(part.tensors.into_iter().map(|(name, ..)| name));
        }
        file.sync_all().map_err(io_error(&path, "sync"))?;
        self.closed.push(names);
        Ok(())
    }

    fn shard_path(&self, shard: usize) -> PathBuf {
        self.temp.path().join(format!("shard-{shard}"))
    }

    /// Moves the shards into the folder, now that their number and so their names are known.
    fn place_shards(&mut self) -> Result<Vec<String>, ArtifactError> {
        let count = self.closed.len();
        let name = |i: usize| match count {
            1 => SINGLE_FILE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let shards: Vec<_> = (0..count).map(name).collect();
        for (i, shard) in shards.iter().enumerate() {
            let path = self.folder.join(shard);
            fs::rename(self.shard_path(i), &path).map_err(io_error(&path, "create"))?;
        }
        if count > 1 {
            let weight_map: BTreeMap<_, _> = shards
                .iter()
                .zip(&self.closed)
                .flat_map(|(s, names)| names.iter().map(move |n| (n, s)))
                .collect();
            let index = json!({ "metadata": { "total_size": self.tensor_bytes }, "weight_map": weight_map });
            self.write_json(INDEX_FILE, &index)?;
        }
        Ok(shards)
    }

    fn write_config(&mut self) -> Result<(), ArtifactError> {
        let mut config = std::mem::take(&mut self.config);
        let base = [SECTION, TWIN_SECTION].iter().find_map(|&section| config.get(section)?.as_object());
        if base.is_some() || !self.entries.is_empty() {
            let mut section = base.cloned().unwrap_or_default();
            section.retain(|key, _| !self.module_paths.contains(&canonical(key)));
            section.extend(self.entries.iter().cloned());
            config.insert(SECTION.to_owned(), section.clone().into());
            config.insert(TWIN_SECTION.to_owned(), section.into());
        }
        self.write_json(CONFIG_FILE, &config.into())
    }

    fn write_json(&self, name: &str, value: &Value) -> Result<(), ArtifactError> {
        let path = self.folder.join(name);
        let mut file = File::create_new(&path).map_err(io_error(&path, "create"))?;
        file.write_all(format!("{value:#}\n").as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(io_error(&path, "write"))
    }

    fn swap_in(&mut self) -> Result<Option<PathBuf>, ArtifactError> {
        let destination = &self.destination;
        let folder = parent(destination);
        // Opened first: a parent that cannot be synced must not be found out after the rename.
        let parent = Folder::open(folder)?;
        let replaced = self.temp.path().join(REPLACED_FOLDER);
        let occupied = check_destination(destination, self.options.overwrite)?;
        if occupied {
            fs::rename(destination, &replaced).map_err(io_error(destination, "move aside"))?;
        }
        if let Err(e) = fs::rename(&self.folder, destination) {
            if occupied && fs::rename(&replaced, destination).is_err() {
                // Nothing more can be done but to keep it where it is.
                self.temp.disable_cleanup(true);
            }
            return Err(io_error(destination, "move the new artifact to it")(e));
        }
        parent.sync()?;
        let removed = fs::remove_dir_all(self.temp.path());
        self.temp.disable_cleanup(true);
        Ok(removed.is_err().then(|| self.temp.path().to_owned()))
    }
}

impl OpenShard {
    fn append(&mut self, folder: &Path, name: &str, tensor: &RawTensor<'_>) -> Result<(), ArtifactError> {
        let width = tensor.dtype.bitsize() / 8;
        let class = ALIGNMENTS.iter().position(|&a| width >= a).unwrap_or(ALIGNMENTS.len() - 1);
        let part = &mut self.parts[class];
        let (path, file) = match &mut part.file {
            Some(open) => open,
            none => {
                let path = folder.join(format!("part-{}", ALIGNMENTS[class]));
                let file = File::create_new(&path).map_err(io_error(&path, "create"))?;
                none.insert((path, file))
            }
        };
        file.write_all(tensor.bytes).map_err(io_error(path, "write"))?;
        let bytes = tensor.bytes.len() as u64;
        part.tensors.push((name.to_owned(), tensor.dtype, tensor.shape.to_vec(), bytes));
        self.bytes += bytes;
        Ok(())
    }

    /// The JSON header, padded with spaces.
    fn header(&self, metadata: &BTreeMap<String, String>) -> Vec<u8> {
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert(METADATA_KEY.to_owned(), json!(metadata));
        }
        let mut at = 0;
        for (name, dtype, shape, bytes) in self.parts.iter().flat_map(|p| &p.tensors) {
            let info = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes] });
            header.insert(name.clone(), info);
            at += bytes;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(HEADER_UNIT), b' ');
        header
    }
}

/// A folder of just this name that removes itself, made anew.
fn exact_folder(path: &Path) -> Result<TempDir, ArtifactError> {
    let Some(name) = path.file_name() else {
        return Err(ArtifactError::Destination { path: path.to_owned() });
    };
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error(path, "remove")(e)),
        _ => {}
    }
    tempfile::Builder::new()
        .prefix(name)
        .rand_bytes(0)
        .tempdir_in(parent(path))
        .map_err(io_error(path, "create"))
}

/// Whether something is there that may be overwritten.
fn check_destination(destination: &Path, overwrite: bool) -> Result<bool, ArtifactError> {
    let path = || destination.to_owned();
    match destination.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io_error(destination, "look for")(e)),
        Ok(_) if !overwrite => Err(ArtifactError::Exists { path: path() }),
        Ok(found) if !found.is_dir() => {
            Err(ArtifactError::NotAnArtifact { path: path(), found: "something that is not a folder" })
        }
        Ok(_) => {
            let mut entries = fs::read_dir(destination).map_err(io_error(destination, "list"))?;
            if entries.next().is_some() && !destination.join(CONFIG_FILE).is_file() {
                return Err(ArtifactError::NotAnArtifact { path: path(), found: "a folder of other things" });
            }
            Ok(true)
        }
    }
}

fn le_bytes<const N: usize, T: bytemuck::NoUninit>(
    numbers: &[T],
    to: fn(T) -> [u8; N],
) -> std::borrow::Cow<'_, [u8]> {
    match bytemuck::try_cast_slice(numbers) {
        Ok(bytes) if cfg!(target_endian = "little") => bytes.into(),
        _ => numbers.iter().flat_map(|&n| to(n)).collect::<Vec<_>>().into(),
    }
}
