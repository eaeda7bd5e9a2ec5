//! What running a [`Launch`] through MLX needs on Metal and on CUDA alike.

use mlx_rs::error::Exception;
use mlx_rs::{Array, Dtype};
use trellis_kernels::{Launch, Type};

/// Whether arrays are of the shapes and dtypes that a launch was made for.
pub(crate) fn check(launch: &Launch, inputs: &[&Array]) -> Result<(), Exception> {
    let found = inputs.len();
    if found != launch.inputs.len() {
        return Err(Exception::custom(format!(
            "{}: found {found} inputs, expected {}",
            launch.name,
            launch.inputs.len()
        )));
    }
    for (array, expected) in inputs.iter().zip(&launch.inputs) {
        if array.dtype() != dtype(expected.dtype) || array.shape() != dims(&expected.shape) {
            return Err(Exception::custom(format!(
                "{}: {} is {:?} {:?}, expected {:?} {:?}",
                launch.name,
                expected.name,
                array.dtype(),
                array.shape(),
                expected.dtype,
                expected.shape
            )));
        }
    }
    Ok(())
}

/// A shape that eligibility has bounded by MLX's 32 bits.
pub(crate) fn dims(shape: &[usize]) -> Vec<i32> {
    shape.iter().map(|&d| d as i32).collect()
}

/// MLX's name for a type.
pub(crate) fn dtype(ty: Type) -> Dtype {
    match ty {
        Type::Float32 => Dtype::Float32,
        Type::Float16 => Dtype::Float16,
        Type::Bfloat16 => Dtype::Bfloat16,
        Type::Uint32 => Dtype::Uint32,
    }
}
