//! Times products on this machine, for each level, axis, `k` and number of rows of x, after checking a sample of
//! every product against the oracle.
//!
//! ```text
//! cargo run --release -p trellis-cpu --example speed -- [rows=17408] [cols=5120] [repeats=15] [levels=avx2,avx512]
//! ```
//! Prints the median and the least time of a call, and weights a second at the median. Activations are bfloat16.

use std::time::Instant;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, Geometry, Layout, bf16, codebook, f16};
use trellis_cpu::{Element, Level, Matrix, contract_for, expand, matmul};

type Failure = Box<dyn std::error::Error>;

struct Options {
    rows: usize,
    cols: usize,
    repeats: usize,
    levels: Vec<Level>,
}

fn options() -> Result<Options, Failure> {
    let mut options = Options {
        rows: 17408,
        cols: 5120,
        repeats: 15,
        levels: Level::available().into_iter().filter(|&l| l != Level::Scalar).collect(),
    };
    for argument in std::env::args().skip(1) {
        let (name, value) = argument.split_once('=').ok_or("arguments are name=value")?;
        match name {
            "rows" => options.rows = value.parse()?,
            "cols" => options.cols = value.parse()?,
            "repeats" => options.repeats = value.parse()?,
            "levels" => options.levels = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            _ => return Err(format!("no argument {name:?}").into()),
        }
    }
    Ok(options)
}

fn main() -> Result<(), Failure> {
    let Options { rows, cols, repeats, levels } = options()?;
    let mut rng = SmallRng::seed_from_u64(1);
    println!("{rows} x {cols} stored, {} threads, median of {repeats}", rayon::current_num_threads());
    println!("level   axis k layout      contract  m     median ms   least ms   G weights/s  worst");
    for (axis, layout, bits) in [
        (Axis::Output, Layout::RowMajor, 2),
        (Axis::Output, Layout::RowMajor, 3),
        (Axis::Output, Layout::Interleaved, 3),
        (Axis::Output, Layout::RowMajor, 4),
        (Axis::Input, Layout::RowMajor, 2),
        (Axis::Input, Layout::RowMajor, 3),
        (Axis::Input, Layout::RowMajor, 4),
    ] {
        let geometry = Geometry::new(axis, bits, 12, 256, rows, cols)?.with_layout(layout)?;
        let codes: Vec<u32> = (0..geometry.words()).map(|_| rng.random()).collect();
        let scales: Vec<f16> = (0..rows).map(|_| f16::from_f32(rng.random_range(0.005..0.02))).collect();
        let matrix = Matrix::new(geometry, &codes, &scales)?;
        for &level in &levels {
            let mut time = |m, contract| -> Result<(), Failure> {
                let x: Vec<bf16> = (0..m * geometry.in_features())
                    .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
                    .collect();
                let mut out = vec![bf16::ZERO; m * geometry.out_features()];
                let mut times = Vec::new();
                for _ in 0..=repeats {
                    let start = Instant::now();
                    matmul(&matrix, &x, m, contract, level, &mut out)?;
                    times.push(start.elapsed().as_secs_f64());
                }
                let worst = check(&matrix, &codes, &scales, &x, m, contract, &out);
                if worst > 1.0 {
                    return Err(
                        format!("{geometry} {level} {contract:?} m={m}: {worst} of the allowance").into()
                    );
                }
                report(&format!("{contract:?}"), level, &geometry, &m.to_string(), times, worst);
                Ok(())
            };
            for m in [1, 4, 8] {
                time(m, contract_for(m))?;
            }
            time(1, Contract::Factored)?;
            time(32, Contract::Expanded)?;
            let mut out = vec![bf16::ZERO; rows * cols];
            let mut times = Vec::new();
            for _ in 0..=repeats.min(5) {
                let start = Instant::now();
                expand(&matrix, level, &mut out)?;
                times.push(start.elapsed().as_secs_f64());
            }
            report("expand", level, &geometry, "-", times, 0.0);
        }
    }
    Ok(())
}

/// The worst share of the allowance over a sample of outputs.
fn check(
    matrix: &Matrix<'_>,
    codes: &[u32],
    scales: &[f16],
    x: &[bf16],
    m: usize,
    contract: Contract,
    out: &[bf16],
) -> f64 {
    let g = matrix.geometry();
    let (n, outputs) = (g.in_features(), g.out_features());
    let mut worst = 0f64;
    for (row, output) in [(0, 0), (m - 1, outputs - 1), (m / 2, outputs / 3), (0, outputs / 2 + 1)] {
        let mut product =
            reference::Product { y: vec![0.0], magnitude: vec![0.0], square: vec![0.0], terms: n };
        for i in 0..n {
            let (r, c) = if g.axis() == Axis::Output { (i, output) } else { (output, i) };
            let y = codebook::y(reference::state(g, codes, r, c));
            let term = reference::weight(contract, Dtype::Bf16, y, scales[r]) * x[row * n + i].to_f64();
            product.y[0] += term;
            product.magnitude[0] += term.abs();
        }
        worst = worst.max(product.worst(&[out[row * outputs + output].to_f32()], bf16::DTYPE, false).0);
    }
    worst
}

fn report(what: &str, level: Level, g: &Geometry, m: &str, mut times: Vec<f64>, worst: f64) {
    times.remove(0); // the first call warms caches and the thread pool
    times.sort_by(f64::total_cmp);
    let (median, least) = (times[times.len() / 2], times[0]);
    println!(
        "{level:<7} {:>4} {} {:<11} {what:<9} {m:<4} {:>10.2} {:>10.2} {:>13.2}  {worst:.3}",
        g.axis().index(),
        g.bits(),
        format!("{:?}", g.layout()),
        median * 1e3,
        least * 1e3,
        (g.rows() * g.cols()) as f64 / median / 1e9,
    );
}
