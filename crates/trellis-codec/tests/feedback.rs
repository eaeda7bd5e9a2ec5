//! Error feedback against the float64 oracle, and where it must fall back.

use std::sync::atomic::{AtomicUsize, Ordering};

use rand::{SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use rstest::rstest;
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{
    Axis, DEFAULT_DAMPING, EncodeError, EncodeOptions, Encoded, Fallback, Geometry, Hessian, HessianError,
    Layout, Rotation, ScaleRule, encode, encode_with_feedback, pack, stored_rows,
};

fn gaussian(seed: u64, n: usize) -> Vec<f32> {
    StandardNormal.sample_iter(SmallRng::seed_from_u64(seed)).take(n).collect()
}

/// Moments of inputs that share a component, are like their neighbours besides, and differ in size.
fn moments(n: usize) -> Vec<f32> {
    let size = |i: usize| 1.0 + 3.0 * (i as f64 * 0.7).sin().powi(2);
    (0..n * n)
        .map(|at| (at / n, at % n))
        .map(|(i, j)| ((0.5 + 0.5 * 0.9f64.powi(i.abs_diff(j) as i32)) * size(i) * size(j)) as f32)
        .collect()
}

struct Problem {
    geometry: Geometry,
    weight: Vec<f32>,
    stored: Vec<f32>,
    moments: Vec<f32>,
}

fn problem(axis: Axis, bits: u32) -> Problem {
    let (out, inputs, block) = (96, 160, 32);
    let geometry = Geometry::for_linear(axis, bits, 9, block, out, inputs).unwrap();
    let weight = gaussian(3, out * inputs);
    let stored = stored_rows(&geometry, &weight, 0..geometry.rows()).unwrap();
    Problem { geometry, weight, stored, moments: moments(inputs) }
}

impl Problem {
    fn feed(&self, options: &EncodeOptions<'_>) -> Result<Encoded, EncodeError> {
        let hessian = Hessian::new(&self.moments, self.geometry.in_features()).unwrap();
        encode_with_feedback(&self.geometry, &self.stored, &hessian, DEFAULT_DAMPING, options)
    }

    /// `tr(E H Eᵀ) / tr(W H Wᵀ)` and the squared error, from the oracle's decode.
    fn oracle(&self, encoded: &Encoded) -> (f64, f64) {
        let g = &encoded.geometry;
        let (out, n) = (g.out_features(), g.in_features());
        let decoded =
            reference::decode(g, &encoded.codes, &encoded.scales, Contract::Expanded, Dtype::F32).unwrap();
        let error = |o: usize, i: usize| {
            let at = if g.axis() == Axis::Output { i * out + o } else { o * n + i };
            f64::from(self.stored[at]) - decoded[at]
        };
        let (mut loss, mut energy, mut square) = (0.0, 0.0, 0.0);
        for o in 0..out {
            for i in 0..n {
                square += error(o, i).powi(2);
                for j in 0..n {
                    let h = f64::from(self.moments[i * n + j]);
                    loss += h * error(o, i) * error(o, j);
                    energy += h * f64::from(self.weight[o * n + i]) * f64::from(self.weight[o * n + j]);
                }
            }
        }
        (loss / energy, square)
    }
}

#[rstest]
fn the_proxy_loss_falls(
    #[values(Axis::Output, Axis::Input)] axis: Axis,
    #[values(2, 3, 4)] bits: u32,
    #[values(ScaleRule::Rms, ScaleRule::Search)] scale: ScaleRule,
) {
    let problem = problem(axis, bits);
    let options = EncodeOptions { tensor: "w", scale, ..Default::default() };
    let (plain, fed) =
        (encode(&problem.geometry, &problem.stored, &options).unwrap(), problem.feed(&options).unwrap());
    let report = fed.report.feedback.unwrap();
    assert_eq!(report.fallback, None);
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
    close(report.plain_proxy_loss, problem.oracle(&plain).0);
    let (loss, square) = problem.oracle(&fed);
    close(report.proxy_loss, loss);
    close(fed.report.squared_error, square);
    close(fed.report.energy, plain.report.energy);
    // Blocks of 32 features feed each other much less than single features do.
    let bar = if axis == Axis::Output { 0.2 } else { 0.7 };
    let ratio = report.proxy_loss / report.plain_proxy_loss;
    println!("axis {} k={bits} {scale:?}: {ratio:.3} of plain coding's proxy loss", axis.index());
    assert!(ratio < bar, "{ratio}");
    let states = pack::unpack(&fed.geometry, &fed.codes).unwrap();
    assert_eq!(pack::pack(&fed.geometry, &states).unwrap(), fed.codes);
}

/// A rotation of weight and moments alike changes no loss of the exact weight, and feedback gains as much.
#[test]
fn rotated_weights_are_fed_too() {
    let mut problem = problem(Axis::Output, 3);
    let n = problem.geometry.in_features();
    let rotation = Rotation::new(32, 5).unwrap();
    rotation.apply(&mut problem.weight, n).unwrap();
    problem.stored = stored_rows(&problem.geometry, &problem.weight, 0..n).unwrap();
    let hessian = Hessian::new(&problem.moments, n).unwrap().rotated(&rotation).unwrap();
    let fed =
        encode_with_feedback(&problem.geometry, &problem.stored, &hessian, 0.01, &EncodeOptions::default())
            .unwrap();
    let report = fed.report.feedback.unwrap();
    assert!(report.proxy_loss < 0.2 * report.plain_proxy_loss, "{report:?}");
}

#[rstest]
fn the_same_bytes_for_any_threads(#[values(Axis::Output, Axis::Input)] axis: Axis) {
    let problem = problem(axis, 3);
    let run = || problem.feed(&EncodeOptions::default()).unwrap();
    let expected = run();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(run), expected, "{threads} threads");
        let many: Vec<Encoded> = pool.install(|| (0..4).into_par_iter().map(|_| run()).collect());
        assert!(many.iter().all(|e| *e == expected), "4 at once on {threads} threads");
    }
}

#[rstest]
fn where_plain_coding_is_kept(#[values(Axis::Output, Axis::Input)] axis: Axis) {
    let mut problem = problem(axis, 3);
    let n = problem.geometry.in_features();
    let done = AtomicUsize::new(0);
    let count = |w| {
        done.fetch_add(w, Ordering::Relaxed);
    };
    let options = EncodeOptions { progress: Some(&count), ..Default::default() };
    let plain = encode(&problem.geometry, &problem.stored, &EncodeOptions::default()).unwrap();
    let mut kept = |moments: Vec<f32>, damping| {
        problem.moments = moments;
        done.store(0, Ordering::Relaxed);
        let hessian = Hessian::new(&problem.moments, n).unwrap();
        let fed =
            encode_with_feedback(&problem.geometry, &problem.stored, &hessian, damping, &options).unwrap();
        assert_eq!(done.load(Ordering::Relaxed), problem.stored.len());
        let report = fed.report.feedback.unwrap();
        if report.fallback.is_some() {
            assert_eq!((&fed.codes, &fed.scales), (&plain.codes, &plain.scales));
            assert_eq!(report.proxy_loss, report.plain_proxy_loss);
        }
        report.fallback
    };
    assert_eq!(kept(vec![0.0; n * n], 0.01), Some(Fallback::NoInputs));
    // One direction only: singular, and usable once damped.
    let x = gaussian(8, n);
    let outer: Vec<f32> = (0..n * n).map(|at| x[at / n] * x[at % n]).collect();
    assert_eq!(kept(outer.clone(), 0.0), Some(Fallback::NotPositiveDefinite));
    assert_eq!(kept(outer, 0.01), None);
    let indefinite = (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 2.0 }).collect();
    assert_eq!(kept(indefinite, 0.01), Some(Fallback::NotPositiveDefinite));
    // Uncorrelated inputs give nothing to feed back.
    let identity = (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect();
    assert_eq!(kept(identity, 0.01), Some(Fallback::NoGain));
    if axis == Axis::Output {
        // Eight features worth next to nothing would take up the errors of all others, many times enlarged.
        let lopsided = |at: usize| match (at / n, at % n) {
            (i, j) if i == j && i < 8 => 1e-6,
            (i, j) if i == j => 1.0,
            (i, j) if i.min(j) < 8 && i.max(j) >= 8 => 1e-5,
            _ => 0.0,
        };
        assert_eq!(kept((0..n * n).map(lopsided).collect(), 1e-9), Some(Fallback::BlowUp));
    }
}

#[test]
fn rows_of_zeros_stay_zero() {
    for axis in [Axis::Output, Axis::Input] {
        let mut problem = problem(axis, 3);
        let cols = problem.geometry.cols();
        if axis == Axis::Input {
            problem.stored[cols..2 * cols].fill(0.0);
        } else {
            // Its target is not zero: feedback may use it.
            problem.stored.fill(0.0);
        }
        let fed = problem.feed(&EncodeOptions::default()).unwrap();
        let zeros = if axis == Axis::Input { 1 } else { problem.geometry.rows() };
        assert_eq!(fed.report.zero_rows, zeros);
        assert_eq!(fed.scales.iter().filter(|s| s.to_bits() == 0).count(), zeros);
    }
}

#[test]
fn interleaved_codes_are_the_same_codes() {
    let row_major = Geometry::new(Axis::Output, 3, 12, 256, 6, 1024).unwrap();
    let interleaved = row_major.with_layout(Layout::Interleaved).unwrap();
    let (weights, hessian) = (gaussian(2, 6 * 1024), Hessian::new(&moments(6), 6).unwrap());
    let run = |g| encode_with_feedback(g, &weights, &hessian, 0.01, &EncodeOptions::default()).unwrap();
    let (a, b) = (run(&row_major), run(&interleaved));
    assert_eq!(pack::relayout(&row_major, &a.codes, Layout::Interleaved).unwrap().0, b.codes);
    assert_eq!(a.scales, b.scales);
}

#[test]
fn wrong_moments_are_typed_errors() {
    let problem = problem(Axis::Output, 3);
    let n = problem.geometry.in_features();
    let wrong = Hessian::new(&problem.moments[..100], 10).unwrap();
    let options = EncodeOptions { tensor: "mlp.up_proj", ..Default::default() };
    let error = encode_with_feedback(&problem.geometry, &problem.stored, &wrong, 0.01, &options).unwrap_err();
    let reason = HessianError::Features { found: 10, in_features: n };
    assert_eq!(error, EncodeError::Hessian { tensor: "mlp.up_proj".into(), reason });
    assert_eq!(error.to_string(), r#"tensor "mlp.up_proj": Hessian is of 10 input features, expected 160"#);
    let mut weights = problem.stored.clone();
    weights[5] = f32::NAN;
    let hessian = Hessian::new(&problem.moments, n).unwrap();
    let error = encode_with_feedback(&problem.geometry, &weights, &hessian, 0.01, &options).unwrap_err();
    assert!(matches!(error, EncodeError::NotFinite { row: 0, col: 5, .. }));
    let error = Hessian::new(&problem.moments, n + 1).unwrap_err();
    assert_eq!(error.to_string(), "Hessian has 25600 elements, expected 161x161");
}
