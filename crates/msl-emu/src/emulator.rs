//! Compiles a kernel, runs it in a process of its own, and reads back what happened.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cost::{self, Cost};
use crate::error::{EmuError, FaultKind};
use crate::kernel::{Dtype, Kernel};
use crate::report::{self, Context, Success};
use crate::toolchain::{self, Build, Toolchain, io_error};
use crate::translate;
use crate::wrapper::{self, Argument};

/// Metal's limits.
const MAX_THREADS: u64 = 1024;
const MAX_BUFFERS: usize = 31;
const MAX_THREADGROUP_BYTES: u64 = 32768;

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// At full speed, with what guard pages, poison and several orders of threads show.
    #[default]
    Fast,
    /// Every access to memory is looked at.
    Checked,
    /// As checked, and arithmetic is counted by one more run.
    Cost,
}

/// The order in which the threads of a threadgroup, and the threadgroups, run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Reverse,
    /// By the seed, another for each threadgroup.
    Random,
}

/// How to run a kernel.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// How much is checked.
    pub mode: Mode,
    /// One run for each; their outputs must be equal, unless they are atomic. Unwritten output elements are found
    /// in fast mode only with two or more.
    pub orders: Vec<Order>,
    /// For the random order.
    pub seed: u64,
    /// OS threads; `None` for one a core.
    pub threads: Option<usize>,
    /// Accept a barrier that threads which returned early do not reach. Metal's specification does not allow it.
    pub allow_early_return: bool,
    /// Let `a * b + c` become one fma, as Metal may, unless the source says `#pragma METAL fp contract(off)`. What
    /// gives the same bits either way does not depend on it.
    pub contract: bool,
    /// Limit for all runs together, in seconds; 0 for none.
    pub timeout: u32,
    /// Stack of one GPU thread, in bytes.
    pub stack: usize,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions {
            mode: Mode::Fast,
            orders: vec![Order::Forward, Order::Reverse, Order::Random],
            seed: 1,
            threads: None,
            allow_early_return: false,
            contract: false,
            timeout: 120,
            stack: 65536,
        }
    }
}

impl RunOptions {
    /// The default options, checking every access.
    pub fn checked() -> Self {
        RunOptions { mode: Mode::Checked, orders: vec![Order::Forward, Order::Random], ..Self::default() }
    }

    /// The default options, counting what the kernel costs.
    pub fn cost() -> Self {
        RunOptions { mode: Mode::Cost, ..Self::checked() }
    }
}

/// What a run gave.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Outcome {
    /// The outputs' bytes, in order.
    pub outputs: Vec<Vec<u8>>,
    /// What it cost; in fast mode `None`.
    pub cost: Option<Cost>,
    /// Time in the kernel for each order, compilation and copies left out.
    pub times: Vec<Duration>,
}

/// A C++ compiler, a cache of compiled kernels, and the means to run them. Cheap to make and to share.
#[derive(Debug, Clone)]
pub struct Emulator {
    toolchain: Toolchain,
}

impl Emulator {
    /// An emulator with the system's C++ compiler (`CXX`, or the first of `c++`, `g++`, `clang++`), which keeps
    /// compiled kernels in `cache`, by default `msl-emu` in Cargo's target folder.
    pub fn new(cache: Option<&Path>) -> Result<Self, EmuError> {
        Self::with_compiler(cache, None)
    }

    /// As [`Emulator::new`], with the compiler named.
    pub fn with_compiler(cache: Option<&Path>, compiler: Option<&Path>) -> Result<Self, EmuError> {
        let cache = cache.map_or_else(toolchain::default_cache, Path::to_owned);
        Ok(Emulator { toolchain: Toolchain::find(cache, compiler)? })
    }

    /// The Metal source that MLX writes for this kernel, without MLX's own header before it.
    pub fn source(&self, kernel: &Kernel) -> String {
        crate::source(kernel)
    }

    /// Compiles the kernel, unless that was done before, and does not run it.
    pub fn compile(&self, kernel: &Kernel, mode: Mode) -> Result<(), EmuError> {
        validate(kernel)?;
        let builds: &[Build] = match mode {
            Mode::Fast => &[Build::Fast],
            Mode::Checked => &[Build::Checked],
            Mode::Cost => &[Build::Checked, Build::Counted],
        };
        builds.iter().try_for_each(|&build| self.library(kernel, build, false).map(|_| ()))
    }

    /// Runs the kernel on the inputs' bytes.
    pub fn run(&self, kernel: &Kernel, inputs: &[&[u8]], options: &RunOptions) -> Result<Outcome, EmuError> {
        validate(kernel)?;
        let invalid = |reason: String| Err(EmuError::Invalid { kernel: kernel.name.clone(), reason });
        if inputs.len() != kernel.inputs.len() {
            return invalid(format!("{} inputs given, expected {}", inputs.len(), kernel.inputs.len()));
        }
        for (input, bytes) in kernel.inputs.iter().zip(inputs) {
            if bytes.len() != input.bytes() {
                return invalid(format!(
                    "input `{}` has {} bytes, expected {} for {:?} of {:?}",
                    input.name,
                    bytes.len(),
                    input.bytes(),
                    input.dtype,
                    input.shape
                ));
            }
        }
        if options.orders.is_empty() || options.threads == Some(0) || options.stack < 16384 {
            return invalid("no order of threads, no OS thread, or a stack below 16384 bytes".to_owned());
        }
        let dir = tempfile::Builder::new().prefix("msl-emu").tempdir().map_err(io_error(&env::temp_dir()))?;
        for (index, argument) in wrapper::arguments(kernel).into_iter().enumerate() {
            let path = dir.path().join(format!("in{index}"));
            let own: Vec<u8>;
            let bytes: &[u8] = match argument {
                Argument::Input(i) => inputs[i],
                Argument::Shape(i) => {
                    own = kernel.inputs[i].shape.iter().flat_map(|&d| (d as i32).to_le_bytes()).collect();
                    &own
                }
                Argument::Strides(i) => {
                    own = strides(&kernel.inputs[i].shape).into_iter().flat_map(i64::to_le_bytes).collect();
                    &own
                }
                Argument::Ndim(i) => {
                    own = (kernel.inputs[i].shape.len() as i32).to_le_bytes().to_vec();
                    &own
                }
                Argument::Output(_) => continue,
            };
            fs::write(&path, bytes).map_err(io_error(&path))?;
        }
        let checked = options.mode != Mode::Fast;
        let mut success = match self.launch(kernel, dir.path(), options, checked) {
            // The bits depend on the order or on unset memory: a checked run can say why.
            Err(error) if !checked && is_symptom(&error) => {
                return match self.launch(kernel, dir.path(), options, true) {
                    Err(better) => Err(better),
                    Ok(_) => Err(error),
                };
            }
            other => other?,
        };
        let mut outputs = Vec::with_capacity(kernel.outputs.len());
        for index in 0..kernel.outputs.len() {
            let path = dir.path().join(format!("out{index}"));
            outputs.push(fs::read(&path).map_err(io_error(&path))?);
        }
        if success.cost.threadgroup_bytes > MAX_THREADGROUP_BYTES {
            return invalid(format!(
                "{} bytes of threadgroup memory, at most {MAX_THREADGROUP_BYTES}",
                success.cost.threadgroup_bytes
            ));
        }
        if options.mode == Mode::Cost {
            let library = self.library(kernel, Build::Counted, options.contract)?;
            let one = RunOptions { orders: vec![options.orders[0]], ..options.clone() };
            let counted = self.start(kernel, dir.path(), &one, &library, Build::Counted)?;
            success.cost.arithmetic = cost::arithmetic(&library, &counted.blocks);
        }
        Ok(Outcome { outputs, cost: checked.then_some(success.cost), times: success.times })
    }

    fn library(&self, kernel: &Kernel, build: Build, contract: bool) -> Result<PathBuf, EmuError> {
        let place = |prefix: &'static str| {
            move |error| match error {
                EmuError::Compile { kernel: name, message } => EmuError::Compile {
                    kernel: name,
                    message: format!("{prefix}{}", relocate(kernel, &message)),
                },
                other => other,
            }
        };
        let contract = contract && !translate::forbids_contraction(kernel);
        let text = translate::translate(kernel, toolchain::SHIM);
        let made = self.toolchain.kernel(&kernel.name, &text, build, contract).map_err(place(""))?;
        if let Some(text) = translate::with_spaces(kernel, toolchain::SHIM) {
            let prefix =
                "a `constant` pointer (shown as volatile) is used as a pointer of another address space:\n";
            self.toolchain.look(&kernel.name, &text).map_err(place(prefix))?;
        }
        Ok(made)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        dir: &Path,
        options: &RunOptions,
        checked: bool,
    ) -> Result<Success, EmuError> {
        let build = if checked { Build::Checked } else { Build::Fast };
        // Two compilations at once, where neither was done before.
        let (runner, library) = std::thread::scope(|scope| {
            let runner = scope.spawn(|| self.toolchain.runner());
            let library = self.library(kernel, build, options.contract);
            (runner.join(), library)
        });
        if let Ok(runner) = runner {
            runner?;
        }
        self.start(kernel, dir, options, &library?, build)
    }

    fn start(
        &self,
        kernel: &Kernel,
        dir: &Path,
        options: &RunOptions,
        library: &Path,
        build: Build,
    ) -> Result<Success, EmuError> {
        let runner = self.toolchain.runner()?;
        let report_path = dir.join("report");
        let job_path = dir.join("job");
        let threads = options
            .threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
            .min(64);
        let [gx, gy, gz] = kernel.grid;
        let [tx, ty, tz] = kernel.clamped_threadgroup();
        let mut job = String::new();
        let _ = write!(
            job,
            "kernel {}\nreport {}\nthreads {threads}\ngrid {gx} {gy} {gz}\ngroup {tx} {ty} {tz}\n\
             checked {}\ncount_blocks {}\nallow_early {}\natomic {}\ntimeout {}\nseed {}\nstack {}\n",
            library.display(),
            report_path.display(),
            u8::from(build == Build::Checked),
            u8::from(build == Build::Counted),
            u8::from(options.allow_early_return),
            u8::from(kernel.atomic_outputs),
            options.timeout,
            options.seed,
            options.stack.next_multiple_of(16384),
        );
        for (index, argument) in wrapper::arguments(kernel).into_iter().enumerate() {
            let file = match argument {
                Argument::Output(i) => dir.join(format!("out{i}")),
                _ => dir.join(format!("in{index}")),
            };
            let (role, element, bytes, init) = match argument {
                Argument::Input(i) => {
                    let input = &kernel.inputs[i];
                    (u8::from(wrapper::is_constant(input)), input.dtype.size(), input.bytes(), Vec::new())
                }
                Argument::Shape(i) => (1, 4, kernel.inputs[i].shape.len() * 4, Vec::new()),
                Argument::Strides(i) => (1, 8, kernel.inputs[i].shape.len() * 8, Vec::new()),
                Argument::Ndim(_) => (1, 4, 4, Vec::new()),
                Argument::Output(i) => {
                    let output = &kernel.outputs[i];
                    let init = kernel.init_value.map(|v| encode(v, output.dtype)).unwrap_or_default();
                    (2, output.dtype.size(), output.bytes(), init)
                }
            };
            let _ = write!(job, "buffer {role} {element} {bytes} {}", init.len());
            for byte in init {
                let _ = write!(job, " {byte}");
            }
            let _ = writeln!(job, " {}", file.display());
        }
        for (index, order) in options.orders.iter().enumerate() {
            let order = match order {
                Order::Forward => 0,
                Order::Reverse => 1,
                Order::Random => 2,
            };
            // No two runs share the poison, and the guarded side alternates.
            let poison = [0xFBu8, 0x7E, 0xA5, 0x35][index % 4].wrapping_add((index / 4) as u8);
            let _ = writeln!(job, "run {order} {} {poison}", u8::from(index % 2 == 0));
        }
        fs::write(&job_path, job).map_err(io_error(&job_path))?;
        let _ = fs::remove_file(&report_path);
        let output = Command::new(&runner)
            .arg(&job_path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .output()
            .map_err(io_error(&runner))?;
        let text = fs::read_to_string(&report_path).map_err(|_| EmuError::Runner {
            kernel: kernel.name.clone(),
            reason: format!(
                "{} without a report: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ),
        })?;
        report::read(&Context { kernel, library, orders: &options.orders }, &text)
    }
}

fn is_symptom(error: &EmuError) -> bool {
    let kind = error.fault().map(|fault| &fault.kind);
    matches!(kind, Some(FaultKind::Unstable { .. } | FaultKind::Unwritten { .. }))
}

fn strides(shape: &[usize]) -> Vec<i64> {
    let mut all = vec![1i64; shape.len()];
    for d in (1..shape.len()).rev() {
        all[d - 1] = all[d] * shape[d] as i64;
    }
    all
}

/// `init_value` as an element of a type.
fn encode(value: f32, dtype: Dtype) -> Vec<u8> {
    let small = |mantissa: u32, bias: i32| -> u16 {
        // Round to nearest even through exact scaling in f64: the value is one f32.
        let bits = value.to_bits();
        let sign = ((bits >> 16) & 0x8000) as u16;
        let magnitude = f64::from(value.abs());
        let infinity = (((2 * bias + 1) as u32) << mantissa) as u16;
        if value.is_nan() {
            return sign | infinity | 1 << (mantissa - 1);
        }
        let mut exponent = 1 - bias;
        while exponent < bias + 1 && magnitude >= 2f64.powi(exponent + 1) {
            exponent += 1;
        }
        let steps = (magnitude / 2f64.powi(exponent - mantissa as i32)).round_ties_even();
        let ordinal = steps.min(f64::from(1u32 << (mantissa + 1))) as u32
            + (((exponent + bias - 1) as u32) << mantissa);
        sign | ordinal.min(u32::from(infinity)) as u16
    };
    match dtype {
        Dtype::Bool => vec![u8::from(value != 0.0)],
        Dtype::Uint8 => (value as u8).to_le_bytes().to_vec(),
        Dtype::Uint16 => (value as u16).to_le_bytes().to_vec(),
        Dtype::Uint32 => (value as u32).to_le_bytes().to_vec(),
        Dtype::Uint64 => (value as u64).to_le_bytes().to_vec(),
        Dtype::Int8 => (value as i8).to_le_bytes().to_vec(),
        Dtype::Int16 => (value as i16).to_le_bytes().to_vec(),
        Dtype::Int32 => (value as i32).to_le_bytes().to_vec(),
        Dtype::Int64 => (value as i64).to_le_bytes().to_vec(),
        Dtype::Float16 => small(10, 15).to_le_bytes().to_vec(),
        Dtype::Bfloat16 => small(7, 127).to_le_bytes().to_vec(),
        Dtype::Float32 => value.to_le_bytes().to_vec(),
        Dtype::Complex64 => [value.to_le_bytes(), 0f32.to_le_bytes()].concat(),
    }
}

fn is_identifier(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
}

fn validate(kernel: &Kernel) -> Result<(), EmuError> {
    let invalid = |reason: String| Err(EmuError::Invalid { kernel: kernel.name.clone(), reason });
    let host_name = wrapper::host_name(kernel);
    if !is_identifier(&host_name) {
        // A negative template integer ends up here: MLX puts its sign into the function's name.
        return invalid(format!("MLX would name the function `{host_name}`, which Metal cannot compile"));
    }
    let names = kernel
        .inputs
        .iter()
        .chain(&kernel.outputs)
        .map(|a| &a.name)
        .chain(kernel.template.iter().map(|t| &t.0));
    for name in names {
        if !is_identifier(name) {
            return invalid(format!("`{name}` is not a name"));
        }
    }
    if kernel.outputs.is_empty() {
        return invalid("no outputs".to_owned());
    }
    let buffers = wrapper::arguments(kernel).len();
    if buffers > MAX_BUFFERS {
        return invalid(format!("{buffers} buffers, at most {MAX_BUFFERS}"));
    }
    if kernel.grid.contains(&0) || kernel.threadgroup.contains(&0) {
        return invalid(format!("empty grid {:?} or threadgroup {:?}", kernel.grid, kernel.threadgroup));
    }
    let threads: u64 = kernel.clamped_threadgroup().iter().map(|&d| u64::from(d)).product();
    if threads > MAX_THREADS {
        return invalid(format!("{threads} threads in a threadgroup, at most {MAX_THREADS}"));
    }
    for array in kernel.inputs.iter().chain(&kernel.outputs) {
        let bytes = array.shape.iter().try_fold(array.dtype.size(), |n, &d| n.checked_mul(d));
        if bytes.is_none_or(|n| n > 1 << 36) || array.shape.iter().any(|&d| i32::try_from(d).is_err()) {
            return invalid(format!("`{}` of shape {:?} is too large", array.name, array.shape));
        }
    }
    Ok(())
}

/// Compiler messages with lines counted in the header and the body.
fn relocate(kernel: &Kernel, message: &str) -> String {
    let mut text = String::new();
    for line in message.lines() {
        let moved = line.split_once("kernel.metal:").and_then(|(before, rest)| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            let location = wrapper::locate(kernel, digits.parse().ok()?)?;
            let part = location.to_string();
            let part = part.split_once(": `").map_or(part.as_str(), |(place, _)| place);
            Some(format!("{before}{part}{}", &rest[digits.len()..]))
        });
        text += moved.as_deref().unwrap_or(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_values_round_to_nearest_even() {
        for value in [
            0.0f32,
            -0.0,
            1.0,
            3.5,
            65504.0,
            65520.0,
            1e-8,
            6e-8,
            1e30,
            0.1,
            -2.7,
            f32::INFINITY,
            3.4e38,
            1e-40,
        ] {
            let half = half::f16::from_f32(value).to_le_bytes().to_vec();
            let bfloat = half::bf16::from_f32(value).to_le_bytes().to_vec();
            assert_eq!(encode(value, Dtype::Float16), half, "{value}");
            assert_eq!(encode(value, Dtype::Bfloat16), bfloat, "{value}");
        }
    }
}
