//! The plan: what becomes of each tensor, and how large the result is. Made from names and shapes alone.

use anyhow::{Context, Result};
use mlx_trellis::{AxisChoice, Error, QuantizeOptions};
use serde::Serialize;
use serde_json::{Map, Value, json};
use trellis_codec::artifact::Dtype;
use trellis_codec::{Axis as CodecAxis, DEFAULT_DAMPING, GeometryError};

use super::calibration::Calibration;
use super::options::{Affine, Args, Rest, Rotate, Rules, Trellis, Wish};
use crate::source::{Source, Stored, TensorInfo};

/// What becomes of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "method", rename_all = "lowercase")]
pub(super) enum Action {
    Trellis(Trellis),
    /// `instead` says why not trellis codes.
    Affine {
        #[serde(flatten)]
        affine: Affine,
        instead: Option<String>,
    },
    Keep {
        reason: String,
    },
}

/// A tensor's place in the plan.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    #[serde(flatten)]
    pub(super) action: Action,
    /// The type in which it, or its affine scales, are written.
    #[serde(serialize_with = "dtype_name")]
    pub(super) dtype: Dtype,
    /// Least and most bytes in the result; they differ where the axis is found out by measuring.
    pub(super) bytes: [u64; 2],
}

/// The whole of it.
#[derive(Serialize)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// The type that the config is to name, if not the source's.
    #[serde(serialize_with = "optional_dtype_name")]
    pub(super) config_dtype: Option<Dtype>,
}

impl Plan {
    pub(super) fn new(args: &Args, source: &Source, calibration: Option<&Calibration>) -> Result<Self> {
        let rules = Rules::new(args)?;
        let config_dtype = match (args.dtype, source) {
            (Some(dtype), _) => Some(dtype.file()),
            (None, Source::Gguf { .. }) => Some(Dtype::F16),
            (None, Source::Folder(_)) => None,
        };
        let steps = source.tensors().iter().map(|info| step(&rules, info, config_dtype));
        let plan = Self { steps: steps.collect::<Result<_>>()?, config_dtype };
        rules.check_matched()?;
        if let Some(calibration) = calibration {
            plan.steps.iter().filter(|s| s.feeds_back()).try_for_each(|s| calibration.check(s))?;
        }
        Ok(plan)
    }

    /// Weights that are to be quantized.
    pub(super) fn weights(&self) -> u64 {
        self.steps.iter().filter(|s| !matches!(s.action, Action::Keep { .. })).map(Step::len).sum()
    }

    /// Least and most bytes of all tensors in the result.
    pub(super) fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|i| self.steps.iter().map(|s| s.bytes[i]).sum())
    }

    /// `config.json` to start from: the source's with a quantization section for affine modules. As mlx-lm writes
    /// it: the most common parameters at the top, `false` for matrices that are not quantized, an entry of their own
    /// for modules with other parameters.
    pub(super) fn config(&self, mut config: Map<String, Value>) -> Map<String, Value> {
        let affine = |step: &Step| match step.action {
            Action::Affine { affine, .. } => Some(affine),
            _ => None,
        };
        let mut counts: Vec<(Affine, usize)> = Vec::new();
        for found in self.steps.iter().filter_map(affine) {
            match counts.iter_mut().find(|(a, _)| *a == found) {
                Some((_, n)) => *n += 1,
                None => counts.push((found, 1)),
            }
        }
        // The first of the most common.
        let Some(&(default, _)) = counts.iter().rev().max_by_key(|(_, n)| *n) else { return config };
        let entry = |a: Affine| json!({ "group_size": a.group, "bits": a.bits, "mode": "affine" });
        let mut section = entry(default);
        if let Some(section) = section.as_object_mut() {
            for step in &self.steps {
                let Some(module) = step.name.strip_suffix(".weight").filter(|_| step.shape.len() >= 2) else {
                    continue;
                };
                match (&step.action, affine(step)) {
                    (_, Some(found)) if found != default => {
                        section.insert(module.to_owned(), entry(found));
                    }
                    (Action::Keep { .. }, _) => {
                        section.insert(module.to_owned(), false.into());
                    }
                    _ => {}
                }
            }
        }
        config.insert("quantization".to_owned(), section);
        config
    }
}

impl Step {
    /// Number of weights.
    pub(super) fn len(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }

    /// Whether its errors are fed back.
    pub(super) fn feeds_back(&self) -> bool {
        matches!(&self.action, Action::Trellis(Trellis { feedback: Some(_), .. }))
    }

    /// The path of the module whose weight it is.
    pub(super) fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }
}

impl Trellis {
    /// The library's options.
    pub(super) fn options(&self) -> Result<QuantizeOptions, Error> {
        Ok(QuantizeOptions {
            axis: AxisChoice::from(self.axis),
            block: self.block,
            interleave: self.interleave,
            scale: self.scale.into(),
            rotation: self.rotate.map(Rotate::rotation).transpose()?,
            damping: self.feedback.unwrap_or(DEFAULT_DAMPING),
            ..QuantizeOptions::with_bits(self.bits)
        })
    }

    /// Bytes of codes and scales along each axis that the choice leaves open and that divides into blocks.
    fn bytes(&self, out: usize, n: usize) -> Result<Vec<u64>, Error> {
        let options = self.options()?;
        let axes: &[CodecAxis] = match options.axis {
            AxisChoice::Input => &[CodecAxis::Input],
            AxisChoice::Output => &[CodecAxis::Output],
            AxisChoice::Auto => &[CodecAxis::Input, CodecAxis::Output],
        };
        let mut sizes = Vec::new();
        for &axis in axes {
            match options.geometry(axis, out, n) {
                Ok(geometry) => sizes.push(geometry.bytes() as u64),
                Err(
                    Error::NoBlock { .. }
                    | Error::Geometry(GeometryError::Cols { .. } | GeometryError::Empty { .. }),
                ) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(sizes)
    }
}

impl Affine {
    /// Bytes of codes, scales and biases, where the groups fit.
    fn bytes(self, shape: &[usize], dtype: Dtype) -> Option<u64> {
        let &[out, n] = shape else { return None };
        // MLX packs whole words: 32 weights fill them at any number of bits.
        let fits = out > 0 && n > 0 && n.is_multiple_of(self.group);
        let scale = (dtype.bitsize() / 8) as u64;
        fits.then(|| {
            let weights = out as u64 * n as u64;
            weights * u64::from(self.bits) / 8 + weights / self.group as u64 * 2 * scale
        })
    }
}

fn step(rules: &Rules, info: &TensorInfo, dtype: Option<Dtype>) -> Result<Step> {
    let own = if info.is_float() { dtype.unwrap_or(info.dtype) } else { info.dtype };
    // Scales of float32 would cost as much as a bit a weight; the weights are rounded first, as mlx-lm rounds a
    // model that it converts.
    let scales = match dtype.unwrap_or(info.dtype) {
        Dtype::F32 if dtype.is_none() => Dtype::F16,
        other => other,
    };
    let kept = |reason: String| {
        let bytes = info.len() as u64 * own.bitsize() as u64 / 8;
        (Action::Keep { reason }, own, [bytes; 2])
    };
    let affine = |affine: Affine, instead: Option<&str>| match affine.bytes(&info.shape, scales) {
        Some(bytes) => (Action::Affine { affine, instead: instead.map(str::to_owned) }, scales, [bytes; 2]),
        None => kept(format!(
            "{}its {} inputs are no multiple of the group of {}",
            instead.map(|i| format!("{i}, and ")).unwrap_or_default(),
            info.shape.last().unwrap_or(&1),
            affine.group
        )),
    };
    let rest = |reason: &str| match rules.rest {
        Rest::Keep => kept(reason.to_owned()),
        Rest::Affine(a) => affine(a, Some(reason)),
    };
    let (action, dtype, bytes) = match rules.wish(info) {
        Wish::Keep(reason) => kept(reason.to_owned()),
        Wish::Rest(reason) => rest(reason),
        Wish::Affine(a) => affine(a, None),
        Wish::Trellis(trellis) => {
            let sizes = trellis
                .bytes(info.shape[0], info.shape[1])
                .with_context(|| format!("tensor {}", info.name))?;
            match (sizes.iter().min(), sizes.iter().max()) {
                (Some(&least), Some(&most)) => (Action::Trellis(trellis), own, [least, most]),
                _ => rest("no legal block divides its coded dimension"),
            }
        }
    };
    Ok(Step { name: info.name.clone(), shape: info.shape.clone(), action, dtype, bytes })
}

/// Why a source is not taken as it is, if it is quantized.
pub(super) fn quantized(source: &Source) -> Option<&TensorInfo> {
    source.tensors().iter().find(|t| t.stored != Stored::Plain)
}

fn dtype_name<S: serde::Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(dtype)
}

fn optional_dtype_name<S: serde::Serializer>(
    dtype: &Option<Dtype>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    dtype.map(|d| d.to_string()).serialize(serializer)
}
