//! Rotary position embedding (arXiv 2104.09864) by MLX's fast kernel, with the stretches that Llama models use.

use std::f64::consts::PI;

use mlx_rs::error::Exception;
use mlx_rs::{Array, fast};

use crate::config::Config;
use crate::error::Error;
use crate::json::Settings;

/// Base of the wavelengths where `config.json` has none: that of arXiv 2104.09864, section 3.2.2.
pub(crate) const DEFAULT_BASE: f64 = 10_000.0;

/// How positions are stretched beyond the context a model was first trained with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every position divided by `factor` (arXiv 2306.15595).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Long wavelengths stretched by `factor`, short ones kept, those between by a share of it: what Llama 3.1's
    /// `config.json` calls "llama3".
    Llama3 {
        /// Stretch of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are short.
        high_freq_factor: f64,
        /// The context a model was first trained with, in tokens.
        original: f64,
    },
}

impl RopeScaling {
    /// The stretch that an object of settings called `key` describes.
    pub(crate) fn from_json(rope: Option<Settings<'_>>, key: &str) -> Result<Self, Error> {
        let Some(rope) = rope else { return Ok(Self::None) };
        let name = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
        match rope.text(name)? {
            None | Some("default") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: rope.positive("factor")? }),
            Some("llama3") => {
                let (low, high) = (rope.positive("low_freq_factor")?, rope.positive("high_freq_factor")?);
                if low >= high {
                    return Err(rope.error("high_freq_factor", &format!("more than low_freq_factor {low}")));
                }
                Ok(Self::Llama3 {
                    factor: rope.positive("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original: rope.positive("original_max_position_embeddings")?,
                })
            }
            Some(other) => Err(Error::setting(
                rope.file,
                format!("{key}.{name}"),
                format!("{other:?}"),
                "\"default\", \"linear\" or \"llama3\"",
            )),
        }
    }
}

/// The rotary embedding of one model.
#[derive(Debug, Clone)]
pub struct Rope {
    head_dim: i32,
    base: f32,
    scale: f32,
    /// Wavelengths over 2 pi, float32 `[head_dim / 2]`, where base and scale do not say all.
    wavelengths: Option<Array>,
}

impl Rope {
    /// The rotary embedding that a configuration asks for.
    pub fn new(config: &Config) -> Self {
        let (scale, wavelengths) = match config.rope_scaling {
            RopeScaling::None => (1.0, None),
            RopeScaling::Linear { factor } => (1.0 / factor as f32, None),
            RopeScaling::Llama3 { .. } => {
                let lengths: Vec<f32> = wavelengths(config).into_iter().map(|w| w as f32).collect();
                (1.0, Some(Array::from_slice(&lengths, &[lengths.len() as i32])))
            }
        };
        Self { head_dim: config.head_dim, base: config.rope_theta as f32, scale, wavelengths }
    }

    /// x `[batch, heads, length, head_dim]` whose first position is `offset`, rotated.
    ///
    /// # Errors
    /// An error of MLX's.
    pub fn apply(&self, x: &Array, offset: i32) -> Result<Array, Exception> {
        let base = self.wavelengths.is_none().then_some(self.base);
        fast::rope(x, self.head_dim, false, base, self.scale, offset, self.wavelengths.as_ref())
    }
}

/// Wavelengths over 2 pi of each pair of features, stretched as "llama3" says.
fn wavelengths(config: &Config) -> Vec<f64> {
    let plain = (0..config.head_dim / 2)
        .map(|i| config.rope_theta.powf(f64::from(2 * i) / f64::from(config.head_dim)));
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } = config.rope_scaling
    else {
        return plain.collect();
    };
    plain
        .map(|w| {
            let turns = original / (2.0 * PI * w);
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            // Frequencies are mixed, so that the stretch is continuous in the wavelength.
            1.0 / ((1.0 - kept) / (factor * w) + kept / w)
        })
        .collect()
}
