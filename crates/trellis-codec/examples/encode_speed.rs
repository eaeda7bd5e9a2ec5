//! Encodes Gaussian weights at every level this machine has and prints speed and error, after checking that
//! all levels give the same bytes and that the codes decode to the error reported.
//!
//! ```text
//! cargo run --release -p trellis-codec --example encode_speed [blocks, default 1024]
//! ```

use std::time::Instant;

use rand::{SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution, StandardNormal};
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, EncodeLevel, EncodeOptions, Encoded, Geometry, encode};

const REPEATS: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let blocks = std::env::args().nth(1).map_or(Ok(1024), |arg| arg.parse::<usize>())?;
    let weights: Vec<f32> =
        StandardNormal.sample_iter(SmallRng::seed_from_u64(1)).take(blocks * 256).collect();
    println!("{blocks} blocks, L=12, T=256, {} threads, best of {REPEATS}", rayon::current_num_threads());
    println!("k  level    weights/s  relative mse");
    for bits in 1..=4 {
        let geometry = Geometry::new(Axis::Input, bits, 12, 256, 1, weights.len())?;
        let mut first: Option<Encoded> = None;
        for level in EncodeLevel::available() {
            let options = EncodeOptions { tensor: "gaussian", level, ..Default::default() };
            let mut seconds = f64::INFINITY;
            let mut encoded = None;
            for _ in 0..REPEATS {
                let start = Instant::now();
                encoded = Some(encode(&geometry, &weights, &options)?);
                seconds = seconds.min(start.elapsed().as_secs_f64());
            }
            let encoded = encoded.expect("at least one repeat");
            check(&geometry, &weights, &encoded, first.as_ref())?;
            let speed = weights.len() as f64 / seconds / 1e6;
            let mse = encoded.report.relative_mse();
            println!("{bits}  {:7} {speed:7.3} M  {mse:.5}", format!("{level:?}"));
            first.get_or_insert(encoded);
        }
    }
    Ok(())
}

fn check(
    geometry: &Geometry,
    weights: &[f32],
    encoded: &Encoded,
    other: Option<&Encoded>,
) -> Result<(), Box<dyn std::error::Error>> {
    if other.is_some_and(|other| other != encoded) {
        return Err("two levels give different bytes".into());
    }
    let decoded =
        reference::decode(geometry, &encoded.codes, &encoded.scales, Contract::Expanded, Dtype::F32)?;
    let error: f64 = weights.iter().zip(decoded).map(|(&w, d)| (f64::from(w) - d).powi(2)).sum();
    if (error / encoded.report.squared_error - 1.0).abs() > 1e-6 {
        return Err(format!("report says {}, oracle says {error}", encoded.report.squared_error).into());
    }
    Ok(())
}
