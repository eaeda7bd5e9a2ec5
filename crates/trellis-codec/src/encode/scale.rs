//! The scale of a stored row.

use half::f16;

use crate::error::EncodeError;
use crate::format::LUT_RMS;

/// How a row's scale is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScaleRule {
    /// `rms(row) / LUT_RMS`: the code's rms becomes the row's. Best for Gaussian rows, or nearly so.
    #[default]
    Rms,
    /// The scale of least predicted error. Real rows have entries many times their rms, which the code's range
    /// (about 3 scales) clips unless the scale is larger. A weight `w` coded with scale `s` is taken to cost
    ///
    /// ```text
    /// granular * s^2 + dense * max(0, |w| - s)^2 + clipped * max(0, |w| - 3 s)^2
    /// ```
    ///
    /// with three constants for each `k`: the error where the code's values are dense, its growth where they thin
    /// out, and what lies beyond them, neighbours that an outlier takes along included. Their sum over a row is
    /// convex in `s`, so its least value is found exactly, in the time of a few passes over the row.
    Search,
}

/// `granular`, `dense` and `clipped` of [`ScaleRule::Search`] for `k` = 1 to 4: a non-negative least-squares fit to
/// the errors of 864 rows of nine matrices of SmolLM2-135M-Instruct (both axes, `L` = 12), each coded with 18 scales
/// from 0.8 to 2.5 times [`ScaleRule::Rms`]'s, those within 1.5 times the row's least error counting. The scale
/// it picks loses about 1 % against the best of the 18.
const COST: [[f64; 3]; 4] = [
    [0.15997, 0.72363, 0.0],
    [0.03469, 0.25478, 0.45841],
    [0.00845, 0.07302, 0.76004],
    [0.00213, 0.01927, 0.81289],
];
/// Where `dense` and `clipped` of [`COST`] set in, in scales.
const KNOTS: [f64; 2] = [1.0, 3.0];

/// A row's scale, and the sum of its squares.
pub(super) struct RowScale {
    pub(super) scale: f16,
    pub(super) energy: f64,
}

impl RowScale {
    /// Of row number `row` of the matrix `tensor`, at `bits` a weight.
    pub(super) fn new(
        weights: &[f32],
        bits: u32,
        rule: ScaleRule,
        tensor: &str,
        row: usize,
    ) -> Result<Self, EncodeError> {
        if let Some(col) = weights.iter().position(|w| !w.is_finite()) {
            return Err(EncodeError::NotFinite { tensor: tensor.into(), row, col, value: weights[col] });
        }
        let energy: f64 = weights.iter().map(|&w| f64::from(w) * f64::from(w)).sum();
        let rms = (energy / weights.len() as f64).sqrt();
        let scale = half_from_f64(rms / LUT_RMS);
        if scale.is_infinite() {
            return Err(EncodeError::ScaleOverflow { tensor: tensor.into(), row, rms });
        }
        if rule == ScaleRule::Rms {
            return Ok(Self { scale, energy });
        }
        let searched = half_from_f64(least_cost(weights, rms / LUT_RMS, &COST[bits as usize - 1]));
        Ok(Self { scale: if searched.is_infinite() { scale } else { searched }, energy })
    }
}

/// The scale at which the derivative of [`ScaleRule::Search`]'s cost is zero, by Newton's method from `start`. The
/// derivative is increasing, concave and made of straight pieces, so from the second step on the scale only grows and
/// after finitely many steps stays.
fn least_cost(weights: &[f32], start: f64, &[granular, dense, clipped]: &[f64; 3]) -> f64 {
    const MAX_STEPS: usize = 64;
    let mut scale = start;
    for _ in 0..MAX_STEPS {
        let mut slope = granular * weights.len() as f64;
        let mut sum = 0.0;
        for (factor, knot) in [dense, clipped].into_iter().zip(KNOTS) {
            let threshold = (knot * scale) as f32;
            let (mut beyond, mut count) = (0.0, 0u32);
            for w in weights.iter().map(|w| w.abs()).filter(|&w| w > threshold) {
                beyond += f64::from(w);
                count += 1;
            }
            sum += factor * knot * beyond;
            slope += factor * knot * knot * f64::from(count);
        }
        let next = sum / slope;
        if next == scale {
            break;
        }
        scale = next;
    }
    scale
}

/// A non-negative number rounded once to binary16, to nearest even. (`f16::from_f64` rounds to binary32 on
/// the way, or not, depending on the machine.) The step through binary32 rounds to odd, which keeps the
/// second rounding exact.
fn half_from_f64(value: f64) -> f16 {
    let nearest = value as f32;
    let below = if f64::from(nearest) > value { nearest.next_down() } else { nearest };
    let exact = f64::from(below) == value;
    f16::from_f32(f32::from_bits(below.to_bits() | u32::from(!exact)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_is_rounded_once() {
        let ulp = 2f64.powi(-10);
        // A hair off a tie, below what binary32 can tell from it.
        let hair = 2f64.powi(-40);
        for (value, expected) in [
            (0.0, 0x0000),
            (1.0, 0x3C00),
            (1.0 + ulp / 2.0 - hair, 0x3C00),
            (1.0 + ulp / 2.0, 0x3C00),
            (1.0 + ulp / 2.0 + hair, 0x3C01),
            (1.0 + ulp * 1.5 - hair, 0x3C01),
            (1.0 + ulp * 1.5, 0x3C02),
            (2f64.powi(-24), 0x0001),
            (2f64.powi(-25), 0x0000),
            (2f64.powi(-25) * (1.0 + hair), 0x0001),
            (1e-300, 0x0000),
            (65504.0, 0x7BFF),
            (65520.0 * (1.0 - hair), 0x7BFF),
            (65520.0, 0x7C00),
            (1e300, 0x7C00),
        ] {
            assert_eq!(half_from_f64(value).to_bits(), expected, "{value:e}");
        }
    }

    /// No scale on a fine grid has a lower predicted cost.
    #[test]
    fn the_least_cost_is_least() {
        for (bits, spike) in [(1, 1.0), (2, 4.0), (3, 9.0), (4, 30.0), (4, 0.0)] {
            let mut weights: Vec<f32> = (0..500).map(|i| (i as f32 * 0.7).sin()).collect();
            weights[77] = spike;
            let constants = &COST[bits - 1];
            let cost = |scale: f64| -> f64 {
                let beyond = |w: f32, knot: f64| (f64::from(w.abs()) - knot * scale).max(0.0).powi(2);
                let [granular, dense, clipped] = constants;
                let weight = |&w: &f32| dense * beyond(w, KNOTS[0]) + clipped * beyond(w, KNOTS[1]);
                granular * scale * scale * 500.0 + weights.iter().map(weight).sum::<f64>()
            };
            let found = least_cost(&weights, 0.7, constants);
            let least = (1..4000).map(|i| cost(f64::from(i) * 1e-3)).fold(f64::INFINITY, f64::min);
            assert!(cost(found) <= least * (1.0 + 1e-6), "k={bits} spike {spike}: {found}");
            assert_eq!(found, least_cost(&weights, found * 3.0, constants), "from any start");
        }
    }
}
