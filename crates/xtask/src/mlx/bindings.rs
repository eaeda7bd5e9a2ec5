//! mlx-c's Rust bindings, made as mlx-sys's own build script makes them.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

use super::native::{Compiler, Shim};
use crate::{files, process};

/// The Rust version whose syntax the bindings may use: mlx-sys's.
pub(crate) const RUST_TARGET: &str = "1.73.0";

/// Writes `bindings.rs` into `folder` with the libclang somewhere in `libclang`.
///
/// This program starts itself for it: bindgen takes the place of libclang from the environment, which a
/// process cannot safely change for itself.
pub(crate) fn generate(
    mlx_c: &Path,
    shim: &Shim,
    compiler: &Compiler,
    libclang: &Path,
    folder: &Path,
) -> Result<()> {
    let library = files::named(libclang, "libclang.so")?;
    let program = env::current_exe().context("cannot tell where this program is")?;
    let mut command = Command::new(program);
    command.arg("bindings").arg("--mlx-c").arg(mlx_c).arg("--prelude").arg(&shim.header);
    command.arg("--compiler-include").arg(compiler.include()?);
    command.arg("--out").arg(folder.join("bindings.rs"));
    command.env("LIBCLANG_PATH", library);
    process::output(&mut command).map(drop).context("cannot write mlx-c's Rust bindings")
}

/// What the child process does.
pub(crate) fn write(mlx_c: &Path, prelude: &Path, compiler_include: &Path, out: &Path) -> Result<()> {
    let headers = files::with_extension(&mlx_c.join("mlx/c"), "h")?;
    let rust_target = RUST_TARGET.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut builder = bindgen::Builder::default()
        .rust_target(rust_target)
        .clang_args([OsStr::new("-I"), mlx_c.as_os_str()].map(OsStr::to_string_lossy))
        .clang_args([OsStr::new("-include"), prelude.as_os_str()].map(OsStr::to_string_lossy))
        // The wheel of libclang comes without the headers that belong to a compiler, such as stddef.h.
        .clang_args([OsStr::new("-isystem"), compiler_include.as_os_str()].map(OsStr::to_string_lossy))
        // Left out by mlx-sys too: their `c_ulong` sizes trip a lint of rustc.
        .blocklist_function("malloc")
        .blocklist_function("realloc");
    for header in &headers {
        builder = builder.header(header.to_string_lossy());
    }
    let bindings = builder.generate().context("bindgen cannot read mlx-c's headers")?;
    if let Some(folder) = out.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    bindings.write_to_file(out).with_context(|| format!("cannot write {}", out.display()))
}
