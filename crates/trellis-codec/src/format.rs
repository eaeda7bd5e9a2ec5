//! The packed trellis format: words, constants and [`Geometry`]. Everything else in the workspace takes the
//! numbers from here.
//!
//! A matrix is *stored* as `[rows, cols]` and always coded along its last axis, in blocks of `T` weights. A
//! block is a ring of `T*k` bits in `T*k/32` little-endian 32-bit words: bit `b` is bit `b % 32` of word
//! `b / 32`. The state of weight `t` is the `L`-bit window that starts at bit `(T-1-t)*k` and wraps at the
//! ring's end (tail-biting), so time runs towards lower bit offsets and neighbours share `L-k` bits:
//!
//! ```text
//! bit   T*k-1                                  2k   k    0
//!       | sym 0 | sym 1 |  ...            | sym T-2 | sym T-1 |     sym t = k bits at (T-1-t)*k
//!                                  |<------ L bits ------>|         state[T-1] starts at bit 0 and reaches up
//!
//!       state[t+1] >> k == state[t] & (2^(L-k) - 1)                 also from weight T-1 to weight 0
//! ```
//!
//! The value of a state is QTIP's 1MAD code (arXiv 2406.11235, section 3.1.1):
//!
//! ```text
//! x(s) = s * 34038481 + 76625530 (mod 2^32)
//! y(s) = (sum of the four bytes of x) - 510            an integer in [-510, 510]
//! value(s) = y / 147.800537109375
//! weight = value * scale[row]                           one binary16 scale for each stored row
//! ```
//!
//! Any bit pattern is a valid block.

use crate::error::GeometryError;

/// Multiplier of the 1MAD code's linear congruence (QTIP, arXiv 2406.11235, section 3.1.1).
pub const CODE_MULTIPLIER: u32 = 34_038_481;
/// Increment of the 1MAD code's linear congruence (QTIP, arXiv 2406.11235, section 3.1.1).
pub const CODE_INCREMENT: u32 = 76_625_530;
/// Mean of the sum of four uniform bytes, `4 * 255 / 2`: subtracted so that `y` is centred.
pub const CODE_BIAS: i32 = 510;
/// The divisor that takes `y` to unit variance (QTIP's published 1MAD decoder); exact in binary32.
#[allow(clippy::excessive_precision)] // all the digits of the format's statement, so that it can be searched for
pub const CODE_DIVISOR: f32 = 147.800_537_109_375;
/// Root mean square of `value` over all 4096 states at `L` = 12: the encoder divides a row's rms by it.
pub const LUT_RMS: f64 = 1.004_107;
/// `0x4B000000` is 2^23 in binary32: or-ing an integer below 2^23 into it gives the float 2^23 + integer.
pub const FLOAT_LIFT_BITS: u32 = 0x4B00_0000;
/// `2^23 + CODE_BIAS`, subtracted after the lift: `lift(byte sum) - FLOAT_LIFT_BIAS` is exactly `y`.
pub const FLOAT_LIFT_BIAS: f32 = 8_389_118.0;

/// Name of the code in `config.json`.
pub const CODE_NAME: &str = "1mad";
/// Its name for a module whose input is rotated (see [`rotation`](crate::rotation)): another one, so that a reader that
/// does not know of rotations refuses the module.
pub const ROTATED_CODE_NAME: &str = "1mad-hadamard";
/// Value of `mode` in a module's `config.json` entry.
pub const MODE_NAME: &str = "trellis";

/// Bits of a code word.
pub const WORD_BITS: usize = 32;
/// Fewest bits stored for a weight.
pub const MIN_BITS: u32 = 1;
/// Most bits stored for a weight.
pub const MAX_BITS: u32 = 4;
/// Most bits of trellis state.
pub const MAX_STATE_BITS: u32 = 16;
/// Bits of trellis state unless a file says otherwise.
pub const DEFAULT_STATE_BITS: u32 = 12;
/// Weights in a block unless a file says otherwise.
pub const DEFAULT_BLOCK: usize = 256;

/// Most rows of activations for which a product keeps contract P, weights straight from the codes; above, weights are
/// rounded as a dense weight's would be (contract E). The limit of the format's numerical contracts (`format.md`).
pub const MAX_PACKED_ROWS: usize = 4;

/// Bits a weight of the one geometry whose blocks may be interleaved.
pub const INTERLEAVE_BITS: u32 = 3;
/// Words of a pair of interleaved blocks: the last dimension of the 3-D codes.
pub const INTERLEAVE_WORDS: usize = 2 * DEFAULT_BLOCK * INTERLEAVE_BITS as usize / WORD_BITS;

const _: () = assert!(INTERLEAVE_WORDS == 48);
const _: () = assert!(FLOAT_LIFT_BIAS as i64 == (1 << 23) + CODE_BIAS as i64);
const _: () = assert!(f32::from_bits(FLOAT_LIFT_BITS) == 8_388_608.0);
const _: () = assert!((DEFAULT_BLOCK * MIN_BITS as usize).is_multiple_of(WORD_BITS));

/// The axis of the layer's weight `W [out, in]` along which blocks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Axis 0: coded along the output features. The stored matrix is `Wᵀ`, `[in, out]`, and `y = x · stored`.
    Output,
    /// Axis 1: coded along the input features. The stored matrix is `W`, `[out, in]`, and `y = x · storedᵀ`.
    Input,
}

impl Axis {
    /// The number in `config.json`: 0 for [`Axis::Output`], 1 for [`Axis::Input`].
    pub const fn index(self) -> u32 {
        match self {
            Axis::Output => 0,
            Axis::Input => 1,
        }
    }

    /// The axis with the given number, or `None` for anything but 0 and 1.
    pub const fn from_index(index: u64) -> Option<Self> {
        match index {
            0 => Some(Axis::Output),
            1 => Some(Axis::Input),
            _ => None,
        }
    }
}

/// How blocks follow each other in the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Codes are `[rows, cols*k/32]`: the blocks of a row one after the other.
    RowMajor,
    /// Codes are `[cols/512, rows, 48]`: two neighbouring blocks of one row side by side, then the next row.
    /// Only for axis 0, `k` = 3, `T` = 256, `L` = 12.
    Interleaved,
}

/// Shape and coding parameters of one stored matrix, checked when made.
///
/// ```
/// use trellis_codec::{Axis, Geometry, Layout};
/// let g = Geometry::new(Axis::Output, 3, 12, 256, 17408, 5120)?;
/// assert_eq!((g.in_features(), g.out_features()), (17408, 5120));
/// assert_eq!(g.words_per_block(), 24);
/// assert_eq!(g.codes_shape(), [17408, 480]);
/// assert_eq!(g.with_layout(Layout::Interleaved)?.codes_shape(), [10, 17408, 48]);
/// # Ok::<(), trellis_codec::GeometryError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    axis: Axis,
    bits: u32,
    state_bits: u32,
    block: usize,
    rows: usize,
    cols: usize,
    layout: Layout,
}

impl Geometry {
    /// A row-major geometry: `bits` is `k`, `state_bits` is `L`, `block` is `T`; `rows` and `cols` are those of
    /// the stored matrix.
    ///
    /// # Errors
    /// `k` outside 1..=4, `L` outside `k+1..=16`, `T*k` zero or not a multiple of 32, a dimension of zero,
    /// `cols` not a multiple of `T`, or a matrix of more than 2^60 bits.
    pub fn new(
        axis: Axis,
        bits: u32,
        state_bits: u32,
        block: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Self, GeometryError> {
        if !(MIN_BITS..=MAX_BITS).contains(&bits) {
            return Err(GeometryError::Bits { found: bits });
        }
        if state_bits <= bits || state_bits > MAX_STATE_BITS {
            return Err(GeometryError::StateBits { found: state_bits, bits });
        }
        let ring = block.checked_mul(bits as usize).unwrap_or(0);
        if ring == 0 || !ring.is_multiple_of(WORD_BITS) {
            return Err(GeometryError::Block { found: block, bits });
        }
        if rows == 0 || cols == 0 {
            return Err(GeometryError::Empty { rows, cols });
        }
        if !cols.is_multiple_of(block) {
            return Err(GeometryError::Cols { found: cols, block });
        }
        let total = (rows as u128).saturating_mul(cols as u128).saturating_mul(u128::from(bits));
        if total > 1 << 60 {
            return Err(GeometryError::TooLarge { rows, cols });
        }
        Ok(Self { axis, bits, state_bits, block, rows, cols, layout: Layout::RowMajor })
    }

    /// The geometry of a layer's weight `W [out_features, in_features]`.
    ///
    /// # Errors
    /// As [`Geometry::new`].
    pub fn for_linear(
        axis: Axis,
        bits: u32,
        state_bits: u32,
        block: usize,
        out_features: usize,
        in_features: usize,
    ) -> Result<Self, GeometryError> {
        let (rows, cols) = match axis {
            Axis::Output => (in_features, out_features),
            Axis::Input => (out_features, in_features),
        };
        Self::new(axis, bits, state_bits, block, rows, cols)
    }

    /// The same matrix with its blocks in the given layout.
    ///
    /// # Errors
    /// Interleaving anything but axis 0, `k` = 3, `T` = 256, `L` = 12, or an odd number of blocks a row.
    pub fn with_layout(mut self, layout: Layout) -> Result<Self, GeometryError> {
        if layout == Layout::Interleaved {
            let fits = self.axis == Axis::Output
                && self.bits == INTERLEAVE_BITS
                && self.block == DEFAULT_BLOCK
                && self.state_bits == DEFAULT_STATE_BITS
                && self.blocks_per_row().is_multiple_of(2);
            if !fits {
                return Err(GeometryError::Interleave { geometry: Box::new(self) });
            }
        }
        self.layout = layout;
        Ok(self)
    }

    /// The same codes taken the other way round: input and output features change places, so that the product is the
    /// one of a gradient, `dx = dy · W`. The only way to an interleaved geometry of axis 1, which no file has.
    pub const fn transposed(mut self) -> Self {
        self.axis = match self.axis {
            Axis::Output => Axis::Input,
            Axis::Input => Axis::Output,
        };
        self
    }

    /// The axis of `W` along which blocks run.
    pub const fn axis(&self) -> Axis {
        self.axis
    }
    /// `k`, bits stored for a weight, 1..=4.
    pub const fn bits(&self) -> u32 {
        self.bits
    }
    /// `L`, bits of trellis state, `k < L <= 16`.
    pub const fn state_bits(&self) -> u32 {
        self.state_bits
    }
    /// `T`, weights in a block.
    pub const fn block(&self) -> usize {
        self.block
    }
    /// Rows of the stored matrix.
    pub const fn rows(&self) -> usize {
        self.rows
    }
    /// Columns of the stored matrix, a multiple of [`Geometry::block`].
    pub const fn cols(&self) -> usize {
        self.cols
    }
    /// How blocks follow each other in the codes.
    pub const fn layout(&self) -> Layout {
        self.layout
    }
    /// Input features of the layer: stored rows for axis 0, columns for axis 1.
    pub const fn in_features(&self) -> usize {
        match self.axis {
            Axis::Output => self.rows,
            Axis::Input => self.cols,
        }
    }
    /// Output features of the layer: stored columns for axis 0, rows for axis 1.
    pub const fn out_features(&self) -> usize {
        match self.axis {
            Axis::Output => self.cols,
            Axis::Input => self.rows,
        }
    }
    /// Bits of a block's ring, `T*k`.
    pub const fn ring_bits(&self) -> usize {
        self.block * self.bits as usize
    }
    /// 32-bit words in a block, `T*k/32`.
    pub const fn words_per_block(&self) -> usize {
        self.ring_bits() / WORD_BITS
    }
    /// Blocks in a stored row.
    pub const fn blocks_per_row(&self) -> usize {
        self.cols / self.block
    }
    /// Number of trellis states, `2^L`.
    pub const fn states(&self) -> usize {
        1 << self.state_bits
    }
    /// Number of code words of the whole matrix.
    pub const fn words(&self) -> usize {
        self.rows * self.blocks_per_row() * self.words_per_block()
    }
    /// Shape of the uint32 codes: `[rows, cols*k/32]`, or `[cols/512, rows, 48]` when interleaved.
    pub fn codes_shape(&self) -> Vec<usize> {
        match self.layout {
            Layout::RowMajor => vec![self.rows, self.blocks_per_row() * self.words_per_block()],
            Layout::Interleaved => vec![self.blocks_per_row() / 2, self.rows, INTERLEAVE_WORDS],
        }
    }
    /// Index of the first code word of block `block` of row `row`; a block's words are contiguous in both
    /// layouts.
    pub const fn block_offset(&self, row: usize, block: usize) -> usize {
        let wpb = self.words_per_block();
        match self.layout {
            Layout::RowMajor => (row * self.blocks_per_row() + block) * wpb,
            Layout::Interleaved => ((block / 2) * self.rows + row) * INTERLEAVE_WORDS + (block % 2) * wpb,
        }
    }
    /// Bit offset in its block's ring at which the window of weight `t` starts, `(T-1-t)*k`.
    pub const fn window_offset(&self, t: usize) -> usize {
        (self.block - 1 - t) * self.bits as usize
    }
    /// Bytes of codes and scales together.
    pub const fn bytes(&self) -> usize {
        self.words() * 4 + self.rows * 2
    }
}

impl std::fmt::Display for Geometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}x{} axis {} k={} L={} T={}{}",
            self.rows,
            self.cols,
            self.axis.index(),
            self.bits,
            self.state_bits,
            self.block,
            match self.layout {
                Layout::RowMajor => "",
                Layout::Interleaved => " interleaved",
            }
        )
    }
}
