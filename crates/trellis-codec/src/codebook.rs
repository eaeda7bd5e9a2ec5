//! From trellis state to value: the 1MAD code and the three ways of forming its binary32 value.

use crate::format::{CODE_BIAS, CODE_DIVISOR, CODE_INCREMENT, CODE_MULTIPLIER};

/// `1 / CODE_DIVISOR` rounded to binary32, the factor of the unrefined and refined forms.
pub const CODE_RECIPROCAL: f32 = 1.0 / CODE_DIVISOR;

/// `y(s)`: the sum of the four bytes of `s * CODE_MULTIPLIER + CODE_INCREMENT` less [`CODE_BIAS`]; an integer
/// in [-510, 510].
pub const fn y(state: u32) -> i32 {
    let x = state.wrapping_mul(CODE_MULTIPLIER).wrapping_add(CODE_INCREMENT);
    let bytes = x.to_le_bytes();
    bytes[0] as i32 + bytes[1] as i32 + bytes[2] as i32 + bytes[3] as i32 - CODE_BIAS
}

/// `y / d` correctly rounded to binary32: the codebook proper, used by contract E.
pub const fn exact(y: i32) -> f32 {
    y as f32 / CODE_DIVISOR
}

/// `fl(y * fl(1/d))`: within one ulp of [`exact`] and different from it for 398 of the 1021 values of `y`; used
/// by contract P.
pub const fn unrefined(y: i32) -> f32 {
    y as f32 * CODE_RECIPROCAL
}

/// One Newton step on [`unrefined`], `q + fma(-q, d, y) * r` with the last step one fma; equals [`exact`] for
/// every `y` of the code.
pub fn refined(y: i32) -> f32 {
    let y = y as f32;
    let q = y * CODE_RECIPROCAL;
    (-q).mul_add(CODE_DIVISOR, y).mul_add(CODE_RECIPROCAL, q)
}

/// The exact values of all `2^state_bits` states, in state order. `state_bits` is at most 16.
pub fn table(state_bits: u32) -> Vec<f32> {
    (0..1u32 << state_bits).map(|s| exact(y(s))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::LUT_RMS;

    #[test]
    fn states_are_frozen() {
        // Worked out by hand from the definition; literals, so that a changed constant shows.
        assert_eq!([0, 1, 2, 4095, 65535].map(y), [-185, -124, -63, 188, 61]);
        assert_eq!(exact(-185).to_bits(), 0xbfa03747);
    }

    #[test]
    fn refined_is_exact_and_unrefined_differs_as_specified() {
        let mut differ = 0;
        for y in -510..=510 {
            assert_eq!(refined(y).to_bits(), exact(y).to_bits(), "y = {y}");
            differ += usize::from(unrefined(y) != exact(y));
            let ulps = (i64::from(unrefined(y).to_bits()) - i64::from(exact(y).to_bits())).abs();
            assert!(ulps <= 1, "y = {y}: {ulps} ulps");
        }
        assert_eq!(differ, 398);
    }

    #[test]
    fn rms_is_as_stated() {
        let t = table(12);
        let rms = (t.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / t.len() as f64).sqrt();
        assert!((rms - LUT_RMS).abs() < 5e-7, "{rms}");
    }
}
