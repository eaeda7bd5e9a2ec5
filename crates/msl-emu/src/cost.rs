//! What a kernel costs: how often it does what, added over all threads of one run.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// Operations of one run, added over all threads.
///
/// Accesses and SIMD operations are counted as they happen in a build whose optimiser is on, so a value the
/// compiler keeps in a register is loaded once. A SIMD operation counts once for each lane.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cost {
    /// GPU threads.
    pub threads: u64,
    /// Loads from device memory (not from `constant`).
    pub device_loads: u64,
    /// Bytes of them.
    pub device_load_bytes: u64,
    /// Stores to device memory.
    pub device_stores: u64,
    /// Bytes of them.
    pub device_store_bytes: u64,
    /// Loads from `constant` memory.
    pub constant_loads: u64,
    /// Bytes of them.
    pub constant_load_bytes: u64,
    /// Loads from threadgroup memory.
    pub threadgroup_loads: u64,
    /// Bytes of them.
    pub threadgroup_load_bytes: u64,
    /// Stores to threadgroup memory.
    pub threadgroup_stores: u64,
    /// Bytes of them.
    pub threadgroup_store_bytes: u64,
    /// Atomic operations.
    pub atomics: u64,
    /// Threads through a `threadgroup_barrier`.
    pub barriers: u64,
    /// Lanes through a `simdgroup_barrier`.
    pub simdgroup_barriers: u64,
    /// Lanes through a shuffle or broadcast.
    pub simd_moves: u64,
    /// Lanes through a reduction, scan or vote.
    pub simd_reductions: u64,
    /// Lanes through a load or store of an 8 x 8 matrix.
    pub matrix_loads: u64,
    /// Lanes through an 8 x 8 x 8 matrix product.
    pub matrix_products: u64,
    /// Bytes of threadgroup memory that one threadgroup declares.
    pub threadgroup_bytes: u64,
    /// Arithmetic, where it was asked for and could be counted.
    pub arithmetic: Option<Arithmetic>,
}

/// Arithmetic of one run, counted in the host's instruction stream.
///
/// The body is compiled once more with optimisation and without vector instructions, every basic block counts
/// its executions, and the instructions of each block are read back from a disassembly. So this counts what the
/// host's compiler made of the body: address arithmetic included, constants folded, moves and calls left out,
/// `fma` one operation. Conversions to and from half and bfloat are integer operations here. It compares two
/// bodies; it is not a count of a GPU's instructions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Arithmetic {
    /// Integer additions, multiplications, shifts, logic and extensions.
    pub integer: u64,
    /// Floating-point operations, comparisons and conversions.
    pub float: u64,
    /// Integer comparisons and conditional moves.
    pub compare: u64,
    /// Jumps.
    pub branch: u64,
    /// Instructions in the body that no block counter covers, so that are left out. Static, not executed.
    pub uncounted: u64,
}

impl Cost {
    pub(crate) fn set(&mut self, name: &str, value: u64) -> bool {
        let field = match name {
            "threads" => &mut self.threads,
            "device_loads" => &mut self.device_loads,
            "device_load_bytes" => &mut self.device_load_bytes,
            "device_stores" => &mut self.device_stores,
            "device_store_bytes" => &mut self.device_store_bytes,
            "constant_loads" => &mut self.constant_loads,
            "constant_load_bytes" => &mut self.constant_load_bytes,
            "threadgroup_loads" => &mut self.threadgroup_loads,
            "threadgroup_load_bytes" => &mut self.threadgroup_load_bytes,
            "threadgroup_stores" => &mut self.threadgroup_stores,
            "threadgroup_store_bytes" => &mut self.threadgroup_store_bytes,
            "atomics" => &mut self.atomics,
            "barriers" => &mut self.barriers,
            "simdgroup_barriers" => &mut self.simdgroup_barriers,
            "simd_moves" => &mut self.simd_moves,
            "simd_reductions" => &mut self.simd_reductions,
            "matrix_loads" => &mut self.matrix_loads,
            "matrix_products" => &mut self.matrix_products,
            "threadgroup_bytes" => &mut self.threadgroup_bytes,
            _ => return false,
        };
        *field = value;
        true
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Integer,
    Float,
    Compare,
    Branch,
    Other,
}

fn classify(mnemonic: &str, operands: &str) -> Class {
    if cfg!(target_arch = "aarch64") {
        classify_aarch64(mnemonic, operands)
    } else {
        classify_x86(mnemonic, operands)
    }
}

fn classify_x86(mnemonic: &str, operands: &str) -> Class {
    // Stack-pointer arithmetic belongs to the call frame, not to the kernel; `xor r, r` sets a zero.
    if operands.ends_with("%rsp") {
        return Class::Other;
    }
    if matches!(mnemonic, "xor" | "xorl" | "pxor" | "vpxor" | "xorps" | "vxorps") {
        let mut parts = operands.split(',').map(str::trim);
        let first = parts.next();
        if first.is_some() && parts.any(|p| Some(p) == first) {
            return Class::Other;
        }
    }
    let starts = |names: &[&str]| names.iter().any(|n| mnemonic.starts_with(n));
    if mnemonic.starts_with('j') {
        return Class::Branch;
    }
    if starts(&["cmp", "test", "set", "cmov", "bt"]) && !starts(&["cmpss", "cmpps"]) {
        return Class::Compare;
    }
    if starts(&[
        "add", "sub", "imul", "mul", "div", "idiv", "shl", "shr", "sar", "sal", "rol", "ror", "and", "or",
        "xor", "not", "neg", "lea", "inc", "dec", "popcnt", "lzcnt", "tzcnt", "bsr", "bsf", "bswap", "bextr",
        "blsr", "blsi", "bls", "shrx", "shlx", "sarx", "movz", "movs", "cltq", "cltd", "cqto", "cwtl", "adc",
        "sbb", "shld", "shrd", "rorx",
    ]) && !operands.contains("%xmm")
        && !operands.contains("%ymm")
    {
        return Class::Integer;
    }
    let bare = mnemonic.strip_prefix('v').unwrap_or(mnemonic);
    let begins = |names: &[&str]| names.iter().any(|n| bare.starts_with(n));
    if begins(&[
        "add", "sub", "mul", "div", "sqrt", "min", "max", "fmadd", "fmsub", "fnmadd", "fnmsub", "cvt",
        "ucomis", "comis", "round", "and", "or", "xor", "cmp", "rcp", "rsqrt", "blend", "hadd",
    ]) && (operands.contains("%xmm") || operands.contains("%ymm"))
    {
        return Class::Float;
    }
    if begins(&[
        "padd", "psub", "pmul", "psll", "psrl", "psra", "pand", "por", "pxor", "pmin", "pmax", "psad",
    ]) {
        return Class::Integer;
    }
    Class::Other
}

fn classify_aarch64(mnemonic: &str, operands: &str) -> Class {
    let starts = |names: &[&str]| names.iter().any(|n| mnemonic.starts_with(n));
    if operands.starts_with("sp,") {
        return Class::Other;
    }
    if starts(&["b.", "cbz", "cbnz", "tbz", "tbnz"]) || mnemonic == "b" {
        return Class::Branch;
    }
    if starts(&["fmov"]) {
        return Class::Other;
    }
    if mnemonic.starts_with('f') || starts(&["scvtf", "ucvtf"]) {
        return Class::Float;
    }
    if starts(&["cmp", "cmn", "tst", "ccmp", "cset", "csel", "csinc", "csinv", "csneg"]) {
        return Class::Compare;
    }
    if starts(&[
        "add", "sub", "mul", "madd", "msub", "neg", "sdiv", "udiv", "lsl", "lsr", "asr", "ror", "and", "orr",
        "eor", "bic", "orn", "eon", "mvn", "ubf", "sbf", "bfi", "bfx", "uxt", "sxt", "extr", "rbit", "rev",
        "clz", "cnt", "umull", "smull", "umulh", "smulh", "umadd", "smadd",
    ]) {
        return Class::Integer;
    }
    Class::Other
}

/// Weighs the instructions of a counted build by the executions of their blocks. `blocks` maps the return
/// address of each block's counter, as an offset in the file, to its executions.
pub(crate) fn arithmetic(kernel: &Path, blocks: &HashMap<u64, u64>) -> Option<Arithmetic> {
    let output =
        Command::new("objdump").args(["-d", "--no-show-raw-insn", "-w"]).arg(kernel).output().ok()?;
    if !output.status.success() {
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut cost = Arithmetic::default();
    let mut executions: Option<u64> = None;
    let mut after_counter = false;
    let mut text_section = false;
    for line in text.lines() {
        if let Some(section) = line.strip_prefix("Disassembly of section ") {
            text_section = section.starts_with(".text");
            continue;
        }
        if line.ends_with(">:") {
            // A new function: nothing is known until its first counter.
            executions = None;
            continue;
        }
        let Some((address, instruction)) = line.trim_start().split_once(':') else { continue };
        let Ok(address) = u64::from_str_radix(address.trim(), 16) else { continue };
        if !text_section {
            continue;
        }
        let instruction = instruction.trim();
        if after_counter {
            executions = Some(blocks.get(&address).copied().unwrap_or(0));
            after_counter = false;
        }
        if instruction.contains("__sanitizer_cov_trace_pc") && !instruction.starts_with('j') {
            after_counter = true;
            continue;
        }
        let (mnemonic, operands) = instruction.split_once(char::is_whitespace).unwrap_or((instruction, ""));
        let class = classify(mnemonic, operands.trim());
        let Some(n) = executions else {
            cost.uncounted += u64::from(class != Class::Other);
            continue;
        };
        match class {
            Class::Integer => cost.integer += n,
            Class::Float => cost.float += n,
            Class::Compare => cost.compare += n,
            Class::Branch => cost.branch += n,
            Class::Other => {}
        }
        if matches!(mnemonic, "jmp" | "ret" | "b") {
            executions = None;
        }
    }
    Some(cost)
}
