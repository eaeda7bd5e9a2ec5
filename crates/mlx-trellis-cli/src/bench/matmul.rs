//! `trellis bench matmul`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mlx_rs::{Array, Dtype as MlxDtype, ops};
use mlx_trellis::dispatch::{self, Device};
use mlx_trellis::{Axis, Geometry, TrellisWeights, f16, problem, trellis_matmul};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use trellis_codec::reference;

use super::{Machine, Times};
use crate::report::{self, AxisArg, DtypeArg};

/// Group size of MLX's affine weights in the comparison: mlx-lm's default.
const AFFINE_GROUP: i32 = 64;

/// Least time of a contender's turn.
const TURN: Duration = Duration::from_millis(50);

/// Outputs compared with the float64 oracle before timing.
const CHECKED_OUTPUTS: usize = 256;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rows of the stored matrix (input features for --axis out, output features for --axis in)
    #[arg(long, default_value_t = 17408)]
    rows: usize,
    /// Columns of the stored matrix, along which it is coded
    #[arg(long, default_value_t = 5120)]
    cols: usize,
    /// Bits a weight, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [3])]
    bits: Vec<u32>,
    /// Axis coded along
    #[arg(long, value_enum, default_value_t = AxisArg::Out)]
    axis: AxisArg,
    /// Rows of activations, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8])]
    m: Vec<usize>,
    /// Type of activations; MLX's affine and dense products use float32, their fastest type on a CPU
    #[arg(long, value_enum, default_value_t = DtypeArg::Float32)]
    dtype: DtypeArg,
    /// Weights in a block
    #[arg(long, default_value_t = trellis_codec::format::DEFAULT_BLOCK)]
    block: usize,
    /// Store neighbouring blocks side by side
    #[arg(long)]
    interleave: bool,
    /// Turns that each product takes
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Copies of each quantized weight are rotated until they fill this many MiB, so that caches hold none of them
    #[arg(long, default_value_t = 512)]
    rotate_mib: usize,
    /// Leave out the dense and affine products
    #[arg(long)]
    only_trellis: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    axis: u32,
    bits: u32,
    m: usize,
    median_us: f64,
    min_us: f64,
    max_us: f64,
    weights_per_s: f64,
    /// The time to read the weights' bytes once, as a share of the median.
    share_of_floor: f64,
}

/// One way of computing the product, with weights to rotate through.
struct Contender {
    name: &'static str,
    bytes: usize,
    weights: Vec<Weights>,
}

enum Weights {
    Trellis(TrellisWeights),
    Affine {
        w: Array,
        scales: Array,
        biases: Array,
        bits: i32,
    },
    /// `[in, out]`, or its transposed view.
    Dense(Array),
}

impl Weights {
    fn product(&self, x: &Array) -> Result<Array> {
        Ok(match self {
            Weights::Trellis(weights) => trellis_matmul(x, weights)?,
            Weights::Affine { w, scales, biases, bits } => {
                ops::quantized_matmul(x, w, scales, biases, true, AFFINE_GROUP, *bits)?
            }
            Weights::Dense(w) => ops::matmul(x, w)?,
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.rounds > 0, "--rounds is 0, expected at least 1");
    let machine = Machine::current();
    let mut rows = Vec::new();
    if !args.json {
        machine.print();
    }
    for &bits in &args.bits {
        let geometry =
            report::geometry(args.axis.into(), bits, args.block, args.rows, args.cols, args.interleave)?;
        let mut contenders = vec![trellis(args, geometry)?];
        if !args.only_trellis {
            contenders.extend(affine(args, &geometry)?);
            contenders.push(dense(&geometry)?);
        }
        for &m in &args.m {
            let x = activations(m, geometry.in_features(), args.dtype)?;
            validate(&contenders[0], &geometry, &x, m, args)?;
            let x32 = x.as_dtype(MlxDtype::Float32)?;
            x32.eval()?;
            for (contender, times) in contenders.iter().zip(time(&contenders, &x, &x32, args)?) {
                let (median, min, max) = times.summary();
                let row = Row {
                    name: contender.name,
                    axis: geometry.axis().index(),
                    bits: if contender.name == "dense" { 32 } else { bits },
                    m,
                    median_us: median * 1e6,
                    min_us: min * 1e6,
                    max_us: max * 1e6,
                    weights_per_s: (geometry.rows() * geometry.cols()) as f64 / median,
                    share_of_floor: machine.floor(contender.bytes) / median,
                };
                if !args.json {
                    print(&row);
                }
                rows.push(row);
            }
            if !args.json {
                print_ratios(&rows[rows.len() - contenders.len()..]);
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&serde_json::json!({ "machine": machine, "rows": rows }))?);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(row: &Row) {
    println!(
        "{:<11} axis {} {:>2} bits M={:<3} {:>10.0} us (min {:.0}, max {:.0})  {:>6.2} G weights/s  {:>3.0}% of floor",
        row.name,
        row.axis,
        row.bits,
        row.m,
        row.median_us,
        row.min_us,
        row.max_us,
        row.weights_per_s / 1e9,
        row.share_of_floor * 100.0
    );
}

fn print_ratios(rows: &[Row]) {
    let Some((ours, others)) = rows.split_first() else { return };
    for other in others {
        println!("            {:.1} times as fast as {}", other.median_us / ours.median_us, other.name);
    }
}

/// Contenders take turns, so that whatever else the machine does falls on all of them alike. A turn is as many products as
/// fit in [`TURN`], at least one, since a processor that idled through the others' turns needs a moment to wake.
fn time(contenders: &[Contender], x: &Array, x32: &Array, args: &Args) -> Result<Vec<Times>> {
    let mut times: Vec<Times> = contenders.iter().map(|_| Times::default()).collect();
    let mut products = 0;
    for round in 0..=args.rounds {
        for (contender, times) in contenders.iter().zip(&mut times) {
            let turn = Instant::now();
            while turn.elapsed() < TURN {
                let weights = &contender.weights[products % contender.weights.len()];
                products += 1;
                let x = if matches!(weights, Weights::Trellis(_)) { x } else { x32 };
                let run = || -> Result<()> { Ok(weights.product(x)?.eval()?) };
                if round == 0 {
                    run()?; // warm-up
                } else {
                    times.time(run)?;
                }
            }
        }
    }
    Ok(times)
}

fn copies(bytes: usize, args: &Args) -> usize {
    (args.rotate_mib << 20).div_ceil(bytes).max(1)
}

fn random_words(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random()).collect()
}

fn trellis(args: &Args, geometry: Geometry) -> Result<Contender> {
    let scales: Vec<f16> =
        (0..geometry.rows()).map(|r| f16::from_f32(0.01 + 0.0001 * (r % 97) as f32)).collect();
    let weights = (0..copies(geometry.bytes(), args))
        .map(|i| {
            let codes = random_words(geometry.words(), i as u64);
            let weights = TrellisWeights::from_slices(&codes, &scales, geometry)?;
            mlx_rs::transforms::eval([weights.codes(), weights.scales()])?;
            Ok(Weights::Trellis(weights))
        })
        .collect::<Result<_>>()?;
    Ok(Contender { name: "trellis", bytes: geometry.bytes(), weights })
}

/// MLX's own quantized weights at the same bits, or nothing where it has no such bits.
fn affine(args: &Args, geometry: &Geometry) -> Result<Option<Contender>> {
    let (out, n, bits) = (geometry.out_features(), geometry.in_features(), geometry.bits() as usize);
    if !(2..=4).contains(&bits) || !n.is_multiple_of(AFFINE_GROUP as usize) {
        return Ok(None);
    }
    let (words, groups) = (n * bits / 32, n / AFFINE_GROUP as usize);
    let bytes = out * words * 4 + 2 * out * groups * 4;
    let weights = (0..copies(bytes, args))
        .map(|i| {
            let w =
                Array::from_slice(&random_words(out * words, 1000 + i as u64), &[out as i32, words as i32]);
            let scales = ops::full::<f32>(&[out as i32, groups as i32], Array::from_f32(0.01))?;
            let biases = ops::full::<f32>(&[out as i32, groups as i32], Array::from_f32(-0.03))?;
            mlx_rs::transforms::eval([&w, &scales, &biases])?;
            Ok(Weights::Affine { w, scales, biases, bits: bits as i32 })
        })
        .collect::<Result<_>>()?;
    Ok(Some(Contender { name: "mlx-affine", bytes, weights }))
}

/// One dense float32 weight: too large for any cache to matter.
fn dense(geometry: &Geometry) -> Result<Contender> {
    let (out, n) = (geometry.out_features() as i32, geometry.in_features() as i32);
    let w = match geometry.axis() {
        Axis::Output => mlx_rs::random::uniform::<_, f32>(-0.1, 0.1, &[n, out], None)?,
        Axis::Input => mlx_rs::random::uniform::<_, f32>(-0.1, 0.1, &[out, n], None)?,
    };
    w.eval()?;
    let bytes = w.nbytes();
    let w = if geometry.axis() == Axis::Input { w.t() } else { w };
    Ok(Contender { name: "dense", bytes, weights: vec![Weights::Dense(w)] })
}

fn activations(m: usize, n: usize, dtype: DtypeArg) -> Result<Array> {
    let mut rng = SmallRng::seed_from_u64(m as u64);
    let values: Vec<f32> = (0..m * n).map(|_| rng.random_range(-1.0f32..1.0)).collect();
    let shape = [i32::try_from(m)?, i32::try_from(n)?];
    let x = Array::from_slice(&values, &shape).as_dtype(dtype.mlx())?;
    x.eval()?;
    Ok(x)
}

/// The whole product's first and last outputs against float64, with the weights and the dtype that will be timed.
fn validate(contender: &Contender, geometry: &Geometry, x: &Array, m: usize, args: &Args) -> Result<()> {
    let Weights::Trellis(weights) = &contender.weights[0] else { return Ok(()) };
    let y = weights_product(weights, x)?;
    let choice = dispatch::choose(&problem(x, geometry, Default::default())?, &Device::current());
    let codes = weights.codes().to_vec_exact::<u32>()?;
    let scales = weights.scales().to_vec_exact::<f16>()?;
    let x = x.as_dtype(MlxDtype::Float32)?.to_vec_exact::<f32>()?;
    let dtype = args.dtype.codec();
    let out = geometry.out_features();
    let checked = CHECKED_OUTPUTS.min(out);
    for first in [0, out - checked] {
        let product = reference::matmul_outputs(
            geometry,
            &codes,
            &scales,
            &x,
            m,
            choice.contract,
            dtype,
            first..first + checked,
        )?;
        let found: Vec<f32> = (0..m).flat_map(|r| y[r * out + first..][..checked].to_vec()).collect();
        let (worst, at) = product.worst(&found, dtype, false);
        ensure!(
            worst <= 1.0,
            "{geometry} M={m}: output {} of row {} is {}, expected {}: {worst:.2} of the allowance",
            first + at % checked,
            at / checked,
            found[at],
            product.y[at]
        );
    }
    Ok(())
}

fn weights_product(weights: &TrellisWeights, x: &Array) -> Result<Vec<f32>> {
    let y = trellis_matmul(x, weights)?.as_dtype(MlxDtype::Float32)?;
    y.to_vec_exact::<f32>().context("the product is no contiguous float32 array")
}
