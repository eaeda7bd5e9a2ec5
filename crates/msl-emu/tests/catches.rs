//! Every rule has a kernel here that breaks it.

use msl_emu::{Access, Dtype, EmuError, Emulator, Fault, FaultKind, Kernel, Order, Part, RunOptions};

fn emulator() -> Emulator {
    Emulator::new(None).expect("a C++ compiler")
}

fn fast() -> RunOptions {
    RunOptions::default()
}

fn checked() -> RunOptions {
    RunOptions::checked()
}

/// One float in, one float out, 64 elements, two threadgroups of 32.
fn kernel(name: &str, body: &str) -> Kernel {
    Kernel::new(name, body)
        .input("x", Dtype::Float32, [64])
        .output("y", Dtype::Float32, [64])
        .launch([64, 1, 1], [32, 1, 1])
}

fn run(kernel: &Kernel, options: &RunOptions) -> Result<Vec<f32>, EmuError> {
    let inputs: Vec<Vec<u8>> = kernel
        .inputs
        .iter()
        .map(|input| match input.dtype {
            Dtype::Float32 => (0..input.len()).flat_map(|i| (i as f32).to_le_bytes()).collect(),
            _ => vec![0; input.bytes()],
        })
        .collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let outcome = emulator().run(kernel, &inputs, options)?;
    Ok(outcome.outputs[0].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn fault(kernel: &Kernel, options: &RunOptions) -> Fault {
    match run(kernel, options) {
        Err(EmuError::Fault(fault)) => {
            println!("{fault}");
            *fault
        }
        Err(error) => panic!("not a fault: {error}"),
        Ok(_) => panic!("nothing was caught"),
    }
}

fn line(fault: &Fault) -> (Part, u32) {
    let location = fault.location.as_ref().expect("a location");
    (location.part, location.line)
}

#[test]
fn read_past_the_end() {
    let k = kernel("read_past", "uint i = thread_position_in_grid.x;\ny[i] = x[i + 1];");
    let f = fault(&k, &fast());
    let FaultKind::OutOfBounds { access, element } = &f.kind else { panic!("{f}") };
    assert_eq!((*access, element.buffer.as_str(), element.index, element.len), (Access::Read, "x", 64, 64));
    assert_eq!((f.thread, f.threadgroup, line(&f)), (Some([63, 0, 0]), Some([1, 0, 0]), (Part::Body, 2)));
    let f = fault(&k, &checked());
    assert!(matches!(&f.kind, FaultKind::OutOfBounds { element, .. } if element.index == 64), "{f}");
    assert_eq!((f.thread, line(&f)), (Some([63, 0, 0]), (Part::Body, 2)));
}

#[test]
fn read_before_the_start() {
    let k = kernel("read_before", "uint i = thread_position_in_grid.x;\ny[i] = x[int(i) - 1];");
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        assert!(matches!(&f.kind, FaultKind::OutOfBounds { element, .. } if element.index == -1), "{f}");
    }
}

#[test]
fn wrapped_index() {
    let f = fault(&kernel("wrapped", "uint i = thread_position_in_grid.x;\ny[i] = x[i - 32];"), &fast());
    let FaultKind::OutOfBounds { element, .. } = &f.kind else { panic!("{f}") };
    assert_eq!((element.buffer.as_str(), element.index), ("x", (1i64 << 32) - 32));
}

#[test]
fn write_past_the_end() {
    let k = kernel("write_past", "uint i = thread_position_in_grid.x;\ny[i] = 1;\nif (i == 5) y[64] = 1;");
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::OutOfBounds { access, element } = &f.kind else { panic!("{f}") };
        assert_eq!((*access, element.buffer.as_str(), element.index), (Access::Write, "y", 64));
        assert_eq!((f.thread, line(&f)), (Some([5, 0, 0]), (Part::Body, 3)));
    }
}

#[test]
fn write_just_past_an_odd_size() {
    // 63 floats leave four bytes up to the guarded page: seen after the run in fast mode.
    let mut k = kernel("write_odd", "uint i = thread_position_in_grid.x;\ny[i] = 1;");
    k.outputs[0].shape = vec![63];
    for mut options in [fast(), checked()] {
        options.orders = vec![Order::Forward];
        let f = fault(&k, &options);
        assert!(matches!(&f.kind, FaultKind::OutOfBounds { element, .. } if element.index == 63), "{f}");
    }
}

#[test]
fn small_inputs_are_bounded() {
    let mut k = kernel("small_input", "uint i = thread_position_in_grid.x;\ny[i] = x[i % 8] + x_shape[1];");
    k.inputs[0].shape = vec![7];
    let f = fault(&k, &checked());
    assert!(
        matches!(&f.kind, FaultKind::OutOfBounds { element, .. } if element.index == 7 || element.buffer == "x_shape"),
        "{f}"
    );
}

#[test]
fn unwritten_output() {
    let k = kernel("unwritten", "uint i = thread_position_in_grid.x;\nif (i % 10 != 7) y[i] = x[i];");
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::Unwritten { element, count } = &f.kind else { panic!("{f}") };
        assert_eq!((element.buffer.as_str(), element.index, *count), ("y", 7, 6));
    }
    let mut k = k;
    k.init_value = Some(2.5);
    for options in [fast(), checked()] {
        let y = run(&k, &options).expect("an initialised output");
        assert_eq!((y[6], y[7], y[8]), (6.0, 2.5, 8.0));
    }
}

#[test]
fn barrier_under_divergence() {
    let k = kernel(
        "divergent_barrier",
        "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[32];\nt[i] = x[i];\n\
         if (i < 20)\n  threadgroup_barrier(mem_flags::mem_threadgroup);\ny[thread_position_in_grid.x] = t[i];",
    );
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::Divergence(a, b) = &f.kind else { panic!("{f}") };
        assert_eq!((a.at.as_str(), b.at.as_str()), ("threadgroup_barrier", "the end of the body"));
        assert_eq!(line(&f), (Part::Body, 5));
    }
}

#[test]
fn two_barriers_are_not_one() {
    let k = kernel(
        "two_barriers",
        "uint i = thread_position_in_grid.x;\nif (i % 2)\n  threadgroup_barrier(mem_flags::mem_none);\nelse\n  \
         threadgroup_barrier(mem_flags::mem_none);\ny[i] = x[i];",
    );
    let f = fault(&k, &fast());
    let FaultKind::Divergence(a, b) = &f.kind else { panic!("{f}") };
    let lines = [a, b].map(|l| l.location.as_ref().map(|l| l.line));
    assert!(lines == [Some(3), Some(5)] || lines == [Some(5), Some(3)], "{f}");
}

#[test]
fn early_return_before_a_barrier() {
    let k = kernel(
        "early_return",
        "uint i = thread_position_in_grid.x;\nif (i % 32 >= 16) { y[i] = 0; return; }\n\
         threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = 1;",
    );
    let f = fault(&k, &fast());
    let FaultKind::Divergence(_, b) = &f.kind else { panic!("{f}") };
    assert_eq!(b.at, "an early return");
    let allowed = RunOptions { allow_early_return: true, ..fast() };
    let y = run(&k, &allowed).expect("allowed");
    assert_eq!((y[15], y[16], y[47]), (1.0, 0.0, 1.0));
}

#[test]
fn simd_operation_under_divergence() {
    let k = kernel(
        "divergent_simd",
        "uint i = thread_position_in_grid.x;\nfloat s = 0;\nif (thread_index_in_simdgroup < 16)\n  s = simd_sum(x[i]);\ny[i] = s;",
    );
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::Divergence(a, b) = &f.kind else { panic!("{f}") };
        assert_eq!((a.at.as_str(), b.at.as_str()), ("simd_sum", "the end of the body"));
        assert_eq!(line(&f), (Part::Body, 4));
    }
}

#[test]
fn simd_operation_against_a_barrier() {
    let k = kernel(
        "simd_against_barrier",
        "uint i = thread_position_in_grid.x;\nfloat s = 0;\nif (i % 2 == 0)\n  s = simd_sum(x[i]);\n\
         threadgroup_barrier(mem_flags::mem_none);\ny[i] = s;",
    );
    let f = fault(&k, &fast());
    let FaultKind::Divergence(a, b) = &f.kind else { panic!("{f}") };
    assert_eq!((a.at.as_str(), b.at.as_str()), ("simd_sum", "threadgroup_barrier"));
}

#[test]
fn lanes_outside_the_simd_group() {
    let k = kernel(
        "bad_lane",
        "uint i = thread_position_in_grid.x;\ny[i] = simd_shuffle(x[i], ushort(thread_index_in_simdgroup + 8));",
    );
    let f = fault(&k, &fast());
    let FaultKind::BadLane { op, lane, named } = &f.kind else { panic!("{f}") };
    assert_eq!((op.as_str(), *lane, *named, line(&f)), ("simd_shuffle", 24, 32, (Part::Body, 2)));
    // A short SIMD group: lane 20 of the second threadgroup's only one is not there.
    let mut k = kernel("absent_lane", "uint i = thread_position_in_grid.x;\ny[i] = simd_shuffle(x[i], 20);");
    k.grid = [40, 1, 1];
    k.outputs[0].shape = vec![40];
    let f = fault(&k, &fast());
    assert!(matches!(&f.kind, FaultKind::BadLane { lane: 0, named: 20, .. }), "{f}");
}

#[test]
fn shuffle_delta_must_be_uniform() {
    let k = kernel(
        "uneven_delta",
        "uint i = thread_position_in_grid.x;\ny[i] = simd_shuffle_xor(x[i], ushort(i % 4));",
    );
    assert!(matches!(fault(&k, &fast()).kind, FaultKind::NotUniform { .. }));
}

#[test]
fn unset_threadgroup_memory() {
    let k = kernel(
        "unset_threadgroup",
        "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[33];\nt[i] = x[i];\n\
         threadgroup_barrier(mem_flags::mem_threadgroup);\ny[thread_position_in_grid.x] = t[i + 1];",
    );
    // Fast mode sees other bits under other poison, and then looks closer.
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::UninitialisedThreadgroup { variable, byte } = &f.kind else { panic!("{f}") };
        assert_eq!((variable.as_str(), *byte, line(&f)), ("t", 128, (Part::Body, 5)));
    }
}

#[test]
fn threadgroup_index_out_of_bounds() {
    let k = kernel(
        "threadgroup_past",
        "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[32];\nthreadgroup float* p = t;\n\
         p[i + 1] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\ny[thread_position_in_grid.x] = x[i];",
    );
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::ThreadgroupOutOfBounds { variable, access, byte, .. } = &f.kind else { panic!("{f}") };
        assert_eq!((variable.as_str(), *access, *byte, line(&f)), ("t", Access::Write, 128, (Part::Body, 4)));
    }
}

#[test]
fn write_to_an_input() {
    let k = kernel(
        "input_write",
        "uint i = thread_position_in_grid.x;\ny[i] = x[i];\n((device float*)x)[i] = 1;",
    );
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::InputWrite(element) = &f.kind else { panic!("{f}") };
        assert_eq!((element.buffer.as_str(), line(&f)), ("x", (Part::Body, 3)));
    }
    assert!(matches!(run(&kernel("const_input", "x[0] = 1;"), &fast()), Err(EmuError::Compile { .. })));
}

#[test]
fn missing_barrier_is_a_race() {
    let k = kernel(
        "race",
        "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[64];\nt[i] = x[i];\n\
         y[thread_position_in_grid.x] = t[63 - i];",
    )
    .launch([64, 1, 1], [64, 1, 1]);
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        // In some orders a read comes before the write it races with: then memory is unset.
        assert!(
            matches!(&f.kind, FaultKind::Race { variable, .. } | FaultKind::UninitialisedThreadgroup { variable, .. } if variable == "t"),
            "{f}"
        );
    }
}

#[test]
fn race_names_both_lines() {
    let k = kernel(
        "race_lines",
        "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[64];\nt[i] = x[i];\n\
         threadgroup_barrier(mem_flags::mem_threadgroup);\nfloat s = t[63 - i];\nt[i] = s + 1;\n\
         threadgroup_barrier(mem_flags::mem_threadgroup);\ny[thread_position_in_grid.x] = t[i];",
    )
    .launch([64, 1, 1], [64, 1, 1]);
    for options in [fast(), checked()] {
        let f = fault(&k, &options);
        let FaultKind::Race { other_location, .. } = &f.kind else { panic!("{f}") };
        let mut lines = [line(&f).1, other_location.as_ref().expect("the other line").line];
        lines.sort_unstable();
        assert_eq!(lines, [5, 6]);
    }
}

#[test]
fn barrier_without_the_memory_flag_orders_nothing() {
    let body = |flags: &str| {
        format!(
            "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[64];\nt[i] = x[i];\n\
             threadgroup_barrier(mem_flags::{flags});\ny[thread_position_in_grid.x] = t[63 - i];"
        )
    };
    let k = |flags: &str| kernel(flags, &body(flags)).launch([64, 1, 1], [64, 1, 1]);
    assert!(matches!(fault(&k("mem_device"), &checked()).kind, FaultKind::Race { .. }));
    run(&k("mem_threadgroup"), &checked()).expect("a barrier that orders");
}

#[test]
fn simdgroup_barrier_orders_its_own_group_only() {
    let body = "uint i = thread_position_in_threadgroup.x;\nthreadgroup float t[64];\nt[i] = x[i];\n\
                simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = t[i ^ FAR];";
    let k = |far: i32| kernel("simdgroup_barrier", body).template("FAR", far).launch([64, 1, 1], [64, 1, 1]);
    run(&k(1), &checked()).expect("neighbours in one SIMD group");
    assert!(matches!(
        fault(&k(32), &checked()).kind,
        FaultKind::Race { .. } | FaultKind::UninitialisedThreadgroup { .. }
    ));
}

#[test]
fn double_write() {
    let k = kernel("double_write", "uint i = thread_position_in_grid.x;\ny[i] = 1;\nif (i == 3) y[40] = 1;");
    let f = fault(&k, &checked());
    let FaultKind::DoubleWrite { element, .. } = &f.kind else { panic!("{f}") };
    assert_eq!(element.index, 40);
    // Other values by other threads: fast mode sees it too.
    let k = kernel(
        "double_write_differs",
        "uint i = thread_position_in_grid.x;\ny[i] = i;\nif (i == 3) y[40] = 1;",
    );
    assert!(matches!(fault(&k, &fast()).kind, FaultKind::DoubleWrite { .. }));
}

#[test]
fn reads_of_outputs() {
    let k = kernel("unset_output", "uint i = thread_position_in_grid.x;\ny[i] = y[i] + 1;");
    assert!(matches!(fault(&k, &checked()).kind, FaultKind::UninitialisedOutput(_)));
    let k = kernel("own_output", "uint i = thread_position_in_grid.x;\ny[i] = 1;\ny[i] += 1;");
    assert_eq!(run(&k, &checked()).expect("a thread's own element")[3], 2.0);
    let body = |flags: &str| {
        format!(
            "uint i = thread_position_in_grid.x;\ny[i] = i;\nthreadgroup_barrier(mem_flags::{flags});\n\
             float s = y[i ^ 1];\nthreadgroup_barrier(mem_flags::{flags});\ny[i] = s;"
        )
    };
    assert!(matches!(
        fault(&kernel("output_race", &body("mem_threadgroup")), &checked()).kind,
        FaultKind::OutputRace { .. }
    ));
    assert_eq!(run(&kernel("output_fenced", &body("mem_device")), &checked()).expect("fenced")[4], 5.0);
}

#[test]
fn misaligned_vector() {
    let k = kernel(
        "misaligned",
        "uint i = thread_position_in_grid.x;\nfloat2 v = *(const device float2*)(x + (i % 32));\ny[i] = v.x + v.y;",
    );
    let f = fault(&k, &checked());
    assert!(matches!(&f.kind, FaultKind::Misaligned { size: 8, byte: 4, .. }), "{f}");
}

#[test]
fn indices_shifts_and_divisions() {
    let k = kernel(
        "local_index",
        "uint i = thread_position_in_grid.x;\nfloat a[4] = {x[i], 2, 3, 4};\ny[i] = a[i % 5];",
    );
    let f = fault(&k, &checked());
    assert_eq!((f.kind.clone(), line(&f)), (FaultKind::ArrayIndex { index: 4 }, (Part::Body, 3)));
    let k = kernel("shift", "uint i = thread_position_in_grid.x;\ny[i] = 1u << (32 - i % 32);");
    assert_eq!(fault(&k, &checked()).kind, FaultKind::Shift { by: 32 });
    let k = kernel("division", "uint i = thread_position_in_grid.x;\ny[i] = 7 / int(x[i]);");
    for options in [fast(), checked()] {
        assert_eq!(fault(&k, &options).kind, FaultKind::Division);
    }
}

#[test]
fn endless_loop_and_deep_stack() {
    let k = kernel(
        "endless",
        "uint i = thread_position_in_grid.x;\nfloat s = x[i];\nwhile (s >= 0) s = s * 0.5f + 1;\ny[i] = s;",
    );
    let f = fault(&k, &RunOptions { timeout: 1, ..fast() });
    assert_eq!(f.kind, FaultKind::Timeout { seconds: 1 });
    let k = kernel(
        "deep",
        "uint i = thread_position_in_grid.x;\nfloat a[20000];\nfor (int j = 0; j < 20000; j++) a[j] = x[(i + j) % 64];\n\
         float s = 0;\nfor (int j = 0; j < 20000; j++) s += a[(j * 7 + i) % 20000];\ny[i] = s;",
    );
    let f = fault(&k, &fast());
    assert!(matches!(f.kind, FaultKind::StackOverflow { .. } | FaultKind::WildAccess { .. }), "{f}");
    run(&k, &RunOptions { stack: 1 << 18, ..fast() }).expect("enough stack");
}

#[test]
fn order_dependence_without_memory_of_its_own() {
    // An atomic counter hands out numbers: legal, but the numbers depend on the order.
    let k = kernel(
        "ticket",
        "uint i = thread_position_in_grid.x;\nthreadgroup atomic_uint next[1];\n\
         if (i % 32 == 0) atomic_store_explicit(&next[0], 0u, memory_order_relaxed);\n\
         threadgroup_barrier(mem_flags::mem_threadgroup);\n\
         y[i] = atomic_fetch_add_explicit(&next[0], 1u, memory_order_relaxed);",
    );
    let f = fault(&k, &fast());
    assert!(matches!(f.kind, FaultKind::Unstable { .. }), "{f}");
}

#[test]
fn compile_errors_name_the_body_line() {
    let k = kernel("typo", "uint i = thread_position_in_grid.x;\ny[i] = xx[i];");
    let Err(EmuError::Compile { kernel, message }) = run(&k, &fast()) else { panic!("compiled") };
    assert_eq!(kernel, "typo");
    assert!(message.contains("body line 2:"), "{message}");
    let mut k = k;
    k.header = "\nfloat f() { return 1 }\n".to_owned();
    let Err(EmuError::Compile { message, .. }) = run(&k, &fast()) else { panic!("compiled") };
    assert!(message.contains("header line 2:"), "{message}");
}

#[test]
fn what_is_no_kernel_is_refused() {
    let reason = |k: &Kernel| match run(k, &fast()) {
        Err(EmuError::Invalid { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let good = kernel("good", "y[thread_position_in_grid.x] = 1;");
    assert!(reason(&good.clone().template("N", -1)).contains("cannot compile"));
    assert!(reason(&good.clone().launch([0, 1, 1], [1, 1, 1])).contains("empty grid"));
    assert!(reason(&good.clone().launch([4096, 1, 1], [2048, 1, 1])).contains("at most 1024"));
    let short = emulator().run(&good, &[&[0; 4]], &fast());
    assert!(matches!(short, Err(EmuError::Invalid { .. })));
    let big = kernel(
        "too_much",
        "threadgroup float t[8193];\nt[thread_position_in_grid.x] = 1;\ny[thread_position_in_grid.x] = 1;",
    );
    assert!(reason(&big).contains("32772 bytes of threadgroup memory"));
    let missing = Emulator::with_compiler(None, Some("/nonexistent/c++".as_ref()));
    assert!(matches!(missing, Err(EmuError::NoCompiler { .. })));
}

#[test]
fn constant_inputs_are_not_device_pointers() {
    let k = |n: usize, space: &str| {
        let mut k = kernel(
            "spaces",
            "uint i = thread_position_in_grid.x;\ny[i] = get(x, i % 4) + x[0] + min(x[1], 2.0) + x_shape[0];",
        )
        .header(format!("inline float get(const {space} float* p, uint i) {{ return p[i]; }}\n"));
        k.inputs[0].shape = vec![n];
        k
    };
    run(&k(64, "device"), &fast()).expect("a large input");
    run(&k(7, "constant"), &fast()).expect("a small input where it may go");
    let Err(EmuError::Compile { message, .. }) = run(&k(7, "device"), &fast()) else { panic!("compiled") };
    assert!(message.contains("address space") && message.contains("body line 2:"), "{message}");
}
