//! `trellis`: quantize, inspect, verify and measure trellis-coded weights.

mod bench;
mod dequantize;
mod inspect;
mod kernels;
mod memory;
mod progress;
mod quantize;
mod report;
mod source;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "trellis",
    version,
    about = "Quantize, inspect, verify and measure trellis-coded weights for MLX"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Quantize the matrices of a safetensors file, a folder of them, or a GGUF file into a new folder
    Quantize(Box<quantize::Args>),
    /// Decode a GGUF file or a quantized folder into a dense Hugging Face folder
    Dequantize(dequantize::Args),
    /// Show what a quantized file or folder holds
    Inspect(inspect::Args),
    /// Compare decodes and products with reference cases
    Verify(verify::Args),
    /// Explain, dump, export or count what a product launches on Metal
    Kernels(kernels::Args),
    /// Validate, then time
    #[command(subcommand)]
    Bench(bench::Command),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Quantize(args) => quantize::run(&args),
        Command::Dequantize(args) => dequantize::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Bench(bench::Command::Matmul(args)) => bench::matmul::run(&args),
        Command::Bench(bench::Command::Encode(args)) => bench::encode::run(&args),
    };
    mlx_trellis::skip_cuda_teardown();
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}
