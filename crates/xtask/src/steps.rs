//! The commands that run other commands: demo, test, ci.

use std::path::Path;
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result};

use crate::process::{run, say};
use crate::workspace::Workspace;
use crate::{fetch, mlx};

/// The packages that need no MLX; their tests run in parallel. Every other member is taken to use MLX, whose
/// device and streams are shared by the whole process, and runs with one test thread: a new package is tested
/// either way.
const PURE: &[&str] = &["msl-emu", "trellis-codec", "trellis-cpu", "trellis-kernels"];

/// Runs the main job: a layer of the size it was made for, then real weights.
pub(crate) fn demo(workspace: &Workspace) -> Result<()> {
    set_up(workspace)?;
    run(&mut example(workspace, "qwen_down_proj"))?;
    // After the first example on purpose: without a network that one still shows the main thing.
    let weights = fetch::smollm2(workspace)
        .context("the first example ran; the second needs real weights, which could not be fetched")?;
    // Cargo runs the example in the workspace's root.
    let weights = weights.strip_prefix(workspace.root()).unwrap_or(&weights);
    run(example(workspace, "quantize_real").arg("--").arg(weights))
}

/// What the demonstration's models are asked.
const PROMPT: &str = "Explain what a trellis code is.";

/// Tokens that the demonstration generates, and predicts: enough to read, and to tell models apart in a few minutes on a CPU.
const GENERATED: &str = "48";
const PREDICTED: &str = "256";

/// Quantizes a language model at 3 bits, generates text with it, and compares it and MLX's own 3 bits with the model it
/// was.
pub(crate) fn demo_model(workspace: &Workspace) -> Result<()> {
    set_up(workspace)?;
    let weights = fetch::smollm2(workspace)?;
    let folder = workspace.kept("demo");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let [dense, coded, affine] = ["SmolLM2", "SmolLM2-3bit", "SmolLM2-affine-3bit"].map(|n| folder.join(n));
    let text = workspace.root().join("tests/text/evaluation.txt");

    run(trellis(workspace).arg("dequantize").arg(&weights).arg("-o").arg(&dense).args([
        "--dtype",
        "float16",
        "--overwrite",
    ]))?;
    let quantize = |output: &Path, method: &[&str]| {
        let mut command = trellis(workspace);
        command
            .arg("quantize")
            .arg(&dense)
            .arg("-o")
            .arg(output)
            .args(["--bits", "3", "--overwrite"])
            .args(method);
        run(&mut command)
    };
    quantize(&coded, &["--rotate"])?;
    quantize(&affine, &["--method", "affine", "--group", "64"])?;
    run(trellis(workspace).arg("generate").arg("--model").arg(&coded).args([
        "--prompt",
        PROMPT,
        "--max-tokens",
        GENERATED,
    ]))?;
    // In float32: MLX's CPU back end takes many times as long for affine products in float16.
    let mut eval = trellis(workspace);
    eval.args(["eval", "--dtype", "float32"])
        .arg("--text")
        .arg(text)
        .args(["--tokens", PREDICTED])
        .arg("--reference")
        .arg(&dense);
    run(eval.arg("--model").arg(&coded).arg("--model").arg(&affine))
}

/// Runs all tests, doc tests included, and builds the examples.
pub(crate) fn test(workspace: &Workspace, full: bool) -> Result<()> {
    let started = Instant::now();
    set_up(workspace)?;
    for mut command in test_commands(workspace) {
        if full {
            command.env("TRELLIS_FULL", "1");
        }
        run(&mut command)?;
    }
    say(format_args!("all tests passed in {:.0} s", started.elapsed().as_secs_f64()));
    Ok(())
}

/// Runs `.ci/run`, the one list of what continuous integration checks.
pub(crate) fn ci(workspace: &Workspace) -> Result<()> {
    run(Command::new("bash").arg(".ci/run").current_dir(workspace.root()))
}

fn set_up(workspace: &Workspace) -> Result<()> {
    let installed = mlx::set_up(workspace, None)?;
    let replaced =
        ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"].into_iter().find(|name| env::var_os(name).is_some());
    if let (Some(_), Some(name)) = (installed, replaced) {
        say(format_args!(
            "note: {name} is set and replaces the run path in .cargo/mlx-linux.toml: programs may not find MLX"
        ));
    }
    Ok(())
}

fn example(workspace: &Workspace, name: &str) -> Command {
    let mut command = workspace.cargo();
    command.args(["run", "--release", "--package", "mlx-trellis-examples", "--example", name]);
    command
}

/// The command-line tool, optimised; what it takes comes behind.
fn trellis(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo();
    command.args(["run", "--quiet", "--release", "--package", "mlx-trellis-cli", "--"]);
    command
}

fn test_commands(workspace: &Workspace) -> [Command; 3] {
    let mut pure = workspace.cargo();
    pure.arg("test");
    // In the profile that `cargo xtask` builds with, so that bindgen is not compiled once more.
    let mut xtask = workspace.cargo();
    xtask.args(["test", "--profile", "xtask", "--package", "xtask"]);
    let mut with_mlx = workspace.cargo();
    with_mlx.args(["test", "--workspace", "--exclude", "xtask"]);
    for package in PURE {
        pure.args(["--package", package]);
        with_mlx.args(["--exclude", package]);
    }
    with_mlx.args(["--", "--test-threads=1"]);
    [pure, xtask, with_mlx]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_tested_once() {
        let commands = test_commands(&Workspace::locate());
        let [pure, xtask, with_mlx] =
            commands.each_ref().map(|command| command.get_args().collect::<Vec<_>>());
        let has = |args: &[&std::ffi::OsStr], pair: [&str; 2]| args.windows(2).any(|window| window == pair);
        for package in PURE {
            assert!(has(&pure, ["--package", package]));
            assert!(has(&with_mlx, ["--exclude", package]));
        }
        assert!(has(&xtask, ["--package", "xtask"]));
        assert!(has(&with_mlx, ["--exclude", "xtask"]));
        assert!(has(&with_mlx, ["test", "--workspace"]));
        assert!(has(&with_mlx, ["--", "--test-threads=1"]));
    }
}
