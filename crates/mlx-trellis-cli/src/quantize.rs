//! `trellis quantize`: the matrices of a model to trellis codes, everything else as it was.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use globset::{Glob, GlobSet, GlobSetBuilder};
use mlx_trellis::{AxisChoice, Encoded, Error, QuantizeOptions, quantize_weight};
use serde::Serialize;
use trellis_codec::artifact::{ArtifactWriter, RawTensor, WriteOptions};

use crate::progress::Progress;
use crate::source::{Source, Stored, TensorInfo, Values};

/// Matrices that are looked up rather than multiplied: embeddings, under the names that models give them.
const EMBEDDINGS: [&str; 4] = ["*embed*", "*token_embd*", "*wte*", "*wpe*"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A .safetensors file, a folder of them, or a .gguf file
    source: PathBuf,
    /// Folder to make
    #[arg(short, long)]
    output: PathBuf,
    /// Bits a weight
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=4))]
    bits: u32,
    /// Axis of the weight to code along
    #[arg(long, value_enum, default_value_t = AxisSetting::Auto)]
    axis: AxisSetting,
    /// Weights in a block [default: 256, or the largest multiple of 32 below it that fits]
    #[arg(long)]
    block: Option<usize>,
    /// Store neighbouring blocks side by side where the format allows it
    #[arg(long)]
    interleave: bool,
    /// Quantize only tensors whose name matches; may be repeated [default: every matrix but embeddings]
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Leave tensors as they are whose name matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Replace an artifact that is at the output already
    #[arg(long)]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum AxisSetting {
    /// Along the input features (axis 1)
    In,
    /// Along the output features (axis 0)
    Out,
    /// The one with the lower error on a sample of rows
    Auto,
}

#[derive(Serialize)]
struct Quantized {
    module: String,
    out_features: usize,
    in_features: usize,
    axis: u32,
    bits: u32,
    block: usize,
    bytes: usize,
    relative_mse: f64,
    zero_rows: usize,
    underflowed_rows: usize,
    seconds: f64,
}

#[derive(Serialize)]
struct Kept {
    tensor: String,
    shape: Vec<usize>,
    reason: String,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let source = Source::open(&args.source)?;
    refuse_quantized(args, &source)?;
    let options = QuantizeOptions {
        bits: args.bits,
        axis: match args.axis {
            AxisSetting::In => AxisChoice::Input,
            AxisSetting::Out => AxisChoice::Output,
            AxisSetting::Auto => AxisChoice::Auto,
        },
        block: args.block,
        interleave: args.interleave,
        ..QuantizeOptions::default()
    };
    let filter = Filter::new(args)?;
    let write_options = WriteOptions { overwrite: args.overwrite, ..WriteOptions::default() };
    let mut writer = ArtifactWriter::create(&args.output, write_options)?;
    copy_companions(&source, &mut writer)?;

    let tensors = source.tensors();
    let total: usize = tensors.iter().filter(|t| filter.refusal(t).is_none()).map(TensorInfo::len).sum();
    let progress = Progress::new(total as u64, args.json);
    let (mut quantized, mut kept) = (Vec::new(), Vec::new());
    for (index, info) in tensors.iter().enumerate() {
        let TensorInfo { name, shape, dtype, .. } = info;
        let reason = match filter.refusal(info) {
            Some(reason) => reason,
            None => {
                let start = Instant::now();
                match quantize(source.values(index)?, name, shape, &options, &progress) {
                    Ok(encoded) => {
                        let module = name.strip_suffix(".weight").unwrap_or(name);
                        writer.add_module(
                            module,
                            &encoded.geometry,
                            &encoded.codes,
                            &encoded.scales,
                            None,
                        )?;
                        let row = row(module, &encoded, start.elapsed().as_secs_f64());
                        progress.line(&row.to_string());
                        quantized.push(row);
                        continue;
                    }
                    // Named in the report rather than fatal: such a tensor stays usable as it is.
                    Err(Error::NoBlock { .. }) => "no legal block divides its coded dimension".to_owned(),
                    Err(error) => return Err(error.into()),
                }
            }
        };
        let bytes = source.bytes(index, *dtype)?;
        writer.add_tensor(name, RawTensor { dtype: *dtype, shape, bytes: &bytes })?;
        kept.push(Kept { tensor: name.clone(), shape: shape.clone(), reason });
    }
    progress.finish();
    if quantized.is_empty() {
        bail!("{}: found no matrix to quantize among {} tensors", args.source.display(), tensors.len());
    }
    let summary = writer.finish()?;
    if let Some(leftover) = &summary.leftover {
        eprintln!("warning: could not remove {}", leftover.display());
    }
    report(args, &quantized, &kept, &summary.path)?;
    Ok(ExitCode::SUCCESS)
}

fn quantize(
    values: Values,
    name: &str,
    shape: &[usize],
    options: &QuantizeOptions,
    progress: &Progress,
) -> Result<Encoded, Error> {
    let advance: &(dyn Fn(usize) + Sync) = &|n| progress.advance(n as u64);
    let (out, n) = (shape[0], shape[1]);
    match values {
        Values::F32(w) => quantize_weight(&w, out, n, options, name, Some(advance)),
        Values::F16(w) => quantize_weight(&w, out, n, options, name, Some(advance)),
        Values::Bf16(w) => quantize_weight(&w, out, n, options, name, Some(advance)),
    }
}

fn row(module: &str, encoded: &Encoded, seconds: f64) -> Quantized {
    let g = &encoded.geometry;
    Quantized {
        module: module.to_owned(),
        out_features: g.out_features(),
        in_features: g.in_features(),
        axis: g.axis().index(),
        bits: g.bits(),
        block: g.block(),
        bytes: g.bytes(),
        relative_mse: encoded.report.relative_mse(),
        zero_rows: encoded.report.zero_rows,
        underflowed_rows: encoded.report.underflowed_rows,
        seconds,
    }
}

impl std::fmt::Display for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} [{}, {}] axis {} k={} T={}: relative mse {:.5}, {:.1} s",
            self.module,
            self.out_features,
            self.in_features,
            self.axis,
            self.bits,
            self.block,
            self.relative_mse,
            self.seconds
        )?;
        if self.zero_rows + self.underflowed_rows > 0 {
            write!(
                f,
                " ({} rows of zeros, {} rows too small for a scale)",
                self.zero_rows, self.underflowed_rows
            )?;
        }
        Ok(())
    }
}

fn report(args: &Args, quantized: &[Quantized], kept: &[Kept], path: &Path) -> Result<()> {
    if args.json {
        let json = serde_json::json!({ "output": path, "quantized": quantized, "kept": kept });
        println!("{}", serde_json::to_string(&json)?);
        return Ok(());
    }
    let weights: usize = quantized.iter().map(|q| q.out_features * q.in_features).sum();
    let bytes: usize = quantized.iter().map(|q| q.bytes).sum();
    let seconds: f64 = quantized.iter().map(|q| q.seconds).sum();
    println!(
        "{}: {} modules, {:.1} M weights at {:.3} bits with scales, {:.1} MB, in {:.1} s",
        path.display(),
        quantized.len(),
        weights as f64 / 1e6,
        bytes as f64 * 8.0 / weights as f64,
        bytes as f64 / 1e6,
        seconds
    );
    let mut reasons: Vec<(&str, usize)> = Vec::new();
    for k in kept {
        match reasons.iter_mut().find(|(r, _)| *r == k.reason) {
            Some((_, n)) => *n += 1,
            None => reasons.push((&k.reason, 1)),
        }
    }
    for (reason, n) in reasons {
        println!("{n} tensors kept as they were: {reason}");
    }
    Ok(())
}

/// Which tensors to quantize.
struct Filter {
    include: Option<GlobSet>,
    exclude: GlobSet,
    embeddings: GlobSet,
}

impl Filter {
    fn new(args: &Args) -> Result<Self> {
        Ok(Self {
            include: if args.include.is_empty() { None } else { Some(globs(&args.include)?) },
            exclude: globs(&args.exclude)?,
            embeddings: globs(&EMBEDDINGS)?,
        })
    }

    /// Why a tensor is kept as it is, or `None` if it is to be quantized.
    fn refusal(&self, info: &TensorInfo) -> Option<String> {
        let TensorInfo { name, shape, .. } = info;
        let reason = if shape.len() != 2 || !name.ends_with(".weight") {
            "not a matrix named .weight"
        } else if !info.is_float() {
            "not floating point"
        } else if self.exclude.is_match(name) {
            "excluded"
        } else if let Some(include) = &self.include {
            if include.is_match(name) {
                return None;
            }
            "not included"
        } else if self.embeddings.is_match(name) {
            "an embedding"
        } else {
            return None;
        };
        Some(reason.to_owned())
    }
}

fn globs(patterns: &[impl AsRef<str>]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let pattern = pattern.as_ref();
        set.add(Glob::new(pattern).with_context(|| format!("glob {pattern:?}"))?);
    }
    Ok(set.build()?)
}

/// A source that is quantized already would be coded twice over.
fn refuse_quantized(args: &Args, source: &Source) -> Result<()> {
    match source.tensors().iter().find(|t| t.stored != Stored::Plain) {
        Some(t) => bail!(
            "{}: tensor {} is {}, expected a model that is not quantized",
            args.source.display(),
            t.name,
            t.stored
        ),
        None => Ok(()),
    }
}

/// The config and the files that go with a model: tokenizer, chat template, licence.
fn copy_companions(source: &Source, writer: &mut ArtifactWriter) -> Result<()> {
    writer.set_config(source.config().into())?;
    for file in source.companions()? {
        writer.copy_file(file)?;
    }
    for (name, content) in source.files() {
        writer.add_file(name, content)?;
    }
    Ok(())
}
