//! The hidden folder beside the destination in which finished tensors outlive the process.
//!
//! `.NAME.quantize` holds the plan, a lock that the system drops with the process, two files for each finished tensor
//! (its parts, and a record of them that is written last: without it the tensor counts as not begun), and the
//! artifact while it is put together. Every file is written under another name, synced and renamed. So a kill at any
//! moment costs the tensor under way at most, and since a tensor's bytes depend on the plan alone, whoever goes on
//! ends with the same artifact.
//!
//! Just before the artifact is moved to the destination a marker is left: with the marker there and the artifact gone,
//! the move has happened, and only the report and the tidying are left.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use safetensors::tensor::TensorView;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use trellis_codec::artifact::{ARTIFACT_FOLDER, Dtype, NewFile, REPLACED_FOLDER, Tensors};

const LOCK: &str = "lock";
const PLAN: &str = "plan.json";
const MARKER: &str = "publishing.json";
const STAGING: &str = "staging";

/// The folder, locked.
pub(super) struct WorkFolder {
    path: PathBuf,
    /// Held for as long as it is open.
    _lock: File,
}

/// A part of a finished tensor: name, type, shape, bytes.
pub(super) type Part = (String, Dtype, Vec<usize>, Vec<u8>);

impl WorkFolder {
    /// The folder for `destination`, made if it is not there. With `restart` what it holds is dropped; else it must
    /// belong to `plan`. `true` says that the plan had been carried out but for tidying.
    pub(super) fn open(destination: &Path, plan: &Value, restart: bool) -> Result<(Self, bool)> {
        let name = destination.file_name().with_context(|| {
            format!("{}: found no folder name at its end, expected one", destination.display())
        })?;
        let path = destination.with_file_name(format!(".{}.quantize", name.to_string_lossy()));
        let lock = lock(&path).with_context(|| format!("{}", path.display()))?;
        remove(&gone(&path))?;
        let work = Self { path, _lock: lock };
        let published = work.recover(destination, plan, restart);
        Ok((work, published.context("going on with an interrupted run")?))
    }

    fn recover(&self, destination: &Path, plan: &Value, restart: bool) -> Result<bool> {
        // Killed between the two renames that replace an artifact: the old one is put back.
        let replaced = self.staging().join(REPLACED_FOLDER);
        if replaced.exists() && !destination.exists() {
            fs::rename(&replaced, destination).with_context(|| format!("{}", replaced.display()))?;
        }
        let marker = self.read_json::<Value>(MARKER)?;
        let moved =
            marker.is_some() && !self.staging().join(ARTIFACT_FOLDER).exists() && destination.exists();
        if moved && marker.as_ref() == Some(plan) && !restart {
            return Ok(true);
        }
        if moved || restart {
            self.clear()?;
        }
        match self.read_json::<Value>(PLAN)? {
            Some(found) if found != *plan => bail!(
                "{} holds {} finished tensors of another plan ({}): run that command again to finish it, or add \
                 --restart to drop them",
                self.path.display(),
                self.finished(),
                difference(&found, plan)
            ),
            Some(_) => {}
            None => {
                self.clear()?;
                self.write_json(PLAN, plan)?;
            }
        }
        remove(&self.path.join(MARKER))?;
        Ok(false)
    }

    /// Where the artifact is put together.
    pub(super) fn staging(&self) -> PathBuf {
        self.path.join(STAGING)
    }

    /// Says that the artifact is about to be moved to the destination.
    pub(super) fn mark(&self, plan: &Value) -> Result<()> {
        self.write_json(MARKER, plan)
    }

    /// The record of a finished tensor.
    pub(super) fn record<T: DeserializeOwned>(&self, index: usize) -> Result<Option<T>> {
        if !self.parts_path(index).exists() {
            return Ok(None);
        }
        self.read_json(&record_name(index))
    }

    /// Keeps a finished tensor.
    pub(super) fn finish(&self, index: usize, parts: &[Part], record: &impl Serialize) -> Result<()> {
        let views = parts
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>>>()?;
        // A second copy in memory: both take less than the float32 weights did. safetensors writes to paths only.
        write_whole(&self.parts_path(index), &safetensors::serialize(views, None)?)?;
        self.write_json(&record_name(index), record)
    }

    /// The parts of a finished tensor.
    pub(super) fn parts(&self, index: usize) -> Result<Tensors> {
        Ok(Tensors::open(self.parts_path(index))?)
    }

    /// How many tensors are finished.
    pub(super) fn finished(&self) -> usize {
        let Ok(entries) = fs::read_dir(&self.path) else { return 0 };
        let names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
        names.filter(|n| n.ends_with(".json") && n.starts_with(|c: char| c.is_ascii_digit())).count()
    }

    /// Removes the folder: in one step, under another name.
    pub(super) fn remove(self) -> Result<()> {
        let gone = gone(&self.path);
        remove(&gone)?;
        fs::rename(&self.path, &gone).with_context(|| format!("{}", self.path.display()))?;
        remove(&gone)
    }

    /// Removes the folder if it holds no finished tensor; else says where it is and how many.
    pub(super) fn abandon(self) -> Option<(PathBuf, usize)> {
        let (path, finished) = (self.path.clone(), self.finished());
        if finished > 0 {
            return Some((path, finished));
        }
        // What cannot be removed does no harm.
        let _ = self.remove();
        None
    }

    fn clear(&self) -> Result<()> {
        for entry in self.entries()? {
            if !entry.ends_with(LOCK) {
                remove(&entry)?;
            }
        }
        Ok(())
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.path).and_then(|all| all.map(|e| Ok(e?.path())).collect());
        entries.with_context(|| format!("{}", self.path.display()))
    }

    fn parts_path(&self, index: usize) -> PathBuf {
        self.path.join(format!("{index:05}.safetensors"))
    }

    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Ok(bytes) => {
                Ok(Some(serde_json::from_slice(&bytes).with_context(|| format!("{}", path.display()))?))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("{}", path.display())),
        }
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        write_whole(&self.path.join(name), &serde_json::to_vec(value)?)
    }
}

/// Writes a file that is there whole or not at all.
pub(super) fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = NewFile::create(path)?;
    file.write(content)?;
    Ok(file.publish()?)
}

/// What a folder is called while it is being removed.
fn gone(path: &Path) -> PathBuf {
    path.with_added_extension("gone")
}

fn record_name(index: usize) -> String {
    format!("{index:05}.json")
}

fn remove(path: &Path) -> Result<()> {
    let result = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match result {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("{}: cannot remove", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes and locks the folder. The lock file may have been removed with its folder by the process that held the lock;
/// then another try makes a new one.
fn lock(path: &Path) -> Result<File> {
    loop {
        match fs::create_dir(path) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(e).context("cannot create");
            }
            _ => {}
        }
        let lock = path.join(LOCK);
        let file = match File::options().create(true).truncate(false).write(true).open(&lock) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.context("cannot open the lock")?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => bail!("locked: another process is quantizing into this place"),
            Err(TryLockError::Error(e)) => return Err(e).context("cannot lock"),
            Ok(()) if is_same(&file, &lock) => return Ok(file),
            Ok(()) => {}
        }
    }
}

#[cfg(unix)]
fn is_same(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |m: &fs::Metadata| (m.dev(), m.ino());
    matches!((file.metadata(), path.metadata()), (Ok(a), Ok(b)) if id(&a) == id(&b))
}

#[cfg(not(unix))]
fn is_same(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Where two plans first differ.
fn difference(a: &Value, b: &Value) -> String {
    fn walk(at: &str, a: &Value, b: &Value) -> Option<String> {
        match (a, b) {
            (Value::Object(x), Value::Object(y)) => {
                let mut keys: Vec<&String> = x.keys().chain(y.keys()).collect();
                keys.dedup();
                keys.into_iter().find_map(|key| {
                    let null = &Value::Null;
                    let name = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                    walk(&name, x.get(key).unwrap_or(null), y.get(key).unwrap_or(null))
                })
            }
            (Value::Array(x), Value::Array(y)) if x.len() == y.len() => x.iter().zip(y).find_map(|(x, y)| {
                let name = x.get("name").or(x.get("file")).and_then(Value::as_str).unwrap_or(at);
                walk(name, x, y)
            }),
            (a, b) if a == b => None,
            (Value::Array(x), Value::Array(y)) => Some(format!("{at}: {} and {} of them", x.len(), y.len())),
            (a, b) => Some(format!("{at}: {a} there, {b} here")),
        }
    }
    walk("", a, b).unwrap_or_else(|| "in nothing that can be shown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The moments that a test with kills at random would hardly hit.
    #[test]
    fn it_knows_how_far_publishing_had_come() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("out");
        let plan = json!({ "plan": 1 });
        let open = || WorkFolder::open(&destination, &plan, false).unwrap();

        let (work, published) = open();
        assert!(!published);
        let artifact = work.staging().join(ARTIFACT_FOLDER);
        fs::create_dir_all(&artifact).unwrap();
        work.mark(&plan).unwrap();
        drop(work);
        // Marked but not moved, with nothing or with another artifact at the destination.
        assert!(!open().1);
        fs::create_dir(&destination).unwrap();
        let (work, published) = open();
        assert!(!published);
        work.mark(&plan).unwrap();
        fs::remove_dir(&destination).unwrap();
        drop(work);

        // Killed between the renames: the old artifact is put back.
        let replaced = destination.parent().unwrap().join(".out.quantize/staging").join(REPLACED_FOLDER);
        fs::create_dir(&replaced).unwrap();
        fs::write(replaced.join("old"), "").unwrap();
        let (work, published) = open();
        assert!(!published && destination.join("old").exists());

        // Moved: only the tidying is left, unless another plan is asked for.
        work.mark(&plan).unwrap();
        fs::remove_dir(&artifact).unwrap();
        drop(work);
        let (work, published) = open();
        assert!(published);
        drop(work);
        let (work, published) = WorkFolder::open(&destination, &json!({ "plan": 2 }), false).unwrap();
        assert!(!published);
        work.remove().unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn half_a_tensor_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("out");
        let (work, _) = WorkFolder::open(&destination, &json!(1), false).unwrap();
        let part: Part = ("a.weight".to_owned(), Dtype::U32, vec![1], vec![1, 2, 3, 4]);
        work.finish(3, &[part], &json!({ "row": 1 })).unwrap();
        assert_eq!(work.finished(), 1);
        assert_eq!(work.record::<Value>(3).unwrap(), Some(json!({ "row": 1 })));
        assert_eq!(work.parts(3).unwrap().read("a.weight").unwrap(), [1, 2, 3, 4]);
        fs::remove_file(work.path.join("00003.json")).unwrap();
        assert_eq!((work.record::<Value>(3).unwrap(), work.finished()), (None, 0));
        assert!(work.abandon().is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
