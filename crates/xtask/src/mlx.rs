//! MLX on Linux, for an mlx-sys whose build script knows Apple's platforms only.
//!
//! Cargo lets a target's configuration stand in for the build script of a package with a `links` key, so
//! nothing is patched: MLX comes as a prebuilt wheel, the mlx-c bundled with mlx-sys is compiled against the
//! wheel's headers, bindgen writes the bindings, and `.cargo/mlx-linux.toml` tells Cargo where all of that is.
//!
//! Everything for one combination of versions is kept in `target/mlx/<key>`, which is built under another name
//! and renamed when complete: a folder of that name is whole, and the configuration is written after it.
//! Cargo takes the configuration's flags for build scripts and for this program too, so that the first command
//! after it was written compiles this program once more.

pub(crate) mod bindings;
mod config;
mod key;
mod native;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

pub(crate) use self::key::{Backend, Choice};
use crate::process::say;
use crate::python::{Dependencies, Python};
use crate::workspace::{Package, Workspace};

/// The wheel of libclang that bindgen loads; any recent one would do.
const LIBCLANG: &str = "libclang==18.1.1";

/// What the wheels of MLX state as their needs.
const MLX_NEEDS: &str = "Python 3.10 and glibc 2.35 (Debian 12, Ubuntu 22.04) or newer";

/// What is set up, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Installed {
    triple: &'static str,
    choice: Choice,
    mlx_version: String,
    /// `target/mlx/<key>`.
    folder: PathBuf,
    /// Sources of the mlx-c that mlx-sys brings.
    mlx_c: PathBuf,
    mlx: MlxFolders,
}

/// A prebuilt MLX.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MlxFolders {
    /// Holds libmlx.so.
    lib: PathBuf,
    /// Holds mlx/mlx.h.
    include: PathBuf,
}

impl Installed {
    /// Holds libmlxc.so.
    fn lib(&self) -> PathBuf {
        self.folder.join("lib")
    }

    /// Holds bindings.rs.
    fn bindings(&self) -> PathBuf {
        self.folder.join("bindings")
    }

    fn is_complete(&self) -> bool {
        [self.lib().join("libmlxc.so"), self.bindings().join("bindings.rs"), self.mlx.lib.join("libmlx.so")]
            .iter()
            .all(|file| file.is_file())
    }

    /// The folders, for scripts.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "mlx_version": self.mlx_version,
            "choice": self.choice.to_string(),
            "bindings": self.bindings(),
            "include": [&self.mlx.include, &self.mlx_c],
            "lib": [&self.lib(), &self.mlx.lib],
        })
    }
}

impl MlxFolders {
    /// Of an unpacked wheel.
    fn of_wheel(folder: &Path) -> Self {
        let mlx = folder.join("wheel/mlx");
        Self { lib: mlx.join("lib"), include: mlx.join("include") }
    }

    /// Of a folder that the user names, either MLX's own or a site-packages with MLX in it.
    fn find(folder: &Path, wanted_version: &str) -> Result<Self> {
        for base in [folder.to_owned(), folder.join("mlx")] {
            let found = Self { lib: base.join("lib"), include: base.join("include") };
            let header = found.include.join("mlx/version.h");
            if !found.lib.join("libmlx.so").is_file() || !header.is_file() {
                continue;
            }
            let text =
                fs::read_to_string(&header).with_context(|| format!("cannot read {}", header.display()))?;
            let version = key::version_in_header(&text)
                .with_context(|| format!("{} states no MLX version", header.display()))?;
            ensure!(
                version == wanted_version,
                "the MLX in {} is {version}, but mlx-sys needs {wanted_version}; \
                 `cargo xtask mlx --backend cpu` downloads that one",
                base.display()
            );
            return Ok(found);
        }
        bail!(
            "expected lib/libmlx.so and include/mlx in {0} or in {0}/mlx; found no such pair",
            folder.display()
        )
    }
}

/// Sets MLX up, unless it is, and returns where it is; `None` on macOS, where mlx-sys builds MLX itself.
///
/// Without a `choice` the recorded one stays; at first that is MLX for the CPU.
pub(crate) fn set_up(workspace: &Workspace, choice: Option<Choice>) -> Result<Option<Installed>> {
    if cfg!(target_os = "macos") {
        say("MLX: nothing to set up on macOS, mlx-sys builds it");
        return Ok(None);
    }
    let triple = triple()?;
    let config_file = workspace.root().join(".cargo/mlx-linux.toml");
    let choice = match choice {
        Some(Choice::From(folder)) => Choice::From(
            folder.canonicalize().with_context(|| format!("there is no folder {}", folder.display()))?,
        ),
        Some(wheel) => wheel,
        None => recorded_choice(&config_file)?,
    };
    let mlx_sys = workspace.dependency("mlx-sys", triple)?;
    let installed = plan(workspace, triple, choice, &mlx_sys)?;
    let text = config::text(&installed)?;

    if installed.is_complete() {
        say(format_args!(
            "MLX {} ({}) is in {}",
            installed.mlx_version,
            installed.choice,
            installed.folder.display()
        ));
    } else {
        build(&installed)?;
    }
    if fs::read_to_string(&config_file).ok().as_deref() != Some(text.as_str()) {
        write_atomically(&config_file, &text)?;
        say(format_args!("wrote {}, which tells Cargo where MLX is", config_file.display()));
    }
    Ok(Some(installed))
}

fn triple() -> Result<&'static str> {
    match (std::env::consts::OS, std::env::consts::ARCH, cfg!(target_env = "gnu")) {
        ("linux", "x86_64", true) => Ok("x86_64-unknown-linux-gnu"),
        ("linux", "aarch64", true) => Ok("aarch64-unknown-linux-gnu"),
        (os, arch, gnu) => bail!(
            "MLX is published for macOS, and for Linux on x86_64 and aarch64 with glibc; this is {os}, {arch}{}",
            if os == "linux" && !gnu { ", without glibc" } else { "" }
        ),
    }
}

/// What was chosen before, or else MLX for the CPU.
fn recorded_choice(config_file: &Path) -> Result<Choice> {
    let recorded = match fs::read_to_string(config_file) {
        Ok(text) => config::recorded_choice(&text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", config_file.display())),
    };
    Ok(match recorded {
        Some(Choice::From(folder)) if !folder.is_dir() => {
            say(format_args!("{}, where MLX was, is gone: taking MLX for the CPU", folder.display()));
            Choice::Wheel(Backend::Cpu)
        }
        Some(choice) => choice,
        None => Choice::Wheel(Backend::Cpu),
    })
}

/// Says what belongs where, without touching anything.
fn plan(workspace: &Workspace, triple: &'static str, choice: Choice, mlx_sys: &Package) -> Result<Installed> {
    let mlx_c = mlx_sys.folder.join("src/mlx-c");
    let cmake_lists = mlx_c.join("CMakeLists.txt");
    let text = fs::read_to_string(&cmake_lists)
        .with_context(|| format!("cannot read {}, which pins MLX's version", cmake_lists.display()))?;
    let mlx_version = key::version_in_cmake(&text)
        .with_context(|| format!("{} has no line `GIT_TAG v…` that pins MLX", cmake_lists.display()))?;
    let key = key::of(&mlx_version, &choice, &mlx_sys.version, &recipe());
    let folder = workspace.kept("mlx").join(key);
    let mlx = match &choice {
        Choice::Wheel(_) => MlxFolders::of_wheel(&folder),
        Choice::From(existing) => MlxFolders::find(existing, &mlx_version)?,
    };
    Ok(Installed { triple, choice, mlx_version, folder, mlx_c, mlx })
}

/// Everything of ours that shapes the result, so that a change of it makes another key.
fn recipe() -> String {
    [native::SHIM_HEADER, native::SHIM_SOURCE, native::FLAGS, LIBCLANG, bindings::RUST_TARGET].join("\n")
}

fn build(installed: &Installed) -> Result<()> {
    let started = Instant::now();
    let version = &installed.mlx_version;
    say(format_args!("setting up MLX {version} ({}) in {}", installed.choice, installed.folder.display()));
    let compiler = native::Compiler::find()?;
    let python = Python::find()?;

    let all = installed.folder.parent().unwrap_or(&installed.folder);
    fs::create_dir_all(all).with_context(|| format!("cannot create {}", all.display()))?;
    remove_abandoned(all);
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .tempdir_in(all)
        .with_context(|| format!("cannot create a folder in {}", all.display()))?;
    let made = temporary.path().join("made");
    let scratch = temporary.path().join("scratch");

    let (mlx, run_path) = match installed.choice {
        Choice::Wheel(backend) => {
            let requirement = format!("{}=={version}", backend.wheel());
            say(format_args!("downloading {requirement} ({})", backend.download_size()));
            let wheels = python
                .download(&requirement, backend.dependencies(), &scratch.join("mlx"))
                .with_context(|| format!("cannot get MLX, which asks for {MLX_NEEDS}"))?;
            for wheel in &wheels {
                python.unpack(wheel, &made.join("wheel"))?;
            }
            (MlxFolders::of_wheel(&made), "$ORIGIN/../wheel/mlx/lib".to_owned())
        }
        Choice::From(_) => (installed.mlx.clone(), installed.mlx.lib.display().to_string()),
    };

    say(format_args!("downloading {LIBCLANG} (25 MB)"));
    let libclang = scratch.join("libclang");
    for wheel in python.download(LIBCLANG, Dependencies::Without, &libclang)? {
        python.unpack(&wheel, &libclang)?;
    }

    let shim = native::Shim::write(&scratch)?;
    say("writing mlx-c's Rust bindings");
    bindings::generate(&installed.mlx_c, &shim, &compiler, &libclang, &made.join("bindings"))?;

    native::build(&native::Build {
        compiler: &compiler,
        mlx_c: &installed.mlx_c,
        mlx_include: &mlx.include,
        mlx_lib: &mlx.lib,
        run_path: &run_path,
        shim: &shim,
        objects: &scratch.join("objects"),
        library: &made.join("lib/libmlxc.so"),
    })?;

    // Something may lie there: a folder that lost files, or the work of another run that was quicker.
    if installed.folder.exists() && !installed.is_complete() {
        fs::remove_dir_all(&installed.folder)
            .with_context(|| format!("cannot remove the incomplete {}", installed.folder.display()))?;
    }
    if let Err(error) = fs::rename(&made, &installed.folder)
        && !installed.is_complete()
    {
        return Err(error)
            .with_context(|| format!("cannot rename {} to {}", made.display(), installed.folder.display()));
    }
    ensure!(
        installed.is_complete(),
        "{} should now hold libmlx.so, libmlxc.so and bindings.rs, and does not",
        installed.folder.display()
    );
    say(format_args!("MLX {version} is set up, in {:.0} s", started.elapsed().as_secs_f64()));
    Ok(())
}

/// What the names of unfinished folders begin with.
const TEMPORARY: &str = "tmp-";

/// Removes what killed runs left. Younger folders may belong to a run that still goes on; and nothing depends
/// on this, so errors don't matter.
fn remove_abandoned(folder: &Path) {
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let old =
            entry.metadata().and_then(|metadata| metadata.modified()).is_ok_and(|time| time < an_hour_ago);
        if old && entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn write_atomically(file: &Path, text: &str) -> Result<()> {
    let temporary = file.with_extension(std::process::id().to_string());
    fs::write(&temporary, text)
        .and_then(|()| fs::rename(&temporary, file))
        .with_context(|| format!("cannot write {}", file.display()))
}
