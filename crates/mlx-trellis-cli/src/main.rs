//! `trellis`: quantize, inspect, verify and measure trellis-coded weights, and run the models they belong to.

mod bench;
mod calibrate;
mod dequantize;
mod device;
mod eval;
mod generate;
mod inspect;
mod kernels;
mod lm;
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
    /// Generate text with a language model
    Generate(generate::Args),
    /// Measure how well language models predict a text, and how far they are from a reference
    Eval(eval::Args),
    /// Collect statistics of a dense model's activations, for `quantize` to weigh errors by
    Calibrate(calibrate::Args),
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
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
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
