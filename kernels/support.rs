//! What the families' tests share: data, host mirrors of each kernel's order of operations, and the emulator.
//!
//! A mirror computes with the same roundings in the same order as a body, from the codec's own window and codebook,
//! so that results compare bit for bit.

use std::path::Path;
use std::sync::LazyLock;

use msl_emu::{Emulator, Order, Outcome, RunOptions};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use trellis_codec::cases::{self, Case};
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, Geometry, Layout, bf16, codebook, f16};

use crate::prelude::PRAGMA;
use crate::scatter::SPLITS;
use crate::{Launch, Problem, Type, Variant, emulator};

/// A row-major stored matrix of axis 0.
pub(crate) fn geometry(bits: u32, state_bits: u32, block: usize, rows: usize, cols: usize) -> Geometry {
    Geometry::new(Axis::Output, bits, state_bits, block, rows, cols).expect("a legal geometry")
}

pub(crate) fn interleaved(rows: usize, cols: usize) -> Geometry {
    geometry(3, 12, 256, rows, cols).with_layout(Layout::Interleaved).expect("a legal geometry")
}

pub(crate) fn variants(numbers: std::ops::RangeInclusive<u8>) -> impl Iterator<Item = Variant> {
    numbers.map(|n| Variant::new(n).expect("a variant"))
}

pub(crate) fn golden() -> Vec<Case> {
    cases::read_cases(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")).expect("golden cases")
}

/// Codes, scales and activations of one problem.
#[derive(Debug, Clone)]
pub(crate) struct Data {
    pub(crate) codes: Vec<u32>,
    pub(crate) scales: Vec<f16>,
    /// `[m, in]`, values of the problem's type.
    pub(crate) x: Vec<f32>,
}

impl Data {
    /// Random words; scales with a zero and a subnormal among them.
    pub(crate) fn random(problem: &Problem) -> Self {
        let g = &problem.geometry;
        let mut rng = SmallRng::seed_from_u64(g.words() as u64 ^ ((problem.m as u64) << 40));
        let scales = (0..g.rows())
            .map(|row| match row % 29 {
                7 => f16::ZERO,
                11 => f16::from_bits(37),
                _ => f16::from_f32(rng.random_range(0.004..0.08)),
            })
            .collect();
        Data {
            codes: (0..g.words()).map(|_| rng.random()).collect(),
            scales,
            x: (0..problem.m * g.in_features())
                .map(|_| problem.dtype.round(rng.random_range(-2.0f32..2.0)))
                .collect(),
        }
    }

    pub(crate) fn of(case: &Case) -> Self {
        Data { codes: case.codes.clone(), scales: case.scales.clone(), x: case.x.clone() }
    }

    /// The bytes of a launch's inputs.
    fn bytes(&self, problem: &Problem, launch: &Launch) -> Vec<Vec<u8>> {
        let input = |name: &str| match name {
            "x" => encode(&self.x, problem.dtype),
            "codes" => self.codes.iter().flat_map(|v| v.to_le_bytes()).collect(),
            "scales" => self.scales.iter().flat_map(|v| v.to_le_bytes()).collect(),
            "lut" => encode(&codebook::table(problem.geometry.state_bits()), Dtype::F32),
            other => panic!("no data for input {other}"),
        };
        launch.inputs.iter().map(|a| input(&a.name)).collect()
    }
}

pub(crate) fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}

pub(crate) fn decode(bytes: &[u8], dtype: Type) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        Type::Float32 | Type::Uint32 => {
            bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
        }
        Type::Float16 => pairs().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        Type::Bfloat16 => pairs().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
    }
}

/// How much the emulator looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// Two orders of threads, unmapped pages around buffers: also finds elements never written.
    Fast,
    /// Every access: also finds elements written twice, races and unset memory.
    Checked,
    /// As fast, with the pragma taken out and `a * b + c` made one fma wherever the compiler can.
    Contracted,
}

/// What a launch on raw inputs gives.
fn outcome(launch: &Launch, inputs: &[Vec<u8>], look: Look) -> Outcome {
    static EMULATOR: LazyLock<Emulator> = LazyLock::new(|| Emulator::new(None).expect("a C++ compiler"));
    let options = match look {
        Look::Fast => RunOptions { orders: vec![Order::Forward, Order::Random], ..RunOptions::default() },
        Look::Checked => RunOptions::checked(),
        Look::Contracted => RunOptions { contract: true, ..RunOptions::default() },
    };
    let mut kernel = emulator::kernel(launch);
    if look == Look::Contracted {
        kernel.header = kernel.header.replace(PRAGMA, "");
    }
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    EMULATOR.run(&kernel, &inputs, &options).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs a launch on raw inputs; its one output.
pub(crate) fn run_bytes(launch: &Launch, inputs: &[Vec<u8>], look: Look) -> Vec<f32> {
    decode(&outcome(launch, inputs, look).outputs[0], launch.outputs[0].dtype)
}

/// Runs a launch on a problem's data; its one output.
pub(crate) fn run(launch: &Launch, problem: &Problem, data: &Data, look: Look) -> Vec<f32> {
    run_bytes(launch, &data.bytes(problem, launch), look)
}

/// Loads from device memory in one run of a launch, over the elements of the stored matrix.
pub(crate) fn loads_per_weight(launch: &Launch, problem: &Problem) -> f64 {
    let inputs = Data::random(problem).bytes(problem, launch);
    let cost = outcome(launch, &inputs, Look::Checked).cost.expect("a checked run counts");
    cost.device_loads as f64 / (problem.geometry.rows() * problem.geometry.cols()) as f64
}

/// Bit equality, with the first difference in the message.
pub(crate) fn assert_bits(found: &[f32], expected: &[f32], what: impl std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{what}: number of elements");
    if let Some(i) = (0..found.len()).find(|&i| found[i].to_bits() != expected[i].to_bits()) {
        panic!("{what}: element {i} is {:e}, expected {:e}", found[i], expected[i]);
    }
}

/// Contract E weights `[rows, cols]`.
pub(crate) fn expanded(geometry: &Geometry, data: &Data, dtype: Dtype) -> Vec<f32> {
    reference::decode(geometry, &data.codes, &data.scales, Contract::Expanded, dtype)
        .expect("lengths that fit")
        .into_iter()
        .map(|w| w as f32)
        .collect()
}

/// The weight of a packed kernel.
pub(crate) fn packed_weight(variant: Variant, state: u32, scale: f16) -> f32 {
    let y = codebook::y(state);
    let value = match variant.number() {
        0..=3 => codebook::exact(y),
        4 => state as f32,
        5 => codebook::refined(y),
        _ => codebook::unrefined(y),
    };
    let weight = value * scale.to_f32();
    if variant <= Variant::DEVICE_TABLE { Dtype::Bf16.round(weight) } else { weight }
}

/// `partial [m, 128, cols]`: rows of a split in ascending order, one fma each.
pub(crate) fn scatter_mirror(problem: &Problem, data: &Data) -> Vec<f32> {
    let (g, m) = (&problem.geometry, problem.m);
    let (rows, cols) = (g.rows(), g.cols());
    let span = rows.div_ceil(SPLITS);
    let mut partial = vec![0f32; m * SPLITS * cols];
    for row in 0..rows {
        let (split, scale) = (row / span, data.scales[row]);
        for col in 0..cols {
            let weight = packed_weight(problem.variant, reference::state(g, &data.codes, row, col), scale);
            for sample in 0..m {
                let sum = &mut partial[(sample * SPLITS + split) * cols + col];
                *sum = weight.mul_add(data.x[sample * rows + row], *sum);
            }
        }
    }
    partial
}

/// Adds partials `[m, splits, n]` over the splits, as MLX's sum does up to its order.
pub(crate) fn sum_splits(partial: &[f32], m: usize, cols: usize, dtype: Dtype) -> Vec<f32> {
    let mut out = vec![0f32; m * cols];
    for (i, plane) in partial.chunks_exact(cols).enumerate() {
        for (sum, value) in out[i / SPLITS * cols..].iter_mut().zip(plane) {
            *sum += value;
        }
    }
    out.into_iter().map(|v| dtype.round(v)).collect()
}

/// Every `(k, T)` of the format up to blocks of `words` words.
pub(crate) fn blocks(words: usize) -> impl Iterator<Item = (u32, usize)> {
    (1..=4u32).flat_map(move |k| {
        (8..=words * 32 / k as usize)
            .step_by(8)
            .filter(move |t| (t * k as usize).is_multiple_of(32))
            .map(move |t| (k, t))
    })
}

/// Worst error of `y [m, out]` as a share of the format's allowance, against the float64 oracle.
pub(crate) fn worst(problem: &Problem, data: &Data, contract: Contract, y: &[f32]) -> f64 {
    let dtype = problem.dtype;
    reference::matmul(&problem.geometry, &data.codes, &data.scales, &data.x, problem.m, contract, dtype)
        .expect("lengths that fit")
        .worst(y, dtype, false)
        .0
}

/// Whether full-size tests run; says so where they do not.
pub(crate) fn full_size(what: &str) -> bool {
    let wanted = std::env::var_os("TRELLIS_FULL").is_some_and(|v| v == "1");
    if !wanted {
        // Past the test harness's capture, so that the skip is seen.
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "skipped: {what} (set TRELLIS_FULL=1)");
    }
    wanted
}
