//! The headers in front of every Metal and every CUDA body, written from `trellis-codec`'s constants: no number of the
//! format appears in a body. What follows is about Metal; the functions of CUDA bodies are in `decode.cuh`.
//!
//! Contraction is off, and a product that must round stands in a statement of its own all the same; where the format
//! says fma, the text says `fma`. Loops over a lane's sums are unrolled whole, which keeps the sums in registers and
//! makes a window's offset a constant. Inputs never reach a function: one of fewer than 8 elements is in the `constant`
//! address space, so bodies index them by name.

use std::fmt::Write as _;
use std::sync::LazyLock;

use trellis_codec::codebook::CODE_RECIPROCAL;
use trellis_codec::format::{
    CODE_BIAS, CODE_DIVISOR, CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS, WORD_BITS,
};

use crate::{SIMD_LANES, Variant};

/// Forbids `a * b + c` to become an fma; the header's first line.
pub(crate) const PRAGMA: &str = "#pragma METAL fp contract(off)";

static HEADER: LazyLock<String> = LazyLock::new(write);

/// The header: constants `TRELLIS_*` and functions `trellis_*`.
pub fn header() -> &'static str {
    &HEADER
}

static CUDA_HEADER: LazyLock<String> = LazyLock::new(write_cuda);

/// The header of CUDA bodies: macros `TRELLIS_*` and the namespace `trellis`. MLX puts it after its own includes, which
/// bring the half types, and in front of the kernel's signature.
pub fn cuda_header() -> &'static str {
    &CUDA_HEADER
}

/// [`cuda_header`], with the kernel that follows bounded to `threads` a block and `blocks` blocks a multiprocessor. MLX
/// writes the signature itself and has no place for launch bounds, so they ride on the keyword that it begins with.
pub(crate) fn cuda_bounded_header(threads: usize, blocks: usize) -> String {
    format!(
        "{}\n#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})\n",
        cuda_header()
    )
}

fn write_cuda() -> String {
    let mut text = String::new();
    for (name, value) in [
        ("MULTIPLIER", format!("{CODE_MULTIPLIER}u")),
        ("INCREMENT", format!("{CODE_INCREMENT}u")),
        ("BIAS", CODE_BIAS.to_string()),
        ("DIVISOR", format!("{CODE_DIVISOR:?}f")),
        ("LIFT_BITS", format!("{FLOAT_LIFT_BITS}u")),
        ("LIFT_BIAS", format!("{FLOAT_LIFT_BIAS:?}f")),
    ] {
        let _ = writeln!(text, "#define TRELLIS_{name} {value}");
    }
    text + include_str!("decode.cuh")
}

fn write() -> String {
    let mut text = format!("{PRAGMA}\n");
    // `{:?}` gives the shortest decimal that reads back as the same binary32.
    for (kind, name, value) in [
        ("uint", "MULTIPLIER", format!("{CODE_MULTIPLIER}u")),
        ("uint", "INCREMENT", format!("{CODE_INCREMENT}u")),
        ("int", "BIAS", CODE_BIAS.to_string()),
        ("float", "DIVISOR", format!("{CODE_DIVISOR:?}f")),
        ("float", "RECIPROCAL", format!("{CODE_RECIPROCAL:?}f")),
        ("uint", "LIFT_BITS", format!("{FLOAT_LIFT_BITS}u")),
        ("float", "LIFT_BIAS", format!("{FLOAT_LIFT_BIAS:?}f")),
        ("uint", "EVEN_BYTES", "0x00ff00ffu".to_owned()),
        ("int", "WORD_BITS", WORD_BITS.to_string()),
        ("int", "LANES", SIMD_LANES.to_string()),
        ("int", "EXACT", Variant::EXACT.to_string()),
        ("int", "REFINED", Variant::REFINED.to_string()),
        ("int", "LOCAL_TABLE", Variant::LOCAL_TABLE.to_string()),
        ("int", "DEVICE_TABLE", Variant::DEVICE_TABLE.to_string()),
        ("int", "STATE", Variant::STATE.to_string()),
        ("int", "REFINED_WIDE", Variant::REFINED_WIDE.to_string()),
        ("int", "SHARED_SCATTER", Variant::SHARED_SCATTER.to_string()),
    ] {
        let _ = writeln!(text, "constant constexpr {kind} TRELLIS_{name} = {value};");
    }
    text.push_str("#define TRELLIS_UNROLL _Pragma(\"clang loop unroll(full)\")\n");
    text + FUNCTIONS
}

const FUNCTIONS: &str = "
// The sum of the four bytes that the code's congruence gives a state: y + TRELLIS_BIAS.
inline uint trellis_byte_sum(uint state) {
  const uint code = state * TRELLIS_MULTIPLIER + TRELLIS_INCREMENT;
  const uint pairs = (code & TRELLIS_EVEN_BYTES) + ((code >> 8) & TRELLIS_EVEN_BYTES);
  return (pairs & 0xffffu) + (pairs >> 16);
}

inline int trellis_y(uint state) {
  return int(trellis_byte_sum(state)) - TRELLIS_BIAS;
}

// y as a float; BITS_Y goes through the bits of 2^23 + y + bias and has the same result.
template <int BITS_Y>
inline float trellis_float_y(uint state) {
  if (BITS_Y) {
    return as_type<float>(TRELLIS_LIFT_BITS | trellis_byte_sum(state)) - TRELLIS_LIFT_BIAS;
  }
  return float(trellis_y(state));
}

inline float trellis_unrefined(float y) {
  return y * TRELLIS_RECIPROCAL;
}

// Equals y / d correctly rounded for every y of the code.
inline float trellis_refined(float y) {
  const float quotient = y * TRELLIS_RECIPROCAL;
  return fma(fma(-quotient, TRELLIS_DIVISOR, y), TRELLIS_RECIPROCAL, quotient);
}

// A state's value in a variant without a table.
template <int VARIANT, int BITS_Y>
inline float trellis_value(uint state) {
  if (VARIANT == TRELLIS_STATE) {
    return float(state);
  }
  const float y = trellis_float_y<BITS_Y>(state);
  if (VARIANT == TRELLIS_EXACT) {
    return precise::divide(y, TRELLIS_DIVISOR);
  }
  if (VARIANT == TRELLIS_REFINED || VARIANT == TRELLIS_REFINED_WIDE) {
    return trellis_refined(y);
  }
  return trellis_unrefined(y);
}

// The scaled weight, rounded to bfloat16 in the variants up to the device table.
template <int VARIANT>
inline float trellis_weight(float value, float scale) {
  const float weight = value * scale;
  if (VARIANT <= TRELLIS_DEVICE_TABLE) {
    return float(bfloat16_t(weight));
  }
  return weight;
}

// Contract E: the exact value times the scale, rounded to T.
template <typename T>
inline T trellis_expanded(uint state, float scale) {
  const float weight = trellis_refined(trellis_float_y<0>(state)) * scale;
  return T(weight);
}

// Index of a block's first word; SIDE blocks of a row lie side by side, then those of the next row.
template <int SIDE, int WPB>
inline ulong trellis_block(uint rows, uint row, uint block) {
  return ((ulong(block / SIDE) * rows + row) * SIDE + block % SIDE) * WPB;
}

// 64 bits of a ring from bit `shift` of its word `low` on; `high` is the next word.
inline uint2 trellis_ring(uint low, uint high, uint shift) {
  const ulong bits = ((ulong(high) << TRELLIS_WORD_BITS) | low) >> shift;
  return uint2(uint(bits), uint(bits >> TRELLIS_WORD_BITS));
}

// The L-bit window at an offset below TRELLIS_WORD_BITS that is known when compiled: 32-bit shifts are enough.
template <int L>
inline uint trellis_window(uint2 ring, int offset) {
  uint bits = ring.x >> offset;
  if (offset + L > TRELLIS_WORD_BITS) {
    bits |= ring.y << (TRELLIS_WORD_BITS - offset);
  }
  return bits & ((1u << L) - 1);
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_constants_of_cuda_read_back() {
        for (name, value) in [("DIVISOR", CODE_DIVISOR), ("LIFT_BIAS", FLOAT_LIFT_BIAS)] {
            let start = format!("#define TRELLIS_{name} ");
            let line = cuda_header().lines().find(|l| l.starts_with(&start)).expect("a constant");
            let literal = line[start.len()..].strip_suffix('f').expect("a float literal");
            assert_eq!(literal.parse::<f32>().map(f32::to_bits), Ok(value.to_bits()), "{line}");
        }
    }

    #[test]
    fn float_constants_read_back() {
        for (name, value) in
            [("DIVISOR", CODE_DIVISOR), ("RECIPROCAL", CODE_RECIPROCAL), ("LIFT_BIAS", FLOAT_LIFT_BIAS)]
        {
            let line =
                header().lines().find(|l| l.contains(&format!("TRELLIS_{name} ="))).expect("a constant");
            let literal =
                line.rsplit(' ').next().and_then(|l| l.strip_suffix("f;")).expect("a float literal");
            assert_eq!(literal.parse::<f32>().map(f32::to_bits), Ok(value.to_bits()), "{line}");
        }
    }
}
