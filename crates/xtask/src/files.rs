//! Looking for files.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result, ensure};

/// The files in a folder that end in `.extension`, sorted; there has to be one.
pub(crate) fn with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let list = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect()
    };
    let mut files = list().with_context(|| format!("cannot list {}", folder.display()))?;
    files.retain(|file| file.extension() == Some(OsStr::new(extension)));
    files.sort();
    ensure!(!files.is_empty(), "expected *.{extension} files in {}, found none", folder.display());
    Ok(files)
}

/// The file of this name in the folder or below it; there has to be one.
pub(crate) fn named(folder: &Path, name: &str) -> Result<PathBuf> {
    find(folder, name)
        .with_context(|| format!("cannot search {}", folder.display()))?
        .with_context(|| format!("expected a file {name} in {} or below, found none", folder.display()))
}

fn find(folder: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let found = match entry.file_type()?.is_dir() {
            true => find(&entry.path(), name)?,
            false => (entry.file_name() == name).then(|| entry.path()),
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        for name in ["y.gguf", "x.gguf", "z.txt"] {
            fs::write(deep.join(name), "").unwrap();
        }
        assert_eq!(named(folder.path(), "x.gguf").unwrap(), deep.join("x.gguf"));
        assert_eq!(with_extension(&deep, "gguf").unwrap(), [deep.join("x.gguf"), deep.join("y.gguf")]);
    }

    #[test]
    fn says_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let error = named(folder.path(), "x.gguf").unwrap_err().to_string();
        assert!(error.contains("x.gguf"), "{error}");
        let error = with_extension(folder.path(), "cpp").unwrap_err().to_string();
        assert!(error.contains("*.cpp"), "{error}");
        assert!(with_extension(&folder.path().join("none"), "cpp").is_err());
    }
}
