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

use super::{Machine, Times, cuda};
use crate::device::{self, Backend, NO_DEVICE};
use crate::report::{self, AxisArg, DtypeArg};

/// Group size of MLX's affine weights in the comparison: mlx-lm's default.
const AFFINE_GROUP: i32 = 64;

/// Least time of a contender's turn.
const TURN: Duration = Duration::from_millis(50);

/// Outputs compared with the float64 oracle before timing.
const CHECKED_OUTPUTS: usize = 256;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to run: on the CPU one product at a time, by the clock, on CUDA chains of products, which the GPU runs without
    /// the host
    #[arg(long, value_parser = device::one_of([Backend::Cpu, Backend::Cuda]), default_value = "cpu")]
    backend: Backend,
    /// Products in a chain, on CUDA
    #[arg(long, default_value_t = 48)]
    chain: usize,
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
    /// Type of activations, float32 on the CPU and bfloat16 on CUDA if left out; on the CPU MLX's affine and dense
    /// products use float32 whatever this says, their fastest type there
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
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
    /// Bytes of weights read, over the median.
    bytes_per_s: f64,
    /// Whether the host's time is in the figures, which it is where MLX does not launch ahead.
    wall: bool,
    floor_us: f64,
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

impl Args {
    fn on_cuda(&self) -> bool {
        self.backend == Backend::Cuda
    }

    fn dtype(&self) -> DtypeArg {
        self.dtype.unwrap_or(if self.on_cuda() { DtypeArg::Bfloat16 } else { DtypeArg::Float32 })
    }

    /// The type of MLX's own products.
    fn rival(&self) -> DtypeArg {
        if self.on_cuda() { self.dtype() } else { DtypeArg::Float32 }
    }
}

/// What a figure is measured on.
enum On {
    Cpu(Machine),
    Cuda(cuda::Machine),
}

impl On {
    fn floor(&self, bytes: usize) -> f64 {
        match self {
            On::Cpu(machine) => machine.floor(bytes),
            On::Cuda(machine) => machine.floor(bytes),
        }
    }

    fn wall(&self) -> bool {
        match self {
            On::Cpu(_) => true,
            On::Cuda(machine) => machine.wall,
        }
    }

    fn print(&self) {
        match self {
            On::Cpu(machine) => machine.print(),
            On::Cuda(machine) => machine.print(),
        }
    }

    fn json(&self) -> serde_json::Result<serde_json::Value> {
        match self {
            On::Cpu(machine) => serde_json::to_value(machine),
            On::Cuda(machine) => serde_json::to_value(machine),
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.rounds > 0, "--rounds is 0, expected at least 1");
    ensure!(args.chain > 0, "--chain is 0, expected at least 1");
    if device::select(Some(args.backend)).is_none() {
        return Ok(ExitCode::from(NO_DEVICE));
    }
    if args.on_cuda() {
        mlx_rs::with_device(mlx_rs::Device::gpu(), || bench(args, On::Cuda(cuda::Machine::current()?)))
    } else {
        bench(args, On::Cpu(Machine::current()))
    }
}

fn bench(args: &Args, mut machine: On) -> Result<ExitCode> {
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
            contenders.push(dense(args, &geometry)?);
        }
        for &m in &args.m {
            let x = activations(m, geometry.in_features(), args.dtype())?;
            validate(&contenders[0], &geometry, &x, m, args)?;
            let theirs = x.as_dtype(args.rival().mlx())?;
            theirs.eval()?;
            for (contender, times) in
                contenders.iter().zip(time(&contenders, &x, &theirs, args, &mut machine)?)
            {
                let (median, min, max) = times.summary();
                let row = Row {
                    name: contender.name,
                    axis: geometry.axis().index(),
                    bits: match (contender.name, args.rival()) {
                        ("dense", DtypeArg::Float32) => 32,
                        ("dense", _) => 16,
                        _ => bits,
                    },
                    m,
                    median_us: median * 1e6,
                    min_us: min * 1e6,
                    max_us: max * 1e6,
                    weights_per_s: (geometry.rows() * geometry.cols()) as f64 / median,
                    bytes_per_s: contender.bytes as f64 / median,
                    wall: machine.wall(),
                    floor_us: machine.floor(contender.bytes) * 1e6,
                    share_of_floor: machine.floor(contender.bytes) / median,
                };
                if !args.json {
                    print(&row, matches!(machine, On::Cuda(_)));
                }
                rows.push(row);
            }
            if !args.json {
                print_ratios(&rows[rows.len() - contenders.len()..]);
            }
        }
    }
    if args.json {
        println!(
            "{}",
            serde_json::to_string(&serde_json::json!({ "machine": machine.json()?, "rows": rows }))?
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn print(row: &Row, on_cuda: bool) {
    println!(
        "{:<11} axis {} {:>2} bits M={:<3} {:>10.1} us (min {:.1}, max {:.1})  {:>6.2} G weights/s  {:>6.1} GB/s  floor \
         {:.1} us, {:.0}%{}",
        row.name,
        row.axis,
        row.bits,
        row.m,
        row.median_us,
        row.min_us,
        row.max_us,
        row.weights_per_s / 1e9,
        row.bytes_per_s / 1e9,
        row.floor_us,
        row.share_of_floor * 100.0,
        if row.wall && on_cuda { ", host included" } else { "" }
    );
}

fn print_ratios(rows: &[Row]) {
    let Some((ours, others)) = rows.split_first() else { return };
    for other in others {
        println!("            {:.1} times as fast as {}", other.median_us / ours.median_us, other.name);
    }
}

/// Contenders take turns, so that whatever else the machine does falls on all of them alike. On a CPU a turn is as many
/// products as fit in [`TURN`], at least one, since a processor that idled through the others' turns needs a moment to wake.
fn time(
    contenders: &[Contender],
    x: &Array,
    theirs: &Array,
    args: &Args,
    machine: &mut On,
) -> Result<Vec<Times>> {
    let mut times: Vec<Times> = contenders.iter().map(|_| Times::default()).collect();
    let mut products = 0;
    if let On::Cuda(machine) = machine {
        machine.wall = false;
    }
    for round in 0..=args.rounds {
        for (contender, times) in contenders.iter().zip(&mut times) {
            let x = if matches!(contender.weights[0], Weights::Trellis(_)) { x } else { theirs };
            let weights = |i: usize| &contender.weights[i % contender.weights.len()];
            match machine {
                On::Cuda(machine) => {
                    let seconds = machine.chain(args.chain, x, |i, x| weights(i).product(x))?;
                    if round > 0 {
                        times.push(seconds);
                    }
                }
                On::Cpu(_) => {
                    let turn = Instant::now();
                    while turn.elapsed() < TURN {
                        products += 1;
                        let run = || -> Result<()> { Ok(weights(products).product(x)?.eval()?) };
                        if round == 0 {
                            run()?; // warm-up
                        } else {
                            times.time(run)?;
                        }
                    }
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
    let dtype = args.rival().mlx();
    let width = if dtype == MlxDtype::Float32 { 4 } else { 2 };
    let bytes = out * words * 4 + 2 * out * groups * width;
    let weights = (0..copies(bytes, args))
        .map(|i| {
            let w =
                Array::from_slice(&random_words(out * words, 1000 + i as u64), &[out as i32, words as i32]);
            let scales =
                ops::full::<f32>(&[out as i32, groups as i32], Array::from_f32(0.01))?.as_dtype(dtype)?;
            let biases =
                ops::full::<f32>(&[out as i32, groups as i32], Array::from_f32(-0.03))?.as_dtype(dtype)?;
            mlx_rs::transforms::eval([&w, &scales, &biases])?;
            Ok(Weights::Affine { w, scales, biases, bits: bits as i32 })
        })
        .collect::<Result<_>>()?;
    Ok(Some(Contender { name: "mlx-affine", bytes, weights }))
}

/// A dense weight: one is too large for any cache to matter on a CPU; on a GPU they are rotated like the others.
fn dense(args: &Args, geometry: &Geometry) -> Result<Contender> {
    let (out, n) = (geometry.out_features() as i32, geometry.in_features() as i32);
    let shape = match geometry.axis() {
        Axis::Output => [n, out],
        Axis::Input => [out, n],
    };
    let new = || -> Result<Array> {
        let w = mlx_rs::random::uniform::<_, f32>(-0.1, 0.1, &shape, None)?.as_dtype(args.rival().mlx())?;
        w.eval()?;
        Ok(w)
    };
    let first = new()?;
    let bytes = first.nbytes();
    let copies = if args.on_cuda() { copies(bytes, args) } else { 1 };
    let weights = std::iter::once(Ok(first)).chain((1..copies).map(|_| new()));
    let weights = weights
        .map(|w| w.map(|w| Weights::Dense(if geometry.axis() == Axis::Input { w.t() } else { w })))
        .collect::<Result<_>>()?;
    Ok(Contender { name: "dense", bytes, weights })
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
    let dtype = args.dtype().codec();
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
        let (worst, at) = product.worst(&found, dtype, choice.kernel.takes_tf32_allowance());
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
