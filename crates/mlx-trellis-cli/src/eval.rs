//! `trellis eval`: how well models predict a text, and how far they are from a reference.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mlx_rs::Dtype;
use mlx_trellis_models::{LinearInfo, Model, Tokenizer};
use rayon::prelude::*;
use serde::Serialize;

use crate::device::NO_DEVICE;
use crate::lm::{self, Peak, RunArgs};
use crate::progress::Steps;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder of a model to evaluate; may be given several times: all are loaded at once, so that the reference's logits,
    /// of which one window is held, serve them all
    #[arg(long = "model", required = true)]
    models: Vec<PathBuf>,
    /// Text to predict, UTF-8
    #[arg(long)]
    text: PathBuf,
    /// Folder of the model that the others are compared with; its tokenizer is used, and its own row comes first
    #[arg(long)]
    reference: Option<PathBuf>,
    /// Use at most so many tokens of the text
    #[arg(long)]
    tokens: Option<usize>,
    /// Tokens a model sees at a time; windows do not overlap, and each starts without memory of the one before
    #[arg(long, default_value_t = 512)]
    context: usize,
    #[command(flatten)]
    run: RunArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    device: String,
    text: PathBuf,
    /// Tokens predicted.
    predicted: usize,
    context: usize,
    seconds: f64,
    peak: Peak,
    models: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    model: PathBuf,
    /// Bits a weight of the layers' linear modules, scales and all, from the sizes of their tensors.
    bits_per_weight: f64,
    perplexity: f64,
    /// Mean Kullback-Leibler divergence from the reference's prediction to this model's, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    kl: Option<f64>,
    /// Standard error of that mean, over the predictions.
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_error: Option<f64>,
    /// Share of predictions whose most likely token is the reference's.
    #[serde(skip_serializing_if = "Option::is_none")]
    top1: Option<f64>,
}

/// A model with what has been counted so far.
struct Contender {
    folder: PathBuf,
    model: Model,
    nll: Vec<f64>,
    kl: Vec<f64>,
    agreed: usize,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let Some(device) = args.run.select() else { return Ok(ExitCode::from(NO_DEVICE)) };
    ensure!(args.context > 0, "--context: found 0, expected at least 1");
    let tokenizer = Tokenizer::load(args.reference.as_ref().unwrap_or(&args.models[0]))?;
    // The first token is only seen, never predicted.
    let tokens = lm::read_tokens(&tokenizer, &args.text, args.tokens.map(|n| n.saturating_add(1)))?;
    ensure!(tokens.len() > 1, "{}: found {} tokens, expected two or more", args.text.display(), tokens.len());

    let mut reference = args.reference.as_deref().map(|f| Contender::load(f, &args.run)).transpose()?;
    let mut contenders =
        args.models.iter().map(|f| Contender::load(f, &args.run)).collect::<Result<Vec<_>>>()?;
    for c in reference.iter().chain(&contenders) {
        let vocabulary = c.model.config().vocab_size as u32;
        let unknown = tokens.iter().find(|&&t| t >= vocabulary);
        ensure!(
            unknown.is_none(),
            "{}: found token {} in the text, expected ones of its vocabulary of {vocabulary}",
            c.folder.display(),
            unknown.copied().unwrap_or_default()
        );
    }
    if let Some(reference) = &reference {
        let expected = reference.model.config().vocab_size;
        for c in &contenders {
            let found = c.model.config().vocab_size;
            let folder = c.folder.display();
            ensure!(
                found == expected,
                "{folder}: found a vocabulary of {found}, expected the reference's {expected}"
            );
        }
    }

    let started = Instant::now();
    let windows = windows(tokens.len(), args.context);
    let mut progress = Steps::new(
        "windows through models",
        windows.len() * (contenders.len() + usize::from(reference.is_some())),
    );
    for window in windows {
        let (seen, next) = (&tokens[window.clone()], &tokens[window.start + 1..window.end + 1]);
        let compared = match &mut reference {
            Some(reference) => {
                let logits = reference.logits(seen)?;
                reference.count(&logits, next, None);
                progress.step();
                Some(logits)
            }
            None => None,
        };
        for contender in &mut contenders {
            let logits = contender.logits(seen)?;
            contender.count(&logits, next, compared.as_deref());
            progress.step();
        }
    }
    progress.finish();

    let report = Report {
        device,
        text: args.text.clone(),
        predicted: tokens.len() - 1,
        context: args.context,
        seconds: started.elapsed().as_secs_f64(),
        peak: Peak::now()?,
        models: reference.iter().chain(&contenders).map(Contender::row).collect(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report, reference.is_some());
    }
    Ok(ExitCode::SUCCESS)
}

/// Ranges of tokens that a model sees at a time; of each token the next is predicted, so that the last is in none.
fn windows(tokens: usize, context: usize) -> Vec<std::ops::Range<usize>> {
    (0..tokens - 1).step_by(context).map(|at| at..(at + context).min(tokens - 1)).collect()
}

impl Contender {
    fn load(folder: &Path, run: &RunArgs) -> Result<Self> {
        let model = run.load(folder)?;
        Ok(Self { folder: folder.to_owned(), model, nll: Vec::new(), kl: Vec::new(), agreed: 0 })
    }

    /// Logits of every token, row after row.
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut cache = self.model.new_cache();
        let logits = self.model.forward(tokens, &mut cache)?.as_dtype(Dtype::Float32)?.contiguous()?;
        logits.eval()?;
        logits.to_vec_exact().with_context(|| format!("logits of {}", self.folder.display()))
    }

    fn count(&mut self, logits: &[f32], next: &[u32], reference: Option<&[f32]>) {
        let vocabulary = logits.len() / next.len();
        let nll = logits.par_chunks_exact(vocabulary).zip(next).map(|(row, &next)| {
            let next = f64::from(row[next as usize]);
            log_sum_exp(row) - next
        });
        self.nll.par_extend(nll);
        if let Some(reference) = reference {
            let pairs = || reference.par_chunks_exact(vocabulary).zip(logits.par_chunks_exact(vocabulary));
            self.kl.par_extend(pairs().map(|(p, q)| divergence(p, q)));
            self.agreed += pairs().filter(|(p, q)| most_likely(p) == most_likely(q)).count();
        }
    }

    fn row(&self) -> Row {
        let (kl, kl_error) = mean_and_error(&self.kl).unzip();
        Row {
            model: self.folder.clone(),
            bits_per_weight: bits_per_weight(self.model.linears()),
            perplexity: mean_and_error(&self.nll).map_or(f64::NAN, |(mean, _)| mean.exp()),
            top1: kl.map(|_| self.agreed as f64 / self.kl.len() as f64),
            kl,
            kl_error,
        }
    }
}

fn bits_per_weight(linears: &[LinearInfo]) -> f64 {
    let layers = || linears.iter().filter(|l| !l.is_head);
    let weights: usize = layers().map(|l| l.out_features * l.in_features).sum();
    layers().map(|l| l.bytes).sum::<usize>() as f64 * 8.0 / weights as f64
}

/// `ln(sum(exp(logit)))` in float64, from the greatest logit down.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !greatest.is_finite() {
        return f64::from(greatest);
    }
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(greatest)).exp()).sum();
    f64::from(greatest) + sum.ln()
}

/// Kullback-Leibler divergence of softmax(q) from softmax(p), in nats, in float64.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (total_p, total_q) = (log_sum_exp(p), log_sum_exp(q));
    p.iter()
        .zip(q)
        .map(|(&p, &q)| {
            let (p, q) = (f64::from(p) - total_p, f64::from(q) - total_q);
            // What has no probability has no share, whatever its logarithm.
            let share = p.exp();
            if share == 0.0 { 0.0 } else { share * (p - q) }
        })
        .sum()
}

/// The greatest logit, the first of equals.
fn most_likely(logits: &[f32]) -> usize {
    (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best }).unwrap_or(0)
}

/// Mean, and its standard error; of nothing, `None`.
fn mean_and_error(values: &[f64]) -> Option<(f64, f64)> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (!values.is_empty()).then(|| (mean, (variance / n).sqrt()))
}

fn print(report: &Report, compared: bool) {
    let width = report.models.iter().map(|r| r.model.display().to_string().len()).max().unwrap_or(5).max(5);
    let head = if compared { "   KL (nats)         top-1" } else { "" };
    println!("{:<width$}  bits/weight  perplexity{head}", "model");
    for row in &report.models {
        print!("{:<width$}  {:>11.3}  {:>10.4}", row.model.display(), row.bits_per_weight, row.perplexity);
        match (row.kl, row.kl_error, row.top1) {
            (Some(kl), Some(error), Some(top1)) => {
                println!("   {kl:.5} ± {error:.5} {:>6.2} %", 100.0 * top1)
            }
            _ if compared => println!("   reference"),
            _ => println!(),
        }
    }
    println!(
        "{} predictions in windows of {} tokens of {}, on {}; {:.0} s; {}",
        report.predicted,
        report.context,
        report.text.display(),
        report.device,
        report.seconds,
        report.peak
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_predict_every_token_but_the_first_once() {
        assert_eq!(windows(10, 4), [0..4, 4..8, 8..9]);
        assert_eq!(windows(9, 4), [0..4, 4..8]);
        assert_eq!(windows(3, 1), [0..1, 1..2]);
    }

    #[test]
    fn divergence_is_that_of_the_probabilities() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), each shifted by a constant.
        let (half, quarter) = (0.5f32.ln(), 0.25f32.ln());
        let (p, q) =
            ([half + 30.0, quarter + 30.0, quarter + 30.0], [quarter - 9.0, quarter - 9.0, half - 9.0]);
        let expected = 0.25 * 2f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
        assert!((log_sum_exp(&p) - 30.0).abs() < 1e-5);
        // One part in 10^4 of a logit is seen: KL is half its square times the variance of a coin, 1/4.
        let small = divergence(&[0.0, 0.0], &[1e-4, 0.0]);
        assert!((small / (1e-8 / 8.0) - 1.0).abs() < 1e-3, "{small:e}");
        assert_eq!(divergence(&[0.0, f32::NEG_INFINITY], &[0.0, f32::NEG_INFINITY]), 0.0);
        assert!(divergence(&[0.0, 0.0], &[0.0, f32::NEG_INFINITY]).is_infinite());
        assert!(divergence(&[0.0, f32::NAN], &[0.0, 0.0]).is_nan());
    }

    #[test]
    fn most_likely_is_the_first_of_equals() {
        assert_eq!(most_likely(&[1.0, 3.0, 3.0, 2.0]), 1);
    }

    #[test]
    fn error_of_the_mean() {
        let (mean, error) = mean_and_error(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(mean, 2.5);
        assert!((error - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert_eq!(mean_and_error(&[3.0]), Some((3.0, 0.0)));
        assert_eq!(mean_and_error(&[]), None);
    }
}
