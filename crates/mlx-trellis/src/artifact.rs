//! Tensors of a file as MLX arrays.

use std::borrow::Cow;

use mlx_rs::{Array, Dtype as MlxDtype};
use trellis_codec::artifact::{Dtype, RawTensor};
use trellis_codec::{bf16, f16};

use crate::error::Error;

/// A tensor (float32, float16, bfloat16, or uint32 as MLX's own codes are) as an array of the same dtype and shape; the
/// bytes are copied, once.
///
/// # Errors
/// [`Error::TensorDtype`] for another dtype, [`Error::TooLarge`] for dimensions beyond 31 bits.
pub fn to_array(tensor: &RawTensor<'_>) -> Result<Array, Error> {
    let dims = |d: usize| i32::try_from(d).map_err(|_| Error::TooLarge { what: "tensor", found: d });
    let shape = tensor.shape.iter().map(|&d| dims(d)).collect::<Result<Vec<_>, _>>()?;
    let len = dims(tensor.shape.iter().product())?;
    let flat = match tensor.dtype {
        Dtype::F32 => Array::from_slice(&numbers(tensor.bytes, f32::from_le_bytes), &[len]),
        Dtype::F16 => Array::from_slice(&numbers(tensor.bytes, f16::from_le_bytes), &[len]),
        Dtype::BF16 => Array::from_slice(&numbers(tensor.bytes, bf16::from_le_bytes), &[len]),
        Dtype::U32 => Array::from_slice(&numbers(tensor.bytes, u32::from_le_bytes), &[len]),
        found => return Err(Error::TensorDtype { found }),
    };
    Ok(flat.reshape(&shape)?)
}

/// An array as the bytes of a file's tensor, in row-major order; evaluates it.
///
/// # Errors
/// [`Error::Dtype`] for a dtype other than float32, float16 and bfloat16, or an error of MLX's.
pub fn to_bytes(array: &Array) -> Result<(Dtype, Vec<u8>), Error> {
    fn bytes<const N: usize, T: mlx_rs::ArrayElement + Clone>(
        array: &Array,
        to: fn(T) -> [u8; N],
    ) -> Result<Vec<u8>, Error> {
        let values = array
            .contiguous()?
            .to_vec_exact::<T>()
            .map_err(|e| Error::Mlx(mlx_rs::error::Exception::custom(e.to_string())))?;
        Ok(values.into_iter().flat_map(to).collect())
    }
    match array.dtype() {
        MlxDtype::Float32 => Ok((Dtype::F32, bytes(array, f32::to_le_bytes)?)),
        MlxDtype::Float16 => Ok((Dtype::F16, bytes(array, f16::to_le_bytes)?)),
        MlxDtype::Bfloat16 => Ok((Dtype::BF16, bytes(array, bf16::to_le_bytes)?)),
        found => Err(Error::Dtype { what: "tensor", found }),
    }
}

/// Little-endian numbers, borrowed where the machine and the alignment allow it.
fn numbers<const N: usize, T: bytemuck::AnyBitPattern>(bytes: &[u8], from: fn([u8; N]) -> T) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) if cfg!(target_endian = "little") => Cow::Borrowed(numbers),
        _ => Cow::Owned(bytes.as_chunks().0.iter().map(|&c| from(c)).collect()),
    }
}
