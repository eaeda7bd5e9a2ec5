//! What the commands that run a language model share: where it runs, and how much memory that takes.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use mlx_rs::Device;
use mlx_trellis::{cuda_is_available, cuda_preflight, gpu_name, metal_is_available, mlx_version};
use mlx_trellis_models::{LoadOptions, Model, Tokenizer};
use serde::Serialize;

use crate::report::DtypeArg;

/// Time between two lines of progress where there is no terminal.
const QUIET: Duration = Duration::from_secs(10);

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
    pub(crate) resident_bytes: Option<usize>,
}

impl Peak {
    pub(crate) fn now() -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
        let mlx_bytes = mlx_rs::memory::peak_memory()?;
        Ok(Self { mlx_bytes, resident_bytes: kibibytes.map(|k| k << 10) })
    }
}

impl std::fmt::Display for Peak {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peak memory {:.0} MB of MLX's", self.mlx_bytes as f64 / 1e6)?;
        self.resident_bytes.map_or(Ok(()), |b| write!(f, ", {:.0} MB resident", b as f64 / 1e6))
    }
}

/// A bar on a terminal, a line now and then elsewhere.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    what: &'static str,
    total: usize,
    done: usize,
    started: Instant,
    said: Instant,
}

impl Progress {
    /// Of `total` steps, called `what`.
    pub(crate) fn new(what: &'static str, total: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            let template = format!("{{bar:30}} {{percent:>3}}% {{pos}} of {{len}} {what}, {{eta}} left");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style);
            }
            bar
        });
        let now = Instant::now();
        Self { bar, what, total, done: 0, started: now, said: now }
    }

    /// One step is done.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        } else if self.said.elapsed() >= QUIET && self.done < self.total {
            self.said = Instant::now();
            let left =
                self.started.elapsed().as_secs_f64() / self.done as f64 * (self.total - self.done) as f64;
            eprintln!("{} of {} {}, {left:.0} s left", self.done, self.total, self.what);
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
