//! `trellis kernels`: what would be launched for a product on Metal, why, and at what cost; or on CUDA, and why. Needs
//! neither.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use mlx_trellis::dispatch::{Choice, Device, Kernel, Problem, choose};
use mlx_trellis::export::export_metal;
use mlx_trellis::{Cuda, Gpu, Variant, f16};
use msl_emu::{Emulator, Order, RunOptions};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use trellis_codec::format::{DEFAULT_BLOCK, DEFAULT_STATE_BITS};
use trellis_codec::{Geometry, Layout, codebook};
use trellis_kernels::{Launch, Type, emulator};

use crate::report::{AxisNumber, DtypeArg};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rows of the stored matrix
    #[arg(long)]
    rows: usize,
    /// Columns of the stored matrix, along which it is coded
    #[arg(long)]
    cols: usize,
    /// Bits a weight
    #[arg(long)]
    bits: u32,
    /// Axis of the weight coded along: 0 or out, 1 or in
    #[arg(long)]
    axis: AxisNumber,
    /// Rows of activations
    #[arg(long)]
    m: usize,
    /// Type of activations
    #[arg(long, value_enum)]
    dtype: DtypeArg,
    /// Weights in a block
    #[arg(long, default_value_t = DEFAULT_BLOCK)]
    block: usize,
    /// Bits of trellis state
    #[arg(long, default_value_t = DEFAULT_STATE_BITS)]
    state: u32,
    /// Neighbouring blocks are stored side by side
    #[arg(long)]
    interleave: bool,
    /// Architecture string of the GPU, such as applegpu_g13s
    #[arg(long, default_value = "")]
    arch: String,
    /// For a CUDA GPU with this many multiprocessors instead of Metal, to explain or dump
    #[arg(long, value_name = "MULTIPROCESSORS", conflicts_with_all = ["export", "cost", "arch"])]
    cuda: Option<u32>,
    /// Compute capability of the CUDA GPU, such as 9.0
    #[arg(long, value_name = "MAJOR.MINOR", value_parser = capability, default_value = "9.0", requires = "cuda")]
    capability: (u32, u32),
    /// Decode arithmetic and set of kernels, 0 to 13
    #[arg(long, default_value_t = Variant::DEFAULT.number())]
    variant: u8,
    /// The layer asks for the shared codebook at M = 3 and 4
    #[arg(long)]
    shared_codebook: bool,
    /// Say which kernel is chosen, and why each better one was not
    #[arg(long)]
    explain: bool,
    /// Write each launch as JSON, with an index.json, into this folder
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Write the product as a function that MLX can import, for a Mac
    #[arg(long, value_name = "FILE.mlxfn")]
    export: Option<PathBuf>,
    /// Count memory accesses and operations a weight, in the emulator
    #[arg(long)]
    cost: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // A group of clap's would hold every argument of the struct and be satisfied by --rows.
    ensure!(
        args.explain || args.cost || args.dump.is_some() || args.export.is_some(),
        "nothing asked for, expected --explain, --dump DIR, --export FILE or --cost"
    );
    let layout = if args.interleave { Layout::Interleaved } else { Layout::RowMajor };
    let geometry = Geometry::new(args.axis.0, args.bits, args.state, args.block, args.rows, args.cols)?
        .with_layout(layout)?;
    let problem = Problem {
        variant: Variant::new(args.variant)?,
        shared_codebook: args.shared_codebook,
        ..Problem::new(geometry, args.m, args.dtype.codec())
    };
    let gpu = Gpu::from_architecture(&args.arch);
    let device = match args.cuda {
        Some(multiprocessors) => {
            Device { cuda: Some(Cuda { multiprocessors, capability: args.capability }), ..Device::cpu() }
        }
        None => Device { metal: Some(gpu), ..Device::cpu() },
    };
    let choice = choose(&problem, &device);
    let launches = choice.launches(&problem)?;
    let mut report = json!({});
    if args.explain {
        report["explain"] = explanation(&problem, &choice, &launches);
        if !args.json {
            print_explanation(&problem, &choice, &launches);
        }
    }
    if let Some(dir) = &args.dump {
        dump(dir, &problem, &choice, &launches)?;
        report["dump"] = json!(dir);
    }
    if let Some(file) = &args.export {
        export_metal(&problem, gpu, file)?;
        report["export"] = json!(file);
    }
    if args.cost {
        let costs = launches.iter().map(|l| cost(l, &geometry)).collect::<Result<Vec<_>>>()?;
        if !args.json {
            costs.iter().for_each(print_cost);
        }
        report["cost"] = json!(costs);
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn capability(text: &str) -> Result<(u32, u32), String> {
    let parts =
        text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| format!("found {text:?}, expected two numbers such as 9.0"))
}

fn explanation(problem: &Problem, choice: &Choice, launches: &[Launch]) -> Value {
    let refused: Vec<Value> = choice
        .refused
        .iter()
        .map(|r| json!({ "kernel": r.kernel.to_string(), "reason": r.reason }))
        .collect();
    json!({
        "problem": problem.on(choice.gpu.unwrap_or_default()).to_string(),
        "kernel": choice.kernel.to_string(),
        "contract": format!("{:?}", choice.contract).to_lowercase(),
        "basis": choice.basis,
        "launches": launches.iter().map(|l| &l.name).collect::<Vec<_>>(),
        "refused": refused,
    })
}

fn print_explanation(problem: &Problem, choice: &Choice, launches: &[Launch]) {
    println!("{}", problem.on(choice.gpu.unwrap_or_default()));
    println!("  {}: {}", choice.kernel, choice.basis);
    for refused in &choice.refused {
        println!("  not {}: {}", refused.kernel, refused.reason);
    }
    for launch in launches {
        println!(
            "  launches {} over {:?} in threadgroups of {:?}",
            launch.name, launch.grid, launch.threadgroup
        );
    }
    for step in after(choice.kernel) {
        println!("  then {step}");
    }
}

/// What MLX does to the last launch's output.
fn after(kernel: Kernel) -> &'static [&'static str] {
    match kernel {
        Kernel::MetalScatter => &["sum over axis 1", "cast to x's dtype"],
        Kernel::MetalExpand | Kernel::CudaExpand => {
            &["matmul of x with the stored matrix (transposed for axis 1)"]
        }
        _ => &[],
    }
}

/// One file a launch, numbered in order, and an index that says where each array comes from and goes.
fn dump(dir: &Path, problem: &Problem, choice: &Choice, launches: &[Launch]) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    let write = |name: &str, value: &Value| -> Result<()> {
        let path = dir.join(name);
        let mut text = serde_json::to_string_pretty(value)?;
        text.push('\n');
        std::fs::write(&path, text).with_context(|| format!("{}", path.display()))
    };
    let mut entries: Vec<Value> = Vec::new();
    for (i, launch) in launches.iter().enumerate() {
        let file = format!("{i:02}-{}.json", launch.name);
        write(&file, &serde_json::to_value(launch)?)?;
        let inputs: serde_json::Map<String, Value> = launch
            .inputs
            .iter()
            .map(|a| (a.name.to_string(), source(&a.name, &launches[..i]).into()))
            .collect();
        entries.push(json!({ "file": file, "inputs": inputs, "then": if i + 1 == launches.len() { after(choice.kernel) } else { &[] } }));
    }
    write("index.json", &json!({ "explain": explanation(problem, choice, launches), "launches": entries }))
}

/// Where an input comes from: an earlier launch's output of the same name, or the product's own arguments.
fn source(name: &str, earlier: &[Launch]) -> String {
    match earlier.iter().position(|l| l.outputs.iter().any(|o| o.name == name)) {
        Some(i) => format!("output {name} of launch {i}"),
        None if name == "lut" => "the exact value of every state, in state order".to_owned(),
        None => format!("argument {name}"),
    }
}

/// Counts of one launch, divided by the matrix's weights.
fn cost(launch: &Launch, geometry: &Geometry) -> Result<Value> {
    let emulator = Emulator::new(None)?;
    let inputs: Vec<Vec<u8>> = launch.inputs.iter().map(|a| random_bytes(a, geometry)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let options = RunOptions { orders: vec![Order::Forward], timeout: 600, ..RunOptions::cost() };
    let outcome = emulator.run(&emulator::kernel(launch), &inputs, &options)?;
    let cost = outcome.cost.context("the emulator counted nothing")?;
    let weights = (geometry.rows() * geometry.cols()) as f64;
    let per = |n: u64| n as f64 / weights;
    let arithmetic = cost.arithmetic.as_ref();
    ensure!(cost.threads > 0, "{}: no thread ran", launch.name);
    Ok(json!({
        "kernel": launch.name,
        "weights": weights,
        "code_bytes": geometry.bits() as f64 / 8.0,
        "device_loads": per(cost.device_loads),
        "device_load_bytes": per(cost.device_load_bytes),
        "device_stores": per(cost.device_stores),
        "threadgroup_loads": per(cost.threadgroup_loads),
        "threadgroup_stores": per(cost.threadgroup_stores),
        "integer": arithmetic.map(|a| per(a.integer + a.compare + a.branch)),
        "float": arithmetic.map(|a| per(a.float)),
        "simd": per(cost.simd_moves + cost.simd_reductions + cost.matrix_loads + cost.matrix_products),
    }))
}

fn print_cost(cost: &Value) {
    let n = |key: &str| cost[key].as_f64().map_or("not counted".to_owned(), |v| format!("{v:.3}"));
    println!(
        "{}: a weight costs {} device loads ({} bytes, codes alone {}), {} stores, {} + {} threadgroup accesses, \
         {} integer, {} float, {} SIMD operations",
        cost["kernel"].as_str().unwrap_or_default(),
        n("device_loads"),
        n("device_load_bytes"),
        n("code_bytes"),
        n("device_stores"),
        n("threadgroup_loads"),
        n("threadgroup_stores"),
        n("integer"),
        n("float"),
        n("simd")
    );
}

fn random_bytes(array: &trellis_kernels::Array, geometry: &Geometry) -> Vec<u8> {
    let mut rng = SmallRng::seed_from_u64(1);
    let n: usize = array.shape.iter().product();
    if array.name == "lut" {
        return codebook::table(geometry.state_bits()).iter().flat_map(|v| v.to_le_bytes()).collect();
    }
    match array.dtype {
        Type::Uint32 => (0..n).flat_map(|_| rng.random::<u32>().to_le_bytes()).collect(),
        Type::Float32 => (0..n).flat_map(|_| rng.random_range(-1f32..1.0).to_le_bytes()).collect(),
        Type::Float16 => {
            (0..n).flat_map(|_| f16::from_f32(rng.random_range(-1f32..1.0)).to_le_bytes()).collect()
        }
        Type::Bfloat16 => (0..n)
            .flat_map(|_| mlx_trellis::bf16::from_f32(rng.random_range(-1f32..1.0)).to_le_bytes())
            .collect(),
    }
}
