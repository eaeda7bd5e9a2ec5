//! One tensor: its numbers to codes, and the codes' parts to the artifact.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use mlx_rs::{Array, Dtype as MlxDtype, ops};
use mlx_trellis::{EncodeReport, Encoded, f16, quantize_weight_with};
use trellis_codec::artifact::{ArtifactWriter, Dtype, RawTensor};
use trellis_codec::{Axis, Geometry, Layout};

use super::calibration::Calibration;
use super::options::{Affine, Rotate, Trellis};
use super::plan::{Action, Step};
use super::report::Row;
use super::work::{Part, WorkFolder};
use crate::source::{Source, Values};

/// A tensor that is about to be coded.
pub(super) struct Task {
    pub(super) index: usize,
    values: Values,
    hessian: Option<Vec<f32>>,
    seconds: f64,
}

/// Reads what coding tensor `index` takes.
pub(super) fn read(
    source: &Source,
    calibration: Option<&Calibration>,
    index: usize,
    step: &Step,
) -> Result<Task> {
    let start = Instant::now();
    let calibration = calibration.filter(|_| step.feeds_back());
    let hessian = calibration.map(|c| c.hessian(step.module())).transpose()?;
    let values = source.values(index)?;
    Ok(Task { index, values, hessian, seconds: start.elapsed().as_secs_f64() })
}

/// Codes a tensor as the plan has it.
pub(super) fn encode(task: Task, step: &Step, progress: &(dyn Fn(usize) + Sync)) -> Result<(Vec<Part>, Row)> {
    let start = Instant::now();
    let (parts, mut row) = match &step.action {
        Action::Keep { .. } => bail!("tensor {} is to be kept", step.name),
        Action::Trellis(trellis) => {
            encode_trellis(task.values, task.hessian.as_deref(), step, trellis, progress)?
        }
        Action::Affine { affine, instead } => {
            let (parts, mut row) =
                encode_affine(task.values, step, *affine).with_context(|| format!("tensor {}", step.name))?;
            progress(usize::try_from(step.len())?);
            row.instead_of_trellis.clone_from(instead);
            (parts, row)
        }
    };
    row.bytes = parts.iter().map(|(.., bytes)| bytes.len() as u64).sum();
    row.bits_per_weight = row.bytes as f64 * 8.0 / step.len() as f64;
    row.seconds = task.seconds + start.elapsed().as_secs_f64();
    Ok((parts, row))
}

fn encode_trellis(
    values: Values,
    hessian: Option<&[f32]>,
    step: &Step,
    trellis: &Trellis,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<(Vec<Part>, Row)> {
    let (out, n, options, name) = (step.shape[0], step.shape[1], trellis.options()?, &step.name);
    let encoded = match values {
        Values::F32(w) => quantize_weight_with(&w, out, n, &options, hessian, name, Some(progress)),
        Values::F16(w) => quantize_weight_with(&w, out, n, &options, hessian, name, Some(progress)),
        Values::Bf16(w) => quantize_weight_with(&w, out, n, &options, hessian, name, Some(progress)),
    }?;
    let Encoded { geometry: g, rotation, codes, scales, report } = &encoded;
    let codes = codes.iter().flat_map(|w| w.to_le_bytes()).collect();
    let parts = vec![
        (format!("{}.weight", step.module()), Dtype::U32, g.codes_shape(), codes),
        (
            format!("{}.scales", step.module()),
            Dtype::F16,
            vec![g.rows()],
            scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
        ),
    ];
    let row = Row {
        axis: Some(g.axis().index()),
        block: Some(g.block()),
        state_bits: Some(g.state_bits()),
        interleaved: Some(g.layout() == Layout::Interleaved),
        rotation: rotation.map(Into::into),
        feedback: report.feedback.map(Into::into),
        relative_mse: report.relative_mse(),
        zero_rows: report.zero_rows,
        underflowed_rows: report.underflowed_rows,
        ..Row::new("trellis", step, g.bits())
    };
    Ok((parts, row))
}

fn encode_affine(values: Values, step: &Step, affine: Affine) -> Result<(Vec<Part>, Row)> {
    let original = values.into_f32();
    if let Some(at) = original.iter().position(|w| !w.is_finite()) {
        bail!("element {at} is {}, expected a finite number", original[at]);
    }
    let (group, bits) = (i32::try_from(affine.group)?, i32::try_from(affine.bits)?);
    let shape = [i32::try_from(step.shape[0])?, i32::try_from(step.shape[1])?];
    let dtype = match step.dtype {
        Dtype::F16 => MlxDtype::Float16,
        Dtype::BF16 => MlxDtype::Bfloat16,
        _ => MlxDtype::Float32,
    };
    // Flat first: mlx-rs multiplies the dimensions of a shape in 32 bits.
    let weight = Array::from_slice(&original, &[i32::try_from(original.len())?]).reshape(&shape)?;
    let (codes, scales, biases) = ops::quantize(weight.as_dtype(dtype)?, group, bits)?;
    drop(weight);
    let wide = biases.as_dtype(MlxDtype::Float32)?;
    let decoded = ops::dequantize(&codes, scales.as_dtype(MlxDtype::Float32)?, &wide, group, bits)?;
    let decoded: Vec<f32> = decoded.contiguous()?.to_vec_exact()?;
    let squared = |f: &dyn Fn(usize) -> f64| (0..original.len()).map(|i| f(i) * f(i)).sum::<f64>();
    let error = squared(&|i| f64::from(original[i]) - f64::from(decoded[i]));
    let energy = squared(&|i| f64::from(original[i]));
    let part = |suffix: &str, array: &Array| -> Result<Part> {
        let shape = array.shape().iter().map(|&d| d as usize).collect();
        let (dtype, bytes) = match array.dtype() {
            MlxDtype::Uint32 => {
                let words: Vec<u32> = array.contiguous()?.to_vec_exact()?;
                (Dtype::U32, words.iter().flat_map(|w| w.to_le_bytes()).collect())
            }
            _ => mlx_trellis::artifact::to_bytes(array)?,
        };
        Ok((format!("{}.{suffix}", step.module()), dtype, shape, bytes))
    };
    let parts = vec![part("weight", &codes)?, part("scales", &scales)?, part("biases", &biases)?];
    let row = Row {
        group: Some(affine.group),
        relative_mse: if energy == 0.0 { 0.0 } else { error / energy },
        ..Row::new("affine", step, affine.bits)
    };
    Ok((parts, row))
}

/// Adds a finished tensor to the artifact.
pub(super) fn add(writer: &mut ArtifactWriter, work: &WorkFolder, index: usize, row: &Row) -> Result<()> {
    let parts = work.parts(index)?;
    if row.method == "affine" {
        for suffix in ["weight", "scales", "biases"] {
            let name = format!("{}.{suffix}", row.module);
            let bytes = parts.read(&name)?;
            let part = parts.get(&name).with_context(|| format!("tensor {name} is missing"))?;
            writer.add_tensor(&name, RawTensor { dtype: part.dtype, shape: part.shape, bytes: &bytes })?;
        }
        return Ok(());
    }
    let part = |suffix: &str| parts.read(&format!("{}.{suffix}", row.module));
    let codes = numbers(&part("weight")?, u32::from_le_bytes);
    let scales = numbers(&part("scales")?, f16::from_le_bytes);
    let rotation = row.rotation.map(Rotate::rotation).transpose()?;
    let encoded =
        Encoded { geometry: geometry(row)?, rotation, codes, scales, report: EncodeReport::default() };
    Ok(writer.add_encoded(&row.module, &encoded, None)?)
}

fn geometry(row: &Row) -> Result<Geometry> {
    let part =
        |n: Option<u32>, what: &str| n.with_context(|| format!("the record of {} lacks {what}", row.module));
    let axis = Axis::from_index(part(row.axis, "axis")?.into()).context("axis")?;
    let block = row.block.with_context(|| format!("the record of {} lacks block", row.module))?;
    let state_bits = part(row.state_bits, "state_bits")?;
    let geometry =
        Geometry::for_linear(axis, row.bits, state_bits, block, row.out_features, row.in_features)?;
    let layout = if row.interleaved == Some(true) { Layout::Interleaved } else { Layout::RowMajor };
    Ok(geometry.with_layout(layout)?)
}

fn numbers<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&c| from(c)).collect()
}
