//! Reads folders of reference cases: an `index.json` and one safetensors file a case, as in `tests/golden`.

use std::path::{Path, PathBuf};

use half::f16;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use thiserror::Error;

use crate::error::GeometryError;
use crate::format::{Axis, Geometry, Layout};

/// A folder of cases that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A file that cannot be read.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A file whose content is not a case.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
    /// A case outside the format.
    #[error("{}: {reason}", path.display())]
    Geometry {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: GeometryError,
    },
}

/// One reference case: a stored matrix, its decode and a product, all worked out by an independent program.
#[derive(Debug, Clone)]
pub struct Case {
    /// The file's name without its ending.
    pub name: String,
    /// The matrix's geometry.
    pub geometry: Geometry,
    /// Code words in the geometry's layout.
    pub codes: Vec<u32>,
    /// Scales `[rows]`.
    pub scales: Vec<f16>,
    /// Trellis states `[rows, cols]`.
    pub states: Vec<u32>,
    /// Contract P weights `[rows, cols]`.
    pub packed: Vec<f32>,
    /// Contract E weights before rounding `[rows, cols]`.
    pub expanded: Vec<f32>,
    /// Contract E weights for bfloat16 activations `[rows, cols]`.
    pub expanded_bf16: Vec<f32>,
    /// Rows of activations.
    pub m: usize,
    /// Activations `[m, in]`, all representable in bfloat16.
    pub x: Vec<f32>,
    /// Product with contract P weights `[m, out]`.
    pub y_packed: Vec<f64>,
    /// Product with contract E weights for bfloat16 `[m, out]`.
    pub y_expanded_bf16: Vec<f64>,
}

#[derive(Deserialize)]
struct Entry {
    file: String,
    axis: u64,
    k: u32,
    #[serde(rename = "L")]
    state_bits: u32,
    #[serde(rename = "T")]
    block: usize,
    rows: usize,
    cols: usize,
    block_interleave: u32,
    m: usize,
}

/// Reads every case that `dir/index.json` lists, in its order.
///
/// # Errors
/// A missing or malformed file, naming it.
pub fn read_cases(dir: &Path) -> Result<Vec<Case>, CaseError> {
    let path = dir.join("index.json");
    let text = read(&path)?;
    let entries: Vec<Entry> =
        serde_json::from_slice(&text).map_err(|e| CaseError::Content { path, problem: e.to_string() })?;
    entries.iter().map(|entry| read_case(dir, entry)).collect()
}

/// The 1MAD code's values at `L` = 12, state by state.
#[derive(Debug, Clone)]
pub struct Codebook {
    /// `y` of each of the 4096 states.
    pub y: Vec<i16>,
    /// `y / d`, correctly rounded.
    pub exact: Vec<f32>,
    /// `fl(y * fl(1/d))`.
    pub unrefined: Vec<f32>,
}

/// Reads `dir/codebook_1mad_L12.safetensors`.
///
/// # Errors
/// A missing or malformed file, naming it.
pub fn read_codebook(dir: &Path) -> Result<Codebook, CaseError> {
    let path = dir.join("codebook_1mad_L12.safetensors");
    let bytes = read(&path)?;
    let file = Opened::new(&path, &bytes)?;
    Ok(Codebook {
        y: file.numbers("y", i16::from_le_bytes)?,
        exact: file.numbers("exact_f32", f32::from_le_bytes)?,
        unrefined: file.numbers("unrefined_f32", f32::from_le_bytes)?,
    })
}

fn read_case(dir: &Path, entry: &Entry) -> Result<Case, CaseError> {
    let path = dir.join(&entry.file);
    let bytes = read(&path)?;
    let file = Opened::new(&path, &bytes)?;
    let axis = Axis::from_index(entry.axis)
        .ok_or_else(|| file.content(format!("axis is {}, expected 0 or 1", entry.axis)))?;
    let layout = if entry.block_interleave == 0 { Layout::RowMajor } else { Layout::Interleaved };
    let geometry = Geometry::new(axis, entry.k, entry.state_bits, entry.block, entry.rows, entry.cols)
        .and_then(|g| g.with_layout(layout))
        .map_err(|reason| CaseError::Geometry { path: path.clone(), reason })?;
    Ok(Case {
        name: entry.file.trim_end_matches(".safetensors").to_owned(),
        geometry,
        codes: file.numbers("codes", u32::from_le_bytes)?,
        scales: file.numbers("scales", f16::from_le_bytes)?,
        states: file.numbers("states", u32::from_le_bytes)?,
        packed: file.numbers("weight_packed_f32", f32::from_le_bytes)?,
        expanded: file.numbers("weight_expanded_f32", f32::from_le_bytes)?,
        expanded_bf16: file.numbers("weight_expanded_bf16_as_f32", f32::from_le_bytes)?,
        m: entry.m,
        x: file.numbers("x_bf16_as_f32", f32::from_le_bytes)?,
        y_packed: file.numbers("y_packed_f64", f64::from_le_bytes)?,
        y_expanded_bf16: file.numbers("y_expanded_bf16_f64", f64::from_le_bytes)?,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, CaseError> {
    std::fs::read(path).map_err(|reason| CaseError::Io { path: path.to_owned(), reason })
}

struct Opened<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> Opened<'a> {
    fn new(path: &'a Path, bytes: &'a [u8]) -> Result<Self, CaseError> {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|e| CaseError::Content { path: path.to_owned(), problem: e.to_string() })?;
        Ok(Self { path, tensors })
    }

    fn content(&self, problem: String) -> CaseError {
        CaseError::Content { path: self.path.to_owned(), problem }
    }

    fn numbers<const N: usize, T>(&self, name: &str, from: fn([u8; N]) -> T) -> Result<Vec<T>, CaseError> {
        let view: TensorView<'_> =
            self.tensors.tensor(name).map_err(|_| self.content(format!("tensor {name} is missing")))?;
        let (chunks, rest) = view.data().as_chunks::<N>();
        if !rest.is_empty() || view.dtype().bitsize() != N * 8 {
            return Err(self.content(format!("tensor {name} is {}, expected {N}-byte numbers", view.dtype())));
        }
        Ok(chunks.iter().map(|&c| from(c)).collect())
    }
}
