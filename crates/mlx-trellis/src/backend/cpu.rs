//! The CPU back end: a lazy MLX node whose numbers `trellis-cpu` makes.

use mlx_rs::{Array, Stream};
use trellis_codec::reference::{Contract, Dtype};

use crate::error::Error;
use crate::ffi;
use crate::weights::TrellisWeights;

/// The lazy product `[..., out]` of checked activations.
pub(crate) fn matmul(x: &Array, weights: &TrellisWeights, contract: Contract) -> Result<Array, Error> {
    Ok(ffi::matmul(
        x,
        weights.codes(),
        weights.scales(),
        weights.geometry(),
        contract,
        &Stream::thread_local_or_default(),
    )?)
}

/// The lazy stored matrix `[rows, cols]`.
pub(crate) fn expand(weights: &TrellisWeights, dtype: Dtype) -> Result<Array, Error> {
    Ok(ffi::expand(
        weights.codes(),
        weights.scales(),
        weights.geometry(),
        dtype,
        &Stream::thread_local_or_default(),
    )?)
}
