//! AArch64 Advanced SIMD: 8 weights at a time, in two registers, because only eight windows of 3 bits start at a
//! whole byte.
//!
//! `tbl` gives each lane the four bytes of the group that its window starts in, and a shift by the lane's remaining
//! 0..=7 bits does the rest; x(s) is one `mla`. Its bytes are summed by two pairwise additions, the second onto the
//! bits of 2^23. `udot` would be one operation, but its intrinsic is not stable in Rust 1.95.
//!
//! Tested under emulation (`tests/products.rs` says how), never timed.

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use half::{bf16, f16};
use trellis_codec::format::{CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS};

use crate::simd::{Kernel, Lanes, Window};

/// Proof that the machine has Advanced SIMD.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn new() -> Option<Self> {
        is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

type Pair = [float32x4_t; 2];

#[derive(Clone, Copy)]
pub(crate) struct Code {
    /// For each lane, the four bytes of the group that its window starts in.
    bytes: [uint8x16_t; 2],
    /// For each lane, less the bit of those bytes at which its window starts: `ushl` shifts left.
    shifts: [int32x4_t; 2],
    mask: uint32x4_t,
}

impl Lanes for Neon {
    type V = Pair;
    type Code = Code;

    const LANES: usize = 8;
    const GROUPS: usize = 2;

    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "neon")]
        fn inner<K: Kernel>(lanes: Neon, kernel: K) {
            kernel.run(lanes);
        }
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { inner(self, kernel) }
    }

    #[inline(always)]
    fn code(self, bits: u32, state_bits: u32) -> Code {
        let (mut bytes, mut shifts) = ([0u8; 32], [0i32; 8]);
        for (lane, (bytes, shift)) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut shifts).enumerate() {
            let start = (7 - lane as u32) * bits;
            let byte = (start / 8) as u8;
            (*bytes, *shift) = ([byte, byte + 1, byte + 2, byte + 3], -((start % 8) as i32));
        }
        // SAFETY: `self` was made by `new`, which found the feature; the loads are of arrays of 32 bytes.
        unsafe {
            Code {
                bytes: [vld1q_u8(bytes.as_ptr()), vld1q_u8(bytes[16..].as_ptr())],
                shifts: [vld1q_s32(shifts.as_ptr()), vld1q_s32(shifts[4..].as_ptr())],
                mask: vdupq_n_u32((1 << state_bits) - 1),
            }
        }
    }

    #[inline(always)]
    fn group<const K: u32>(self, code: &Code, window: Window) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe {
            let ring = vreinterpretq_u8_u64(vdupq_n_u64(window[0]));
            let mut y = [vdupq_n_f32(0.0); 2];
            for i in 0..2 {
                let bytes = vreinterpretq_u32_u8(vqtbl1q_u8(ring, code.bytes[i]));
                let state = vandq_u32(vshlq_u32(bytes, code.shifts[i]), code.mask);
                let x = vmlaq_u32(vdupq_n_u32(CODE_INCREMENT), state, vdupq_n_u32(CODE_MULTIPLIER));
                let pairs = vpaddlq_u8(vreinterpretq_u8_u32(x));
                let lifted = vpadalq_u16(vdupq_n_u32(FLOAT_LIFT_BITS), pairs);
                y[i] = vsubq_f32(vreinterpretq_f32_u32(lifted), vdupq_n_f32(FLOAT_LIFT_BIAS));
            }
            y
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { [vdupq_n_f32(value); 2] }
    }

    /// Nothing: the intrinsic is not stable.
    #[inline(always)]
    fn prefetch(self, _: &[u32]) {}

    #[inline(always)]
    fn load(self, from: &[f32]) -> Pair {
        let from = &from[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the feature; the slice has 8 elements.
        unsafe { [vld1q_f32(from.as_ptr()), vld1q_f32(from[4..].as_ptr())] }
    }

    #[inline(always)]
    fn store(self, v: Pair, to: &mut [f32]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the feature; the slice has 8 elements.
        unsafe {
            vst1q_f32(to.as_mut_ptr(), v[0]);
            vst1q_f32(to[4..].as_mut_ptr(), v[1]);
        }
    }

    #[inline(always)]
    fn store_f16(self, v: Pair, to: &mut [f16]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the feature; the slice has 8 elements of 2 bytes.
        unsafe {
            let low = vreinterpret_u16_f16(vcvt_f16_f32(v[0]));
            let high = vreinterpret_u16_f16(vcvt_f16_f32(v[1]));
            vst1q_u16(to.as_mut_ptr().cast(), vcombine_u16(low, high));
        }
    }

    #[inline(always)]
    fn store_bf16(self, v: Pair, to: &mut [bf16]) {
        let to = &mut to[..Self::LANES];
        let [low, high] = self.round_bf16(v);
        // SAFETY: `self` was made by `new`, which found the feature; the slice has 8 elements of 2 bytes.
        unsafe {
            let low = vshrn_n_u32::<16>(vreinterpretq_u32_f32(low));
            let high = vshrn_n_u32::<16>(vreinterpretq_u32_f32(high));
            vst1q_u16(to.as_mut_ptr().cast(), vcombine_u16(low, high));
        }
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    fn fnma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { [vfmsq_f32(c[0], a[0], b[0]), vfmsq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    fn round_f16(self, v: Pair) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe { [vcvt_f32_f16(vcvt_f16_f32(v[0])), vcvt_f32_f16(vcvt_f16_f32(v[1]))] }
    }

    #[inline(always)]
    fn round_bf16(self, v: Pair) -> Pair {
        // SAFETY: `self` was made by `new`, which found the feature.
        unsafe {
            let mut rounded = v;
            for v in &mut rounded {
                let bits = vreinterpretq_u32_f32(*v);
                let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                let half = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
                let kept = vdupq_n_u32(!0xFFFF);
                *v = vreinterpretq_f32_u32(vandq_u32(vaddq_u32(bits, half), kept));
            }
            rounded
        }
    }
}
