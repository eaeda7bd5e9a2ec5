//! `trellis inspect`: what a quantized file or folder holds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use trellis_codec::Layout;
use trellis_codec::artifact::Artifact;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A .safetensors file with its config.json beside it, or a folder
    path: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Module {
    path: String,
    out_features: usize,
    in_features: usize,
    axis: u32,
    bits: u32,
    state_bits: u32,
    block: usize,
    interleaved: bool,
    rotation: Option<String>,
    bias: bool,
    bytes: usize,
}

#[derive(Serialize)]
struct Other {
    tensor: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
}

/// Runs the command. Opening checks everything but the codes, every pattern of which is valid.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let artifact = Artifact::open(&args.path)?;
    let modules: Vec<Module> = artifact
        .modules()
        .iter()
        .map(|info| {
            let g = &info.geometry;
            Module {
                path: info.path.clone(),
                out_features: g.out_features(),
                in_features: g.in_features(),
                axis: g.axis().index(),
                bits: g.bits(),
                state_bits: g.state_bits(),
                block: g.block(),
                interleaved: g.layout() == Layout::Interleaved,
                rotation: info.rotation.map(|r| r.to_string()),
                bias: info.has_bias,
                bytes: g.bytes(),
            }
        })
        .collect();
    let others: Vec<Other> = artifact
        .others()
        .map(|(name, t)| Other {
            tensor: name.to_owned(),
            dtype: t.dtype.to_string(),
            shape: t.shape.to_vec(),
            bytes: t.bytes.len(),
        })
        .collect();
    if args.json {
        println!("{}", serde_json::to_string(&serde_json::json!({ "modules": modules, "others": others }))?);
        return Ok(ExitCode::SUCCESS);
    }
    for m in &modules {
        println!(
            "{} [{}, {}] axis {} k={} L={} T={}{}{}{}, {:.2} MB",
            m.path,
            m.out_features,
            m.in_features,
            m.axis,
            m.bits,
            m.state_bits,
            m.block,
            if m.interleaved { " interleaved" } else { "" },
            m.rotation.as_ref().map_or(String::new(), |r| format!(" {r}")),
            if m.bias { " with bias" } else { "" },
            m.bytes as f64 / 1e6
        );
    }
    let weights: usize = modules.iter().map(|m| m.out_features * m.in_features).sum();
    let bytes: usize = modules.iter().map(|m| m.bytes).sum();
    let bits = if weights == 0 { 0.0 } else { bytes as f64 * 8.0 / weights as f64 };
    println!(
        "{} trellis modules, {:.1} M weights at {bits:.3} bits with scales, {:.1} MB; {} other tensors, {:.1} MB",
        modules.len(),
        weights as f64 / 1e6,
        bytes as f64 / 1e6,
        others.len(),
        others.iter().map(|o| o.bytes).sum::<usize>() as f64 / 1e6
    );
    Ok(ExitCode::SUCCESS)
}
