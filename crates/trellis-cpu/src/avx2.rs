//! AVX2 with FMA and F16C: 8 weights at a time.
//!
//! A group is `k` bytes plus the last window's tail, less than 8 bytes: `vpbroadcastq` loads them, `vpshufb` gives
//! each lane the four bytes its window starts in, a shift by the lane's remaining 0..=7 bits does the rest.
//! `vpmaddubsw` and `vpmaddwd` with ones sum the bytes of x(s).

use std::arch::x86_64::*;

use half::{bf16, f16};
use trellis_codec::format::{CODE_INCREMENT, CODE_MULTIPLIER, FLOAT_LIFT_BIAS, FLOAT_LIFT_BITS};

use crate::simd::{Kernel, Lanes, Window};

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Code {
    /// For each lane, the four bytes of the group that its window starts in.
    bytes: __m256i,
    /// For each lane, the bit of those bytes at which its window starts.
    shifts: __m256i,
    mask: __m256i,
}

impl Lanes for Avx2 {
    type V = __m256;
    type Code = Code;

    const LANES: usize = 8;
    const GROUPS: usize = 2;

    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<K: Kernel>(lanes: Avx2, kernel: K) {
            kernel.run(lanes);
        }
        // SAFETY: `self` was made by `new`, which found these features.
        unsafe { inner(self, kernel) }
    }

    #[inline(always)]
    fn code(self, bits: u32, state_bits: u32) -> Code {
        let (mut bytes, mut shifts) = ([0u8; 32], [0u32; 8]);
        for (lane, (bytes, shift)) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut shifts).enumerate() {
            let start = (7 - lane as u32) * bits;
            let byte = (start / 8) as u8;
            (*bytes, *shift) = ([byte, byte + 1, byte + 2, byte + 3], start % 8);
        }
        // SAFETY: `self` was made by `new`, which found the features; the loads are of arrays of 32 bytes.
        unsafe {
            Code {
                bytes: _mm256_loadu_si256(bytes.as_ptr().cast()),
                shifts: _mm256_loadu_si256(shifts.as_ptr().cast()),
                mask: _mm256_set1_epi32((1 << state_bits) - 1),
            }
        }
    }

    #[inline(always)]
    fn group<const K: u32>(self, code: &Code, window: Window) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe {
            let ring = _mm256_shuffle_epi8(_mm256_set1_epi64x(window[0].cast_signed()), code.bytes);
            let state = _mm256_and_si256(_mm256_srlv_epi32(ring, code.shifts), code.mask);
            let x = _mm256_add_epi32(
                _mm256_mullo_epi32(state, _mm256_set1_epi32(CODE_MULTIPLIER as i32)),
                _mm256_set1_epi32(CODE_INCREMENT as i32),
            );
            let pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi8(1));
            let sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            let lifted = _mm256_or_si256(sum, _mm256_set1_epi32(FLOAT_LIFT_BITS as i32));
            _mm256_sub_ps(_mm256_castsi256_ps(lifted), _mm256_set1_ps(FLOAT_LIFT_BIAS))
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn prefetch(self, words: &[u32]) {
        // SAFETY: a prefetch reads nothing that the program sees and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        let from = &from[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 8 elements.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m256, to: &mut [f32]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 8 elements.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn store_f16(self, v: __m256, to: &mut [f16]) {
        let to = &mut to[..Self::LANES];
        // SAFETY: `self` was made by `new`, which found the features; the slice has 8 elements of 2 bytes.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    #[inline(always)]
    fn store_bf16(self, v: __m256, to: &mut [bf16]) {
        let to = &mut to[..Self::LANES];
        let rounded = self.round_bf16(v);
        // SAFETY: `self` was made by `new`, which found the features; the slice has 8 elements of 2 bytes.
        unsafe {
            let upper = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
            let (low, high) = (_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_packus_epi32(low, high));
        }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn round_f16(self, v: __m256) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe { _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    #[inline(always)]
    fn round_bf16(self, v: __m256) -> __m256 {
        // SAFETY: `self` was made by `new`, which found the features.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
            let kept = _mm256_set1_epi32(!0xFFFF);
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_add_epi32(bits, half), kept))
        }
    }
}
