//! What `config.json` says of each module.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::tensors::read_json;
use crate::error::ArtifactError;
use crate::format::{
    Axis, CODE_NAME, DEFAULT_BLOCK, DEFAULT_STATE_BITS, Geometry, MODE_NAME, ROTATED_CODE_NAME,
};
use crate::rotation::Rotation;

/// The section mlx reads.
pub(super) const SECTION: &str = "quantization";
/// Its twin for Hugging Face's readers, which mlx-lm writes with the same content.
pub(super) const TWIN_SECTION: &str = "quantization_config";
/// The key by which a section of another scheme (GPTQ, fp8 …) is known.
const FOREIGN_KEY: &str = "quant_method";

const SPACES: [&str; 2] = ["language_model.model", "model.language_model"];

/// The same path in the other key space, for a path that is in one of the two.
pub(super) fn twin(path: &str) -> Option<String> {
    SPACES.iter().map(|space| in_space(path, space)).find(|renamed| renamed != path)
}

/// One spelling for both key spaces.
pub(super) fn canonical(path: &str) -> String {
    in_space(path, SPACES[0])
}

fn in_space(path: &str, space: &str) -> String {
    let rest = SPACES.iter().find_map(|s| path.strip_prefix(s));
    match rest.filter(|rest| rest.is_empty() || rest.starts_with('.')) {
        Some(rest) => format!("{space}{rest}"),
        None => path.to_owned(),
    }
}

/// Under which of its two names `config.json` lists a module that has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeySpace {
    /// The name the module was added under.
    #[default]
    AsGiven,
    /// `language_model.model.…`, as mlx names tensors.
    LanguageModelModel,
    /// `model.language_model.…`, as Hugging Face names tensors.
    ModelLanguageModel,
}

impl KeySpace {
    pub(super) fn rename(self, path: &str) -> String {
        match self {
            KeySpace::AsGiven => path.to_owned(),
            KeySpace::LanguageModelModel => in_space(path, SPACES[0]),
            KeySpace::ModelLanguageModel => in_space(path, SPACES[1]),
        }
    }
}

/// The entry of a trellis-coded module, its parameters checked to be in range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrellisEntry {
    /// `k`, bits stored for a weight.
    pub bits: u32,
    /// `T`, weights in a block: `group_size` in the file.
    pub block: usize,
    /// `L`, bits of trellis state.
    pub state_bits: u32,
    /// The axis blocks run along.
    pub axis: Axis,
    /// How the layer's input is rotated, if it is.
    pub rotation: Option<Rotation>,
}

impl fmt::Display for TrellisEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bits, block, state_bits, axis, rotation } = self;
        write!(f, "axis {}, bits {bits}, group_size {block}, L {state_bits}", axis.index())?;
        rotation.map_or(Ok(()), |rotation| write!(f, ", {rotation}"))
    }
}

/// A quantization of another kind (affine, mxfp4 …), which this crate names but does not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// Bits a weight, where given as a number.
    pub bits: Option<u64>,
    /// Weights in a group, where given as a number.
    pub group_size: Option<u64>,
    /// Its name, where given; mlx takes "affine" if not.
    pub mode: Option<String>,
}

impl Quantization {
    fn parse(map: &Map<String, Value>) -> Self {
        let number = |key| map.get(key).and_then(Value::as_u64);
        Self {
            bits: number("bits"),
            group_size: number("group_size"),
            mode: map.get("mode").and_then(Value::as_str).map(str::to_owned),
        }
    }
}

/// What `config.json` says of one module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// Trellis-coded.
    Trellis(TrellisEntry),
    /// `false`: not quantized.
    NotQuantized,
    /// Quantized in another way.
    Other(Quantization),
    /// No entry, or `true`: the model's default, if it has one.
    Default,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Trellis(entry) => write!(f, "mode {MODE_NAME}, {entry}"),
            Entry::NotQuantized => f.write_str("false"),
            Entry::Other(Quantization { bits, group_size, mode }) => {
                let number = |n: &Option<u64>| n.map_or("unset".to_owned(), |n| n.to_string());
                let mode = mode.as_deref().unwrap_or("unset");
                write!(f, "mode {mode}, bits {}, group_size {}", number(bits), number(group_size))
            }
            Entry::Default => f.write_str("the default"),
        }
    }
}

/// A `config.json` and the module entries in it.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) json: Map<String, Value>,
    pub(super) default: Option<Quantization>,
    /// Keys and entries in the file's order.
    pub(super) entries: Vec<(String, Entry)>,
    /// Index into `entries` of a canonical path.
    lookup: HashMap<String, usize>,
}

impl Config {
    pub(super) fn read(file: &Path) -> Result<Self, ArtifactError> {
        Self::parse(file, read_json(file)?)
    }

    /// `file` is for messages only.
    pub(super) fn parse(file: &Path, json: Value) -> Result<Self, ArtifactError> {
        let Value::Object(json) = json else {
            let (file, found) = (file.to_owned(), kind(&json));
            return Err(ArtifactError::Json { file, found, expected: "an object" });
        };
        let main = section(file, &json, SECTION)?;
        let twin = section(file, &json, TWIN_SECTION)?;
        let (name, chosen) = if main.is_some() { (SECTION, main) } else { (TWIN_SECTION, twin) };
        let mut config =
            Self { default: None, entries: Vec::new(), lookup: HashMap::new(), json: Map::new() };
        if let Some(map) = chosen {
            if map.get("mode").and_then(Value::as_str) == Some(MODE_NAME) {
                return Err(ArtifactError::EntryValue {
                    file: file.to_owned(),
                    module: name.to_owned(),
                    key: "mode",
                    found: format!("{MODE_NAME:?} as the model's default"),
                    expected: "it in the entries of modules only",
                });
            }
            let default = Quantization::parse(map);
            let says_nothing = default == Quantization { bits: None, group_size: None, mode: None };
            if !says_nothing && !map.contains_key(FOREIGN_KEY) {
                config.default = Some(default);
            }
            config.take(file, map)?;
        }
        if let (Some(_), Some(twin)) = (main, twin) {
            config.compare(file, twin)?;
        }
        config.json = json;
        Ok(config)
    }

    fn take(&mut self, file: &Path, map: &Map<String, Value>) -> Result<(), ArtifactError> {
        for (key, value) in map {
            let Some(entry) = entry(file, key, value)? else { continue };
            let path = canonical(key);
            match self.lookup.get(&path).map(|&i| &self.entries[i]) {
                Some((first, before)) if *before != entry => {
                    return Err(ArtifactError::EntriesDisagree {
                        file: file.to_owned(),
                        module: first.clone(),
                        found: format!("{entry} in {key}"),
                        expected: before.to_string(),
                    });
                }
                Some(_) => {}
                None => {
                    self.lookup.insert(path, self.entries.len());
                    self.entries.push((key.clone(), entry));
                }
            }
        }
        Ok(())
    }

    /// `quantization` counts, as it does for mlx; its twin must not name a trellis module that it lacks.
    fn compare(&self, file: &Path, twin: &Map<String, Value>) -> Result<(), ArtifactError> {
        for (key, value) in twin {
            let Some(found @ Entry::Trellis(_)) = entry(file, key, value)? else { continue };
            let expected = self.entry(key);
            if found != expected {
                return Err(ArtifactError::EntriesDisagree {
                    file: file.to_owned(),
                    module: key.clone(),
                    found: format!("{found} in {TWIN_SECTION}"),
                    expected: expected.to_string(),
                });
            }
        }
        Ok(())
    }

    pub(super) fn entry(&self, path: &str) -> Entry {
        self.lookup.get(&canonical(path)).map_or(Entry::Default, |&i| self.entries[i].1.clone())
    }
}

/// The scheme of a model that only another reader's section describes.
pub(super) fn foreign_scheme(json: &Map<String, Value>) -> Option<String> {
    let absent = json.get(SECTION).is_none_or(Value::is_null);
    let scheme = json.get(TWIN_SECTION)?.get(FOREIGN_KEY)?;
    absent.then(|| scheme.to_string())
}

/// What a module added to the writer says of itself.
pub(super) fn entry_json(geometry: &Geometry, rotation: Option<&Rotation>) -> Value {
    let code = if rotation.is_some() { ROTATED_CODE_NAME } else { CODE_NAME };
    let mut trellis =
        serde_json::json!({ "L": geometry.state_bits(), "code": code, "axis": geometry.axis().index() });
    if let Some(rotation) = rotation {
        trellis["rotation"] = serde_json::json!({ "block": rotation.block(), "seed": rotation.seed() });
    }
    serde_json::json!({
        "bits": geometry.bits(),
        "group_size": geometry.block(),
        "mode": MODE_NAME,
        "trellis": trellis,
    })
}

fn section<'a>(
    file: &Path,
    json: &'a Map<String, Value>,
    name: &'static str,
) -> Result<Option<&'a Map<String, Value>>, ArtifactError> {
    match json.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(ArtifactError::EntryValue {
            file: file.to_owned(),
            module: name.to_owned(),
            key: name,
            found: kind(other),
            expected: "an object",
        }),
    }
}

/// `None` for what is no module entry: the default triple and the settings of other schemes.
fn entry(file: &Path, key: &str, value: &Value) -> Result<Option<Entry>, ArtifactError> {
    let map = match value {
        Value::Bool(false) => return Ok(Some(Entry::NotQuantized)),
        Value::Bool(true) => return Ok(Some(Entry::Default)),
        Value::Object(map) => map,
        _ => return Ok(None),
    };
    if map.get("mode").and_then(Value::as_str) == Some(MODE_NAME) {
        return trellis_entry(&Parser { file: file.to_owned(), module: key }, map)
            .map(Entry::Trellis)
            .map(Some);
    }
    if map.contains_key("trellis") {
        let found = map.get("mode").map_or_else(|| "nothing".to_owned(), Value::to_string);
        let parser = Parser { file: file.to_owned(), module: key };
        return Err(parser.value("mode", found, "\"trellis\", as the entry has a trellis object"));
    }
    Ok(Some(Entry::Other(Quantization::parse(map))))
}

fn trellis_entry(p: &Parser<'_>, map: &Map<String, Value>) -> Result<TrellisEntry, ArtifactError> {
    p.only(map, &["bits", "group_size", "mode", "trellis"], "bits, group_size, mode, trellis")?;
    let inner = match map.get("trellis") {
        Some(Value::Object(inner)) => inner,
        other => {
            return Err(p.value("trellis", other.map_or("nothing".to_owned(), kind), "an object"));
        }
    };
    let rotation = match inner.get("code") {
        Some(Value::String(code)) if code == CODE_NAME => {
            p.only(inner, &["L", "code", "axis"], "L, code, axis in trellis")?;
            None
        }
        Some(Value::String(code)) if code == ROTATED_CODE_NAME => {
            p.only(inner, &["L", "code", "axis", "rotation"], "L, code, axis, rotation in trellis")?;
            Some(rotation(p, inner.get("rotation"))?)
        }
        Some(Value::String(code)) => {
            let (file, module) = (p.file.clone(), p.module.to_owned());
            return Err(ArtifactError::Code { file, module, found: code.clone() });
        }
        other => return Err(p.value("code", found(other), "\"1mad\" or \"1mad-hadamard\"")),
    };
    let axis = Axis::from_index(p.number(inner, "axis", None)?)
        .ok_or_else(|| p.value("axis", found(inner.get("axis")), "0 or 1"))?;
    // Saturating keeps a number too large for its type out of range, where the geometry's check names it.
    let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let entry = TrellisEntry {
        bits: narrow(p.number(map, "bits", None)?),
        block: p.number(map, "group_size", Some(DEFAULT_BLOCK as u64))?.try_into().unwrap_or(usize::MAX),
        state_bits: narrow(p.number(inner, "L", Some(DEFAULT_STATE_BITS.into()))?),
        axis,
        rotation,
    };
    match Geometry::new(axis, entry.bits, entry.state_bits, entry.block, 1, entry.block) {
        Ok(_) => Ok(entry),
        Err(reason) => {
            let (file, module) = (p.file.clone(), p.module.to_owned());
            Err(ArtifactError::Parameters { file, module, reason })
        }
    }
}

fn rotation(p: &Parser<'_>, value: Option<&Value>) -> Result<Rotation, ArtifactError> {
    let Some(Value::Object(map)) = value else {
        return Err(p.value("rotation", value.map_or("nothing".to_owned(), kind), "an object"));
    };
    p.only(map, &["block", "seed"], "block, seed in rotation")?;
    let block = p.number(map, "block", None)?.try_into().unwrap_or(usize::MAX);
    Rotation::new(block, p.number(map, "seed", None)?).map_err(|reason| {
        let (file, module) = (p.file.clone(), p.module.to_owned());
        ArtifactError::Rotation { file, module, reason }
    })
}

struct Parser<'a> {
    file: PathBuf,
    module: &'a str,
}

impl Parser<'_> {
    fn only(
        &self,
        map: &Map<String, Value>,
        known: &[&str],
        expected: &'static str,
    ) -> Result<(), ArtifactError> {
        match map.keys().find(|key| !known.contains(&key.as_str())) {
            Some(found) => {
                let (file, module, found) = (self.file.clone(), self.module.to_owned(), found.clone());
                Err(ArtifactError::EntryKey { file, module, found, expected })
            }
            None => Ok(()),
        }
    }

    fn number(
        &self,
        map: &Map<String, Value>,
        key: &'static str,
        default: Option<u64>,
    ) -> Result<u64, ArtifactError> {
        match (map.get(key), default) {
            (None, Some(default)) => Ok(default),
            (value, _) => value
                .and_then(Value::as_u64)
                .ok_or_else(|| self.value(key, found(value), "a whole number, zero or more")),
        }
    }

    fn value(&self, key: &'static str, found: String, expected: &'static str) -> ArtifactError {
        let (file, module) = (self.file.clone(), self.module.to_owned());
        ArtifactError::EntryValue { file, module, key, found, expected }
    }
}

fn found(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), Value::to_string)
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
    .to_owned()
}
