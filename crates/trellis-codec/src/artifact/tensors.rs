//! The tensors of one safetensors file, or of a folder of them, memory-mapped.
//!
//! The header is parsed here rather than by the `safetensors` crate for two reasons: a refusal can name the tensor
//! with what was found and expected, and offsets are summed with checks (version 0.8 of the crate adds the
//! header's length to the last offset unchecked, which a crafted file overflows).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

use super::config::twin;
use super::{INDEX_FILE, METADATA_KEY, SINGLE_FILE, io_error};
use crate::error::ArtifactError;
use crate::ffi::map::map;

/// The longest header read or written: the limit of the `safetensors` crate.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// A tensor as bytes: little-endian elements in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawTensor<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape; empty for a scalar.
    pub shape: &'a [usize],
    /// The elements' bytes, as many as shape and dtype ask for.
    pub bytes: &'a [u8],
}

/// Every tensor of a safetensors file or of a model's folder, whatever its `config.json` says.
#[derive(Debug)]
pub struct Tensors {
    location: PathBuf,
    shards: Vec<Shard>,
    tensors: Vec<Located>,
    lookup: HashMap<String, usize>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    map: Mmap,
}

#[derive(Debug)]
struct Located {
    name: String,
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where its bytes are in the map.
    range: Range<usize>,
}

impl Tensors {
    /// Maps a `.safetensors` file, or a folder with `model.safetensors` or with `model.safetensors.index.json` and
    /// the shards it names. When both are there the index counts.
    ///
    /// # Errors
    /// A file that cannot be read, a malformed or truncated one, a folder without weights, a shard that is not on
    /// disk or not in the folder, an index that disagrees with its shards in any tensor, and a file named like a
    /// shard (`model.safetensors`, `model-00001-of-00002.safetensors`) that is not part of the model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ArtifactError> {
        let path = path.as_ref();
        if !fs::metadata(path).map_err(io_error(path, "open"))?.is_dir() {
            return Self::open_shards(path, &[path.to_owned()]);
        }
        let (index, single) = (path.join(INDEX_FILE), path.join(SINGLE_FILE));
        if exists(&index)? {
            return Self::open_index(path, &index);
        }
        if !exists(&single)? {
            let names = file_names(path)?.into_iter().filter(|n| n.ends_with(".safetensors"));
            let found = names.collect::<Vec<_>>().join(", ");
            let found = if found.is_empty() { "no safetensors file".to_owned() } else { found };
            return Err(ArtifactError::NoWeights { path: path.to_owned(), found });
        }
        refuse_unlisted(path, &single, |name| name == SINGLE_FILE)?;
        Self::open_shards(path, &[single])
    }

    fn open_index(folder: &Path, index: &Path) -> Result<Self, ArtifactError> {
        let weight_map = read_index(index)?;
        let mut shards = BTreeSet::new();
        for (tensor, shard) in &weight_map {
            let mut parts = Path::new(shard).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == &**shard)
            {
                let (file, tensor, found) = (index.to_owned(), tensor.clone(), shard.clone());
                return Err(ArtifactError::ShardName { file, tensor, found });
            }
            if shards.insert(shard.as_str()) && !exists(&folder.join(shard))? {
                return Err(ArtifactError::MissingShard {
                    file: index.to_owned(),
                    tensor: tensor.clone(),
                    shard: shard.clone(),
                    expected: folder.join(shard),
                });
            }
        }
        refuse_unlisted(folder, index, |name| shards.contains(name))?;
        let paths: Vec<_> = shards.iter().map(|shard| folder.join(shard)).collect();
        let opened = Self::open_shards(folder, &paths)?;
        let stale = |tensor: &str, found: String, expected: String| {
            Err(ArtifactError::StaleIndex {
                file: index.to_owned(),
                tensor: tensor.to_owned(),
                found,
                expected,
            })
        };
        let shards = Vec::from_iter(shards);
        let shard_of = |located: &Located| shards[located.shard];
        for (tensor, shard) in &weight_map {
            match opened.located(tensor) {
                None => return stale(tensor, "it in no shard".to_owned(), format!("it in {shard}")),
                Some(at) if shard_of(at) != shard => {
                    return stale(tensor, format!("it in {}", shard_of(at)), format!("it in {shard}"));
                }
                Some(_) => {}
            }
        }
        match opened.tensors.iter().find(|at| !weight_map.contains_key(&at.name)) {
            Some(at) => stale(
                &at.name,
                format!("it in {}", shard_of(at)),
                "it listed by the index, or absent".to_owned(),
            ),
            None => Ok(opened),
        }
    }

    fn open_shards(location: &Path, paths: &[PathBuf]) -> Result<Self, ArtifactError> {
        let mut opened = Self {
            location: location.to_owned(),
            shards: Vec::with_capacity(paths.len()),
            tensors: Vec::new(),
            lookup: HashMap::new(),
        };
        for path in paths {
            let file = File::open(path).map_err(io_error(path, "open"))?;
            let map = map(&file).map_err(io_error(path, "map"))?;
            for mut located in parse(path, &map)? {
                located.shard = opened.shards.len();
                if let Some(&before) = opened.lookup.get(&located.name) {
                    return Err(ArtifactError::TensorHeader {
                        file: path.clone(),
                        tensor: located.name,
                        found: format!(
                            "a second one after {}",
                            paths[opened.tensors[before].shard].display()
                        ),
                        expected: "each name once".to_owned(),
                    });
                }
                opened.lookup.insert(located.name.clone(), opened.tensors.len());
                opened.tensors.push(located);
            }
            opened.shards.push(Shard { path: path.clone(), file, map });
        }
        Ok(opened)
    }

    /// The file or folder that was opened.
    pub fn location(&self) -> &Path {
        &self.location
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are no tensors at all.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// All names: shard by shard in order of shard name, in each in order of offset.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|t| t.name.as_str())
    }

    /// All tensors with their names, in the order of [`Tensors::names`].
    pub fn iter(&self) -> impl Iterator<Item = (&str, RawTensor<'_>)> {
        self.tensors.iter().map(|t| (t.name.as_str(), self.raw(t)))
    }

    /// The tensor called `name`, or its twin in the other key space (see [`artifact`](super)).
    pub fn get(&self, name: &str) -> Option<RawTensor<'_>> {
        self.located(name).or_else(|| self.located(&twin(name)?)).map(|t| self.raw(t))
    }

    /// The tensor of exactly this name.
    pub(super) fn exact(&self, name: &str) -> Option<RawTensor<'_>> {
        self.located(name).map(|t| self.raw(t))
    }

    /// The bytes of the tensor called `name` (or its twin), read from its file rather than through the map: the
    /// memory is given back with the result, and a file that cannot be read is an error rather than a signal.
    ///
    /// # Errors
    /// [`ArtifactError::NoTensor`] when there is no such tensor, or what the system said.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, ArtifactError> {
        let located = self.located(name).or_else(|| self.located(&twin(name)?));
        let located = located.ok_or_else(|| ArtifactError::NoTensor {
            file: self.location.clone(),
            tensor: name.to_owned(),
        })?;
        let shard = &self.shards[located.shard];
        let mut bytes = vec![0; located.range.len()];
        read_at(shard, located.range.start, &mut bytes).map_err(io_error(&shard.path, "read"))?;
        Ok(bytes)
    }

    /// The file that holds the tensor of exactly this name; the location when there is none.
    pub fn file_of(&self, name: &str) -> &Path {
        self.located(name).map_or(&self.location, |t| &self.shards[t.shard].path)
    }

    fn located(&self, name: &str) -> Option<&Located> {
        self.lookup.get(name).map(|&i| &self.tensors[i])
    }

    fn raw<'a>(&'a self, located: &'a Located) -> RawTensor<'a> {
        RawTensor {
            dtype: located.dtype,
            shape: &located.shape,
            bytes: &self.shards[located.shard].map[located.range.clone()],
        }
    }
}

#[cfg(unix)]
fn read_at(shard: &Shard, at: usize, bytes: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(&shard.file, bytes, at as u64)
}

#[cfg(not(unix))]
fn read_at(shard: &Shard, at: usize, bytes: &mut [u8]) -> io::Result<()> {
    bytes.copy_from_slice(&shard.map[at..at + bytes.len()]);
    Ok(())
}

/// Bytes of a tensor, or `None` when its bits are not whole bytes. A `u128` so that no shape overflows silently:
/// `None` too when even that is too narrow.
pub(super) fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<u128> {
    let elements = shape.iter().try_fold(1u128, |n, &dim| n.checked_mul(dim as u128))?;
    let bits = elements.checked_mul(dtype.bitsize() as u128)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// A file as [`Tensors`] reads it: `u64` header length, JSON header, then data without holes.
fn parse(file: &Path, bytes: &[u8]) -> Result<Vec<Located>, ArtifactError> {
    let refuse = |found: String, expected: String| {
        Err(ArtifactError::Safetensors { file: file.to_owned(), found, expected })
    };
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return refuse(format!("{} bytes", bytes.len()), "at least the 8 of a header length".to_owned());
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return refuse(format!("a header of {length} bytes"), format!("at most {MAX_HEADER}"));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return refuse(
            format!("a header of {length} bytes"),
            format!("at most {}, what is left of the file", rest.len()),
        );
    };
    let entries = match serde_json::from_slice::<Header>(header) {
        Ok(Header(entries)) => entries,
        Err(e) => return refuse(format!("a header with {e}"), "a JSON object".to_owned()),
    };
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        let refuse = |found: String, expected: &str| {
            let (file, tensor, expected) = (file.to_owned(), name.clone(), expected.to_owned());
            Err(ArtifactError::TensorHeader { file, tensor, found, expected })
        };
        if name == METADATA_KEY {
            match &value {
                Value::Object(map) if map.values().all(Value::is_string) => continue,
                _ => return refuse(value.to_string(), "an object of strings"),
            }
        }
        let info = match TensorInfo::deserialize(&value) {
            Ok(info) => info,
            Err(e) => return refuse(e.to_string(), "dtype, shape and data_offsets"),
        };
        let (start, end) = info.data_offsets;
        match (byte_len(info.dtype, &info.shape), end.checked_sub(start)) {
            (Some(expected), Some(found)) if found as u128 == expected => {}
            (Some(expected), _) => {
                return refuse(
                    format!("data_offsets [{start}, {end}]"),
                    &format!("{expected} bytes for {} of shape {:?}", info.dtype, info.shape),
                );
            }
            (None, _) => {
                return refuse(
                    format!("{} of shape {:?}", info.dtype, info.shape),
                    "a whole number of bytes, of a size that a file can have",
                );
            }
        }
        tensors.push(Located { name, shard: 0, dtype: info.dtype, shape: info.shape, range: start..end });
    }
    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut at = 0;
    for t in &tensors {
        if t.range.start != at {
            return Err(ArtifactError::TensorHeader {
                file: file.to_owned(),
                tensor: t.name.clone(),
                found: format!("data from byte {}", t.range.start),
                expected: format!("byte {at}, where the tensor before it ends"),
            });
        }
        at = t.range.end;
    }
    if at != data.len() {
        return refuse(format!("{} bytes of data", data.len()), format!("the header's {at}"));
    }
    let data_start = bytes.len() - data.len();
    for t in &mut tensors {
        t.range = data_start + t.range.start..data_start + t.range.end;
    }
    Ok(tensors)
}

/// The header's entries in order; unlike a map it shows a name that comes twice.
struct Header(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

fn read_index(file: &Path) -> Result<BTreeMap<String, String>, ArtifactError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    Index::deserialize(read_json(file)?).map(|index| index.weight_map).map_err(|e| ArtifactError::Json {
        file: file.to_owned(),
        found: e.to_string(),
        expected: "an object whose weight_map names a shard for each tensor",
    })
}

/// Parses a file of JSON.
pub(super) fn read_json(file: &Path) -> Result<Value, ArtifactError> {
    let bytes = fs::read(file).map_err(io_error(file, "read"))?;
    serde_json::from_slice(&bytes).map_err(|e| ArtifactError::Json {
        file: file.to_owned(),
        found: e.to_string(),
        expected: "JSON",
    })
}

fn exists(path: &Path) -> Result<bool, ArtifactError> {
    path.try_exists().map_err(io_error(path, "look for"))
}

fn file_names(folder: &Path) -> Result<BTreeSet<String>, ArtifactError> {
    let names = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    fs::read_dir(folder).and_then(|entries| entries.map(names).collect()).map_err(io_error(folder, "list"))
}

fn refuse_unlisted(folder: &Path, file: &Path, listed: impl Fn(&str) -> bool) -> Result<(), ArtifactError> {
    match file_names(folder)?.into_iter().find(|name| is_shard_name(name) && !listed(name)) {
        Some(found) => Err(ArtifactError::UnlistedShard { file: file.to_owned(), found }),
        None => Ok(()),
    }
}

/// `model.safetensors` or `model-<digits>-of-<digits>.safetensors`.
fn is_shard_name(name: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    name == SINGLE_FILE
        || name
            .strip_prefix("model-")
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .and_then(|rest| rest.split_once("-of-"))
            .is_some_and(|(i, n)| digits(i) && digits(n))
}
