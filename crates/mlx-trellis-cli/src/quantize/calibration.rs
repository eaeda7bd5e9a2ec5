//! The second moments of modules' inputs, as `trellis calibrate` writes them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use trellis_codec::artifact::{Dtype, Tensors};

use super::plan::Step;

/// A safetensors file with, for each module, a float32 `[in, in]` called `MODULE.hessian`.
pub(super) struct Calibration {
    file: PathBuf,
    tensors: Tensors,
}

impl Calibration {
    pub(super) fn open(file: &Path) -> Result<Self> {
        Ok(Self { file: file.to_owned(), tensors: Tensors::open(file)? })
    }

    /// Whether a module can be coded with feedback, found out before the work begins.
    pub(super) fn check(&self, step: &Step) -> Result<()> {
        let name = name(step.module());
        let check = || -> Result<()> {
            let Some(found) = self.tensors.get(&name) else {
                bail!(
                    "found no such tensor, expected it for module {}: calibrate it too, or code it without feedback by \
                     --set '{}=BITS,plain'",
                    step.module(),
                    step.module()
                )
            };
            let n = step.shape[1];
            ensure!(
                found.dtype == Dtype::F32 && found.shape == [n, n],
                "found {} of shape {:?}, expected F32 of shape [{n}, {n}]",
                found.dtype,
                found.shape
            );
            Ok(())
        };
        check().with_context(|| format!("{}: tensor {name}", self.file.display()))
    }

    /// The mean of `x xᵀ` over a module's inputs, row-major `[in, in]`.
    pub(super) fn hessian(&self, module: &str) -> Result<Vec<f32>> {
        let bytes = self.tensors.read(&name(module))?;
        Ok(bytes.as_chunks().0.iter().map(|&c| f32::from_le_bytes(c)).collect())
    }
}

fn name(module: &str) -> String {
    format!("{module}.hessian")
}
