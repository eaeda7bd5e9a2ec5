//! What was done: for each tensor, and in sum.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trellis_codec::FeedbackReport;

use super::options::{Args, Rotate};
use super::plan::{Action, Plan, Step};

/// What error feedback did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Feedback {
    /// Error of the outputs over the calibration text, relative to the outputs.
    proxy_loss: f64,
    /// The same of plain coding.
    plain_proxy_loss: f64,
    /// Why plain coding was kept, if it was.
    fallback: Option<String>,
}

impl From<FeedbackReport> for Feedback {
    fn from(report: FeedbackReport) -> Self {
        let FeedbackReport { proxy_loss, plain_proxy_loss, fallback } = report;
        Self { proxy_loss, plain_proxy_loss, fallback: fallback.map(|f| f.to_string()) }
    }
}

/// A tensor that was quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) module: String,
    /// `trellis` or `affine`.
    pub(super) method: String,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) bits: u32,
    /// Trellis: 0 along the outputs, 1 along the inputs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) axis: Option<u32>,
    /// Trellis: weights in a block, T.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) block: Option<usize>,
    /// Trellis: L.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) state_bits: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) interleaved: Option<bool>,
    /// Trellis: how the input is rotated, if it is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) rotation: Option<Rotate>,
    /// Trellis: what error feedback did, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) feedback: Option<Feedback>,
    /// Affine: weights in a group.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) group: Option<usize>,
    /// Why affine, where trellis was asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) instead_of_trellis: Option<String>,
    /// Of codes, scales and biases.
    pub(super) bytes: u64,
    pub(super) bits_per_weight: f64,
    /// Sum of squared errors over sum of squares.
    pub(super) relative_mse: f64,
    pub(super) zero_rows: usize,
    pub(super) underflowed_rows: usize,
    pub(super) seconds: f64,
}

impl Row {
    /// A row of what the plan knows.
    pub(super) fn new(method: &str, step: &Step, bits: u32) -> Self {
        Self {
            module: step.module().to_owned(),
            method: method.to_owned(),
            out_features: step.shape[0],
            in_features: step.shape[1],
            bits,
            axis: None,
            block: None,
            state_bits: None,
            interleaved: None,
            rotation: None,
            feedback: None,
            group: None,
            instead_of_trellis: None,
            bytes: 0,
            bits_per_weight: 0.0,
            relative_mse: 0.0,
            zero_rows: 0,
            underflowed_rows: 0,
            seconds: 0.0,
        }
    }

    fn weights(&self) -> f64 {
        self.out_features as f64 * self.in_features as f64
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} [{}, {}] ", self.module, self.out_features, self.in_features)?;
        match (self.axis, self.block, self.group) {
            (Some(axis), Some(block), _) => {
                write!(f, "axis {axis} k={} T={block}", self.bits)?;
                if let Some(rotation) = self.rotation {
                    write!(f, " rotated by {}", rotation.block)?;
                }
            }
            (.., group) => write!(f, "affine {} bits g{}", self.bits, group.unwrap_or_default())?,
        }
        write!(f, ": relative mse {:.5}, {:.1} s", self.relative_mse, self.seconds)?;
        if let Some(Feedback { proxy_loss, plain_proxy_loss, fallback }) = &self.feedback {
            write!(f, ", of outputs {proxy_loss:.5}")?;
            match fallback {
                Some(reason) => write!(f, " (no feedback: {reason})")?,
                None => write!(f, " (plain {plain_proxy_loss:.5})")?,
            }
        }
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

/// A tensor that was kept.
#[derive(Serialize)]
struct Kept<'a> {
    tensor: &'a str,
    shape: &'a [usize],
    dtype: String,
    bytes: u64,
    reason: &'a str,
}

/// All of it.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    source: &'a Path,
    output: &'a Path,
    quantized: &'a [Row],
    kept: Vec<Kept<'a>>,
    weights: f64,
    bits_per_weight: f64,
    relative_mse_mean: f64,
    /// Of every tensor in the result, without headers.
    tensor_bytes: u64,
    /// Of all tensors, those of earlier runs among them, whether or not they were coded at the same time.
    seconds: f64,
    /// Tensors that an earlier run had finished.
    resumed: usize,
    peak_bytes: Option<u64>,
}

impl<'a> Report<'a> {
    pub(super) fn new(args: &'a Args, plan: &'a Plan, rows: &'a [Row], resumed: usize) -> Self {
        let kept: Vec<Kept<'_>> = plan.steps.iter().filter_map(kept).collect();
        let weights: f64 = rows.iter().map(Row::weights).sum();
        let bytes: u64 = rows.iter().map(|r| r.bytes).sum();
        Self {
            source: &args.source,
            output: &args.output,
            quantized: rows,
            weights,
            bits_per_weight: bytes as f64 * 8.0 / weights,
            relative_mse_mean: rows.iter().map(|r| r.relative_mse * r.weights()).sum::<f64>() / weights,
            tensor_bytes: bytes + kept.iter().map(|k| k.bytes).sum::<u64>(),
            kept,
            seconds: rows.iter().map(|r| r.seconds).sum(),
            resumed,
            peak_bytes: crate::memory::peak_bytes(),
        }
    }

    /// A table of the kinds of module, then the sums.
    pub(super) fn print(&self) {
        let mut kinds: BTreeMap<(String, String), Vec<&Row>> = BTreeMap::new();
        for row in self.quantized {
            let kind = row.module.rsplit('.').next().unwrap_or_default().to_owned();
            let method = match row.group {
                Some(group) => format!("affine {} g{group}", row.bits),
                None => format!("trellis {}", row.bits),
            };
            kinds.entry((kind, method)).or_default().push(row);
        }
        println!(
            "{:<14} {:<13} {:>5} {:>10} {:>9} {:>10} {:>10} {:>8}",
            "module", "method", "count", "weights", "bits", "mse mean", "mse worst", "axis 0"
        );
        for ((kind, method), rows) in kinds {
            let weights: f64 = rows.iter().map(|r| r.weights()).sum();
            let bytes: u64 = rows.iter().map(|r| r.bytes).sum();
            let mean = rows.iter().map(|r| r.relative_mse * r.weights()).sum::<f64>() / weights;
            let worst = rows.iter().map(|r| r.relative_mse).fold(0.0, f64::max);
            let outputs = rows.iter().filter(|r| r.axis == Some(0)).count();
            println!(
                "{kind:<14} {method:<13} {:>5} {:>8.2} M {:>9.3} {mean:>10.5} {worst:>10.5} {outputs:>8}",
                rows.len(),
                weights / 1e6,
                bytes as f64 * 8.0 / weights
            );
        }
        println!(
            "{}: {} modules, {:.1} M weights at {:.3} bits with scales, relative mse {:.5}, {:.1} s of coding{}",
            self.output.display(),
            self.quantized.len(),
            self.weights / 1e6,
            self.bits_per_weight,
            self.relative_mse_mean,
            self.seconds,
            if self.resumed > 0 {
                format!(", {} modules by an earlier run", self.resumed)
            } else {
                String::new()
            }
        );
        let fed: Vec<&Feedback> = self.quantized.iter().filter_map(|r| r.feedback.as_ref()).collect();
        if !fed.is_empty() {
            let kept = fed.iter().filter(|f| f.fallback.is_some()).count();
            let mean =
                |f: &dyn Fn(&Feedback) -> f64| fed.iter().map(|x| f(x)).sum::<f64>() / fed.len() as f64;
            println!(
                "{} modules with feedback, {kept} of them kept plain; error of outputs {:.5} on average, plain {:.5}",
                fed.len(),
                mean(&|f| f.proxy_loss),
                mean(&|f| f.plain_proxy_loss)
            );
        }
        print_kept(self.kept.iter().map(|k| (k.reason, k.bytes)));
        println!("{:.1} MB of tensors in all", self.tensor_bytes as f64 / 1e6);
        if let Some(peak) = self.peak_bytes {
            println!("{:.0} MB of memory at most", peak as f64 / 1e6);
        }
    }
}

fn kept(step: &Step) -> Option<Kept<'_>> {
    let Action::Keep { reason } = &step.action else { return None };
    let (tensor, shape) = (step.name.as_str(), step.shape.as_slice());
    Some(Kept { tensor, shape, dtype: step.dtype.to_string(), bytes: step.bytes[0], reason })
}

fn print_kept<'a>(kept: impl Iterator<Item = (&'a str, u64)>) {
    let mut reasons: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for (reason, bytes) in kept {
        let sum = reasons.entry(reason).or_default();
        *sum = (sum.0 + 1, sum.1 + bytes);
    }
    for (reason, (count, bytes)) in reasons {
        println!("{count} tensors kept as they were, {:.1} MB: {reason}", bytes as f64 / 1e6);
    }
}

/// What `--dry-run` shows.
pub(super) fn print_plan(plan: &Plan) {
    for step in &plan.steps {
        let size = match step.bytes {
            [least, most] if least == most => format!("{least} bytes"),
            [least, most] => format!("{least} to {most} bytes"),
        };
        let what = match &step.action {
            Action::Trellis(t) => {
                let axis = format!("{:?}", t.axis).to_lowercase();
                let rotated = t.rotate.map(|r| format!(", rotated by up to {}", r.block)).unwrap_or_default();
                format!("trellis, {} bits along {axis}{rotated}", t.bits)
            }
            Action::Affine { affine, instead } => format!(
                "affine, {} bits in groups of {}{}",
                affine.bits,
                affine.group,
                instead.as_deref().map(|i| format!(" ({i})")).unwrap_or_default()
            ),
            Action::Keep { reason } => format!("kept: {reason}"),
        };
        println!("{} {:?}: {what}, {size}", step.name, step.shape);
    }
    let [least, most] = plan.bytes();
    let quantized = plan.steps.iter().filter(|s| !matches!(s.action, Action::Keep { .. })).count();
    println!("{quantized} of {} tensors, {:.1} M weights", plan.steps.len(), plan.weights() as f64 / 1e6);
    if least == most {
        println!("{least} bytes of tensors in all");
    } else {
        println!("{least} to {most} bytes of tensors in all, as the axes turn out");
    }
}
