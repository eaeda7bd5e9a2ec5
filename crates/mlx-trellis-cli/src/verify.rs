//! `trellis verify`: reference cases against what this machine computes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use mlx_rs::{Array, Dtype as MlxDtype};
use mlx_trellis::dispatch::{Device, Kernel, choose_cuda};
use mlx_trellis::{
    Axis, Geometry, Layout, MatmulOptions, TrellisWeights, Variant, bf16, dequantize, f16, problem,
    trellis_matmul_by, trellis_matmul_with,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use trellis_codec::cases::{Case, read_cases};
use trellis_codec::pack;
use trellis_codec::reference::{self, Contract, Dtype, Product};
use trellis_cpu::{Level, Matrix, decode_packed};

use crate::device::{self, Backend, NO_DEVICE};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder with an index.json and one safetensors file a case, as tests/golden
    #[arg(long)]
    cases: PathBuf,
    /// Where to compute: on the CPU with every SIMD level this machine has, on Metal with every kernel, variant and
    /// layout, on CUDA with every kernel, axis and layout
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// On CUDA, check this many random matrices besides the cases
    #[arg(long, default_value_t = 10)]
    random: usize,
    /// Check only cases whose name holds this text
    #[arg(long, default_value = "")]
    only: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Rows of activations that a Metal kernel is tried with: each side of every border of the dispatch rule.
const METAL_M: [usize; 6] = [1, 2, 4, 5, 8, 9];

/// The CUDA kernels with the rows of activations that each is tried with: one row, each side of every border. Each is a
/// compilation of a second or more, so none is tried twice over.
const CUDA_M: [(Kernel, &[usize]); 4] = [
    (Kernel::CudaExact, &[1, 2, 3, 4]),
    (Kernel::CudaFloat, &[5, 8, 9]),
    (Kernel::CudaPacked, &[1, 9]),
    (Kernel::CudaExpand, &[17]),
];

#[derive(Serialize)]
struct Report {
    backend: Backend,
    cases: usize,
    failed: usize,
    skipped: usize,
    worst_ratio: f64,
    results: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    case: String,
    check: String,
    passed: bool,
    /// For decodes: how many weights differ. For products: how many outputs are beyond the bound.
    wrong: usize,
    /// For products: the worst error as a share of its allowance.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst_ratio: Option<f64>,
}

/// What is looked at in one case.
type Check = Box<dyn Fn(&Case) -> Result<Vec<Outcome>>>;

/// Runs the command; exits 1 if a case failed, 3 if there is no such device.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if device::select(Some(args.backend)).is_none() {
        return Ok(ExitCode::from(NO_DEVICE));
    }
    let device = Device::current();
    let check: Check = match args.backend {
        Backend::Cpu => Box::new(check_cpu),
        Backend::Metal => {
            device.metal.context("MLX's device is not the GPU")?;
            Box::new(move |case| check_metal(case, device))
        }
        Backend::Cuda => {
            if !args.json {
                println!(
                    "{}, MLX {}",
                    device.cuda.context("MLX's device is not the GPU")?,
                    mlx_trellis::mlx_version()
                );
            }
            Box::new(move |case| check_cuda(case, device))
        }
    };
    let mut cases = read_cases(&args.cases)?;
    if matches!(args.backend, Backend::Cuda) {
        cases.extend((0..args.random).map(random_case).collect::<Result<Vec<_>>>()?);
    }
    cases.retain(|case| case.name.contains(&args.only));
    let mut results = Vec::new();
    for case in &cases {
        results.extend(check(case).with_context(|| format!("case {}", case.name))?);
    }
    let mut failed: Vec<&str> = results.iter().filter(|r| !r.passed).map(|r| r.case.as_str()).collect();
    failed.dedup();
    let report = Report {
        backend: args.backend,
        cases: cases.len(),
        failed: failed.len(),
        skipped: 0,
        worst_ratio: results.iter().filter_map(|r| r.worst_ratio).fold(0.0, f64::max),
        results,
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &Report) {
    for r in &report.results {
        let verdict = if r.passed { "ok" } else { "FAILED" };
        match r.worst_ratio {
            Some(ratio) => println!("{verdict:<6} {} {}: worst {ratio:.3} of the allowance", r.case, r.check),
            None if r.passed => println!("{verdict:<6} {} {}: every bit equal", r.case, r.check),
            None => println!("{verdict:<6} {} {}: {} weights differ", r.case, r.check, r.wrong),
        }
    }
    println!(
        "{} cases, {} failed, {} skipped; worst product {:.3} of the allowance",
        report.cases, report.failed, report.skipped, report.worst_ratio
    );
}

fn check_cpu(case: &Case) -> Result<Vec<Outcome>> {
    let g = &case.geometry;
    let weights = TrellisWeights::from_slices(&case.codes, &case.scales, *g)?;
    let mut outcomes = vec![
        decode(case, "decode float32".to_owned(), &expanded(&weights, MlxDtype::Float32)?, &case.expanded),
        decode(
            case,
            "decode bfloat16".to_owned(),
            &expanded(&weights, MlxDtype::Bfloat16)?,
            &case.expanded_bf16,
        ),
    ];
    let matrix = Matrix::new(*g, &case.codes, &case.scales)?;
    let x: Vec<bf16> = case.x.iter().map(|&v| bf16::from_f32(v)).collect();
    for level in Level::available() {
        let mut packed = vec![0.0; g.rows() * g.cols()];
        decode_packed(&matrix, level, &mut packed)?;
        outcomes.push(decode(case, format!("decode packed {level}"), &packed, &case.packed));
        for contract in [Contract::Packed, Contract::Expanded] {
            let what = format!("product {contract:?} {level}").to_lowercase();
            let mut y = vec![bf16::ZERO; case.m * g.out_features()];
            trellis_cpu::matmul(&matrix, &x, case.m, contract, level, &mut y)?;
            let y: Vec<f32> = y.iter().map(|v| v.to_f32()).collect();
            outcomes.push(given_product(case, what, &y, contract)?);
        }
    }
    let x = Array::from_slice(&x, &[i32::try_from(case.m)?, i32::try_from(g.in_features())?]);
    let options = MatmulOptions { device: Some(Device::cpu()), ..MatmulOptions::default() };
    let contract = options.choose(&problem(&x, g, options)?).contract;
    let y = trellis_matmul_with(&x, &weights, options)?.as_dtype(MlxDtype::Float32)?.to_vec_exact::<f32>()?;
    outcomes.push(given_product(case, "product in MLX".to_owned(), &y, contract)?);
    Ok(outcomes)
}

/// Every variant at every M, in the case's layout and, where it has another, in that one too.
fn check_metal(case: &Case, device: Device) -> Result<Vec<Outcome>> {
    let layouts = layouts(case);
    let mut outcomes = Vec::new();
    for case in &layouts {
        let g = &case.geometry;
        let weights = TrellisWeights::from_slices(&case.codes, &case.scales, *g)?;
        let layout = format!("{:?}", g.layout()).to_lowercase();
        let float32 = expanded(&weights, MlxDtype::Float32)?;
        outcomes.push(decode(case, format!("expand float32 {layout}"), &float32, &case.expanded));
        let bfloat16 = expanded(&weights, MlxDtype::Bfloat16)?;
        outcomes.push(decode(case, format!("expand bfloat16 {layout}"), &bfloat16, &case.expanded_bf16));
        for m in METAL_M {
            let (x, x_array) = activations(case, m)?;
            // Variant 4 computes something else on purpose: it is for timing.
            for number in (0..=Variant::DEFAULT.number()).filter(|&v| v != Variant::STATE.number()) {
                let variant = Variant::new(number)?;
                let options = MatmulOptions { variant, device: Some(device), ..MatmulOptions::default() };
                let choice = options.choose(&problem(&x_array, g, options)?);
                let y = trellis_matmul_with(&x_array, &weights, options)?;
                let y = y.as_dtype(MlxDtype::Float32)?.to_vec_exact::<f32>()?;
                let (contract, dtype) = weights_of(variant, choice.kernel);
                let expected = reference::matmul(g, &case.codes, &case.scales, &x, m, contract, dtype)?;
                let what = format!("{} variant {number} M={m} {layout}", choice.kernel);
                outcomes.push(product(case, what, &y, &expected));
            }
        }
    }
    Ok(outcomes)
}

/// The case, and the case in its other layout if it has one.
fn layouts(case: &Case) -> Vec<Case> {
    let mut layouts = vec![case.clone()];
    let other = match case.geometry.layout() {
        Layout::RowMajor => Layout::Interleaved,
        Layout::Interleaved => Layout::RowMajor,
    };
    if let Ok((codes, geometry)) = pack::relayout(&case.geometry, &case.codes, other) {
        layouts.push(Case { geometry, codes, ..case.clone() });
    }
    layouts
}

/// The case's own activations, repeated to fill m rows, as numbers and as a bfloat16 array.
fn activations(case: &Case, m: usize) -> Result<(Vec<f32>, Array)> {
    let n = case.geometry.in_features();
    let x: Vec<f32> = (0..m * n).map(|i| case.x[i % case.x.len()]).collect();
    let halves: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
    let array = Array::from_slice(&halves, &[i32::try_from(m)?, i32::try_from(n)?]);
    Ok((x, array))
}

/// Every kernel, in the case's layout and its other one. Twice: the second run must have the bits of the first.
fn check_cuda(case: &Case, device: Device) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for case in layouts(case) {
        let layout = format!("{:?}", case.geometry.layout()).to_lowercase();
        let weights = TrellisWeights::from_slices(&case.codes, &case.scales, case.geometry)?;
        for (dtype, expected) in
            [(MlxDtype::Float32, &case.expanded), (MlxDtype::Bfloat16, &case.expanded_bf16)]
        {
            outcomes.push(decode(
                &case,
                format!("expand {dtype:?} {layout}"),
                &expanded(&weights, dtype)?,
                expected,
            ));
        }
        for geometry in [case.geometry, case.geometry.transposed()] {
            // Golden cases come along both axes; a random one is taken along both.
            if geometry != case.geometry && !case.packed.is_empty() {
                continue;
            }
            let case = Case { geometry, ..case.clone() };
            let weights = TrellisWeights::new(weights.codes().clone(), weights.scales().clone(), geometry)?;
            for (kernel, m) in CUDA_M.iter().flat_map(|&(kernel, all)| all.iter().map(move |&m| (kernel, m)))
            {
                let (x, x_array) = activations(&case, m)?;
                let options = MatmulOptions::default();
                let problem = problem(&x_array, &geometry, options)?;
                // Not every kernel takes every geometry; those that do not are other kernels' work.
                let Some(Ok(choice)) = choose_cuda(kernel, &problem, &device) else { continue };
                let run = || -> Result<Vec<f32>> {
                    let y = trellis_matmul_by(&x_array, &weights, options, &choice)?;
                    Ok(y.as_dtype(MlxDtype::Float32)?.to_vec_exact::<f32>()?)
                };
                let y = run()?;
                let what = format!("{kernel} axis {} M={m} {layout}", geometry.axis().index());
                let contract = choice.contract;
                let expected =
                    reference::matmul(&geometry, &case.codes, &case.scales, &x, m, contract, Dtype::Bf16)?;
                outcomes.push(product_within(
                    &case,
                    what.clone(),
                    &y,
                    &expected,
                    kernel.takes_tf32_allowance(),
                ));
                outcomes.push(decode(&case, format!("{what}, again"), &run()?, &y));
            }
        }
    }
    Ok(outcomes)
}

/// A random matrix: all k, states and blocks in turn, shapes that tiles divide and shapes that they do not.
fn random_case(i: usize) -> Result<Case> {
    const SHAPES: [(u32, usize, usize, usize); 5] =
        [(12, 256, 129, 768), (16, 64, 37, 256), (10, 128, 1, 512), (9, 32, 70, 1024), (12, 96, 33, 192)];
    let (state_bits, block, rows, cols) = SHAPES[i % SHAPES.len()];
    let geometry = Geometry::new(Axis::Output, 1 + (i % 4) as u32, state_bits, block, rows, cols)?;
    let mut rng = SmallRng::seed_from_u64(i as u64);
    let codes: Vec<u32> = (0..geometry.words()).map(|_| rng.random()).collect();
    let scales: Vec<f16> = (0..rows)
        .map(|row| if row % 13 == 5 { f16::ZERO } else { f16::from_f32(rng.random_range(0.004..0.08)) })
        .collect();
    let x = (0..rows.max(cols)).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)).to_f32()).collect();
    let weights = |dtype| -> Result<Vec<f32>> {
        let weights = reference::decode(&geometry, &codes, &scales, Contract::Expanded, dtype)?;
        Ok(weights.iter().map(|&w| w as f32).collect())
    };
    Ok(Case {
        name: format!("random {i} ({geometry})"),
        geometry,
        m: 1,
        expanded: weights(Dtype::F32)?,
        expanded_bf16: weights(Dtype::Bf16)?,
        states: Vec::new(),
        packed: Vec::new(),
        y_packed: Vec::new(),
        y_expanded_bf16: Vec::new(),
        codes,
        scales,
        x,
    })
}

/// The contract, with the type it rounds weights to, that a variant's weights are those of.
fn weights_of(variant: Variant, kernel: Kernel) -> (Contract, Dtype) {
    match kernel {
        Kernel::MetalScatter if variant <= Variant::DEVICE_TABLE => (Contract::Expanded, Dtype::Bf16),
        Kernel::MetalScatter if variant == Variant::REFINED_WIDE => (Contract::Expanded, Dtype::F32),
        Kernel::MetalScatter => (Contract::Packed, Dtype::Bf16),
        _ => (Contract::Expanded, Dtype::Bf16),
    }
}

/// The stored matrix of the lazy dense weight.
fn expanded(weights: &TrellisWeights, dtype: MlxDtype) -> Result<Vec<f32>> {
    let w = dequantize(weights, dtype)?.as_dtype(MlxDtype::Float32)?;
    let stored = if weights.geometry().axis() == Axis::Output { w.transpose()? } else { w };
    Ok(stored.contiguous()?.to_vec_exact::<f32>()?)
}

fn decode(case: &Case, check: String, found: &[f32], expected: &[f32]) -> Outcome {
    let differ = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let wrong = differ + found.len().abs_diff(expected.len());
    Outcome { case: case.name.clone(), check, passed: wrong == 0, wrong, worst_ratio: None }
}

/// A product of the case's own x against the case's own numbers; the oracle adds the magnitudes that the bound needs.
fn given_product(case: &Case, check: String, found: &[f32], contract: Contract) -> Result<Outcome> {
    let g = &case.geometry;
    let mut expected =
        reference::matmul(g, &case.codes, &case.scales, &case.x, case.m, contract, Dtype::Bf16)?;
    expected.y = match contract {
        Contract::Packed => case.y_packed.clone(),
        _ => case.y_expanded_bf16.clone(),
    };
    Ok(product(case, check, found, &expected))
}

fn product(case: &Case, check: String, found: &[f32], expected: &Product) -> Outcome {
    product_within(case, check, found, expected, false)
}

fn product_within(case: &Case, check: String, found: &[f32], expected: &Product, tf32: bool) -> Outcome {
    let (worst, _) = expected.worst(found, Dtype::Bf16, tf32);
    let wrong = (0..found.len())
        .filter(|&i| {
            let error = (f64::from(found[i]) - expected.y[i]).abs();
            error.is_nan() || error > expected.allowance(i, Dtype::Bf16, tf32)
        })
        .count();
    Outcome { case: case.name.clone(), check, passed: worst <= 1.0, wrong, worst_ratio: Some(worst) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_cases_are_legal_and_differ() {
        let cases: Vec<Case> = (0..20).map(|i| random_case(i).expect("a legal case")).collect();
        assert!(cases.iter().zip(&cases[1..]).all(|(a, b)| a.geometry != b.geometry));
        assert!(cases.iter().all(|c| c.expanded.len() == c.geometry.rows() * c.geometry.cols()));
    }
}
