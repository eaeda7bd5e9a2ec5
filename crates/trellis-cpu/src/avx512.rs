//! AVX-512: 16 weights at a time, ten vector operations each 16 for contract P at m = 1 (five cycles on a core
//! with two 512-bit ports).
//!
//! `vpbroadcastq` puts the group's 8 bytes in every lane at the cost of a load alone, and one `vpmultishiftqb` with
//! a constant control moves each lane's window to its low bits. `vpdpbusd` with ones, started at the bits of 2^23,
//! sums the bytes of x(s) to the float 2^23 + y + 510. Rejected: 16-bit multiplies in place of `vpmulld`, which come
//! to the same number of operations.

use std::arch::x86_64::*;
use std::hint::black_box;

use half::{bf16, f16};
use trellis_codec::format::{CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS, MAX_BITS};

use crate::simd::{Kernel, Lanes, Window};

/// Proof that the machine has AVX-512 F, BW, VBMI and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vnni"))
        .then_some(Self(()))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Code {
    /// For each byte of a lane, the bit of the lane's 8 bytes at which it starts.
    control: __m512i,
    mask: __m512i,
    /// The lanes that a wide group's second half goes to. Opaque, so that they are written by a masked broadcast
    /// from memory; knowing them, the compiler assembles two halves with a shuffle.
    upper: __mmask8,
}

impl Lanes for Avx512 {
    type V = __m512;
    type Code = Code;

    const LANES: usize = 16;
    const GROUPS: usize = 4;

    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vnni")]
        fn inner<K: Kernel>(lanes: Avx512, kernel: K) {
            kernel.run(lanes);
        }
        // SAFETY: `self` was made by `new`, which found these features.
        unsafe { inner(self, kernel) }
    }

    #[inline(always)]
    fn code(self, bits: u32, state_bits: u32) -> Code {
        let mut control = [0u8; 64];
        for (lane, control) in control.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // A wide group's first eight lanes use the window's second half, which starts eight weights on.
            let skipped = if bits == MAX_BITS && lane < 8 { 8 * bits } else { 0 };
            let start = ((15 - lane as u32) * bits - skipped) as u8;
            *control = [start, start + 8, start, start + 8];
        }
        // SAFETY: `self` was made by `new`, which found the features; the load is of an array of 64 bytes.
        unsafe {
            Code {
                control: _mm512_loadu_si512(control.as_ptr().cast()),
                mask: _mm512_set1_epi32((1 << state_bits) - 1),
                upper: black_box(0x0F),
            }
        }
    }

    #[inline(always)]
    fn group<const K: u32>(self, code: &Code, window: Window) -> __m512 {
        let [low, high] = window.map(u64::cast_signed);
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe {
            let mut ring = _mm512_set1_epi64(low);
            if K == MAX_BITS {
                ring = _mm512_mask_set1_epi64(ring, code.upper, high);
            }
            let state = _mm512_and_si512(_mm512_multishift_epi64_epi8(code.control, ring), code.mask);
            let x = _mm512_add_epi32(
                _mm512_mullo_epi32(state, _mm512_set1_epi32(CODE_MULTIPLIER as i32)),
                _mm512_set1_epi32(CODE_INCREMENT as i32),
            );
            let lift = _mm512_set1_epi32(FLOAT_LIFT_BITS as i32);
            let sum = _mm512_castsi512_ps(_mm512_dpbusd_epi32(lift, x, _mm512_set1_epi8(1)));
            _mm512_sub_ps(sum, _mm512_set1_ps(FLOAT_LIFT_BIAS))
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn prefetch(self, words: &[u32]) {
        // SAFETY: a prefetch reads nothing that the program sees and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        let from = &from[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 16 elements.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 16 elements.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn store_f16(self, v: __m512, to: &mut [f16]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 16 elements of 2 bytes.
        unsafe {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
        }
    }

    #[inline(always)]
    fn store_bf16(self, v: __m512, to: &mut [bf16]) {
        let to = &mut to[..Self::LANES];
        let rounded = self.round_bf16(v);
        // SAFETY: `self` was made by `new`, which found the features; the slice has 16 elements of 2 bytes.
        unsafe {
            let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(rounded));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(upper));
        }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn round_f16(self, v: __m512) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    /// In integers: `vcvtneps2bf16` is one more feature to ask for, and saves nothing once widened again.
    #[inline(always)]
    fn round_bf16(self, v: __m512) -> __m512 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
            let kept = _mm512_set1_epi32(!0xFFFF);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, half), kept))
        }
    }
}
