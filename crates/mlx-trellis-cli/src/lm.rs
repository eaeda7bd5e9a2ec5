//! What the commands that run a language model share: where and how it runs, and how much memory that takes.

use std::path::Path;

use anyhow::{Context, Result};
use mlx_trellis_models::{LoadOptions, Model, Tokenizer};
use serde::Serialize;

use crate::device::{self, Backend};
use crate::memory;
use crate::report::DtypeArg;

/// Where and how a model runs.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Where to run; left out, on the GPU if MLX has one
    #[arg(long, value_enum)]
    backend: Option<Backend>,
    /// Type of activations; left out, the model's own. In float32, CUDA rounds the factors of dense products to tf32
    /// unless MLX_ENABLE_TF32=0 is set
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
}

impl RunArgs {
    /// [`device::select`].
    pub(crate) fn select(&self) -> Option<String> {
        device::select(self.backend)
    }

    /// Loads a model.
    pub(crate) fn load(&self, folder: &Path) -> Result<Model> {
        let options = LoadOptions { dtype: self.dtype.map(DtypeArg::mlx) };
        Model::load(folder, &options).with_context(|| format!("model {}", folder.display()))
    }
}

/// The tokens of a text file, at most `limit` of them.
pub(crate) fn read_tokens(tokenizer: &Tokenizer, file: &Path, limit: Option<usize>) -> Result<Vec<u32>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("text {}", file.display()))?;
    let mut tokens = tokenizer.encode(&text, true)?;
    tokens.truncate(limit.unwrap_or(usize::MAX));
    Ok(tokens)
}

/// The most memory a process has taken.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Peak {
    /// Bytes that MLX had allocated at once.
    pub(crate) mlx_bytes: usize,
    /// Bytes of the process that were resident at once, mapped files among them, where the system says.
    pub(crate) resident_bytes: Option<u64>,
}

impl Peak {
    pub(crate) fn now() -> Result<Self> {
        Ok(Self { mlx_bytes: mlx_rs::memory::peak_memory()?, resident_bytes: memory::peak_bytes() })
    }
}

impl std::fmt::Display for Peak {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peak memory {:.0} MB of MLX's", self.mlx_bytes as f64 / 1e6)?;
        self.resident_bytes.map_or(Ok(()), |b| write!(f, ", {:.0} MB resident", b as f64 / 1e6))
    }
}
