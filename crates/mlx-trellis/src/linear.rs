//! The layer: [`TrellisLinear`], a drop-in for `mlx_rs::nn::Linear`, and [`MaybeTrellis`], a linear layer that may or
//! may not have been quantized.

use std::path::Path;

use mlx_macros::ModuleParameters;
use mlx_rs::error::Exception;
use mlx_rs::module::{Module, ModuleParameters as _, Param};
use mlx_rs::nn::Linear;
use mlx_rs::{Array, Dtype};
use trellis_codec::artifact::Artifact;
use trellis_codec::{EncodeReport, Geometry, Rotation};

use crate::dispatch::Kernel;
use crate::error::Error;
use crate::quantize::{QuantizeOptions, quantize_weight};
use crate::rotation::InputRotation;
use crate::weights::{MatmulOptions, TrellisWeights, check_parameter, dequantize, problem, run};

/// `y = x · Wᵀ + bias` with `W [out, in]` kept as trellis codes.
///
/// Its parameters are `weight` (uint32 codes), `scales` (float16) and, where there is one, `bias`: the names of the file
/// format, so `load_safetensors` and `save_safetensors` on a model read and write trellis files. They are frozen when
/// made, as in mlx-rs's `QuantizedLinear`. Parameters put in place later are checked at each [`forward`](Module::forward)
/// against the geometry (dtype and shape, without evaluating anything).
///
/// ```
/// use mlx_rs::{module::Module, nn::LinearBuilder, ops::ones, builder::Builder};
/// use mlx_trellis::{QuantizeOptions, TrellisLinear};
///
/// let dense = LinearBuilder::new(256, 64).build()?;
/// let mut layer = TrellisLinear::quantize(&dense, &QuantizeOptions::with_bits(3))?;
/// let y = layer.forward(&ones::<f32>(&[1, 4, 256])?)?;
/// assert_eq!(y.shape(), [1, 4, 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, ModuleParameters)]
pub struct TrellisLinear {
    /// Code words, uint32 of [`Geometry::codes_shape`].
    #[param]
    pub weight: Param<Array>,
    /// One scale for each stored row, float16 `[rows]`.
    #[param]
    pub scales: Param<Array>,
    /// `[out]`, or none.
    #[param]
    pub bias: Param<Option<Array>>,
    geometry: Geometry,
    rotation: Option<InputRotation>,
    options: MatmulOptions,
}

impl TrellisLinear {
    /// A layer of checked weights and an optional bias `[out]`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a bias of another shape, [`Error::Dtype`] for one that is not floating point.
    pub fn new(weights: TrellisWeights, bias: Option<Array>) -> Result<Self, Error> {
        let geometry = *weights.geometry();
        if let Some(bias) = &bias {
            check_bias(bias, &geometry)?;
        }
        let mut layer = Self {
            weight: Param::new(weights.codes().clone()),
            scales: Param::new(weights.scales().clone()),
            bias: Param::new(bias),
            geometry,
            rotation: weights.input_rotation().cloned(),
            options: MatmulOptions::default(),
        };
        layer.freeze_parameters(true);
        Ok(layer)
    }

    /// Quantizes a dense layer; its bias is kept as it is. Evaluates the layer's weight, and encodes on the CPU: about
    /// a microsecond a weight.
    ///
    /// # Errors
    /// As [`quantize_weight`].
    pub fn quantize(linear: &Linear, options: &QuantizeOptions) -> Result<Self, Error> {
        Ok(Self::quantize_with_report(linear, options)?.0)
    }

    /// [`TrellisLinear::quantize`], with the encoder's report.
    ///
    /// # Errors
    /// As [`quantize_weight`].
    pub fn quantize_with_report(
        linear: &Linear,
        options: &QuantizeOptions,
    ) -> Result<(Self, EncodeReport), Error> {
        let weight = &linear.weight.value;
        let &[out_features, in_features] = weight.shape() else {
            return Err(Error::NotAMatrix { shape: weight.shape().to_vec() });
        };
        if !weight.dtype().is_float() {
            return Err(Error::Dtype { what: "weight", found: weight.dtype() });
        }
        let dense = weight.as_dtype(Dtype::Float32)?.contiguous()?;
        dense.eval()?;
        let encoded = quantize_weight(
            dense.try_as_slice::<f32>().map_err(|e| Exception::custom(e.to_string()))?,
            out_features as usize,
            in_features as usize,
            options,
            "weight",
            None,
        )?;
        let weights = TrellisWeights::from_encoded(&encoded)?;
        Ok((Self::new(weights, linear.bias.value.clone())?, encoded.report))
    }

    /// The layer stored as `module` (such as `model.layers.0.mlp.down_proj`) in a safetensors file or a folder of them.
    ///
    /// # Errors
    /// [`Error::Artifact`] if the file is not what the format says or has no such module.
    pub fn from_artifact(path: impl AsRef<Path>, module: &str) -> Result<Self, Error> {
        Self::from_open_artifact(&Artifact::open(path.as_ref())?, module)
    }

    /// [`TrellisLinear::from_artifact`] on a file that is already open.
    ///
    /// # Errors
    /// As [`TrellisLinear::from_artifact`].
    pub fn from_open_artifact(artifact: &Artifact, module: &str) -> Result<Self, Error> {
        let module = artifact.module(module)?;
        let bias = module.bias.as_ref().map(crate::artifact::to_array).transpose()?;
        Self::new(TrellisWeights::from_module(&module)?, bias)
    }

    /// The same layer with other options for its products.
    #[must_use]
    pub fn with_options(mut self, options: MatmulOptions) -> Self {
        self.options = options;
        self
    }

    /// Shape and coding parameters of the stored matrix.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How the input is rotated before the product, if it is. Not a parameter: it belongs to the layer, as the geometry
    /// does.
    pub fn rotation(&self) -> Option<Rotation> {
        self.rotation.as_ref().map(|r| r.rotation)
    }

    /// `(out_features, in_features)`, as `nn::Linear::shape`.
    pub fn shape(&self) -> (i32, i32) {
        (self.geometry.out_features() as i32, self.geometry.in_features() as i32)
    }

    /// The layer's weights as they are now, checked against its geometry.
    ///
    /// # Errors
    /// [`Error::Parameter`] if a parameter was replaced by an array of another dtype or shape.
    pub fn weights(&self) -> Result<TrellisWeights, Error> {
        let weights =
            TrellisWeights::new(self.weight.value.clone(), self.scales.value.clone(), self.geometry)?;
        Ok(weights.with_input_rotation(self.rotation.clone()))
    }

    /// The lazy dense weight `W [out, in]` in `dtype`, in the original basis.
    ///
    /// # Errors
    /// As [`TrellisLinear::weights`] and [`dequantize`].
    pub fn dequantize(&self, dtype: Dtype) -> Result<Array, Error> {
        dequantize(&self.weights()?, dtype)
    }

    /// [`Module::forward`] with this crate's typed errors, on a shared reference: x `[..., in]` gives `[..., out]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Scalar`] or [`Error::Dtype`] for x, [`Error::Parameter`] for replaced parameters; all
    /// before a graph node is built.
    pub fn try_forward(&self, x: &Array) -> Result<Array, Error> {
        let weights = self.weights()?;
        if let Some(bias) = &self.bias.value {
            check_bias(bias, &self.geometry)?;
        }
        let problem = problem(x, &self.geometry, self.options)?;
        let choice = self.options.choose(&problem);
        let y = run(x, &weights, &problem, &choice)?;
        if choice.kernel == Kernel::MetalExpand {
            bound_memory(&y)?;
        }
        match &self.bias.value {
            Some(bias) => Ok(y.add(bias)?),
            None => Ok(y),
        }
    }
}

impl Module<&Array> for TrellisLinear {
    type Output = Array;
    type Error = Exception;

    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        Ok(self.try_forward(x)?)
    }

    fn training_mode(&mut self, _: bool) {}
}

/// Dense weights that many layers queue lazily can exhaust a GPU's memory, so a layer evaluates after each one. While a
/// function is traced there is nothing to evaluate, and MLX says so; whoever evaluates the trace then bounds it.
fn bound_memory(y: &Array) -> Result<(), Error> {
    match y.eval() {
        Err(error) if error.what().contains("function transformations") => Ok(()),
        other => Ok(other?),
    }
}

fn check_bias(bias: &Array, geometry: &Geometry) -> Result<(), Error> {
    if !bias.dtype().is_float() {
        return Err(Error::Dtype { what: "bias", found: bias.dtype() });
    }
    check_parameter("bias", bias, bias.dtype(), "floating point", &[geometry.out_features()], geometry)
}
