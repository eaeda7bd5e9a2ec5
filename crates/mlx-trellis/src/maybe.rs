//! [`MaybeTrellis`]: a module that may have been quantized, so that a model can swap layer by layer.

use mlx_rs::error::Exception;
use mlx_rs::module::{Module, ModuleParamMut, ModuleParamRef, ModuleParameters, Param};
use mlx_rs::nn::Linear;
use mlx_rs::ops::dequantize;
use mlx_rs::quantization::MaybeQuantized;

use crate::error::Error;
use crate::linear::TrellisLinear;
use crate::quantize::QuantizeOptions;

/// A module that has a trellis-coded form; mlx-rs's `Quantizable`, for trellis codes.
pub trait TrellisQuantizable {
    /// The quantized type.
    type Trellis;

    /// Quantizes the module.
    ///
    /// # Errors
    /// As [`quantize_weight`](crate::quantize_weight), for the first module that fails.
    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<Self::Trellis, Error>;
}

impl TrellisQuantizable for Linear {
    type Trellis = TrellisLinear;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<TrellisLinear, Error> {
        TrellisLinear::quantize(&self, options)
    }
}

/// So that one layer of a model may be dense, MLX affine or trellis-coded: `MaybeTrellis<MaybeQuantized<Linear>>`. An
/// affine layer is coded from what it dequantizes to.
impl TrellisQuantizable for MaybeQuantized<Linear> {
    type Trellis = TrellisLinear;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<TrellisLinear, Error> {
        let dense = match self {
            Self::Original(linear) => linear,
            Self::Quantized(q) => {
                let Linear { weight, bias } = q.inner;
                let weight =
                    dequantize(&weight.value, &q.scales.value, &q.biases.value, q.group_size, q.bits)?;
                Linear { weight: Param::new(weight), bias }
            }
        };
        dense.try_into_trellis(options)
    }
}

impl<M: TrellisQuantizable> TrellisQuantizable for Vec<M> {
    type Trellis = Vec<M::Trellis>;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<Self::Trellis, Error> {
        self.into_iter().map(|m| m.try_into_trellis(options)).collect()
    }
}

impl<M: TrellisQuantizable> TrellisQuantizable for Box<M> {
    type Trellis = Box<M::Trellis>;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<Self::Trellis, Error> {
        (*self).try_into_trellis(options).map(Box::new)
    }
}

impl<M: TrellisQuantizable> TrellisQuantizable for Option<M> {
    type Trellis = Option<M::Trellis>;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<Self::Trellis, Error> {
        self.map(|m| m.try_into_trellis(options)).transpose()
    }
}

/// A module in its original or its trellis-coded form; mirrors mlx-rs's `MaybeQuantized`, with the same parameter names
/// in either form.
#[derive(Debug, Clone)]
pub enum MaybeTrellis<M: TrellisQuantizable> {
    /// The module as it was.
    Original(M),
    /// The quantized module.
    Trellis(M::Trellis),
}

impl<M: TrellisQuantizable> MaybeTrellis<M> {
    /// Wraps a module that is not quantized.
    pub fn new(module: M) -> Self {
        Self::Original(module)
    }

    /// Whether the module is quantized.
    pub fn is_quantized(&self) -> bool {
        matches!(self, Self::Trellis(_))
    }

    /// Quantizes the module with a function of the caller's; one that is quantized already stays as it is.
    ///
    /// # Errors
    /// Those of `op`.
    pub fn quantize_with<E>(self, op: impl FnOnce(M) -> Result<M::Trellis, E>) -> Result<Self, E> {
        match self {
            Self::Original(m) => op(m).map(Self::Trellis),
            quantized => Ok(quantized),
        }
    }
}

impl<M: TrellisQuantizable> TrellisQuantizable for MaybeTrellis<M> {
    type Trellis = Self;

    fn try_into_trellis(self, options: &QuantizeOptions) -> Result<Self, Error> {
        self.quantize_with(|m| m.try_into_trellis(options))
    }
}

/// The same call on whichever form is there.
macro_rules! either {
    ($self:expr, $m:ident => $call:expr) => {
        match $self {
            MaybeTrellis::Original($m) => $call,
            MaybeTrellis::Trellis($m) => $call,
        }
    };
}

impl<M> ModuleParameters for MaybeTrellis<M>
where
    M: TrellisQuantizable + ModuleParameters,
    M::Trellis: ModuleParameters,
{
    fn num_parameters(&self) -> usize {
        either!(self, m => m.num_parameters())
    }

    fn parameters(&self) -> ModuleParamRef<'_> {
        either!(self, m => m.parameters())
    }

    fn parameters_mut(&mut self) -> ModuleParamMut<'_> {
        either!(self, m => m.parameters_mut())
    }

    fn trainable_parameters(&self) -> ModuleParamRef<'_> {
        either!(self, m => m.trainable_parameters())
    }

    fn freeze_parameters(&mut self, recursive: bool) {
        either!(self, m => m.freeze_parameters(recursive));
    }

    fn unfreeze_parameters(&mut self, recursive: bool) {
        either!(self, m => m.unfreeze_parameters(recursive));
    }

    fn all_frozen(&self) -> Option<bool> {
        either!(self, m => m.all_frozen())
    }

    fn any_frozen(&self) -> Option<bool> {
        either!(self, m => m.any_frozen())
    }
}

impl<M, Input> Module<Input> for MaybeTrellis<M>
where
    M: TrellisQuantizable + Module<Input, Error = Exception>,
    M::Trellis: Module<Input, Output = <M as Module<Input>>::Output, Error = Exception>,
{
    type Output = <M as Module<Input>>::Output;
    type Error = Exception;

    fn forward(&mut self, x: Input) -> Result<Self::Output, Exception> {
        either!(self, m => m.forward(x))
    }

    fn training_mode(&mut self, mode: bool) {
        either!(self, m => m.training_mode(mode));
    }
}
