//! `cargo xtask …`: the chores of this workspace that Cargo alone cannot do.
//!
//! `mlx` sets MLX up on Linux, `fetch` gets real weights, `demo` and `test` run the whole thing, `ci` is what
//! a continuous-integration job runs. Progress goes to stderr; stdout carries only what a script might read.

mod fetch;
mod files;
mod mlx;
mod process;
mod python;
mod steps;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::mlx::{Backend, Choice};
use crate::process::Failed;
use crate::workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Chores of the mlx-trellis workspace")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Set MLX up for mlx-rs on Linux (on macOS nothing is needed)
    Mlx(MlxArgs),
    /// Download something that the examples use into target/data
    Fetch {
        /// What to download
        what: Download,
    },
    /// Run the main examples: a full-size layer, then real weights
    Demo {
        /// Quantize a language model instead, generate text with it, and measure it
        #[arg(long)]
        model: bool,
    },
    /// Run every test: pure packages in parallel, those that use MLX with one thread
    Test {
        /// Also run the big opt-in tests (sets TRELLIS_FULL=1)
        #[arg(long)]
        full: bool,
    },
    /// Run what continuous integration runs (.ci/run)
    Ci,
    /// Write the Rust bindings of mlx-c; `mlx` calls this with LIBCLANG_PATH set
    #[command(hide = true)]
    Bindings {
        /// mlx-c's source folder
        #[arg(long)]
        mlx_c: PathBuf,
        /// Header to include before all others
        #[arg(long)]
        prelude: PathBuf,
        /// The C++ compiler's own include folder
        #[arg(long)]
        compiler_include: PathBuf,
        /// File to write
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Args)]
struct MlxArgs {
    /// Which build of MLX; left out, the one set up before, or else cpu
    #[arg(long, conflicts_with = "from")]
    backend: Option<Backend>,
    /// Use the MLX in this folder: lib/libmlx.so with include/mlx, or a site-packages folder with mlx/ in it
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Print the folders as JSON on stdout
    #[arg(long)]
    print: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Download {
    /// SmolLM2-135M-Instruct, 4-bit GGUF, 98 MB
    Smollm2,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            error.chain().skip(1).for_each(|cause| eprintln!("because: {cause}"));
            error.downcast_ref::<Failed>().map_or(ExitCode::FAILURE, Failed::exit_code)
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let workspace = Workspace::locate();
    match cli.command {
        Command::Mlx(args) => {
            let choice = match (args.backend, args.from) {
                (_, Some(folder)) => Some(Choice::From(folder)),
                (backend, None) => backend.map(Choice::Wheel),
            };
            let installed = mlx::set_up(&workspace, choice)?;
            match (args.print, installed) {
                (true, Some(installed)) => println!("{:#}", installed.to_json()),
                (true, None) => println!("null"),
                (false, _) => {}
            }
            Ok(())
        }
        Command::Fetch { what: Download::Smollm2 } => {
            println!("{}", fetch::smollm2(&workspace)?.display());
            Ok(())
        }
        Command::Demo { model: false } => steps::demo(&workspace),
        Command::Demo { model: true } => steps::demo_model(&workspace),
        Command::Test { full } => steps::test(&workspace, full),
        Command::Ci => steps::ci(&workspace),
        Command::Bindings { mlx_c, prelude, compiler_include, out } => {
            mlx::bindings::write(&mlx_c, &prelude, &compiler_include, &out)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
