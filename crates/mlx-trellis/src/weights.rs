//! A trellis-coded matrix as MLX arrays, and the two things done with it: multiply and decode.

use std::borrow::Cow;

use mlx_rs::{Array, Dtype as MlxDtype};
use trellis_codec::artifact::TrellisModule;
use trellis_codec::reference::Dtype;
use trellis_codec::{Axis, Encoded, Geometry, Rotation};
use trellis_kernels::{Gpu, Variant};

use crate::backend;
use crate::dispatch::{self, Choice, Device, Kernel, Problem};
use crate::error::Error;
use crate::rotation::InputRotation;

/// Codes, scales and geometry of one layer's weight, checked against each other when made.
///
/// Cloning shares the arrays.
#[derive(Debug, Clone)]
pub struct TrellisWeights {
    codes: Array,
    scales: Array,
    geometry: Geometry,
    rotation: Option<InputRotation>,
}

impl TrellisWeights {
    /// Weights from arrays: `codes` uint32 of [`Geometry::codes_shape`], `scales` float16 `[rows]`. Only dtypes and
    /// shapes are looked at; nothing is evaluated.
    ///
    /// # Errors
    /// [`Error::Parameter`] for another dtype or shape, [`Error::TooLarge`] for dimensions beyond 31 bits.
    pub fn new(codes: Array, scales: Array, geometry: Geometry) -> Result<Self, Error> {
        check_dims(&geometry)?;
        check_parameter("weight", &codes, MlxDtype::Uint32, "uint32", &geometry.codes_shape(), &geometry)?;
        check_parameter("scales", &scales, MlxDtype::Float16, "float16", &[geometry.rows()], &geometry)?;
        Ok(Self { codes, scales, geometry, rotation: None })
    }

    /// Weights from code words and scales in memory, which are copied.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for dimensions beyond 31 bits, an [`Error::Parameter`] for slices of the wrong length.
    pub fn from_slices(
        codes: &[u32],
        scales: &[trellis_codec::f16],
        geometry: Geometry,
    ) -> Result<Self, Error> {
        check_dims(&geometry)?;
        let mismatch = |what, dtype, found: usize, expected_dtype, expected: Vec<usize>| Error::Parameter {
            what,
            found_dtype: dtype,
            found_shape: vec![i32::try_from(found).unwrap_or(i32::MAX)],
            expected_dtype,
            expected_shape: expected,
            geometry: Box::new(geometry),
        };
        if codes.len() != geometry.words() {
            return Err(mismatch("weight", MlxDtype::Uint32, codes.len(), "uint32", geometry.codes_shape()));
        }
        if scales.len() != geometry.rows() {
            return Err(mismatch(
                "scales",
                MlxDtype::Float16,
                scales.len(),
                "float16",
                vec![geometry.rows()],
            ));
        }
        let shape: Vec<i32> = geometry.codes_shape().iter().map(|&d| d as i32).collect();
        // Flat first: mlx-rs multiplies the dimensions of a shape in 32 bits.
        let words =
            i32::try_from(codes.len()).map_err(|_| Error::TooLarge { what: "weight", found: codes.len() })?;
        let codes = Array::from_slice(codes, &[words]).reshape(&shape)?;
        let scales = Array::from_slice(scales, &[geometry.rows() as i32]);
        Self::new(codes, scales, geometry)
    }

    /// Weights of a module that an artifact's reader has checked.
    ///
    /// # Errors
    /// As [`TrellisWeights::from_slices`].
    pub fn from_module(module: &TrellisModule<'_>) -> Result<Self, Error> {
        Self::from_slices(&module.codes, &module.scales, module.geometry)?.with_rotation(module.rotation)
    }

    /// Weights that an encoder made.
    ///
    /// # Errors
    /// As [`TrellisWeights::from_slices`].
    pub fn from_encoded(encoded: &Encoded) -> Result<Self, Error> {
        Self::from_slices(&encoded.codes, &encoded.scales, encoded.geometry)?.with_rotation(encoded.rotation)
    }

    /// The same codes as those of a rotated weight, or not: products rotate x first, and [`dequantize`] turns the weight
    /// back.
    ///
    /// # Errors
    /// [`Error::Rotation`] if the rotation's block does not divide the input features.
    pub fn with_rotation(mut self, rotation: Option<Rotation>) -> Result<Self, Error> {
        let rotation = rotation.map(|rotation| InputRotation::new(rotation, self.geometry.in_features()));
        self.rotation = rotation.transpose()?;
        Ok(self)
    }

    /// Code words, uint32 of [`Geometry::codes_shape`].
    pub fn codes(&self) -> &Array {
        &self.codes
    }

    /// Scales, float16 `[rows]`.
    pub fn scales(&self) -> &Array {
        &self.scales
    }

    /// Shape and coding parameters.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How the input is rotated, if it is.
    pub fn rotation(&self) -> Option<Rotation> {
        self.rotation.as_ref().map(|r| r.rotation)
    }

    pub(crate) fn input_rotation(&self) -> Option<&InputRotation> {
        self.rotation.as_ref()
    }

    pub(crate) fn with_input_rotation(mut self, rotation: Option<InputRotation>) -> Self {
        self.rotation = rotation;
        self
    }

    /// x in the basis of the codes.
    fn rotated<'a>(&self, x: &'a Array) -> Result<Cow<'a, Array>, Error> {
        match &self.rotation {
            Some(rotation) => Ok(Cow::Owned(rotation.apply(x)?)),
            None => Ok(Cow::Borrowed(x)),
        }
    }
}

/// How [`trellis_matmul_with`] may compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MatmulOptions {
    /// Accept contract F: scale and divisor applied outside the sum, fewer operations a weight, the same error bound
    /// but not the same bits as the format's packed kernels.
    pub factored: bool,
    /// Insist on contract P, the format's own for few rows, where another is faster (on CUDA). Wins over `factored`.
    pub packed: bool,
    /// Decode arithmetic and set of Metal kernels; for experiments.
    pub variant: Variant,
    /// Ask for the `CODEBOOK` representation of Metal's scatter at M = 3 and 4.
    pub shared_codebook: bool,
    /// Where to compute, or `None` for wherever operations built now on this thread run.
    pub device: Option<Device>,
}

impl MatmulOptions {
    fn device(&self) -> Device {
        self.device.unwrap_or_else(Device::current)
    }

    /// The kernel that [`trellis_matmul_with`] takes for a problem.
    pub fn choose(&self, problem: &Problem) -> Choice {
        dispatch::choose(problem, &self.device())
    }
}

/// The lazy product `y = x · Wᵀ` for a layer's weight `W [out, in]`: x `[..., in]` in float32, float16 or bfloat16
/// gives `[..., out]` in the same dtype. Leading dimensions may be any, x need not be contiguous; M = 0 gives an empty
/// array. Nothing is evaluated.
///
/// # Errors
/// [`Error::Scalar`], [`Error::Shape`] or [`Error::Dtype`] before any graph node is built.
///
/// ```
/// use mlx_rs::{Array, ops::ones};
/// use mlx_trellis::{TrellisWeights, trellis_matmul, Axis, Geometry};
///
/// // Any bit pattern is a valid matrix: 512 inputs, 256 outputs, 3 bits a weight.
/// let geometry = Geometry::for_linear(Axis::Input, 3, 12, 256, 256, 512)?;
/// let codes: Vec<u32> = (0..geometry.words() as u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
/// let weights = TrellisWeights::from_slices(&codes, &vec![mlx_trellis::f16::ONE; 256], geometry)?;
/// let y = trellis_matmul(&ones::<f32>(&[2, 512])?, &weights)?;
/// assert_eq!(y.shape(), [2, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn trellis_matmul(x: &Array, weights: &TrellisWeights) -> Result<Array, Error> {
    trellis_matmul_with(x, weights, MatmulOptions::default())
}

/// [`trellis_matmul`] with options.
///
/// # Errors
/// As [`trellis_matmul`].
pub fn trellis_matmul_with(
    x: &Array,
    weights: &TrellisWeights,
    options: MatmulOptions,
) -> Result<Array, Error> {
    let problem = problem(x, &weights.geometry, options)?;
    run(x, weights, &problem, &options.choose(&problem))
}

/// [`trellis_matmul_with`] by a given kernel: a choice made by [`dispatch::choose`] or [`dispatch::choose_cuda`].
///
/// # Errors
/// As [`trellis_matmul`], and [`Error::Unsupported`] for a kernel that does not take the problem.
pub fn trellis_matmul_by(
    x: &Array,
    weights: &TrellisWeights,
    options: MatmulOptions,
    choice: &Choice,
) -> Result<Array, Error> {
    run(x, weights, &problem(x, &weights.geometry, options)?, choice)
}

/// The lazy product by a kernel that was chosen for the problem; x is rotated first if the weights are.
pub(crate) fn run(
    x: &Array,
    weights: &TrellisWeights,
    problem: &Problem,
    choice: &Choice,
) -> Result<Array, Error> {
    let x = &*weights.rotated(x)?;
    match choice.kernel {
        Kernel::Empty => {
            let shape = output_shape(x, &weights.geometry);
            Ok(mlx_rs::ops::zeros_dtype(&shape, x.dtype())?)
        }
        kernel @ (Kernel::MetalScatter | Kernel::MetalSplitK | Kernel::MetalExpand) => {
            backend::metal::matmul(x, weights, problem, kernel, choice.gpu.unwrap_or_default())
        }
        kernel @ (Kernel::CudaExact | Kernel::CudaFloat | Kernel::CudaPacked | Kernel::CudaExpand) => {
            backend::cuda::matmul(x, weights, problem, kernel, choice.gpu.unwrap_or_default())
        }
        Kernel::CpuFactored | Kernel::CpuPacked | Kernel::CpuTiled => {
            backend::cpu::matmul(x, weights, choice.contract)
        }
    }
}

/// Checks x against a geometry and says what is to be multiplied.
///
/// # Errors
/// [`Error::Scalar`], [`Error::Shape`] or [`Error::Dtype`].
pub fn problem(x: &Array, geometry: &Geometry, options: MatmulOptions) -> Result<Problem, Error> {
    let in_features = geometry.in_features();
    let shape = x.shape();
    let Some((&last, leading)) = shape.split_last() else { return Err(Error::Scalar { in_features }) };
    if usize::try_from(last) != Ok(in_features) {
        return Err(Error::Shape { shape: shape.to_vec(), in_features });
    }
    let m = leading.iter().map(|&d| d as usize).product();
    Ok(Problem {
        geometry: *geometry,
        m,
        dtype: dtype("x", x.dtype())?,
        factored: options.factored,
        packed: options.packed,
        variant: options.variant,
        shared_codebook: options.shared_codebook,
    })
}

/// The lazy dense weight `W [out, in]` in `dtype` (float32, float16 or bfloat16), each weight rounded once (contract
/// E). For axis 0 it is a transposed view of the stored matrix. A rotated weight is turned back in float32 and then
/// rounded. Nothing is evaluated.
///
/// # Errors
/// [`Error::Dtype`] for another dtype.
pub fn dequantize(weights: &TrellisWeights, dtype: MlxDtype) -> Result<Array, Error> {
    let asked = dtype;
    let dtype = match weights.rotation {
        Some(_) => self::dtype("dtype", asked).map(|_| Dtype::F32)?,
        None => self::dtype("dtype", asked)?,
    };
    let problem = Problem::new(weights.geometry, 0, dtype);
    let stored = match Device::current() {
        Device { metal: Some(gpu), .. } => backend::metal::stored(weights, &problem, gpu)?,
        Device { cuda: Some(cuda), .. } => backend::cuda::stored(weights, &problem, Gpu::Cuda(cuda))?,
        _ => backend::cpu::expand(weights, dtype)?,
    };
    let weight = match weights.geometry.axis() {
        Axis::Output => stored.transpose()?,
        Axis::Input => stored,
    };
    match &weights.rotation {
        Some(rotation) => Ok(rotation.undo(&weight)?.as_dtype(asked)?),
        None => Ok(weight),
    }
}

fn dtype(what: &'static str, found: MlxDtype) -> Result<Dtype, Error> {
    match found {
        MlxDtype::Float32 => Ok(Dtype::F32),
        MlxDtype::Float16 => Ok(Dtype::F16),
        MlxDtype::Bfloat16 => Ok(Dtype::Bf16),
        found => Err(Error::Dtype { what, found }),
    }
}

/// The shape of a product: x's leading dimensions, then the output features.
pub(crate) fn output_shape(x: &Array, geometry: &Geometry) -> Vec<i32> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = geometry.out_features() as i32;
    }
    shape
}

/// MLX's name for a dtype.
pub(crate) fn mlx_dtype(dtype: Dtype) -> MlxDtype {
    match dtype {
        Dtype::F32 => MlxDtype::Float32,
        Dtype::F16 => MlxDtype::Float16,
        Dtype::Bf16 => MlxDtype::Bfloat16,
    }
}

/// MLX shapes are 32-bit, and so must be the dimensions of every array made from this geometry.
fn check_dims(geometry: &Geometry) -> Result<(), Error> {
    let stored = [geometry.rows(), geometry.cols()];
    match geometry.codes_shape().into_iter().chain(stored).find(|&d| i32::try_from(d).is_err()) {
        Some(found) => Err(Error::TooLarge { what: "weight", found }),
        None => Ok(()),
    }
}

pub(crate) fn check_parameter(
    what: &'static str,
    array: &Array,
    dtype: MlxDtype,
    expected_dtype: &'static str,
    expected_shape: &[usize],
    geometry: &Geometry,
) -> Result<(), Error> {
    let same_shape = array.ndim() == expected_shape.len()
        && array.shape().iter().zip(expected_shape).all(|(&found, &expected)| found as usize == expected);
    if array.dtype() == dtype && same_shape {
        return Ok(());
    }
    Err(Error::Parameter {
        what,
        found_dtype: array.dtype(),
        found_shape: array.shape().to_vec(),
        expected_dtype,
        expected_shape: expected_shape.to_vec(),
        geometry: Box::new(*geometry),
    })
}
