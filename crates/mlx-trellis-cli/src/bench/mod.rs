//! `trellis bench`: every command validates what it is about to time, then reports medians from one run.

mod cuda;
pub(crate) mod encode;
pub(crate) mod matmul;

use std::time::Instant;

use serde::Serialize;

/// What can be timed.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Products: ours, MLX's affine quantized_matmul at the same bits, and dense, alternating in one run
    Matmul(matmul::Args),
    /// The encoder, on Gaussian weights
    Encode(encode::Args),
}

/// The machine a figure was measured on.
#[derive(Serialize)]
pub(crate) struct Machine {
    cpu: String,
    threads: usize,
    simd: String,
    mlx: String,
    /// Bytes a second that all threads together read from memory, measured in this run.
    read_bytes_per_s: f64,
}

impl Machine {
    /// This machine; measuring its memory takes a fraction of a second.
    pub(crate) fn current() -> Self {
        Self {
            cpu: cpu_name(),
            threads: rayon::current_num_threads(),
            simd: trellis_cpu::Level::best().to_string(),
            mlx: mlx_version(),
            read_bytes_per_s: read_bandwidth(),
        }
    }

    /// The least time, in seconds, in which `bytes` of weights can be read once.
    pub(crate) fn floor(&self, bytes: usize) -> f64 {
        bytes as f64 / self.read_bytes_per_s
    }

    pub(crate) fn print(&self) {
        println!(
            "{}, {} threads, {}, MLX {}, reads {:.1} GB/s",
            self.cpu,
            self.threads,
            self.simd,
            self.mlx,
            self.read_bytes_per_s / 1e9
        );
    }
}

/// Seconds of repeated runs.
#[derive(Default)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    /// Runs `f` and keeps how long it took.
    pub(crate) fn time<T, E>(&mut self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let start = Instant::now();
        let result = f()?;
        self.0.push(start.elapsed().as_secs_f64());
        Ok(result)
    }

    /// Keeps a time that was measured elsewhere.
    pub(crate) fn push(&mut self, seconds: f64) {
        self.0.push(seconds);
    }

    fn sorted(&self) -> Vec<f64> {
        let mut times = self.0.clone();
        times.sort_by(f64::total_cmp);
        times
    }

    /// Median, least and greatest, in seconds; of no runs, zeros.
    pub(crate) fn summary(&self) -> (f64, f64, f64) {
        let times = self.sorted();
        match times.as_slice() {
            [] => (0.0, 0.0, 0.0),
            [first, .., last] => (times[times.len() / 2], *first, *last),
            [only] => (*only, *only, *only),
        }
    }
}

/// What `/proc/cpuinfo` or `sysctl` calls the processor.
fn cpu_name() -> String {
    let from_proc = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    from_proc
        .or_else(|| {
            let output = std::process::Command::new("sysctl")
                .args(["-n", "machdep.cpu.brand_string"])
                .output()
                .ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn mlx_version() -> String {
    mlx_trellis::mlx_version()
}

/// Best of a few passes of all threads over 512 MiB, well past any cache a thread has for itself.
fn read_bandwidth() -> f64 {
    use rayon::prelude::*;
    let buffer = vec![1u64; 64 << 20];
    let pass = || -> f64 {
        let start = Instant::now();
        let sum: u64 =
            buffer.par_chunks(1 << 16).map(|c| c.iter().fold(0u64, |a, &b| a.wrapping_add(b))).sum();
        std::hint::black_box(sum);
        (buffer.len() * 8) as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(|_| pass()).fold(0.0, f64::max)
}
