//! Compiles the C++ halves of `src/ffi` against the MLX that mlx-sys links.

use std::path::PathBuf;

fn main() {
    let sources = ["cpu_primitive", "cuda_device", "cuda_kernel", "export", "gradient"]
        .map(|name| format!("src/ffi/{name}.cpp"));
    let headers = ["cpu_primitive", "guarded"].map(|name| format!("src/ffi/{name}.h"));
    for file in sources.iter().chain(&headers) {
        println!("cargo::rerun-if-changed={file}");
    }
    // Set by mlx-sys on macOS, by `.cargo/mlx-linux.toml` on Linux.
    let Some(include) = std::env::var_os("DEP_MLX_INCLUDE") else {
        eprintln!("mlx-sys did not say where MLX's headers are; on Linux run `cargo xtask mlx` first");
        std::process::exit(1);
    };
    let folders: Vec<PathBuf> = std::env::split_paths(&include).collect();
    for folder in &folders {
        println!("cargo::rerun-if-changed={}", folder.join("mlx/version.h").display());
    }
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .includes(&folders)
        .include("src/ffi")
        // MLX's headers are not ours to warn about.
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-Wno-unused-variable")
        .files(sources)
        .compile("trellis_primitive");
}
