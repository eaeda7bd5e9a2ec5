//! Second moments of a layer's input, and their factor.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis as Dim, s};
use rayon::prelude::*;

use crate::error::HessianError;
use crate::rotation::Rotation;

/// Rows of a tile: factors and products are worked out tile by tile, so that results do not depend on the number of
/// threads.
const TILE: usize = 64;

/// Multiplications above which a product is spread over threads. Below, a thread that waits for others might take up a
/// whole other tensor meanwhile.
const PARALLEL: usize = 1 << 27;

/// `H [in, in]`, the mean of `x xᵀ` over the inputs `x [in]` that a layer sees: half the Hessian of the layer's mean
/// squared output error with respect to a row of its weight, whence the name (GPTQ, arXiv 2210.17323, section 2).
#[derive(Debug, Clone)]
pub struct Hessian {
    moments: Array2<f64>,
}

impl Hessian {
    /// From row-major `[in, in]` moments; what is not symmetric about them (rounding) is averaged away.
    ///
    /// # Errors
    /// The wrong number of moments, or one that is NaN or infinite.
    pub fn new<T: Copy + Into<f64>>(moments: &[T], in_features: usize) -> Result<Self, HessianError> {
        if moments.len() as u128 != in_features as u128 * in_features as u128 {
            return Err(HessianError::Length { found: moments.len(), in_features });
        }
        let at = |row: usize, col: usize| moments[row * in_features + col].into();
        if let Some(i) = moments.iter().position(|&m| !m.into().is_finite()) {
            let (row, col) = (i / in_features, i % in_features);
            return Err(HessianError::NotFinite { row, col, value: at(row, col) });
        }
        let n = (in_features, in_features);
        Ok(Self { moments: Array2::from_shape_fn(n, |(i, j)| 0.5 * (at(i, j) + at(j, i))) })
    }

    /// Input features.
    pub fn in_features(&self) -> usize {
        self.moments.nrows()
    }

    /// The moments of the rotated input.
    ///
    /// # Errors
    /// [`RotationError::Features`](crate::RotationError::Features) if the block does not divide the input features.
    pub fn rotated(mut self, rotation: &Rotation) -> Result<Self, crate::RotationError> {
        rotation.check(self.in_features())?;
        let n = self.in_features();
        rotation.conjugate(self.moments.as_slice_mut().expect("row-major, as it was made"), n);
        Ok(self)
    }

    /// Whether no input was ever anything but zero.
    pub(super) fn is_zero(&self) -> bool {
        self.moments.diag().iter().all(|&m| m == 0.0)
    }

    /// Features by rising second moment.
    pub(super) fn order(&self) -> Vec<usize> {
        let diagonal = self.moments.diag();
        let mut order: Vec<usize> = (0..self.in_features()).collect();
        order.sort_by(|&a, &b| diagonal[a].total_cmp(&diagonal[b]));
        order
    }

    /// `tr(E H Eᵀ)` of `E [out, in]`, given as its transpose `[in, out]`: the mean square of `E x`, summed over outputs.
    pub(super) fn loss(&self, transposed: ArrayView2<'_, f32>) -> f64 {
        let n = self.in_features();
        let tile = |first: usize| -> f64 {
            let rows = first..(first + TILE).min(n);
            let h = self.moments.slice(s![rows.clone(), ..]).mapv(|m| m as f32);
            let product = h.dot(&transposed);
            let terms = product.iter().zip(transposed.slice(s![rows, ..]));
            terms.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        let firsts: Vec<usize> = (0..n).step_by(TILE).collect();
        let large = n * n * transposed.ncols() > PARALLEL;
        let tiles: Vec<f64> = if large {
            firsts.into_par_iter().map(tile).collect()
        } else {
            firsts.into_iter().map(tile).collect()
        };
        tiles.iter().sum()
    }

    /// `M`, unit lower triangular in blocks of `block` features, with `H + damping * mean(diag H) * I = M D Mᵀ` for a
    /// block-diagonal `D`, features in the order given; zero above the blocks of the diagonal and in them. `None` if the
    /// damped `H` is not positive definite.
    ///
    /// The factorisation is in float64. (A crate for it would be faer, whose cold build takes minutes, or nalgebra,
    /// whose Cholesky is not blocked.)
    pub(super) fn unit_factor(&self, order: &[usize], block: usize, damping: f64) -> Option<Array2<f32>> {
        let n = self.in_features();
        let mean = self.moments.diag().sum() / n as f64;
        let mut l = Array2::from_shape_fn((n, n), |(i, j)| {
            let damped = if i == j { damping * mean } else { 0.0 };
            self.moments[(order[i], order[j])] + damped
        });
        cholesky(&mut l)?;
        // M = L · blockdiag(L)⁻¹: every row, block by block, is solved against the triangle on the diagonal.
        let triangles = l.clone();
        let solve = |(i, mut row): (usize, ndarray::ArrayViewMut1<'_, f64>)| -> Vec<f32> {
            let row = row.as_slice_mut().expect("row-major");
            for start in (0..n).step_by(block) {
                if i < start + block {
                    row[start..].fill(0.0);
                    break;
                }
                for j in (0..block).rev() {
                    let triangle = triangles.row(start + j);
                    let triangle = triangle.as_slice().expect("row-major");
                    row[start + j] /= triangle[start + j];
                    let x = row[start + j];
                    for (r, t) in row[start..start + j].iter_mut().zip(&triangle[start..start + j]) {
                        *r -= x * t;
                    }
                }
            }
            row.iter().map(|&x| x as f32).collect()
        };
        let rows: Vec<_> = l.axis_iter_mut(Dim(0)).enumerate().collect();
        let rows: Vec<Vec<f32>> = if n * n * block > PARALLEL {
            rows.into_par_iter().map(solve).collect()
        } else {
            rows.into_iter().map(solve).collect()
        };
        Some(Array2::from_shape_vec((n, n), rows.concat()).expect("n rows of n"))
    }
}

/// The lower Cholesky factor of a symmetric matrix in its place (what is above the diagonal is left as it was), tile by
/// tile, most of it matrix products; `None` if it is not positive definite.
fn cholesky(a: &mut Array2<f64>) -> Option<()> {
    let n = a.nrows();
    for start in (0..n).step_by(TILE) {
        let end = (start + TILE).min(n);
        let (mut top, mut below) = a.view_mut().split_at(Dim(0), end);
        let mut diagonal = top.slice_mut(s![start.., start..end]);
        for i in 0..end - start {
            for j in 0..=i {
                let dot = diagonal.slice(s![i, ..j]).dot(&diagonal.slice(s![j, ..j]));
                let rest = diagonal[(i, j)] - dot;
                diagonal[(i, j)] = match i == j {
                    // Not a NaN either.
                    true if rest > 0.0 => rest.sqrt(),
                    true => return None,
                    false => rest / diagonal[(j, j)],
                };
            }
        }
        let diagonal = diagonal.view();
        let mut panel = below.slice_mut(s![.., start..end]);
        for mut row in panel.axis_iter_mut(Dim(0)) {
            for j in 0..end - start {
                let dot = row.slice(s![..j]).dot(&diagonal.slice(s![j, ..j]));
                row[j] = (row[j] - dot) / diagonal[(j, j)];
            }
        }
        let panel = panel.to_owned();
        let tiles: Vec<_> =
            below.axis_chunks_iter_mut(Dim(0), TILE).zip(panel.axis_chunks_iter(Dim(0), TILE)).collect();
        let update = |(i, (mut tile, rows)): (usize, (ArrayViewMut2<'_, f64>, ArrayView2<'_, f64>))| {
            let upto = (i + 1) * TILE;
            let upto = upto.min(n - end);
            let mut tile = tile.slice_mut(s![.., end..end + upto]);
            general_mat_mul(-1.0, &rows, &panel.slice(s![..upto, ..]).t(), 1.0, &mut tile);
        };
        if (n - end) * (n - end) * TILE > PARALLEL {
            tiles.into_par_iter().enumerate().for_each(update);
        } else {
            tiles.into_iter().enumerate().for_each(update);
        }
    }
    Some(())
}

/// `c += a · b`.
pub(super) fn add_product(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>, mut c: ArrayViewMut2<'_, f32>) {
    let large = a.nrows() * a.ncols() * b.ncols() > PARALLEL;
    let tile = |(a, mut c): (ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>)| {
        general_mat_mul(1.0, &a, &b, 1.0, &mut c);
    };
    let tiles: Vec<_> = a.axis_chunks_iter(Dim(0), TILE).zip(c.axis_chunks_iter_mut(Dim(0), TILE)).collect();
    if large {
        tiles.into_par_iter().for_each(tile);
    } else {
        tiles.into_iter().for_each(tile);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moments of `3 * n` correlated inputs.
    fn moments(n: usize) -> Array2<f64> {
        let x = Array2::from_shape_fn((3 * n, n), |(i, j)| {
            ((i * 7 + j * j) as f64 * 0.37).sin() + (i as f64 * 0.11).cos()
        });
        x.t().dot(&x) / (3 * n) as f64
    }

    #[test]
    fn the_factor_multiplies_back() {
        for (n, block) in [(1, 1), (5, 1), (200, 1), (192, 64), (130, 65), (256, 32)] {
            let h = moments(n);
            let hessian = Hessian::new(h.as_slice().unwrap(), n).unwrap();
            let order: Vec<usize> = (0..n).map(|i| (i * 3 + 1) % n).collect();
            let order = if n % 3 == 0 { (0..n).collect() } else { order };
            let m = hessian.unit_factor(&order, block, 0.01).unwrap().mapv(f64::from) + Array2::<f64>::eye(n);
            // D = M⁻¹ H M⁻ᵀ is block-diagonal: compare H with M D Mᵀ by solving for D forward.
            let damped = Array2::from_shape_fn((n, n), |(i, j)| {
                h[(order[i], order[j])] + if i == j { 0.01 * h.diag().sum() / n as f64 } else { 0.0 }
            });
            let forward = |mut a: Array2<f64>| {
                for i in 0..n {
                    for j in 0..i {
                        let row = a.row(j).to_owned();
                        a.row_mut(i).scaled_add(-m[(i, j)], &row);
                    }
                }
                a
            };
            let d = forward(forward(damped.clone()).reversed_axes());
            for ((i, j), d) in d.indexed_iter() {
                assert!(i / block == j / block || d.abs() < 1e-5, "n={n} block={block}: D[{i}, {j}] = {d}");
            }
        }
    }

    #[test]
    fn what_has_no_factor() {
        let factor = |h: &[f64]| {
            let n = h.len().isqrt();
            Hessian::new(h, n).unwrap().unit_factor(&Vec::from_iter(0..n), 1, 0.0)
        };
        assert!(factor(&[1.0, 0.5, 0.5, 1.0]).is_some());
        assert!(factor(&[1.0, 2.0, 2.0, 1.0]).is_none());
        assert!(factor(&[0.0; 4]).is_none());
        assert!(factor(&[1.0, 1.0, 1.0, 1.0]).is_none());
        assert!(matches!(Hessian::new(&[1.0; 3], 2), Err(HessianError::Length { found: 3, in_features: 2 })));
        let nan = Hessian::new(&[1.0, 0.0, f32::NAN, 1.0], 2);
        assert!(matches!(nan, Err(HessianError::NotFinite { row: 1, col: 0, .. })));
    }
}
