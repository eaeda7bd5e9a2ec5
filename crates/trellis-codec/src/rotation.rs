//! [`Rotation`]: a layer's input turned into a basis in which its weight has fewer outliers.
//!
//! The idea is QuIP#'s incoherence processing by a randomised Hadamard transform (arXiv 2402.04396, section 3), on
//! the input side alone and in blocks, so that no other layer changes. With `R = H · diag(signs)`, where `H` is
//! block-diagonal and orthogonal,
//!
//! ```text
//! y = x · Wᵀ = (x · Rᵀ) · (W · Rᵀ)ᵀ
//! ```
//!
//! A file stores `W · Rᵀ`, that is every row of `W` rotated just as `x` is, and whoever multiplies rotates `x` first.
//! A module's rotation is fixed by two numbers, the block `B` and the seed:
//!
//! - `signs[i]` is -1 where bit `i % 64` of output number `i / 64` of SplitMix64 seeded with `seed` is set, else 1.
//!   (SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
//!   constants of Vigna's public-domain `splitmix64.c`.)
//! - `H` applies to each run of `B` features the Sylvester Hadamard matrix divided by `sqrt(B)`:
//!   `H[i][j] = (-1)^popcount(i & j) / sqrt(B)`.

use crate::error::RotationError;

/// Largest block of a rotation.
pub const MAX_ROTATION_BLOCK: usize = 1024;
/// Largest seed of a rotation: what every JSON reader holds exactly, 2^53 - 1.
pub const MAX_ROTATION_SEED: u64 = (1 << 53) - 1;

/// The rotation of a layer's input features; see the [module](self).
///
/// ```
/// use trellis_codec::Rotation;
/// let rotation = Rotation::new(4, 1)?;
/// let mut x = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 1.0];
/// let before = x;
/// rotation.apply(&mut x, 8)?;
/// assert_ne!(x, before);
/// rotation.undo(&mut x, 8)?;
/// assert_eq!(x, before);
/// # Ok::<(), trellis_codec::RotationError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rotation {
    block: usize,
    seed: u64,
}

impl Rotation {
    /// A rotation in blocks of `block` features with the signs of `seed`.
    ///
    /// # Errors
    /// A block that is no power of two from 2 to [`MAX_ROTATION_BLOCK`], a seed above [`MAX_ROTATION_SEED`].
    pub fn new(block: usize, seed: u64) -> Result<Self, RotationError> {
        if !block.is_power_of_two() || !(2..=MAX_ROTATION_BLOCK).contains(&block) {
            return Err(RotationError::Block { found: block });
        }
        if seed > MAX_ROTATION_SEED {
            return Err(RotationError::Seed { found: seed });
        }
        Ok(Self { block, seed })
    }

    /// Features in a block, `B`.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Where the signs come from.
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// The same seed with the largest block, at most this one's, that divides `in_features`.
    ///
    /// # Errors
    /// Input features of an odd number, which no block divides.
    pub fn fit(&self, in_features: usize) -> Result<Self, RotationError> {
        let mut fitted = *self;
        while !in_features.is_multiple_of(fitted.block) && fitted.block > 2 {
            fitted.block /= 2;
        }
        fitted.check(in_features)?;
        Ok(fitted)
    }

    /// Whether the block divides `in_features`.
    ///
    /// # Errors
    /// [`RotationError::Features`] if it does not.
    pub fn check(&self, in_features: usize) -> Result<(), RotationError> {
        if in_features.is_multiple_of(self.block) {
            return Ok(());
        }
        Err(RotationError::Features { block: self.block, in_features })
    }

    /// The signs of `in_features` features, each 1 or -1.
    pub fn signs(&self, in_features: usize) -> Vec<f32> {
        let words = (1..=in_features.div_ceil(64) as u64).map(|n| split_mix_64(self.seed, n));
        let signs =
            words.flat_map(|word| (0..64).map(move |bit| if (word >> bit) & 1 == 1 { -1.0 } else { 1.0 }));
        signs.take(in_features).collect()
    }

    /// Rotates rows of `in_features` numbers each, in float64 inside: what is done to `x` and to the rows of `W`.
    ///
    /// # Errors
    /// As [`Rotation::check`].
    ///
    /// # Panics
    /// If `rows` is not a whole number of rows.
    pub fn apply(&self, rows: &mut [f32], in_features: usize) -> Result<(), RotationError> {
        self.rows(rows, in_features, |row, signs, scratch| {
            for ((to, &from), &sign) in scratch.iter_mut().zip(&*row).zip(signs) {
                *to = f64::from(from * sign);
            }
            self.transform(scratch);
            for (to, &from) in row.iter_mut().zip(&*scratch) {
                *to = from as f32;
            }
        })
    }

    /// The inverse of [`Rotation::apply`].
    ///
    /// # Errors
    /// As [`Rotation::check`].
    ///
    /// # Panics
    /// As [`Rotation::apply`].
    pub fn undo(&self, rows: &mut [f32], in_features: usize) -> Result<(), RotationError> {
        self.rows(rows, in_features, |row, signs, scratch| {
            for (to, &from) in scratch.iter_mut().zip(&*row) {
                *to = f64::from(from);
            }
            self.transform(scratch);
            for ((to, &from), &sign) in row.iter_mut().zip(&*scratch).zip(signs) {
                *to = from as f32 * sign;
            }
        })
    }

    /// `R · S · Rᵀ` of a symmetric `S [in, in]` in float64, in place: the second moments of rotated inputs.
    pub(crate) fn conjugate(&self, s: &mut [f64], in_features: usize) {
        let signs = self.signs(in_features);
        // Both sides of a symmetric matrix are the same side twice, with a transposition after each.
        for _ in 0..2 {
            for row in s.chunks_exact_mut(in_features) {
                row.iter_mut().zip(&signs).for_each(|(s, &sign)| *s *= f64::from(sign));
                self.transform(row);
            }
            for i in 0..in_features {
                for j in 0..i {
                    s.swap(i * in_features + j, j * in_features + i);
                }
            }
        }
    }

    fn rows(
        &self,
        rows: &mut [f32],
        in_features: usize,
        f: impl Fn(&mut [f32], &[f32], &mut [f64]),
    ) -> Result<(), RotationError> {
        self.check(in_features)?;
        assert!(rows.len().is_multiple_of(in_features), "{} numbers in rows of {in_features}", rows.len());
        let signs = self.signs(in_features);
        let mut scratch = vec![0.0; in_features];
        rows.chunks_exact_mut(in_features).for_each(|row| f(row, &signs, &mut scratch));
        Ok(())
    }

    /// The normalised Walsh-Hadamard transform of every block, by butterflies.
    fn transform(&self, row: &mut [f64]) {
        let norm = 1.0 / (self.block as f64).sqrt();
        for block in row.chunks_exact_mut(self.block) {
            let mut half = 1;
            while half < block.len() {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (a, b) = pair.split_at_mut(half);
                    for (a, b) in a.iter_mut().zip(b) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
            block.iter_mut().for_each(|v| *v *= norm);
        }
    }
}

impl std::fmt::Display for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rotation block {} seed {}", self.block, self.seed)
    }
}

/// Output number `n`, counted from 1, of SplitMix64 seeded with `seed`.
const fn split_mix_64(seed: u64, n: u64) -> u64 {
    let z = seed.wrapping_add(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for seed 1234567, as published with several implementations (and worked out by hand).
    #[test]
    fn the_generator_is_split_mix_64() {
        let outputs = [1, 2, 3, 4, 5].map(|n| split_mix_64(1_234_567, n));
        assert_eq!(
            outputs,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
        let signs = Rotation::new(64, 1_234_567).unwrap().signs(192);
        for (i, sign) in signs.iter().enumerate() {
            let bit = (outputs[i / 64] >> (i % 64)) & 1;
            assert_eq!(*sign, if bit == 1 { -1.0 } else { 1.0 });
        }
    }

    /// Against the definition, entry by entry.
    #[test]
    fn rows_and_moments_are_rotated_as_defined() {
        let (n, rotation) = (24, Rotation::new(8, 3).unwrap());
        let signs = rotation.signs(n);
        let r = |i: usize, j: usize| {
            let same = i / 8 == j / 8;
            let sign = if ((i % 8) & (j % 8)).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
            if same { sign / 8f64.sqrt() * f64::from(signs[j]) } else { 0.0 }
        };
        let x: Vec<f32> = (0..2 * n).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut rotated = x.clone();
        rotation.apply(&mut rotated, n).unwrap();
        for (x, y) in x.chunks(n).zip(rotated.chunks(n)) {
            for (i, &y) in y.iter().enumerate() {
                let expected: f64 = (0..n).map(|j| r(i, j) * f64::from(x[j])).sum();
                assert!((f64::from(y) - expected).abs() < 1e-7, "{i}");
            }
        }
        rotation.undo(&mut rotated, n).unwrap();
        assert!(x.iter().zip(&rotated).all(|(a, b)| (a - b).abs() < 1e-6));

        let moments: Vec<f64> = (0..n * n).map(|i| f64::from(x[i / n]) * f64::from(x[i % n])).collect();
        let mut conjugated = moments.clone();
        rotation.conjugate(&mut conjugated, n);
        for (at, found) in conjugated.iter().enumerate() {
            let (i, j) = (at / n, at % n);
            let term = |a: usize, b: usize| r(i, a) * moments[a * n + b] * r(j, b);
            let expected: f64 = (0..n * n).map(|ab| term(ab / n, ab % n)).sum();
            assert!((found - expected).abs() < 1e-12, "{i} {j}");
        }
    }

    #[test]
    fn blocks_fit_or_are_refused() {
        let block = |b, n| Rotation::new(b, 0).unwrap().fit(n).map(|r| r.block());
        assert_eq!(block(1024, 576), Ok(64));
        assert_eq!(block(1024, 1536), Ok(512));
        assert_eq!(block(256, 1536), Ok(256));
        assert_eq!(block(1024, 6), Ok(2));
        assert_eq!(block(1024, 7), Err(RotationError::Features { block: 2, in_features: 7 }));
        for wrong in [0, 1, 3, 96, 2048] {
            assert_eq!(Rotation::new(wrong, 0), Err(RotationError::Block { found: wrong }));
        }
        let seed = MAX_ROTATION_SEED + 1;
        assert_eq!(Rotation::new(2, seed), Err(RotationError::Seed { found: seed }));
        assert!(Rotation::new(64, 0).unwrap().apply(&mut [0.0; 96], 96).is_err());
    }
}
