//! From a dense weight `W [out, in]` to codes: picks block and axis, then runs the codec's encoder.

use trellis_codec::format::{DEFAULT_BLOCK, DEFAULT_STATE_BITS, WORD_BITS};
use trellis_codec::{
    Axis, DEFAULT_DAMPING, EncodeError, EncodeOptions, Encoded, Encoder, Geometry, GeometryError, Hessian,
    Layout, PackError, Rotation, ScaleRule, encode, encode_with_feedback, stored_rows,
};

use crate::error::Error;

/// Stored rows that [`AxisChoice::Auto`] encodes along each axis before it decides.
pub const AUTO_SAMPLE_ROWS: usize = 16;

/// Weights that are widened to binary32 at a time.
const CHUNK_WEIGHTS: usize = 1 << 22;

/// Which axis of `W` to code along.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AxisChoice {
    /// Axis 1, the input features; one scale for each output.
    Input,
    /// Axis 0, the output features; one scale for each input.
    Output,
    /// The axis that divides into blocks; if both do, the one with the lower relative error on
    /// [`AUTO_SAMPLE_ROWS`] evenly spaced rows of each stored matrix, or axis 0 with error feedback (see
    /// [`quantize_weight_with`]).
    #[default]
    Auto,
}

/// How to quantize a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizeOptions {
    /// Bits a weight, `k`: 1 to 4. Default 3.
    pub bits: u32,
    /// Axis to code along. Default [`AxisChoice::Auto`].
    pub axis: AxisChoice,
    /// Bits of trellis state, `L`. Default 12.
    pub state_bits: u32,
    /// Block length `T`, or `None` (the default) for 256 where it divides the coded dimension, else the largest
    /// multiple of 32 below it that does.
    pub block: Option<usize>,
    /// Store neighbouring blocks side by side where the format allows it (axis 0, `k` = 3, `T` = 256, `L` = 12, even
    /// number of blocks); elsewhere row-major. Default `false`.
    pub interleave: bool,
    /// How each stored row's scale is chosen. Default [`ScaleRule::Rms`].
    pub scale: ScaleRule,
    /// Rotate the layer's input, in the largest blocks up to this rotation's that divide the input features. Default
    /// `None`.
    pub rotation: Option<Rotation>,
    /// Part of the mean of a Hessian's diagonal that is added to it before error feedback. Default [`DEFAULT_DAMPING`].
    pub damping: f64,
}

impl Default for QuantizeOptions {
    fn default() -> Self {
        Self {
            bits: 3,
            axis: AxisChoice::Auto,
            state_bits: DEFAULT_STATE_BITS,
            block: None,
            interleave: false,
            scale: ScaleRule::Rms,
            rotation: None,
            damping: DEFAULT_DAMPING,
        }
    }
}

impl QuantizeOptions {
    /// The defaults at another number of bits.
    pub fn with_bits(bits: u32) -> Self {
        Self { bits, ..Self::default() }
    }

    /// The geometry for a weight `[out_features, in_features]` along `axis`, row-major.
    ///
    /// # Errors
    /// [`Error::NoBlock`] if no legal block divides the coded dimension, [`Error::Geometry`] for numbers outside the
    /// format.
    pub fn geometry(&self, axis: Axis, out_features: usize, in_features: usize) -> Result<Geometry, Error> {
        let (cols, name) = match axis {
            Axis::Output => (out_features, "the output features"),
            Axis::Input => (in_features, "the input features"),
        };
        let block = match self.block {
            Some(block) => block,
            // Multiples of a word's bits are legal for every k.
            None => (1..=DEFAULT_BLOCK / WORD_BITS)
                .rev()
                .map(|n| n * WORD_BITS)
                .find(|&t| cols != 0 && cols.is_multiple_of(t))
                .ok_or(Error::NoBlock { out_features, in_features, axis: name })?,
        };
        Ok(Geometry::for_linear(axis, self.bits, self.state_bits, block, out_features, in_features)?)
    }
}

/// Encodes `weight`, the row-major `W [out_features, in_features]` in binary32 or in any type that widens to it.
///
/// `tensor` names the weight in errors; `progress` is told the number of weights finished, from any thread.
/// Deterministic: the same bytes for any number of threads. With [`QuantizeOptions::rotation`] a rotated copy of the
/// weight is made in binary32; without, no more than some rows are ever widened.
///
/// # Errors
/// Options outside the format, a shape that does not divide into blocks, a rotation that does not fit, a weight that is
/// NaN or infinite or whose scale is.
pub fn quantize_weight<T: Copy + Into<f32>>(
    weight: &[T],
    out_features: usize,
    in_features: usize,
    options: &QuantizeOptions,
    tensor: &str,
    progress: Option<&(dyn Fn(usize) + Sync)>,
) -> Result<Encoded, Error> {
    quantize_weight_with(weight, out_features, in_features, options, None, tensor, progress)
}

/// [`quantize_weight`] with error feedback, if the second moments of the layer's inputs are given: `hessian` is the mean of
/// `x xᵀ`, row-major `[in_features, in_features]`, of the inputs as the layer is given them, before any rotation, every
/// one divided by its own rms (why: [`Hessian`]).
///
/// The report's [`feedback`](trellis_codec::EncodeReport::feedback) says what it gained, or why plain coding was kept.
/// [`AxisChoice::Auto`] takes axis 0 then, if it divides into blocks: there every input feature's error reaches the next,
/// and on SmolLM2-135M-Instruct axis 0 had the lower proxy loss for each of 21 matrices at 3 bits,
/// rotated or not.
///
/// # Errors
/// As [`quantize_weight`], and a Hessian of the wrong size or with NaN or infinity in it.
pub fn quantize_weight_with<T: Copy + Into<f32>>(
    weight: &[T],
    out_features: usize,
    in_features: usize,
    options: &QuantizeOptions,
    hessian: Option<&[f32]>,
    tensor: &str,
    progress: Option<&(dyn Fn(usize) + Sync)>,
) -> Result<Encoded, Error> {
    let shape = (out_features, in_features);
    let rotated = rotate(weight, shape, options, tensor)?;
    let hessian = hessian
        .map(|moments| -> Result<Hessian, Error> {
            let refused = |reason| EncodeError::Hessian { tensor: tensor.into(), reason };
            let hessian = Hessian::new(moments, in_features).map_err(refused)?;
            match &rotated {
                Some((rotation, _)) => Ok(hessian.rotated(rotation)?),
                None => Ok(hessian),
            }
        })
        .transpose()?;
    let hessian = hessian.as_ref();
    match rotated {
        Some((rotation, rotated)) => {
            let encoded = encode_weight(&rotated, shape, options, hessian, tensor, progress)?;
            Ok(Encoded { rotation: Some(rotation), ..encoded })
        }
        None => encode_weight(weight, shape, options, hessian, tensor, progress),
    }
}

/// The axis that `options` asks for, decided by measured error (of the rotated weight, if it is to be rotated) where it
/// leaves the choice open.
///
/// # Errors
/// As [`quantize_weight`].
pub fn choose_axis<T: Copy + Into<f32>>(
    weight: &[T],
    out_features: usize,
    in_features: usize,
    options: &QuantizeOptions,
    tensor: &str,
) -> Result<Axis, Error> {
    let shape = (out_features, in_features);
    match rotate(weight, shape, options, tensor)? {
        Some((_, rotated)) => axis(&rotated, shape, options, false, tensor),
        None => axis(weight, shape, options, false, tensor),
    }
}

/// The rotation that `options` asks for, fitted to the layer, and the weight so rotated.
fn rotate<T: Copy + Into<f32>>(
    weight: &[T],
    (out_features, in_features): (usize, usize),
    options: &QuantizeOptions,
    tensor: &str,
) -> Result<Option<(Rotation, Vec<f32>)>, Error> {
    let Some(rotation) = options.rotation else { return Ok(None) };
    let rotation = rotation.fit(in_features)?;
    let expected = out_features * in_features;
    if weight.len() != expected {
        return Err(PackError::Length { what: "weight", found: weight.len(), expected }.into());
    }
    let mut rotated: Vec<f32> = weight.iter().map(|&w| w.into()).collect();
    // A rotation would spread it over its block.
    if let Some(at) = rotated.iter().position(|w| !w.is_finite()) {
        let (row, col, value) = (at / in_features, at % in_features, rotated[at]);
        return Err(EncodeError::NotFinite { tensor: tensor.into(), row, col, value }.into());
    }
    rotation.apply(&mut rotated, in_features)?;
    Ok(Some((rotation, rotated)))
}

fn encode_weight<T: Copy + Into<f32>>(
    weight: &[T],
    shape: (usize, usize),
    options: &QuantizeOptions,
    hessian: Option<&Hessian>,
    tensor: &str,
    progress: Option<&(dyn Fn(usize) + Sync)>,
) -> Result<Encoded, Error> {
    let axis = axis(weight, shape, options, hessian.is_some(), tensor)?;
    let mut geometry = options.geometry(axis, shape.0, shape.1)?;
    if options.interleave {
        geometry = geometry.with_layout(Layout::Interleaved).unwrap_or(geometry);
    }
    let damping = options.damping;
    let options = EncodeOptions { tensor, progress, scale: options.scale, ..EncodeOptions::default() };
    if let Some(hessian) = hessian {
        let stored = stored_rows(&geometry, weight, 0..geometry.rows())?;
        return Ok(encode_with_feedback(&geometry, &stored, hessian, damping, &options)?);
    }
    let mut encoder = Encoder::new(&geometry, &options)?;
    // Some rows at a time, so that the binary32 (and for axis 0 transposed) copy is never whole.
    let step = (CHUNK_WEIGHTS / geometry.cols()).max(1);
    for first in (0..geometry.rows()).step_by(step) {
        let rows = first..(first + step).min(geometry.rows());
        encoder.push_rows(&stored_rows(&geometry, weight, rows)?)?;
    }
    Ok(encoder.finish()?)
}

fn axis<T: Copy + Into<f32>>(
    weight: &[T],
    (out_features, in_features): (usize, usize),
    options: &QuantizeOptions,
    feedback: bool,
    tensor: &str,
) -> Result<Axis, Error> {
    match options.axis {
        AxisChoice::Input => return Ok(Axis::Input),
        AxisChoice::Output => return Ok(Axis::Output),
        AxisChoice::Auto => {}
    }
    let fits = |axis| match options.geometry(axis, out_features, in_features) {
        Ok(geometry) => Ok(Some(geometry)),
        Err(Error::NoBlock { .. } | Error::Geometry(GeometryError::Cols { .. })) => Ok(None),
        Err(other) => Err(other),
    };
    match (fits(Axis::Input)?, fits(Axis::Output)?) {
        (_, Some(_)) if feedback => Ok(Axis::Output),
        (Some(input), Some(output)) => {
            let encode_options = EncodeOptions { tensor, scale: options.scale, ..EncodeOptions::default() };
            let error = |geometry: &Geometry| sample_error(weight, geometry, &encode_options);
            Ok(if error(&output)? < error(&input)? { Axis::Output } else { Axis::Input })
        }
        (Some(_), None) => Ok(Axis::Input),
        (None, Some(_)) => Ok(Axis::Output),
        (None, None) => {
            Err(Error::NoBlock { out_features, in_features, axis: "the input or the output features" })
        }
    }
}

/// Relative squared error on evenly spaced rows of the stored matrix.
fn sample_error<T: Copy + Into<f32>>(
    weight: &[T],
    geometry: &Geometry,
    options: &EncodeOptions<'_>,
) -> Result<f64, Error> {
    let (rows, cols) = (geometry.rows(), geometry.cols());
    let n = rows.min(AUTO_SAMPLE_ROWS);
    let sampled =
        Geometry::new(geometry.axis(), geometry.bits(), geometry.state_bits(), geometry.block(), n, cols)?;
    let mut sample = Vec::with_capacity(n * cols);
    for i in 0..n {
        let row = i * rows / n;
        sample.extend(stored_rows(geometry, weight, row..row + 1)?);
    }
    Ok(encode(&sampled, &sample, options)?.report.relative_mse())
}
