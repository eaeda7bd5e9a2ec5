//! `trellis bench encode`.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, StandardNormal};
use serde::Serialize;
use trellis_codec::format::{DEFAULT_BLOCK, DEFAULT_STATE_BITS};
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, EncodeOptions, Encoded, Geometry, encode};

use super::{Machine, Times};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Bits a weight, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4])]
    bits: Vec<u32>,
    /// Blocks of Gaussian weights to encode, in rows of 16
    #[arg(long, default_value_t = 2048)]
    blocks: usize,
    /// Weights in a block
    #[arg(long, default_value_t = DEFAULT_BLOCK)]
    block: usize,
    /// Bits of trellis state
    #[arg(long, default_value_t = DEFAULT_STATE_BITS)]
    state_bits: u32,
    /// Times each encode runs
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    axis: u32,
    bits: u32,
    weights: usize,
    median_us: f64,
    min_us: f64,
    max_us: f64,
    weights_per_s: f64,
    /// Mean squared error over the weights' variance.
    mse: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    const ROW_BLOCKS: usize = 16;
    ensure!(args.rounds > 0, "--rounds is 0, expected at least 1");
    let machine = Machine::current();
    if !args.json {
        machine.print();
    }
    let mut out = Vec::new();
    for &bits in &args.bits {
        let rows = args.blocks.div_ceil(ROW_BLOCKS);
        let geometry =
            Geometry::new(Axis::Input, bits, args.state_bits, args.block, rows, ROW_BLOCKS * args.block)?;
        let n = geometry.rows() * geometry.cols();
        let mut rng = SmallRng::seed_from_u64(1);
        let weights: Vec<f32> = (0..n).map(|_| StandardNormal.sample(&mut rng)).collect();
        let run =
            || encode(&geometry, &weights, &EncodeOptions { tensor: "bench", ..EncodeOptions::default() });
        validate(&geometry, &weights, &run()?)?;
        let mut times = Times::default();
        let mut mse = 0.0;
        for _ in 0..args.rounds {
            mse = times.time(run)?.report.relative_mse();
        }
        let (median, min, max) = times.summary();
        let row = Row {
            name: "trellis",
            axis: geometry.axis().index(),
            bits,
            weights: n,
            median_us: median * 1e6,
            min_us: min * 1e6,
            max_us: max * 1e6,
            weights_per_s: n as f64 / median,
            mse,
        };
        if !args.json {
            println!(
                "{} bits: {:.2} M weights/s ({} weights in {:.2} s), mse/variance {:.4}",
                bits,
                row.weights_per_s / 1e6,
                n,
                median,
                mse
            );
        }
        out.push(row);
    }
    if args.json {
        println!("{}", serde_json::to_string(&serde_json::json!({ "machine": machine, "rows": out }))?);
    }
    Ok(ExitCode::SUCCESS)
}

/// The report's error must be the error of what the oracle decodes.
fn validate(geometry: &Geometry, weights: &[f32], encoded: &Encoded) -> Result<()> {
    let decoded =
        reference::decode(geometry, &encoded.codes, &encoded.scales, Contract::Expanded, Dtype::F32)?;
    let error: f64 = weights.iter().zip(&decoded).map(|(&w, d)| (f64::from(w) - d).powi(2)).sum();
    let reported = encoded.report.squared_error;
    ensure!(
        (error - reported).abs() <= 1e-4 * error,
        "the encoder reports a squared error of {reported}, the oracle finds {error}"
    );
    Ok(())
}
