//! What the commands that run a language model share: where it runs, and how much memory that takes.

use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;
use mlx_rs::Device;
use mlx_trellis::{cuda_is_available, cuda_preflight, gpu_name, metal_is_available, mlx_version};
use mlx_trellis_models::{LoadOptions, Model, Tokenizer};
use serde::Serialize;

use crate::memory;
use crate::report::DtypeArg;

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// The CPU
    Cpu,
    /// The Metal GPU; exits 3 where there is none
    Metal,
    /// The CUDA GPU; exits 3 where there is none
    Cuda,
}

/// Makes a back end MLX's default, the best there is if none is asked for, and says what it is; says so and returns
/// `None` where this machine has none. To be called before anything else of MLX's.
pub(crate) fn select(backend: Option<Backend>) -> Option<String> {
    let backend = backend.unwrap_or_else(|| {
        if metal_is_available() {
            Backend::Metal
        } else if cuda_is_available() {
            Backend::Cuda
        } else {
            Backend::Cpu
        }
    });
    match backend {
        Backend::Cpu => {
            Device::set_default(&Device::cpu());
            return Some(format!("CPU, {}", trellis_cpu::Level::best()));
        }
        Backend::Metal if !metal_is_available() => {
            eprintln!("no Metal device: MLX {} has none on this machine", mlx_version());
            return None;
        }
        Backend::Cuda => {
            if let Err(missing) = cuda_preflight() {
                eprintln!("no CUDA: {missing}");
                return None;
            }
        }
        Backend::Metal => {}
    }
    Device::set_default(&Device::gpu());
    Some(gpu_name().unwrap_or_else(|| "GPU".to_owned()))
}

/// Loads a model, in its own dtype or in another.
pub(crate) fn load(folder: &Path, dtype: Option<DtypeArg>) -> Result<Model> {
    let options = LoadOptions { dtype: dtype.map(DtypeArg::mlx) };
    Model::load(folder, &options).with_context(|| format!("model {}", folder.display()))
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
