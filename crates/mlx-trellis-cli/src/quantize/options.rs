//! What is done to which tensor: the command's options, resolved for one tensor at a time.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use globset::{Glob, GlobMatcher};
use mlx_trellis::{AxisChoice, Rotation, RotationError, ScaleRule};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use trellis_codec::DEFAULT_DAMPING;
use trellis_codec::rotation::MAX_ROTATION_BLOCK;

use crate::report::DtypeArg;
use crate::source::TensorInfo;

/// Matrices that are looked up rather than multiplied: embeddings, under the names that models give them.
const EMBEDDINGS: [&str; 4] = ["*embed*", "*token_embd*", "*wte*", "*wpe*"];
/// What MLX's affine quantization takes.
const AFFINE_BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];
const AFFINE_GROUPS: [usize; 3] = [32, 64, 128];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A folder of safetensors, a .safetensors file, or a .gguf file (llama or qwen3)
    pub(super) source: PathBuf,
    /// Folder to make
    #[arg(short, long)]
    pub(super) output: PathBuf,
    /// How to quantize
    #[arg(long, value_enum, default_value_t = Method::Trellis)]
    method: Method,
    /// Bits a weight: 1 to 4, or 2, 3, 4, 5, 6, 8 with --method affine
    #[arg(long, default_value_t = 3)]
    bits: u32,
    /// Weights in a group of --method affine: 32, 64 or 128
    #[arg(long, default_value_t = 64)]
    group: usize,
    /// Axis of the weight to code along
    #[arg(long, value_enum, default_value_t = Axis::Auto)]
    axis: Axis,
    /// Weights in a block [default: 256, or the largest multiple of 32 below it that fits]
    #[arg(long)]
    block: Option<usize>,
    /// Store neighbouring blocks side by side where the format allows it
    #[arg(long)]
    interleave: bool,
    /// How each stored row's scale is chosen
    #[arg(long, value_enum, default_value_t = Scale::Search)]
    scale: Scale,
    /// Rotate inputs by signs and Hadamard transforms, in the largest blocks up to BLOCK that divide them [BLOCK: 1024]
    #[arg(long, value_name = "BLOCK", num_args = 0..=1, default_missing_value = "1024")]
    rotate: Option<usize>,
    /// Seed of the rotations' signs
    #[arg(long, default_value_t = 1)]
    rotate_seed: u64,
    /// Feed errors back by the statistics that `trellis calibrate` wrote to this file
    #[arg(long, value_name = "FILE")]
    pub(super) calibration: Option<PathBuf>,
    /// Part of the mean of a Hessian's diagonal that is added to it before errors are fed back
    #[arg(long, default_value_t = DEFAULT_DAMPING, value_name = "PART")]
    damping: f64,
    /// What becomes of embeddings and of matrices that no block fits: keep, or affine:BITS:GROUP
    #[arg(long, value_name = "RULE", default_value = "keep")]
    rest: Rest,
    /// Quantize only tensors whose name matches; may be repeated [default: every matrix but embeddings]
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Leave tensors as they are whose name matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// For tensors whose name matches, whatever else is said of them: BITS[,in|out|auto][,BLOCK][,rms|search]
    /// [,rotate|rotate:BLOCK|unrotated][,plain] (plain: without feedback), affine:BITS:GROUP, or keep; may be repeated, the last match counts
    #[arg(long, value_name = "GLOB=SPEC")]
    set: Vec<String>,
    /// A JSON object of such globs and specs; what --set says comes after it
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Type of the floating-point tensors that are kept, and of affine scales [default: their own; float16 for GGUF]
    #[arg(long, value_enum)]
    pub(super) dtype: Option<DtypeArg>,
    /// Decode a source that is quantized already, and quantize it anew
    #[arg(long)]
    pub(super) requantize: bool,
    /// Bytes of tensors in a file before another is begun
    #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
    pub(super) max_shard_bytes: u64,
    /// Replace an artifact that is at the output already
    #[arg(long)]
    pub(super) overwrite: bool,
    /// Drop what an interrupted run left instead of going on with it
    #[arg(long)]
    pub(super) restart: bool,
    /// Tensors to code at a time, each of which takes memory [default: 1, or 2 with --calibration: feedback goes from row
    /// to row and leaves cores idle]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
    /// Show what would be done and how large the result would be; reads no weights, writes nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Write the report, a JSON object, to a file too
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// Print the report
    #[arg(long)]
    pub(super) json: bool,
}

impl Args {
    /// Tensors to code at a time.
    pub(super) fn jobs(&self) -> usize {
        let default = if self.calibration.is_some() { 2 } else { 1 };
        self.jobs.unwrap_or(default).into()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    /// Trellis codes
    Trellis,
    /// MLX's affine groups, for comparison
    Affine,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Axis {
    /// Along the input features (axis 1)
    In,
    /// Along the output features (axis 0)
    Out,
    /// The one with the lower error on a sample of rows
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Scale {
    /// The row's rms becomes the code's
    Rms,
    /// The scale of least predicted error
    Search,
}

impl From<Scale> for ScaleRule {
    fn from(scale: Scale) -> Self {
        match scale {
            Scale::Rms => Self::Rms,
            Scale::Search => Self::Search,
        }
    }
}

/// How the input of a module is rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rotate {
    pub(super) block: usize,
    pub(super) seed: u64,
}

impl Rotate {
    fn new(block: usize, seed: u64) -> Result<Self> {
        Rotation::new(block, seed)?;
        Ok(Self { block, seed })
    }

    /// The library's.
    pub(super) fn rotation(self) -> Result<Rotation, RotationError> {
        Rotation::new(self.block, self.seed)
    }
}

impl From<Rotation> for Rotate {
    fn from(rotation: Rotation) -> Self {
        Self { block: rotation.block(), seed: rotation.seed() }
    }
}

impl From<Axis> for AxisChoice {
    fn from(axis: Axis) -> Self {
        match axis {
            Axis::In => Self::Input,
            Axis::Out => Self::Output,
            Axis::Auto => Self::Auto,
        }
    }
}

/// How a tensor is coded in trellis codes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Trellis {
    pub(super) bits: u32,
    pub(super) axis: Axis,
    pub(super) block: Option<usize>,
    pub(super) interleave: bool,
    pub(super) scale: Scale,
    /// Its block is the largest that may be taken.
    pub(super) rotate: Option<Rotate>,
    /// Whether errors are fed back, with this damping.
    pub(super) feedback: Option<f64>,
}

/// How a tensor is coded in MLX's affine groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Affine {
    pub(super) bits: u32,
    pub(super) group: usize,
}

/// What is to become of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Wish {
    Trellis(Trellis),
    Affine(Affine),
    /// For the reason given, kept or coded by the rule for the rest.
    Rest(&'static str),
    /// For the reason given.
    Keep(&'static str),
}

/// The rule for what is not quantized otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    Keep,
    Affine(Affine),
}

impl FromStr for Affine {
    type Err = String;

    /// `affine:BITS:GROUP`.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("found {text:?}, expected affine:BITS:GROUP");
        let (bits, group) =
            text.strip_prefix("affine:").and_then(|t| t.split_once(':')).ok_or_else(expected)?;
        let (bits, group) = (bits.parse().map_err(|_| expected())?, group.parse().map_err(|_| expected())?);
        Self { bits, group }.check().map_err(|e| e.to_string())
    }
}

impl Affine {
    fn check(self) -> Result<Self> {
        ensure!(
            AFFINE_BITS.contains(&self.bits) && AFFINE_GROUPS.contains(&self.group),
            "affine with {} bits in groups of {}, expected 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128",
            self.bits,
            self.group
        );
        Ok(self)
    }
}

impl FromStr for Rest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            _ => text.parse().map(Self::Affine).map_err(|e| format!("{e} or keep")),
        }
    }
}

/// The options, checked, with globs that remember whether they matched.
pub(super) struct Rules {
    default: Wish,
    pub(super) rest: Rest,
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    embeddings: Vec<Pattern>,
    set: Vec<(Pattern, Wish)>,
}

struct Pattern {
    option: &'static str,
    text: String,
    glob: GlobMatcher,
    matched: std::cell::Cell<bool>,
}

impl Pattern {
    fn new(option: &'static str, text: &str) -> Result<Self> {
        let glob = Glob::new(text).with_context(|| format!("{option} {text:?}"))?.compile_matcher();
        Ok(Self { option, text: text.to_owned(), glob, matched: false.into() })
    }

    /// Whether it matches the tensor's name or its module's path.
    fn matches(&self, info: &TensorInfo) -> bool {
        let found = self.glob.is_match(&info.name) || info.module().is_some_and(|m| self.glob.is_match(m));
        self.matched.set(self.matched.get() || found);
        found
    }
}

impl Rules {
    pub(super) fn new(args: &Args) -> Result<Self> {
        let default = match args.method {
            Method::Affine => {
                ensure!(
                    args.axis == Axis::Auto
                        && args.block.is_none()
                        && !args.interleave
                        && args.rotate.is_none()
                        && args.calibration.is_none(),
                    "--axis, --block, --interleave, --rotate and --calibration have no meaning with --method affine"
                );
                Wish::Affine(Affine { bits: args.bits, group: args.group }.check()?)
            }
            Method::Trellis => {
                ensure!(
                    args.damping.is_finite() && args.damping >= 0.0,
                    "--damping is {}, expected zero or more",
                    args.damping
                );
                ensure!((1..=4).contains(&args.bits), "--bits is {}, expected 1 to 4", args.bits);
                let rotate =
                    args.rotate.map(|block| Rotate::new(block, args.rotate_seed).context("--rotate"));
                Wish::Trellis(Trellis {
                    bits: args.bits,
                    axis: args.axis,
                    block: args.block,
                    interleave: args.interleave,
                    scale: args.scale,
                    rotate: rotate.transpose()?,
                    feedback: args.calibration.is_some().then_some(args.damping),
                })
            }
        };
        let patterns = |option, texts: &[String]| {
            texts.iter().map(|t| Pattern::new(option, t)).collect::<Result<Vec<_>>>()
        };
        let mut set = Vec::new();
        for (glob, spec) in args.map.as_deref().map(read_map).transpose()?.unwrap_or_default() {
            set.push((Pattern::new("--map", &glob)?, wish(&default, args.rotate_seed, &spec)?));
        }
        for text in &args.set {
            let (glob, spec) =
                text.split_once('=').with_context(|| format!("--set {text:?}, expected GLOB=SPEC"))?;
            set.push((Pattern::new("--set", glob)?, wish(&default, args.rotate_seed, spec)?));
        }
        Ok(Self {
            default,
            rest: args.rest,
            include: patterns("--include", &args.include)?,
            exclude: patterns("--exclude", &args.exclude)?,
            embeddings: patterns("", &EMBEDDINGS.map(str::to_owned))?,
            set,
        })
    }

    /// What is to become of a tensor, whether or not its shape allows it.
    pub(super) fn wish(&self, info: &TensorInfo) -> Wish {
        let any = |patterns: &[Pattern]| patterns.iter().filter(|p| p.matches(info)).count() > 0;
        let set = self.set.iter().filter(|(p, _)| p.matches(info)).last().map(|&(_, wish)| wish);
        let (included, excluded) = (any(&self.include), any(&self.exclude));
        if info.shape.len() != 2 || info.module().is_none() {
            Wish::Keep("not a matrix named .weight")
        } else if !info.is_float() {
            Wish::Keep("not floating point")
        } else if let Some(wish) = set {
            wish
        } else if excluded {
            Wish::Keep("excluded")
        } else if !self.include.is_empty() {
            if included { self.default } else { Wish::Keep("not included") }
        } else if any(&self.embeddings) {
            Wish::Rest("an embedding")
        } else {
            self.default
        }
    }

    /// A glob that matches nothing is a slip of the pen.
    pub(super) fn check_matched(&self) -> Result<()> {
        let given = self.include.iter().chain(&self.exclude).chain(self.set.iter().map(|(p, _)| p));
        match given.into_iter().find(|p| !p.matched.get()) {
            Some(p) => bail!("{} {:?} matches no tensor", p.option, p.text),
            None => Ok(()),
        }
    }
}

/// A spec of `--set`; what it leaves open is as the other options say.
fn wish(default: &Wish, seed: u64, spec: &str) -> Result<Wish> {
    let at = || format!("spec {spec:?}");
    if spec == "keep" {
        return Ok(Wish::Keep("set to be kept"));
    }
    if spec.starts_with("affine") {
        return spec.parse().map(Wish::Affine).map_err(anyhow::Error::msg).with_context(at);
    }
    let mut parts = spec.split(',').map(str::trim);
    let bits = parts.next().unwrap_or_default();
    let bits: u32 =
        bits.parse().with_context(|| format!("{}: expected bits, affine:BITS:GROUP or keep", at()))?;
    match *default {
        Wish::Affine(affine) => {
            ensure!(parts.next().is_none(), "{}: expected only bits with --method affine", at());
            Ok(Wish::Affine(Affine { bits, ..affine }.check().with_context(at)?))
        }
        Wish::Trellis(mut trellis) => {
            ensure!((1..=4).contains(&bits), "{}: found {bits} bits, expected 1 to 4", at());
            trellis.bits = bits;
            for part in parts {
                match part {
                    "in" => trellis.axis = Axis::In,
                    "out" => trellis.axis = Axis::Out,
                    "auto" => trellis.axis = Axis::Auto,
                    "rms" => trellis.scale = Scale::Rms,
                    "search" => trellis.scale = Scale::Search,
                    "plain" => trellis.feedback = None,
                    "unrotated" => trellis.rotate = None,
                    "rotate" => trellis.rotate = Some(Rotate::new(MAX_ROTATION_BLOCK, seed)?),
                    other => {
                        let (rotate, number) =
                            other.strip_prefix("rotate:").map_or((false, other), |block| (true, block));
                        let block = number.parse().with_context(|| {
                            format!(
                                "{}: {other:?}, expected in, out, auto, a block, rms, search, rotate, rotate:BLOCK, \
                                 unrotated or plain",
                                at()
                            )
                        })?;
                        if rotate {
                            trellis.rotate = Some(Rotate::new(block, seed).with_context(at)?);
                        } else {
                            trellis.block = Some(block);
                        }
                    }
                }
            }
            Ok(Wish::Trellis(trellis))
        }
        other => Ok(other),
    }
}

fn read_map(file: &Path) -> Result<Vec<(String, String)>> {
    let read = || -> Result<Vec<(String, String)>> {
        let map: Map<String, Value> = serde_json::from_slice(&std::fs::read(file)?)?;
        map.into_iter()
            .map(|(glob, spec)| match spec {
                Value::String(spec) => Ok((glob, spec)),
                Value::Number(bits) => Ok((glob, bits.to_string())),
                other => bail!("{glob:?} is {other}, expected a number of bits or a spec as --set has it"),
            })
            .collect()
    };
    read().with_context(|| format!("{}", file.display()))
}
