//! A tiled matrix product as kernels write it: threadgroup tiles, barriers, four SIMD groups of 8 x 8 products.

use half::bf16;
use msl_emu::{Dtype, EmuError, Emulator, FaultKind, Kernel, Outcome, RunOptions};

const M: usize = 8;
const N: usize = 96;
const K: usize = 80;

const BODY: &str = "
constexpr int BN = 32;
constexpr int BK = 16;
threadgroup T ws[BK * BN];
threadgroup T xs[8 * BK];
uint tid = thread_index_in_threadgroup;
uint group = simdgroup_index_in_threadgroup;
uint column = threadgroup_position_in_grid.x * BN;
simdgroup_matrix<float, 8, 8> acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0);
for (uint k = 0; k < K; k += BK) {
  BEFORE
  for (uint i = tid * 4; i < BK * BN; i += 128 * 4) {
    *(threadgroup vec<T, 4>*)(ws + i) = *(const device vec<T, 4>*)(w + size_t(k + i / BN) * N + column + i % BN);
  }
  xs[tid] = x[(tid / BK) * K + k + tid % BK];
  AFTER
  for (int j = 0; j < BK; j += 8) {
    simdgroup_matrix<T, 8, 8> a, b;
    simdgroup_load(a, xs + j, BK);
    simdgroup_load(b, ws + j * BN + group * 8, BN);
    simdgroup_multiply_accumulate(acc, a, b, acc);
  }
}
simdgroup_store(acc, y + column + group * 8, N);
";

fn product(before: &str, after: &str, options: &RunOptions) -> Result<Outcome, EmuError> {
    let kernel = Kernel::new("tiled", BODY.replace("BEFORE", before).replace("AFTER", after))
        .input("x", Dtype::Bfloat16, [M, K])
        .input("w", Dtype::Bfloat16, [K, N])
        .output("y", Dtype::Float32, [M, N])
        .template("T", Dtype::Bfloat16)
        .template("K", K as i32)
        .template("N", N as i32)
        .launch([(N / 32 * 128) as u32, 1, 1], [128, 1, 1]);
    let bytes = |v: &[f32]| -> Vec<u8> { v.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect() };
    Emulator::new(None)?.run(&kernel, &[&bytes(&x()), &bytes(&w())], options)
}

fn x() -> Vec<f32> {
    (0..M * K).map(|i| (i * 7 % 23) as f32 - 11.0).collect()
}

fn w() -> Vec<f32> {
    (0..K * N).map(|i| (i * 5 % 19) as f32 - 9.0).collect()
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

#[test]
fn it_multiplies() {
    for options in [RunOptions::default(), RunOptions::cost()] {
        let outcome = product(BARRIER, BARRIER, &options).unwrap_or_else(|error| panic!("{error}"));
        let (x, w) = (x(), w());
        for (i, bytes) in outcome.outputs[0].chunks_exact(4).enumerate() {
            let expected: f32 = (0..K).map(|k| x[i / N * K + k] * w[k * N + i % N]).sum();
            assert_eq!(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), expected);
        }
        if let Some(cost) = outcome.cost {
            let groups = (N / 32) as u64;
            let steps = groups * (K / 16) as u64;
            assert_eq!(cost.matrix_products, steps * 128 * 2);
            assert_eq!(cost.barriers, steps * 128 * 2);
            assert_eq!(cost.device_loads, steps * 128 * 2);
            assert_eq!(cost.device_load_bytes, steps * 128 * (8 + 2));
            assert_eq!(cost.threadgroup_bytes, (16 * 32 + 8 * 16) * 2);
        }
    }
}

#[test]
fn each_barrier_is_needed() {
    for (before, after) in [("", BARRIER), (BARRIER, "")] {
        for options in [RunOptions::default(), RunOptions::checked()] {
            let error = product(before, after, &options).expect_err("a race");
            println!("{error}");
            let fault = error.fault().expect("a fault");
            assert!(
                matches!(fault.kind, FaultKind::Race { .. } | FaultKind::UninitialisedThreadgroup { .. }),
                "{error}"
            );
            assert!(fault.location.is_some(), "{error}");
        }
    }
}
