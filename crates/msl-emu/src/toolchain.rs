//! The system's C++ compiler, and a cache of what it made.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::EmuError;

pub(crate) const SHIM: &str = include_str!("shim/metal.h");
pub(crate) const RUNNER: &str = include_str!("shim/runner.cpp");

/// How a kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    /// Optimised.
    Fast,
    /// With a call before every access to memory.
    Checked,
    /// With a call at the start of every basic block.
    Counted,
}

/// A C++ compiler and the folder for what it makes.
#[derive(Debug, Clone)]
pub(crate) struct Toolchain {
    command: PathBuf,
    version: String,
    cache: PathBuf,
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> EmuError + '_ {
    move |reason| EmuError::Io { path: path.to_owned(), reason }
}

/// FNV-1a over 128 bits: names files in the cache, guards nothing.
fn hash(parts: &[&str]) -> String {
    let mut h: u128 = 0x6c62272e07bb014262b821756295c58d;
    for part in parts {
        for byte in part.bytes().chain([0]) {
            h = (h ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }
    format!("{h:032x}")
}

/// `target/msl-emu` of the build this runs in.
pub(crate) fn default_cache() -> PathBuf {
    if let Some(dir) = env::var_os("CARGO_TARGET_DIR") {
        return PathBuf::from(dir).join("msl-emu");
    }
    // The workspace's target folder: this crate lies two folders below the root.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    root.join("target").join("msl-emu")
}

impl Toolchain {
    pub(crate) fn find(cache: PathBuf, forced: Option<&Path>) -> Result<Self, EmuError> {
        let mut candidates: Vec<PathBuf> = Vec::new();
        match (forced, env::var_os("CXX")) {
            (Some(path), _) => candidates.push(path.to_owned()),
            (None, Some(path)) if !path.is_empty() => candidates.push(path.into()),
            _ => candidates.extend(["c++", "g++", "clang++"].map(PathBuf::from)),
        }
        for command in &candidates {
            let Ok(output) = Command::new(command).arg("--version").output() else { continue };
            if output.status.success() {
                let version = String::from_utf8_lossy(&output.stdout).into_owned();
                return Ok(Toolchain { command: command.clone(), version, cache });
            }
        }
        Err(EmuError::NoCompiler { tried: candidates.iter().map(|c| c.display().to_string()).collect() })
    }

    pub(crate) fn runner(&self) -> Result<PathBuf, EmuError> {
        let flags = ["-std=c++17", "-O2", "-w", "-rdynamic"];
        let libraries: &[&str] =
            if cfg!(target_os = "linux") { &["-Wl,--no-as-needed", "-lm", "-lpthread", "-ldl"] } else { &[] };
        let all: Vec<&str> = flags.iter().chain(libraries).copied().collect();
        self.build("runner", RUNNER, &flags, libraries, &all, "emulator")
    }

    /// Compiles a text to see whether it compiles.
    pub(crate) fn look(&self, name: &str, text: &str) -> Result<(), EmuError> {
        let flags = ["-std=c++20", "-w", "-DMSL_EMU_SPACES", "-c"];
        self.build("spaces.o", text, &flags, &[], &flags, name).map(|_| ())
    }

    pub(crate) fn kernel(
        &self,
        name: &str,
        text: &str,
        build: Build,
        contract: bool,
    ) -> Result<PathBuf, EmuError> {
        let mut flags = vec![
            "-std=c++20",
            "-O2",
            "-g1",
            "-w",
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-fvisibility=hidden",
            "-fno-math-errno",
            "-fno-strict-aliasing",
            "-fwrapv",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-stack-protector",
            "-fno-asynchronous-unwind-tables",
            "-fno-threadsafe-statics",
        ];
        if cfg!(target_os = "macos") {
            flags.extend(["-undefined", "dynamic_lookup"]);
        }
        #[cfg(target_arch = "x86_64")]
        {
            // `fma` is a library call without them; with contraction off they change no bits.
            if std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2") {
                flags.extend(["-mavx2", "-mfma", "-mpopcnt", "-mbmi"]);
            }
        }
        if cfg!(target_os = "linux") {
            // A large frame must not step over the unmapped pages below its stack.
            flags.push("-fstack-clash-protection");
        }
        let gcc = !self.version.contains("clang");
        // Metal contracts within a statement; gcc has only all or nothing.
        flags.push(match (contract, gcc) {
            (false, _) => "-ffp-contract=off",
            (true, true) => "-ffp-contract=fast",
            (true, false) => "-ffp-contract=on",
        });
        match build {
            Build::Fast => {}
            Build::Checked => {
                flags.extend([
                    "-DMSL_EMU_CHECKED",
                    "-fsanitize=thread",
                    "-fsanitize=bounds,shift-exponent,integer-divide-by-zero,alignment",
                    "-fno-sanitize-recover=all",
                    "-ftrivial-auto-var-init=pattern",
                    "-fno-tree-vectorize",
                ]);
                if gcc {
                    flags.push("-fno-tree-loop-distribute-patterns");
                } else {
                    flags.extend(["-fno-slp-vectorize", "-mllvm", "-tsan-instrument-read-before-write=1"]);
                }
            }
            Build::Counted => {
                flags.push("-fno-tree-vectorize");
                if gcc {
                    flags.extend([
                        "-fsanitize-coverage=trace-pc",
                        "-fno-tree-loop-distribute-patterns",
                        "-fno-reorder-blocks",
                    ]);
                } else {
                    flags.extend(["-fsanitize-coverage=trace-pc,no-prune", "-fno-slp-vectorize"]);
                }
            }
        }
        self.build("kernel.so", text, &flags, &[], &flags, name)
    }

    /// Compiles `text`, unless that was done before. Tests run at once in threads and processes: each writes its
    /// own file and renames it into place.
    fn build(
        &self,
        kind: &str,
        text: &str,
        flags: &[&str],
        libraries: &[&str],
        key: &[&str],
        name: &str,
    ) -> Result<PathBuf, EmuError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let command = self.command.display().to_string();
        let digest = hash(&[kind, text, &key.join(" "), &command, &self.version]);
        let made = self.cache.join(format!("{digest}-{kind}"));
        if made.exists() {
            return Ok(made);
        }
        fs::create_dir_all(&self.cache).map_err(io_error(&self.cache))?;
        let own = format!("{digest}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let source = self.cache.join(format!("{own}.cpp"));
        let partial = self.cache.join(format!("{own}.partial"));
        fs::write(&source, text).map_err(io_error(&source))?;
        let output = Command::new(&self.command)
            .args(flags)
            .arg("-o")
            .arg(&partial)
            .arg(&source)
            .args(libraries)
            .output()
            .map_err(io_error(&self.command));
        let _ = fs::remove_file(&source);
        let output = output?;
        if !output.status.success() {
            let _ = fs::remove_file(&partial);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(EmuError::Compile { kernel: name.to_owned(), message });
        }
        fs::rename(&partial, &made).map_err(io_error(&made))?;
        Ok(made)
    }
}
