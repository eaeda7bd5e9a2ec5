//! `trellis dequantize`: a GGUF file, or a folder of MLX affine or trellis codes, as a dense Hugging Face folder.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use trellis_codec::artifact::{ArtifactWriter, RawTensor, WriteOptions};

use crate::progress::Progress;
use crate::report::DtypeArg;
use crate::source::{Source, Stored, set_dtype};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A .gguf file (llama or qwen3), a folder of safetensors, or a .safetensors file
    source: PathBuf,
    /// Folder to make
    #[arg(short, long)]
    output: PathBuf,
    /// Type of the floating-point tensors; float32 holds any code's value exactly
    #[arg(long, value_enum, default_value_t = DtypeArg::Float32)]
    dtype: DtypeArg,
    /// Bytes of tensors in a file before another is begun
    #[arg(long, value_name = "BYTES", default_value_t = WriteOptions::default().max_shard_bytes)]
    max_shard_bytes: u64,
    /// Replace a model that is at the output already
    #[arg(long)]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let source = Source::open(&args.source)?;
    let mut writer = ArtifactWriter::create(
        &args.output,
        WriteOptions {
            // What Hugging Face's own readers expect of a dense model.
            metadata: BTreeMap::from([("format".to_owned(), "pt".to_owned())]),
            max_shard_bytes: args.max_shard_bytes,
            overwrite: args.overwrite,
            ..WriteOptions::default()
        },
    )?;
    let mut config = source.config();
    if source.has_config() {
        set_dtype(&mut config, args.dtype.file());
    }
    writer.set_config(config.into())?;
    for file in source.companions()? {
        writer.copy_file(file)?;
    }
    for (name, content) in source.files() {
        writer.add_file(name, content)?;
    }
    let tensors = source.tensors();
    let progress = Progress::new(tensors.iter().map(|t| t.len() as u64).sum(), args.json);
    for (index, info) in tensors.iter().enumerate() {
        let dtype = if info.is_float() { args.dtype.file() } else { info.dtype };
        let bytes = source.bytes(index, dtype)?;
        writer.add_tensor(&info.name, RawTensor { dtype, shape: &info.shape, bytes: &bytes })?;
        progress.advance(info.len() as u64);
    }
    progress.finish();
    let summary = writer.finish()?;
    if let Some(leftover) = &summary.leftover {
        eprintln!("warning: could not remove {}", leftover.display());
    }

    let mut decoded: BTreeMap<String, usize> = BTreeMap::new();
    for info in tensors {
        *decoded.entry(info.stored.to_string()).or_default() += 1;
    }
    if args.json {
        let json = serde_json::json!({
            "output": summary.path, "tensors": summary.tensors, "tensor_bytes": summary.tensor_bytes,
            "shards": summary.shards, "sources": decoded,
        });
        println!("{}", serde_json::to_string(&json)?);
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{}: {} tensors, {:.1} MB of {}",
        summary.path.display(),
        summary.tensors,
        summary.tensor_bytes as f64 / 1e6,
        args.dtype.file()
    );
    for (stored, count) in decoded {
        println!("{count} tensors were {stored}");
    }
    if tensors.iter().all(|t| t.stored == Stored::Plain) {
        println!("nothing in {} was quantized", args.source.display());
    }
    Ok(ExitCode::SUCCESS)
}
