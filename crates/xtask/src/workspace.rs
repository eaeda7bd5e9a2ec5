//! Where the workspace is, and what `cargo metadata` says of it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process;

/// The checkout that this program works on.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
}

/// A package as Cargo unpacked it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    /// Its version.
    pub(crate) version: String,
    /// The folder of its Cargo.toml.
    pub(crate) folder: PathBuf,
}

impl Workspace {
    /// The workspace this program is a member of. Cargo says at run time where that is; the path compiled in
    /// serves when the program is started by hand.
    pub(crate) fn locate() -> Self {
        let manifest_dir =
            env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest_dir).ancestors().nth(2).unwrap_or(Path::new("/")).to_owned();
        Self { root }
    }

    /// The folder of the workspace's Cargo.toml.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// `target/<name>`, for what this program keeps. It stays inside the checkout when `CARGO_TARGET_DIR`
    /// points elsewhere: a temporary target folder should not cost another download.
    pub(crate) fn kept(&self, name: &str) -> PathBuf {
        self.root.join("target").join(name)
    }

    /// A Cargo command, run in the workspace's root by the Cargo that started this program.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
        command.current_dir(&self.root);
        command
    }

    /// Finds a dependency's source, downloading what is not there yet.
    pub(crate) fn dependency(&self, name: &str, triple: &str) -> Result<Package> {
        let mut command = self.cargo();
        command.args(["metadata", "--format-version", "1", "--filter-platform", triple]);
        let metadata = process::output(&mut command)?;
        let metadata: Value =
            serde_json::from_str(&metadata).context("cargo metadata did not answer with JSON")?;
        find_package(&metadata, name)
    }
}

fn find_package(metadata: &Value, name: &str) -> Result<Package> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut found = packages.iter().filter(|package| package["name"] == name);
    let (Some(package), None) = (found.next(), found.next()) else {
        let count = packages.iter().filter(|package| package["name"] == name).count();
        bail!("expected one package named {name} among the workspace's dependencies, found {count}");
    };
    match (
        package["version"].as_str(),
        package["manifest_path"].as_str().map(Path::new).and_then(Path::parent),
    ) {
        (Some(version), Some(folder)) => {
            Ok(Package { version: version.to_owned(), folder: folder.to_owned() })
        }
        _ => bail!("cargo metadata names neither version nor manifest path of {name}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn finds_the_one_package() {
        let metadata = json!({"packages": [
            {"name": "mlx-rs", "version": "0.33.0", "manifest_path": "/r/mlx-rs-0.33.0/Cargo.toml"},
            {"name": "mlx-sys", "version": "0.7.0", "manifest_path": "/r/mlx-sys-0.7.0/Cargo.toml"},
        ]});
        let package = find_package(&metadata, "mlx-sys").unwrap();
        assert_eq!(package, Package { version: "0.7.0".into(), folder: "/r/mlx-sys-0.7.0".into() });
        assert!(find_package(&metadata, "mlx").unwrap_err().to_string().contains("found 0"));
    }

    #[test]
    fn root_holds_the_workspace() {
        assert!(Workspace::locate().root().join("crates/xtask/Cargo.toml").is_file());
    }
}
