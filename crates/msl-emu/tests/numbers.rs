//! What kernels compute when they break no rule, against numbers worked out here.

use half::{bf16, f16};
use msl_emu::{Dtype, Emulator, Kernel, Order, Outcome, RunOptions};

fn run_with(kernel: &Kernel, inputs: &[&[u8]], options: &RunOptions) -> Outcome {
    let emulator = Emulator::new(None).expect("a C++ compiler");
    emulator.run(kernel, inputs, options).unwrap_or_else(|error| panic!("{error}"))
}

/// In both modes, whose outputs must be equal.
fn run(kernel: &Kernel, inputs: &[&[u8]]) -> Vec<Vec<u8>> {
    let fast = run_with(kernel, inputs, &RunOptions::default()).outputs;
    let checked = run_with(kernel, inputs, &RunOptions::checked()).outputs;
    assert!(fast == checked, "fast and checked mode differ");
    fast
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn as_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn as_words(bytes: &[u8]) -> Vec<u32> {
    as_floats(bytes).into_iter().map(f32::to_bits).collect()
}

fn as_shorts(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

#[test]
fn every_half_and_bfloat_converts_as_the_half_crate_does() {
    let n = 65536usize;
    let kernel = Kernel::new(
        "conversions",
        "uint i = thread_position_in_grid.x;
         half h = as_type<half>(ushort(i));
         bfloat b = as_type<bfloat>(ushort(i));
         hf[i] = h;
         bf[i] = b;
         for (int j = 0; j < 8; j++) {
           fh[i * 8 + j] = half(f[i * 8 + j]);
           fb[i * 8 + j] = bfloat(f[i * 8 + j]);
         }",
    )
    .input("f", Dtype::Float32, [n * 8])
    .output("hf", Dtype::Float32, [n])
    .output("bf", Dtype::Float32, [n])
    .output("fh", Dtype::Float16, [n * 8])
    .output("fb", Dtype::Bfloat16, [n * 8])
    .launch([n as u32, 1, 1], [256, 1, 1]);
    // Each value, its neighbours, and what lies halfway to the next value of either type.
    let f: Vec<f32> = (0..n as u32)
        .flat_map(|i| {
            let h = f16::from_bits(i as u16).to_f32();
            let b = i << 16;
            let bits = h.to_bits();
            [bits, bits ^ 1, bits + 0x1000, bits + 0x1001, bits + 0xfff, b | 0x8000, b | 0x8001, b | 0x7fff]
        })
        .map(f32::from_bits)
        .collect();
    let outcome = run_with(&kernel, &[&floats(f.iter().copied())], &RunOptions::default());
    // A NaN stays one; its payload is not compared, as this crate and hardware differ there.
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for (i, &value) in as_floats(&outcome.outputs[0]).iter().enumerate() {
        assert!(same(value, f16::from_bits(i as u16).to_f32()), "half {i:#x} is {value}");
    }
    for (i, &value) in as_floats(&outcome.outputs[1]).iter().enumerate() {
        assert!(same(value, bf16::from_bits(i as u16).to_f32()), "bfloat {i:#x} is {value}");
    }
    for (&bits, &value) in as_shorts(&outcome.outputs[2]).iter().zip(&f) {
        let expected = f16::from_f32(value);
        assert!(
            bits == expected.to_bits() || (value.is_nan() && f16::from_bits(bits).is_nan()),
            "half of {value:e}"
        );
    }
    for (&bits, &value) in as_shorts(&outcome.outputs[3]).iter().zip(&f) {
        let expected = bf16::from_f32(value);
        assert!(
            bits == expected.to_bits() || (value.is_nan() && bf16::from_bits(bits).is_nan()),
            "bfloat of {value:e}"
        );
    }
}

#[test]
fn small_floats_round_after_each_operation() {
    let kernel = Kernel::new(
        "small_arithmetic",
        "uint i = thread_position_in_grid.x;
         half a = h[i], c = h[63 - i];
         T b = g[i], d = g[63 - i];
         half u = i < 64 ? a : 0;
         T w = i >= 64 ? 1 : b;
         bool same = u == a && w == b && int(a) == int(float(a)) && (a < 3) == (float(a) < 3) && (a ? true : a == 0);
         float sum = 1; sum += a; sum *= b; sum = a < b ? sum : sum - c; same = same && sum == sum && !(a != a);
         if (!same) a = half(NAN);
         o[i * 8] = a * c; o[i * 8 + 1] = a + c; o[i * 8 + 2] = a / c; o[i * 8 + 3] = a * 2 + 1;
         o[i * 8 + 4] = float(a) * c; o[i * 8 + 5] = b * d; o[i * 8 + 6] = b - d; o[i * 8 + 7] = -b * 3.0;",
    )
    .input("h", Dtype::Float16, [64])
    .input("g", Dtype::Bfloat16, [64])
    .output("o", Dtype::Float32, [64, 8])
    .template("T", Dtype::Bfloat16)
    .launch([64, 1, 1], [64, 1, 1]);
    let value = |i: usize| (i as f32 - 20.3) * 1.37;
    let h: Vec<f16> = (0..64).map(|i| f16::from_f32(value(i))).collect();
    let g: Vec<bf16> = (0..64).map(|i| bf16::from_f32(value(i))).collect();
    let bytes = |bits: Vec<u16>| -> Vec<u8> { bits.into_iter().flat_map(u16::to_le_bytes).collect() };
    let out = run(
        &kernel,
        &[&bytes(h.iter().map(|v| v.to_bits()).collect()), &bytes(g.iter().map(|v| v.to_bits()).collect())],
    );
    let out = as_floats(&out[0]);
    for i in 0..64 {
        let (a, c) = (h[i].to_f32(), h[63 - i].to_f32());
        let (b, d) = (g[i].to_f32(), g[63 - i].to_f32());
        let (rh, rb) = (|v: f32| f16::from_f32(v).to_f32(), |v: f32| bf16::from_f32(v).to_f32());
        let expected =
            [rh(a * c), rh(a + c), rh(a / c), rh(rh(a * 2.0) + 1.0), a * c, rb(b * d), rb(b - d), -b * 3.0];
        assert_eq!(out[i * 8..][..8], expected, "{i}");
    }
}

#[test]
fn simd_operations() {
    let kernel = Kernel::new(
        "simd",
        "uint i = thread_index_in_simdgroup;
         float v = x[i];
         uint u = i * 3;
         float f[12] = {
           simd_shuffle(v, ushort((i * 7 + 3) % 32)), simd_shuffle_up(v, 3), simd_shuffle_down(v, 5),
           simd_shuffle_xor(v, 9), simd_broadcast(v, 17), simd_sum(v), simd_min(v), simd_max(v),
           simd_prefix_inclusive_sum(v), simd_prefix_exclusive_sum(v), simd_broadcast_first(v),
           simd_shuffle_rotate_down(v, 30)};
         for (int j = 0; j < 12; j++) y[i * 12 + j] = f[j];
         uint w[6] = {simd_sum(u), simd_or(1u << i), uint(ulong(simd_ballot(i % 3 == 0))), simd_all(i < 32),
                      uint(simd_any(i == 40) + simd_is_first() - (i == 0)), simd_shuffle_and_fill_up(u, 1000 + i, 4)};
         for (int j = 0; j < 6; j++) z[i * 6 + j] = w[j];
         float2 p = simd_shuffle_xor(float2(v, -v), 1);
         q[i] = p.x - p.y;",
    )
    .input("x", Dtype::Float32, [32])
    .output("y", Dtype::Float32, [32, 12])
    .output("z", Dtype::Uint32, [32, 6])
    .output("q", Dtype::Float32, [32])
    .launch([32, 1, 1], [32, 1, 1]);
    let x: Vec<f32> = (0..32).map(|i| ((i * 11) % 37) as f32 - 12.0).collect();
    let out = run(&kernel, &[&floats(x.iter().copied())]);
    let (y, z, q) = (as_floats(&out[0]), as_words(&out[1]), as_floats(&out[2]));
    let total: f32 = x.iter().sum();
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for i in 0..32usize {
        let before: f32 = x[..i].iter().sum();
        let expected = [
            x[(i * 7 + 3) % 32],
            if i >= 3 { x[i - 3] } else { x[i] },
            if i + 5 < 32 { x[i + 5] } else { x[i] },
            x[i ^ 9],
            x[17],
            total,
            low,
            high,
            before + x[i],
            before,
            x[0],
            x[(i + 30) % 32],
        ];
        assert_eq!(y[i * 12..][..12], expected, "lane {i}");
        let every_third = (0..32).step_by(3).fold(0u32, |m, b| m | 1 << b);
        let filled = if i >= 4 { (i as u32 - 4) * 3 } else { 1000 + i as u32 + 28 };
        assert_eq!(z[i * 6..][..6], [1488, u32::MAX, every_third, 1, 0, filled], "lane {i}");
        assert_eq!(q[i], 2.0 * x[i ^ 1]);
    }
}

#[test]
fn simd_operations_among_lanes_that_stayed() {
    let kernel = Kernel::new(
        "partial",
        "uint i = thread_position_in_grid.x;\ny[i] = 0;\nif (i % 32 >= 20) return;\ny[i] = simd_sum(x[i]);",
    )
    .input("x", Dtype::Float32, [64])
    .output("y", Dtype::Float32, [64])
    .launch([64, 1, 1], [64, 1, 1]);
    let y = as_floats(&run(&kernel, &[&floats((0..64).map(|i| i as f32))])[0]);
    assert_eq!((y[0], y[19], y[20], y[33]), (190.0, 190.0, 0.0, 830.0));
}

/// Apple's layout of an 8 x 8 matrix: the row and the first of the two columns that a lane holds.
fn layout(lane: usize) -> (usize, usize) {
    let quad = lane / 4;
    ((quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2)
}

#[test]
fn matrices_have_apples_layout() {
    // Lanes as they lie in the matrix, two columns each.
    const ROWS: [[usize; 4]; 8] = [
        [0, 1, 8, 9],
        [2, 3, 10, 11],
        [4, 5, 12, 13],
        [6, 7, 14, 15],
        [16, 17, 24, 25],
        [18, 19, 26, 27],
        [20, 21, 28, 29],
        [22, 23, 30, 31],
    ];
    for (row, lanes) in ROWS.iter().enumerate() {
        for (pair, &lane) in lanes.iter().enumerate() {
            assert_eq!(layout(lane), (row, pair * 2));
        }
    }
    let kernel = Kernel::new(
        "layout",
        "threadgroup float t[8 * 12];
         uint i = thread_index_in_simdgroup;
         for (uint j = i; j < 96; j += 32) t[j] = j;
         simdgroup_barrier(mem_flags::mem_threadgroup);
         simdgroup_float8x8 a, b, c, d;
         simdgroup_load(a, x, 8);
         simdgroup_load(b, x, 8, ulong2(0, 0), true);
         simdgroup_load(c, t, 12, ulong2(2, 0));
         d = simdgroup_float8x8(5.0);
         y[i * 8] = a.thread_elements()[0]; y[i * 8 + 1] = a.thread_elements()[1];
         y[i * 8 + 2] = b.thread_elements()[0]; y[i * 8 + 3] = b.thread_elements()[1];
         y[i * 8 + 4] = c.thread_elements()[0]; y[i * 8 + 5] = c.thread_elements()[1];
         y[i * 8 + 6] = d.thread_elements()[0]; y[i * 8 + 7] = d.thread_elements()[1];
         a.thread_elements()[1] += 100;
         simdgroup_store(a, z, 8);",
    )
    .input("x", Dtype::Float32, [8, 8])
    .output("y", Dtype::Float32, [32, 8])
    .output("z", Dtype::Float32, [8, 8])
    .launch([32, 1, 1], [32, 1, 1]);
    let out = run(&kernel, &[&floats((0..64).map(|i| i as f32))]);
    let (y, z) = (as_floats(&out[0]), as_floats(&out[1]));
    for lane in 0..32 {
        let (r, c) = layout(lane);
        let at = |r: usize, c: usize| (r * 8 + c) as f32;
        let wide = |r: usize, c: usize| (r * 12 + c + 2) as f32;
        let diagonal = |r: usize, c: usize| if r == c { 5.0 } else { 0.0 };
        let expected = [
            at(r, c),
            at(r, c + 1),
            at(c, r),
            at(c + 1, r),
            wide(r, c),
            wide(r, c + 1),
            diagonal(r, c),
            diagonal(r, c + 1),
        ];
        assert_eq!(y[lane * 8..][..8], expected, "lane {lane}");
        assert_eq!((z[r * 8 + c], z[r * 8 + c + 1]), (at(r, c), at(r, c + 1) + 100.0));
    }
}

#[test]
fn matrix_products() {
    let kernel = Kernel::new(
        "matmul",
        "threadgroup half t[64];
         uint i = thread_index_in_threadgroup;
         for (uint j = i; j < 64; j += 32) t[j] = half(b[j]);
         threadgroup_barrier(mem_flags::mem_threadgroup);
         simdgroup_matrix<float, 8, 8> ma, acc = make_filled_simdgroup_matrix<float, 8, 8>(0.5);
         simdgroup_matrix<half, 8, 8> mb;
         simdgroup_load(ma, a, 8);
         simdgroup_load(mb, t, 8);
         for (int k = 0; k < 2; k++) simdgroup_multiply_accumulate(acc, ma, mb, acc);
         simdgroup_store(acc, y, 8);",
    )
    .input("a", Dtype::Float32, [8, 8])
    .input("b", Dtype::Float32, [8, 8])
    .output("y", Dtype::Float32, [8, 8])
    .launch([32, 1, 1], [32, 1, 1]);
    let a: Vec<f32> = (0..64).map(|i| (i % 7) as f32 - 2.0).collect();
    let b: Vec<f32> = (0..64).map(|i| (i % 5) as f32 * 0.25).collect();
    let y = as_floats(&run(&kernel, &[&floats(a.iter().copied()), &floats(b.iter().copied())])[0]);
    for r in 0..8 {
        for c in 0..8 {
            let product: f32 = (0..8).map(|k| a[r * 8 + k] * b[k * 8 + c]).sum();
            assert_eq!(y[r * 8 + c], 0.5 + 2.0 * product);
        }
    }
}

#[test]
fn vectors_bits_and_functions() {
    let kernel = Kernel::new(
        "functions",
        "uint i = thread_position_in_grid.x;
         uint2 w = *(const device uint2*)(x + 2 * i);
         uint4 v = uint4(w, w.y, w.x);
         v.xy = v.zw ^ 1;
         ushort4 s = as_type<ushort4>(uint2(v.x, v.y));
         uint k = 0;
         y[i * 16 + k++] = v.x + v.w;
         y[i * 16 + k++] = s.x + s.w;
         y[i * 16 + k++] = popcount(w.x);
         y[i * 16 + k++] = extract_bits(w.x, 5, 11);
         y[i * 16 + k++] = uint(extract_bits(int(w.x), 5, 11));
         y[i * 16 + k++] = insert_bits(w.x, w.y, 8, 4);
         y[i * 16 + k++] = clz(w.x >> 3) + ctz(w.y << 4);
         y[i * 16 + k++] = reverse_bits(w.x);
         y[i * 16 + k++] = rotate(w.x, 13u);
         y[i * 16 + k++] = mulhi(w.x, w.y);
         y[i * 16 + k++] = clamp(int(w.x % 100), 10, 50) + min(w.x % 7, 3u) + max(w.y % 7, 3u);
         y[i * 16 + k++] = select(w.x, w.y, i % 2 == 0);
         y[i * 16 + k++] = as_type<uint>(fma(1.5, float(i), 0.25));
         y[i * 16 + k++] = as_type<uint>(precise::divide(float(w.x), 3.0));
         y[i * 16 + k++] = as_type<uint>(rint(i + 0.5) + metal::fast::exp(0.0) + sqrt(float(i)) + dot(float2(i), float2(2, 3)));
         bool4 q = float4(i) < float4(1, 2, 3, 4);
         y[i * 16 + k++] = uint(any(q)) + 2 * uint(all(q)) + uint(bool(q.z)) * 4;",
    )
    .input("x", Dtype::Uint32, [64])
    .output("y", Dtype::Uint32, [32, 16])
    .launch([32, 1, 1], [32, 1, 1]);
    let x: Vec<u32> = (1..65u32).map(|i| i.wrapping_mul(2654435761)).collect();
    let y = as_words(&run(&kernel, &[&words(x.iter().copied())])[0]);
    for i in 0..32usize {
        let (a, b) = (x[2 * i], x[2 * i + 1]);
        let (vx, vy) = (b ^ 1, a ^ 1);
        let signed = ((a << 16) as i32 >> 21) as u32;
        let f = i as f32;
        let clamped = (a % 100).clamp(10, 50) + (a % 7).min(3) + (b % 7).max(3);
        let flags = u32::from(i < 4) + 2 * u32::from(i < 1) + 4 * u32::from(i < 3);
        let expected = [
            vx.wrapping_add(a),
            (vx & 0xffff) + (vy >> 16),
            a.count_ones(),
            (a >> 5) & 0x7ff,
            signed,
            (a & !0xf00) | ((b & 0xf) << 8),
            (a >> 3).leading_zeros() + (b << 4).trailing_zeros(),
            a.reverse_bits(),
            a.rotate_left(13),
            ((u64::from(a) * u64::from(b)) >> 32) as u32,
            clamped,
            if i % 2 == 0 { b } else { a },
            f.mul_add(1.5, 0.25).to_bits(),
            (a as f32 / 3.0).to_bits(),
            ((f + 0.5).round_ties_even() + 1.0 + f.sqrt() + (f * 2.0 + f * 3.0)).to_bits(),
            flags,
        ];
        assert_eq!(y[i * 16..][..16], expected, "{i}");
    }
}

#[test]
fn positions_at_the_edge_of_the_grid() {
    let kernel = Kernel::new(
        "positions",
        "uint3 p = thread_position_in_grid;
         uint3 n = threads_per_grid;
         uint at = ((p.z * n.y + p.y) * n.x + p.x) * 8;
         y[at] = thread_position_in_threadgroup.x + 100 * thread_position_in_threadgroup.y + 10000 * thread_position_in_threadgroup.z;
         y[at + 1] = threadgroup_position_in_grid.x + 100 * threadgroup_position_in_grid.y + 10000 * threadgroup_position_in_grid.z;
         y[at + 2] = threads_per_threadgroup.x + 100 * threads_per_threadgroup.y + 10000 * threads_per_threadgroup.z;
         y[at + 3] = dispatch_threads_per_threadgroup.x + 100 * dispatch_threads_per_threadgroup.y;
         y[at + 4] = thread_index_in_threadgroup;
         y[at + 5] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
         y[at + 6] = threadgroups_per_grid.x + 100 * threadgroups_per_grid.y + 10000 * threadgroups_per_grid.z;
         y[at + 7] = simdgroups_per_threadgroup;",
    )
    .output("y", Dtype::Uint32, [2, 5, 21, 8])
    .launch([21, 5, 2], [16, 4, 64]);
    let y = as_words(&run(&kernel, &[])[0]);
    for z in 0..2u32 {
        for py in 0..5u32 {
            for px in 0..21u32 {
                let (w, h) = (if px < 16 { 16 } else { 5 }, if py < 4 { 4 } else { 1 });
                let index = (z * h + py % 4) * w + px % 16;
                let at = (((z * 5 + py) * 21 + px) * 8) as usize;
                let expected = [
                    px % 16 + 100 * (py % 4) + 10000 * z,
                    px / 16 + 100 * (py / 4),
                    w + 100 * h + 20000,
                    16 + 400,
                    index,
                    index / 32 * 100 + index % 32,
                    2 + 200 + 10000,
                    (w * h * 2).div_ceil(32),
                ];
                assert_eq!(y[at..][..8], expected, "{px} {py} {z}");
            }
        }
    }
}

#[test]
fn shapes_scalars_and_templates() {
    let kernel = Kernel::new(
        "arguments",
        "uint i = thread_position_in_grid.x;
         uint at = elem_to_loc(i, a_shape, a_strides, a_ndim);
         y[i] = T(a[at] * factor + N) + (FLAG ? small[i % 3] : 0) + twice(a_shape[1]);",
    )
    .header("#include <metal_stdlib>\ntemplate <typename U>\ninline U twice(U x) { return 2 * x; }\nconstant float unused[2] = {1.0, 2.0};\n")
    .input("a", Dtype::Int32, [2, 3, 4])
    .input("factor", Dtype::Int32, [])
    .input("small", Dtype::Float32, [3])
    .output("y", Dtype::Float32, [24])
    .template("T", Dtype::Float32)
    .template("N", 7)
    .template("FLAG", true)
    .launch([24, 1, 1], [256, 1, 1]);
    let a: Vec<u8> = (0..24i32).flat_map(i32::to_le_bytes).collect();
    let y = as_floats(&run(&kernel, &[&a, &3i32.to_le_bytes(), &floats([0.5, 1.5, 2.5])])[0]);
    for (i, &v) in y.iter().enumerate() {
        assert_eq!(v, (i * 3 + 7) as f32 + [0.5, 1.5, 2.5][i % 3] + 6.0);
    }
}

#[test]
fn a_tree_of_barriers() {
    let kernel = Kernel::new(
        "tree",
        "threadgroup float t[256];
         uint i = thread_position_in_threadgroup.x;
         t[i] = x[thread_position_in_grid.x];
         threadgroup_barrier(mem_flags::mem_threadgroup);
         for (uint s = 128; s > 0; s >>= 1) {
           if (i < s) t[i] += t[i + s];
           threadgroup_barrier(mem_flags::mem_threadgroup);
         }
         if (i == 0) y[threadgroup_position_in_grid.x] = t[0];",
    )
    .input("x", Dtype::Float32, [1024])
    .output("y", Dtype::Float32, [4])
    .launch([1024, 1, 1], [256, 1, 1]);
    let x: Vec<f32> = (0..1024).map(|i| (i % 13) as f32).collect();
    let y = as_floats(&run(&kernel, &[&floats(x.iter().copied())])[0]);
    for (g, &v) in y.iter().enumerate() {
        assert_eq!(v, x[g * 256..][..256].iter().sum::<f32>());
    }
    let outcome = run_with(&kernel, &[&floats(x)], &RunOptions::checked());
    let cost = outcome.cost.expect("a cost");
    assert_eq!(
        (cost.threads, cost.barriers, cost.device_loads, cost.device_stores),
        (1024, 9 * 1024, 1024, 4)
    );
    assert_eq!((cost.threadgroup_stores, cost.threadgroup_bytes), (1024 + 4 * 255, 1024));
    assert_eq!(cost.threadgroup_loads, 2 * 4 * 255 + 4);
}

#[test]
fn vector_loads_count_once() {
    let kernel = Kernel::new(
        "vector_loads",
        "uint i = thread_position_in_grid.x;
         uint4 v = *(const device uint4*)(x + 4 * i);
         *(device uint2*)(y + 2 * i) = uint2(v.x + v.y, v.z + v.w);",
    )
    .input("x", Dtype::Uint32, [256])
    .output("y", Dtype::Uint32, [128])
    .launch([64, 1, 1], [64, 1, 1]);
    let outcome = run_with(&kernel, &[&words(0..256)], &RunOptions::checked());
    assert_eq!(as_words(&outcome.outputs[0])[2..4], [9, 13]);
    let cost = outcome.cost.expect("a cost");
    assert_eq!((cost.device_loads, cost.device_load_bytes), (64, 1024));
    assert_eq!((cost.device_stores, cost.device_store_bytes), (64, 512));
}

#[test]
fn arithmetic_is_counted() {
    let kernel = |n: i32| {
        Kernel::new("arithmetic", "uint i = thread_position_in_grid.x;\nfloat s = x[i];\nfor (int j = 0; j < N; j++) s = fma(s, s, 1.0);\ny[i] = s;")
            .input("x", Dtype::Float32, [64])
            .output("y", Dtype::Float32, [64])
            .template("N", n)
            .launch([64, 1, 1], [64, 1, 1])
    };
    let float = |n: i32| {
        let outcome = run_with(&kernel(n), &[&floats((0..64).map(|i| i as f32 / 64.0))], &RunOptions::cost());
        outcome.cost.and_then(|c| c.arithmetic).expect("a count").float
    };
    assert_eq!(float(300) - float(100), 64 * 200);
}

#[test]
fn atomics_and_initial_values() {
    let kernel = Kernel::new(
        "histogram",
        "uint i = thread_position_in_grid.x;
         atomic_fetch_add_explicit(&y[i % 5], 1.0f, memory_order_relaxed);
         atomic_fetch_max_explicit(&z[0], i, memory_order_relaxed);",
    )
    .output("y", Dtype::Float32, [5])
    .output("z", Dtype::Uint32, [1])
    .launch([1000, 1, 1], [64, 1, 1]);
    let kernel = Kernel { atomic_outputs: true, init_value: Some(2.0), ..kernel };
    let out = run(&kernel, &[]);
    assert_eq!(as_floats(&out[0]), [202.0; 5]);
    assert_eq!(as_words(&out[1]), [999]);
}

#[test]
fn every_order_and_number_of_threads_gives_the_same() {
    let kernel = Kernel::new("orders", "uint i = thread_position_in_grid.x;\ny[i] = simd_sum(x[i]) + i;")
        .input("x", Dtype::Float32, [1000])
        .output("y", Dtype::Float32, [1000])
        .launch([1000, 1, 1], [96, 1, 1]);
    let x = floats((0..1000).map(|i| (i % 9) as f32));
    let mut seen = Vec::new();
    for threads in [1, 3] {
        for order in [Order::Forward, Order::Reverse, Order::Random] {
            let options = RunOptions { threads: Some(threads), orders: vec![order], ..RunOptions::default() };
            seen.push(run_with(&kernel, &[&x], &options).outputs);
        }
    }
    assert!(seen.iter().all(|s| *s == seen[0]));
}

#[test]
fn empty_inputs_and_byte_outputs() {
    let kernel = Kernel::new(
        "bytes",
        "uint i = thread_position_in_grid.x;\ny[i] = uchar(i) + uchar(none_shape[0]);\nb[i] = i % 2;",
    )
    .input("none", Dtype::Float32, [0])
    .output("y", Dtype::Uint8, [37])
    .output("b", Dtype::Bool, [37])
    .launch([37, 1, 1], [37, 1, 1]);
    let out = run(&kernel, &[&[]]);
    assert_eq!(out[0], (0..37).collect::<Vec<u8>>());
    assert_eq!(out[1][..4], [0, 1, 0, 1]);
}

#[test]
fn the_dialect() {
    let kernel = Kernel::new(
        "dialect",
        "threadgroup T tile[2][BN + 8], scratch[4];
         threadgroup uint words[ROWS * 4];
         const uint lane = thread_index_in_simdgroup;
         device float* const out = y + thread_position_in_grid.x * 2;
         thread float acc[4] = {0};
         fill<T, BN>(tile[0], lane);
         fill<T, BN>(&tile[1][0], lane + 1);
         if (lane < 4) scratch[lane] = T(lane);
         for (uint i = lane; i < ROWS * 4; i += 32) words[i] = i;
         threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
         #pragma clang loop unroll(full)
         for (short i = 0; i < 4; i++) { add_to(acc[i], float(tile[i & 1][lane]) * table[i]); }
         threadgroup const uint4* wide = (threadgroup const uint4*)words;
         const uint4 q = wide[lane % ROWS];
         Pair pair{acc[0], 1};
         [[unroll]] for (int i = 0; i < 2; ++i) pair.bump();
         thread const float& alias = acc[1];
         auto square = [](float v) { return v * v; };
         switch (lane % 3) {
           case 0: out[0] = pair.sum() + q.x; break;
           case 1: out[0] = square(alias) + q.w; break;
           default: out[0] = Op<float>::apply(acc[2], acc[3]) + float(scratch[lane % 4]);
         }
         using half_pair = metal::vec<half, 2>;
         half_pair hp = half_pair(1.5h, 0.25h) * half(2);
         const device uchar* bytes = (const device uchar*)x;
         out[1] = float(hp.x + hp.y) + bytes[lane] + (1.0 / 3.0) + LIMIT + uint(numeric_limits<ushort>::max()) + e4(lane);",
    )
    .header(
        "#include <metal_stdlib>
using namespace metal;
#define LIMIT 2.5
#pragma METAL fp contract(off)
constant constexpr int ROWS = 8;
constant float table[4] = {1.0, 2.0, 0.5, .25e1};
template <typename T, int N>
METAL_FUNC void fill(threadgroup T* to, uint lane) {
  static_assert(N >= 32, \"too small\");
  for (uint i = lane; i < N + 8; i += 32) to[i] = T(i);
  if (lane == 32) to[0] = T(0);
}
inline void add_to(thread float& sum, float v) { sum += v; }
struct Pair {
  float a;
  int n;
  void bump() thread { n++; }
  float sum() const { return a + n; }
};
template <typename U> struct Op { static U apply(U a, U b) { return metal::max(a, b) - min(a, b); } };
enum Kind : ushort { kOne = 1, kTwo };
inline float e4(const uint lane) {
  float2 r = float2(1, 2).yx;
  float4 v = float4(lane) * float4(1, 2, 3, 4);
  return v.w + Kind::kTwo + r.x + dot(v.xy, v.zw) * 0;
}
",
    )
    .input("x", Dtype::Uint32, [16])
    .output("y", Dtype::Float32, [64])
    .template("T", Dtype::Bfloat16)
    .template("BN", 32)
    .launch([32, 1, 1], [32, 1, 1]);
    let y = as_floats(&run(&kernel, &[&words((0..16).map(|i| i * 0x01010101))])[0]);
    for lane in 0..32usize {
        let v = lane as f32;
        let quad = (lane % 8 * 4) as f32;
        // Row 1 of the tile was filled from one lane further on.
        let tile = [v, v];
        let acc = [tile[0], tile[1] * 2.0, tile[0] * 0.5, tile[1] * 2.5];
        let first = match lane % 3 {
            0 => acc[0] + 3.0 + quad,
            1 => acc[1] * acc[1] + quad + 3.0,
            _ => acc[3] - acc[2] + (lane % 4) as f32,
        };
        let last = 3.5 + (lane / 4) as f32 + 1.0f32 / 3.0 + 2.5 + 65535.0 + (4.0 * v + 2.0 + 2.0);
        assert_eq!(y[lane * 2], first, "lane {lane}");
        assert!((y[lane * 2 + 1] - last).abs() < 0.02, "lane {lane}: {} for {last}", y[lane * 2 + 1]);
    }
}

#[test]
fn contraction_can_be_asked_for() {
    let kernel = |header: &str, body: &str| {
        Kernel::new("contraction", format!("uint i = thread_position_in_grid.x;\n{body}"))
            .header(header)
            .input("x", Dtype::Float32, [64])
            .output("y", Dtype::Float32, [64])
            .launch([64, 1, 1], [64, 1, 1])
    };
    let x: Vec<f32> = (0..64).map(|i| 1.0 + i as f32 * 1.1e-4).collect();
    let apart: Vec<u8> = floats(x.iter().map(|&v| v * v - 1.0));
    let fused: Vec<u8> = floats(x.iter().map(|&v| v.mul_add(v, -1.0)));
    let contract = RunOptions { contract: true, ..RunOptions::default() };
    let get = |k: &Kernel, options: &RunOptions| {
        run_with(k, &[&floats(x.iter().copied())], options).outputs.remove(0)
    };
    let open = kernel("", "y[i] = x[i] * x[i] - 1.0;");
    assert!(get(&open, &RunOptions::default()) == apart);
    if cfg!(target_arch = "aarch64") || std::env::consts::ARCH == "x86_64" && fma() {
        assert!(get(&open, &contract) == fused);
    }
    assert!(
        get(&kernel("#pragma METAL fp contract(off)\n", "y[i] = x[i] * x[i] - 1.0;"), &contract) == apart
    );
    assert!(get(&kernel("", "y[i] = fma(x[i], x[i], -1.0);"), &RunOptions::default()) == fused);
}

fn fma() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}
