//! Times on a CUDA GPU, of chains that the GPU runs without the host.
//!
//! A chain is many products, each waiting for the one before, evaluated at once. In front of it stands a kernel that
//! keeps the GPU busy for a set time, in which the host gets the whole chain launched; what the chain adds to the time
//! of that kernel alone is what the GPU took for it. Between two products stands a link, a small kernel that makes the
//! next one's x depend on the last one's y and changes no number; a chain of links alone is subtracted.
//!
//! MLX hands work to the GPU in pieces and waits when many are under way. Set `MLX_MAX_OPS_PER_BUFFER` and
//! `MLX_MAX_MB_PER_BUFFER` to large numbers, so that a chain is one piece.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mlx_rs::{Array, ops, transforms};
use mlx_trellis::dispatch::Device;
use mlx_trellis::{cuda_hold, cuda_preflight};
use serde::Serialize;

use super::Times;

/// The first time that the GPU is held; doubled while the host needs longer.
const HOLD_US: u16 = 8_000;
const COPY_FLOATS: i32 = 64 << 20;
const COPIES: usize = 16;

/// The GPU a figure was measured on.
#[derive(Serialize)]
pub(crate) struct Machine {
    gpu: String,
    multiprocessors: u32,
    capability: (u32, u32),
    driver: String,
    mlx: String,
    /// Bytes a second, read and written together, of copies of 256 MiB, measured in this run.
    copy_bytes_per_s: f64,
    #[serde(skip)]
    clock: Clock,
    /// Whether chains are timed by the wall clock.
    #[serde(skip)]
    pub(crate) wall: bool,
}

impl Machine {
    /// This machine's GPU.
    pub(crate) fn current() -> Result<Self> {
        cuda_preflight()?;
        let cuda = Device::current().cuda.context("MLX's device is not a CUDA GPU")?;
        let mut clock = Clock { hold_us: HOLD_US };
        let mut times = Times::default();
        let x = ops::zeros::<f32>(&[COPY_FLOATS])?;
        x.eval()?;
        for round in 0..6 {
            let seconds = clock.time(|hold| {
                let mut y = link(&x, hold)?;
                for _ in 0..COPIES {
                    y = y.negative()?;
                }
                Ok(y)
            })? - clock.time(|hold| link(&x, hold))?;
            if round > 0 {
                times.push(seconds / COPIES as f64);
            }
        }
        let bytes = 2.0 * f64::from(COPY_FLOATS) * 4.0;
        Ok(Self {
            gpu: mlx_trellis::gpu_name().unwrap_or_else(|| "unknown GPU".to_owned()),
            multiprocessors: cuda.multiprocessors,
            capability: cuda.capability,
            driver: driver(),
            mlx: mlx_trellis::mlx_version(),
            copy_bytes_per_s: bytes / times.summary().0,
            clock,
            wall: false,
        })
    }

    /// The least time, in seconds, in which `bytes` of weights can be read once.
    pub(crate) fn floor(&self, bytes: usize) -> f64 {
        bytes as f64 / self.copy_bytes_per_s
    }

    pub(crate) fn print(&self) {
        println!(
            "{}, {} multiprocessors, {}, MLX {}, copies {:.2} TB/s",
            self.gpu,
            self.multiprocessors,
            self.driver,
            self.mlx,
            self.copy_bytes_per_s / 1e12
        );
        for name in ["MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"] {
            if std::env::var_os(name).is_none() {
                println!(
                    "{name} is not set: chains are cut into pieces, and short products may wait for the host"
                );
            }
        }
    }

    /// Seconds of one of `n` products in a chain; `product(i, x)` is the i-th.
    ///
    /// Where MLX does not launch the chain while the GPU is held (it may wait for memory), by the wall clock: the time that
    /// a chain of 2n takes beyond one of n, from then on until [`Machine::wall`] is cleared. Links are in that figure, and the
    /// host too unless MLX hands the chain over in pieces.
    pub(crate) fn chain(
        &mut self,
        n: usize,
        x: &Array,
        product: impl Fn(usize, &Array) -> Result<Array>,
    ) -> Result<f64> {
        if !self.wall {
            match self.held_chain(n, x, &product) {
                Err(error) if error.is::<SlowHost>() => self.wall = true,
                done => return done,
            }
        }
        let run = |n: usize| -> Result<f64> {
            let start = Instant::now();
            let mut x = x.clone();
            for i in 0..n {
                x = link(&x, &first(&product(i, &x)?)?)?;
            }
            x.eval()?;
            Ok(start.elapsed().as_secs_f64())
        };
        let once = run(n)?;
        Ok((run(2 * n)? - once) / n as f64)
    }

    fn held_chain(
        &mut self,
        n: usize,
        x: &Array,
        product: impl Fn(usize, &Array) -> Result<Array>,
    ) -> Result<f64> {
        let products = self.clock.time(|hold| {
            let mut x = link(x, hold)?;
            for i in 0..n {
                x = link(&x, &first(&product(i, &x)?)?)?;
            }
            Ok(x)
        })?;
        let links = self.clock.time(|hold| {
            let mut x = link(x, hold)?;
            for _ in 0..n {
                x = link(&x, &first(&x)?)?;
            }
            Ok(x)
        })?;
        Ok((products - links) / n as f64)
    }
}

/// The host took longer to launch a chain than the GPU can be held.
#[derive(Debug)]
struct SlowHost(Duration);

impl std::error::Error for SlowHost {}

impl std::fmt::Display for SlowHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the host needs {:?} to launch a chain, longer than the GPU is held: set MLX_MAX_OPS_PER_BUFFER and \
             MLX_MAX_MB_PER_BUFFER to large numbers",
            self.0
        )
    }
}

/// Times graphs behind a busy GPU.
struct Clock {
    hold_us: u16,
}

impl Clock {
    /// Seconds that a graph, which must wait for the array it is given, takes on the GPU.
    fn time(&mut self, graph: impl Fn(&Array) -> Result<Array>) -> Result<f64> {
        loop {
            let alone = {
                let hold = cuda_hold(self.hold_us)?;
                let start = Instant::now();
                transforms::async_eval([&hold])?;
                hold.eval()?;
                start.elapsed()
            };
            let hold = cuda_hold(self.hold_us)?;
            let y = graph(&hold)?;
            let start = Instant::now();
            transforms::async_eval([&hold])?;
            transforms::async_eval([&y])?;
            let launched = start.elapsed();
            y.eval()?;
            let total = start.elapsed();
            if launched < alone {
                return Ok((total.saturating_sub(alone)).as_secs_f64());
            }
            if self.hold_us >= u16::MAX / 2 {
                return Err(SlowHost(launched).into());
            }
            self.hold_us *= 2;
        }
    }
}

/// `x`, once `y` (of one column) has been computed: one small kernel.
fn link(x: &Array, y: &Array) -> Result<Array> {
    Ok(ops::select(Array::from_bool(true), x, y.as_dtype(x.dtype())?)?)
}

/// The first column.
fn first(y: &Array) -> Result<Array> {
    y.split_at_indices(&[1], -1)?.into_iter().next().context("a product without a column")
}

/// The driver's version as it says itself.
fn driver() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = text
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
    version.map_or_else(|| "driver unknown".to_owned(), |v| format!("driver {v}"))
}
