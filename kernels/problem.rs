//! What a kernel is asked to compute, and why it may refuse.

use std::fmt;

use thiserror::Error;
use trellis_codec::format::DEFAULT_STATE_BITS;
use trellis_codec::reference::Dtype;
use trellis_codec::{Axis, Geometry, Layout};

/// Decode arithmetic and set of kernels, a number in 0..=13; [`Variant::DEFAULT`] unless an experiment says otherwise.
///
/// 0 to 3 (which round the scaled weight to bfloat16) agree bit for bit, and so do 6 to 13; each from 7 on takes the
/// kernels of those below it and adds some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Variant(u8);

impl Variant {
    /// Exact values by precise division.
    pub const EXACT: Variant = Variant(0);
    /// Refined values; the last of those that need no table.
    pub const REFINED: Variant = Variant(1);
    /// A table of exact values in threadgroup memory.
    pub const LOCAL_TABLE: Variant = Variant(2);
    /// The same table in device memory; the last variant that rounds the scaled weight.
    pub const DEVICE_TABLE: Variant = Variant(3);
    /// The state itself as a float: the time of everything but the decode, and wrong numbers.
    pub const STATE: Variant = Variant(4);
    /// Refined values, the scaled weight not rounded.
    pub const REFINED_WIDE: Variant = Variant(5);
    /// Unrefined values, contract P, as all that follow.
    pub const UNREFINED: Variant = Variant(6);
    /// Adds the balanced 3-bit scatter.
    pub const BALANCED: Variant = Variant(8);
    /// Adds one decode shared by 2 to 4 rows in scatter.
    pub const SHARED_SCATTER: Variant = Variant(10);
    /// Adds split-K prefill on axis 0.
    pub const SPLIT_K: Variant = Variant(12);
    /// Adds vectorised expansion and the representation choices.
    pub const DEFAULT: Variant = Variant(13);

    /// The variant of a number.
    ///
    /// # Errors
    /// A number above 13.
    pub const fn new(number: u8) -> Result<Self, VariantError> {
        if number <= Self::DEFAULT.0 { Ok(Self(number)) } else { Err(VariantError { found: number }) }
    }

    /// Its number, 0..=13.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Whether it looks values up, which needs `L` <= 12.
    pub const fn has_table(self) -> bool {
        self.0 == Self::LOCAL_TABLE.0 || self.0 == Self::DEVICE_TABLE.0
    }
}

impl Default for Variant {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A number that is no variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("kernel variant is {found}, expected 0 to 13")]
pub struct VariantError {
    /// The number given.
    pub found: u8,
}

/// The GPUs whose choices differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Gpu {
    /// Architecture `applegpu_g13s`.
    AppleG13s,
    /// An NVIDIA GPU, for CUDA kernels.
    Cuda(Cuda),
    /// Any other.
    #[default]
    Other,
}

/// What the launches of CUDA kernels depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cuda {
    /// Multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(f, "sm_{major}{minor}, {} multiprocessors", self.multiprocessors)
    }
}

impl Gpu {
    /// The GPU of an architecture string, as MLX's device information has it.
    pub fn from_architecture(architecture: &str) -> Self {
        if architecture == "applegpu_g13s" { Gpu::AppleG13s } else { Gpu::Other }
    }
}

/// One product `x [m, in]` with a stored matrix (or its expansion, for which `m` and the variant's arithmetic do not
/// count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// The stored matrix.
    pub geometry: Geometry,
    /// Rows of activations.
    pub m: usize,
    /// Type of x and of the result.
    pub dtype: Dtype,
    /// Decode arithmetic and set of kernels.
    pub variant: Variant,
    /// Where it runs.
    pub gpu: Gpu,
    /// Whether the layer asks for the `CODEBOOK` representation, see [`crate::scatter::Choices`].
    pub shared_codebook: bool,
}

impl Problem {
    /// A problem with the default variant on an unnamed GPU.
    pub const fn new(geometry: Geometry, m: usize, dtype: Dtype) -> Self {
        Self { geometry, m, dtype, variant: Variant::DEFAULT, gpu: Gpu::Other, shared_codebook: false }
    }

    /// The same problem in another variant.
    pub const fn with_variant(mut self, variant: Variant) -> Self {
        self.variant = variant;
        self
    }

    /// The same problem on a GPU.
    pub const fn on(mut self, gpu: Gpu) -> Self {
        self.gpu = gpu;
        self
    }

    /// The template integer `INTERLEAVE`: blocks of a row side by side, as artifacts' `block_interleave` counts them.
    pub(crate) fn interleave(&self) -> usize {
        match self.geometry.layout() {
            Layout::RowMajor => 0,
            Layout::Interleaved => 2,
        }
    }

    /// The GPU's CUDA facts.
    pub(crate) fn cuda(&self) -> Result<Cuda, Reason> {
        match self.gpu {
            Gpu::Cuda(cuda) => Ok(cuda),
            _ => Err(Reason::NotCuda),
        }
    }

    pub(crate) fn check_size(&self) -> Result<(), Reason> {
        // MLX's shapes and template integers are int32.
        let largest = self.geometry.rows().max(self.geometry.cols());
        if i32::try_from(largest).is_err() { Err(Reason::TooLarge { found: largest }) } else { Ok(()) }
    }

    pub(crate) fn check_axis(&self, expected: Axis) -> Result<(), Reason> {
        let found = self.geometry.axis();
        if found == expected {
            Ok(())
        } else {
            Err(Reason::Axis { found: found.index(), expected: expected.index() })
        }
    }

    pub(crate) fn check_m(&self, least: usize, most: usize) -> Result<(), Reason> {
        let found = self.m;
        if (least..=most).contains(&found) { Ok(()) } else { Err(Reason::Activations { found, least, most }) }
    }

    pub(crate) fn check_dtype(&self, expected: Dtype) -> Result<(), Reason> {
        if self.dtype == expected { Ok(()) } else { Err(Reason::Dtype { found: self.dtype, expected }) }
    }

    pub(crate) fn check_block(&self, expected: usize) -> Result<(), Reason> {
        let found = self.geometry.block();
        if found == expected { Ok(()) } else { Err(Reason::Block { found, expected }) }
    }

    pub(crate) fn check_default_states(&self) -> Result<(), Reason> {
        let found = self.geometry.state_bits();
        if found == DEFAULT_STATE_BITS {
            Ok(())
        } else {
            Err(Reason::StateBits { found, expected: DEFAULT_STATE_BITS })
        }
    }

    pub(crate) fn check_variant(&self, least: Variant) -> Result<(), Reason> {
        if self.variant >= least { Ok(()) } else { Err(Reason::Variant { found: self.variant, least }) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} M={} {:?} variant {}", self.geometry, self.m, self.dtype, self.variant)
    }
}

/// A kernel that does not take a problem. Nothing is wrong with the problem: another kernel may take it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kernel} does not take {problem}: {reason}")]
pub struct Unsupported {
    /// The kernel's name, or its family's where no kernel of it takes the problem.
    pub kernel: &'static str,
    /// The problem.
    pub problem: Box<Problem>,
    /// The rule it breaks.
    pub reason: Reason,
}

/// A rule of a kernel that a problem breaks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// Coded along the other axis.
    #[error("the matrix is coded along axis {found}, expected {expected}")]
    Axis {
        /// The matrix's axis.
        found: u32,
        /// The kernel's axis.
        expected: u32,
    },
    /// Too few or too many rows of activations. None at all need no launch: the result is empty.
    #[error("M is {found}, expected {least} to {most}")]
    Activations {
        /// The problem's M.
        found: usize,
        /// The least the kernel takes.
        least: usize,
        /// The most the kernel takes.
        most: usize,
    },
    /// Another type of activations.
    #[error("activations are {found:?}, expected {expected:?}")]
    Dtype {
        /// The problem's type.
        found: Dtype,
        /// The kernel's type.
        expected: Dtype,
    },
    /// Bits a weight out of range.
    #[error("k is {found}, expected {least} to {most}")]
    Bits {
        /// The matrix's `k`.
        found: u32,
        /// The least the kernel takes.
        least: u32,
        /// The most the kernel takes.
        most: u32,
    },
    /// Another size of state.
    #[error("L is {found}, expected {expected}")]
    StateBits {
        /// The matrix's `L`.
        found: u32,
        /// The kernel's `L`.
        expected: u32,
    },
    /// Another block length.
    #[error("T is {found}, expected {expected}")]
    Block {
        /// The matrix's `T`.
        found: usize,
        /// The kernel's `T`.
        expected: usize,
    },
    /// A block with more words than a SIMD group has lanes.
    #[error("a block has {words} words, more than the {} lanes of a SIMD group", crate::SIMD_LANES)]
    BlockTooWide {
        /// Words of a block.
        words: usize,
    },
    /// A table of values for states that are too large for one.
    #[error("variant {variant} looks values up, which needs L <= {DEFAULT_STATE_BITS}, found {found}")]
    Table {
        /// The variant.
        variant: Variant,
        /// The matrix's `L`.
        found: u32,
    },
    /// A variant that does not have this kernel yet.
    #[error("variant {found} does not have it, {least} is the first that does")]
    Variant {
        /// The problem's variant.
        found: Variant,
        /// The first with the kernel.
        least: Variant,
    },
    /// Codes for the balanced kernel, given to a generic one.
    #[error(
        "the codes are balanced (k=3, T=256, L <= 12, variant 8 to 13), which the generic kernel leaves to the balanced one"
    )]
    Balanced,
    /// Codes for the generic kernel, given to a balanced one.
    #[error("the codes are not balanced (k=3, T=256, L <= 12, variant 8 to 13)")]
    NotBalanced,
    /// Several rows of activations in a variant that shares decodes, given to a one-row kernel.
    #[error(
        "variant {variant} shares each decode among the {m} rows of activations, which the one-row kernel cannot"
    )]
    Shares {
        /// The variant.
        variant: Variant,
        /// The problem's M.
        m: usize,
    },
    /// Stored columns that do not divide.
    #[error("the stored matrix has {found} columns, expected a multiple of {multiple}")]
    Columns {
        /// Stored columns.
        found: usize,
        /// What they must be a multiple of.
        multiple: usize,
    },
    /// Too few input features.
    #[error("the matrix has {found} input features, expected at least {least}")]
    TooFewInputs {
        /// Input features.
        found: usize,
        /// The least the kernel takes.
        least: usize,
    },
    /// So many output tiles that a split would not pay.
    #[error("the result has {found} tiles of 16 x 16, expected at most {most}")]
    TooManyTiles {
        /// Tiles.
        found: usize,
        /// The most the kernel takes.
        most: usize,
    },
    /// A GPU that is no CUDA one.
    #[error("the GPU does not run CUDA")]
    NotCuda,
    /// A GPU without the instructions.
    #[error("compute capability is {}.{}, expected at least {}.{}", found.0, found.1, least.0, least.1)]
    Capability {
        /// The GPU's, major and minor.
        found: (u32, u32),
        /// The least the kernel takes.
        least: (u32, u32),
    },
    /// A block length that does not divide a tile of the tensor-core kernels.
    #[error("T is {found}, expected 32, 64, 128 or 256")]
    NotTiled {
        /// The matrix's `T`.
        found: usize,
    },
    /// A launch larger than a grid can be.
    #[error("the grid has {found} {what}, expected at most {most}")]
    Grid {
        /// What of the grid.
        what: &'static str,
        /// How many.
        found: usize,
        /// The most there can be.
        most: usize,
    },
    /// A dimension beyond what MLX's shapes hold.
    #[error("a dimension of {found} is more than MLX's 32-bit shapes hold")]
    TooLarge {
        /// The dimension.
        found: usize,
    },
}
