//! Arguments and printing that several commands share.

use anyhow::Result;
use clap::ValueEnum;
use trellis_codec::format::DEFAULT_STATE_BITS;
use trellis_codec::reference::Dtype;
use trellis_codec::{Axis, Geometry, Layout};

/// An axis of a layer's weight `W [out, in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AxisArg {
    /// Axis 1: along the input features
    In,
    /// Axis 0: along the output features
    Out,
}

impl From<AxisArg> for Axis {
    fn from(axis: AxisArg) -> Self {
        match axis {
            AxisArg::In => Axis::Input,
            AxisArg::Out => Axis::Output,
        }
    }
}

/// An axis by its number in the format, or by what it runs along.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AxisNumber(pub(crate) Axis);

impl std::str::FromStr for AxisNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" | "out" => Ok(Self(Axis::Output)),
            "1" | "in" => Ok(Self(Axis::Input)),
            _ => Err(format!("found {text:?}, expected 0, 1, in or out")),
        }
    }
}

/// A type of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// IEEE binary32
    Float32,
    /// IEEE binary16
    Float16,
    /// bfloat16
    Bfloat16,
}

impl DtypeArg {
    /// The codec's name for it.
    pub(crate) fn codec(self) -> Dtype {
        match self {
            DtypeArg::Float32 => Dtype::F32,
            DtypeArg::Float16 => Dtype::F16,
            DtypeArg::Bfloat16 => Dtype::Bf16,
        }
    }

    /// Its name in files.
    pub(crate) fn file(self) -> trellis_codec::artifact::Dtype {
        match self {
            DtypeArg::Float32 => trellis_codec::artifact::Dtype::F32,
            DtypeArg::Float16 => trellis_codec::artifact::Dtype::F16,
            DtypeArg::Bfloat16 => trellis_codec::artifact::Dtype::BF16,
        }
    }

    /// MLX's name for it.
    pub(crate) fn mlx(self) -> mlx_rs::Dtype {
        match self {
            DtypeArg::Float32 => mlx_rs::Dtype::Float32,
            DtypeArg::Float16 => mlx_rs::Dtype::Float16,
            DtypeArg::Bfloat16 => mlx_rs::Dtype::Bfloat16,
        }
    }
}

/// A geometry with the default state bits.
pub(crate) fn geometry(
    axis: Axis,
    bits: u32,
    block: usize,
    rows: usize,
    cols: usize,
    interleave: bool,
) -> Result<Geometry> {
    let layout = if interleave { Layout::Interleaved } else { Layout::RowMajor };
    Ok(Geometry::new(axis, bits, DEFAULT_STATE_BITS, block, rows, cols)?.with_layout(layout)?)
}
