//! `trellis calibrate`: the second moments of what each linear module is given, from a text.
//!
//! One layer at a time: all of the text goes through a layer before the next begins, so that memory holds one layer's
//! matrices and the text's features, whatever the model's depth. A killed process leaves its temporary file, `.NAME.` and
//! six characters, beside the output.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype, ops};
use mlx_trellis_models::{LayerCache, LinearInfo, Observer, Tokenizer};
use serde_json::{Map, Value, json};
use trellis_codec::artifact::NewFile;

use crate::device::NO_DEVICE;
use crate::lm::{self, Peak, RunArgs};
use crate::progress::Steps;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder of the model, dense
    #[arg(long)]
    model: PathBuf,
    /// Text to run through it, UTF-8
    #[arg(long)]
    text: PathBuf,
    /// Safetensors file to make: for each linear module of the layers, a float32 [in, in] called MODULE.hessian, the
    /// mean of x xᵀ over the tokens, each x divided by its own rms. The sums are in float32 whatever --dtype says; so what
    /// that says of CUDA's rounding to tf32 holds for them with any
    #[arg(short, long)]
    output: PathBuf,
    /// Use at most so many tokens of the text
    #[arg(long)]
    tokens: Option<usize>,
    /// Tokens the model sees at a time; windows do not overlap
    #[arg(long, default_value_t = 512)]
    context: usize,
    #[command(flatten)]
    run: RunArgs,
    /// Replace a file that is at the output already
    #[arg(long)]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Sums of x xᵀ for one layer: the modules that share an input, and float32 `[in, in]`. Every x is divided by its own
/// rms: why is said at `trellis_codec::Hessian`.
#[derive(Default)]
struct Moments(Vec<(Vec<&'static str>, Array)>);

impl Observer for Moments {
    fn inputs(&mut self, modules: &[&'static str], x: &Array) -> Result<(), Exception> {
        let x = x.reshape(&[-1, x.dim(-1)])?.as_dtype(Dtype::Float32)?;
        let rms = x.square()?.mean_axes(&[-1], true)?.sqrt()?;
        // An input of zeros stays one.
        let x = x.divide(ops::maximum(&rms, Array::from_f32(f32::MIN_POSITIVE))?)?;
        let moment = x.transpose()?.matmul(&x)?;
        // One window's sum is added to those before: sums of sums, whose rounding errors stay those of a short sum.
        match self.0.iter_mut().find(|(names, _)| names == modules) {
            Some((_, sum)) => {
                *sum = sum.add(&moment)?;
                sum.eval()
            }
            None => {
                moment.eval()?;
                self.0.push((modules.to_vec(), moment));
                Ok(())
            }
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let Some(device) = args.run.select() else { return Ok(ExitCode::from(NO_DEVICE)) };
    ensure!(args.context > 0, "--context: found 0, expected at least 1");
    let exists = args.output.try_exists().with_context(|| args.output.display().to_string())?;
    ensure!(
        args.overwrite || !exists,
        "{}: found it there already, expected a new path (or --overwrite)",
        args.output.display()
    );
    let tokenizer = Tokenizer::load(&args.model)?;
    let tokens = lm::read_tokens(&tokenizer, &args.text, args.tokens)?;
    ensure!(!tokens.is_empty(), "{}: found no token, expected some", args.text.display());
    let mut model = args.run.load(&args.model)?;

    let started = Instant::now();
    let mut file = MomentFile::create(model.linears(), args, tokens.len())?;
    let mut windows =
        tokens.chunks(args.context).map(|window| model.embed(window)).collect::<Result<Vec<_>, _>>()?;
    let layers = model.config().num_hidden_layers as usize;
    let mut progress = Steps::new("windows through layers", windows.len() * layers);
    for layer in 0..layers {
        let mut moments = Moments::default();
        for x in &mut windows {
            *x = model.layer(layer, x, &mut LayerCache::default(), Some(&mut moments))?;
            x.eval()?;
            progress.step();
        }
        file.write(layer, &moments, tokens.len())?;
    }
    progress.finish();
    let modules = file.publish(args.overwrite)?;

    let (seconds, peak) = (started.elapsed().as_secs_f64(), Peak::now()?);
    let bytes = fs::metadata(&args.output).with_context(|| args.output.display().to_string())?.len();
    if args.json {
        let report = json!({ "output": args.output, "modules": modules, "tokens": tokens.len(), "bytes": bytes,
            "device": device, "seconds": seconds, "peak": peak });
        println!("{report}");
    } else {
        println!(
            "{}: {modules} modules, {} tokens, {:.1} MB; on {device}; {seconds:.0} s; {peak}",
            args.output.display(),
            tokens.len(),
            bytes as f64 / 1e6
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A safetensors file that grows by a layer at a time, and is nothing until it is published.
struct MomentFile {
    file: NewFile,
    /// Modules whose matrices are still to come, in the order of the file.
    left: std::vec::IntoIter<LinearInfo>,
    modules: usize,
}

impl MomentFile {
    /// Writes the header, which the shapes alone decide.
    fn create(linears: &[LinearInfo], args: &Args, tokens: usize) -> Result<Self> {
        let linears: Vec<LinearInfo> = linears.iter().filter(|l| !l.is_head).cloned().collect();
        let mut header = Map::new();
        header.insert(
            "__metadata__".to_owned(),
            json!({
                "content": "mean over tokens of x x^T, x being what a linear module is given divided by its own rms",
                "tokens": tokens.to_string(),
                "context": args.context.to_string(),
                "model": args.model.display().to_string(),
                "text": args.text.display().to_string(),
            }),
        );
        let mut at = 0u64;
        for linear in &linears {
            let n = linear.in_features as u64;
            let end = at + 4 * n * n;
            let tensor = json!({ "dtype": "F32", "shape": [n, n], "data_offsets": [at, end] });
            header.insert(format!("{}.hessian", linear.path), tensor);
            at = end;
        }
        let mut header = Value::Object(header).to_string();
        // So that the data starts at a multiple of 8 bytes.
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));

        let mut file = NewFile::create(&args.output)?;
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(header.as_bytes())?;
        let modules = linears.len();
        Ok(Self { file, left: linears.into_iter(), modules })
    }

    /// Writes the matrices of one layer's modules.
    fn write(&mut self, layer: usize, moments: &Moments, tokens: usize) -> Result<()> {
        for (module, sum) in moments.0.iter().flat_map(|(names, sum)| names.iter().map(move |n| (n, sum))) {
            let LinearInfo { path, in_features, .. } = self
                .left
                .next()
                .with_context(|| format!("layer {layer}: {module} is none of the model's modules"))?;
            let here = path.ends_with(&format!("layers.{layer}.{module}"));
            ensure!(
                here && sum.shape() == [in_features as i32; 2],
                "{path}: found {:?} of layer {layer}'s {module}, expected its own [{in_features}, {in_features}]",
                sum.shape()
            );
            let mean = sum.divide(Array::from_f32(tokens as f32))?;
            mean.eval()?;
            let values = mean.try_as_slice::<f32>().with_context(|| path.clone())?;
            ensure!(
                values.iter().all(|v| v.is_finite()),
                "{path}: found NaN or infinity among its inputs' moments"
            );
            for value in values {
                self.file.write(&value.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Makes the file durable, then gives it its name; returns the number of modules.
    fn publish(self, overwrite: bool) -> Result<usize> {
        ensure!(self.left.len() == 0, "found no inputs of {} modules", self.left.len());
        if overwrite {
            self.file.publish()?;
        } else {
            self.file.publish_new()?;
        }
        Ok(self.modules)
    }
}
