//! Typed errors. Each prints the whole problem: what was found, what was expected, and where.

use thiserror::Error;

use crate::format::Geometry;

/// A geometry that the format does not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// `k` out of range.
    #[error("bits a weight (k) is {found}, expected 1 to 4")]
    Bits {
        /// The `k` given.
        found: u32,
    },
    /// `L` out of range.
    #[error("state bits (L) is {found}, expected {} to 16 for k={bits}", bits + 1)]
    StateBits {
        /// The `L` given.
        found: u32,
        /// The `k` it goes with.
        bits: u32,
    },
    /// A block that does not fill whole words.
    #[error("block length (T) is {found}, expected T*k a non-zero multiple of 32 for k={bits}")]
    Block {
        /// The `T` given.
        found: usize,
        /// The `k` it goes with.
        bits: u32,
    },
    /// A matrix without elements.
    #[error("stored matrix is {rows}x{cols}, expected at least one row and one block of columns")]
    Empty {
        /// Stored rows.
        rows: usize,
        /// Stored columns.
        cols: usize,
    },
    /// Columns that do not divide into blocks.
    #[error("stored matrix has {found} columns, expected a multiple of the block length {block}")]
    Cols {
        /// Stored columns.
        found: usize,
        /// Block length `T`.
        block: usize,
    },
    /// A matrix whose bits cannot be counted.
    #[error("stored matrix of {rows}x{cols} is too large to address")]
    TooLarge {
        /// Stored rows.
        rows: usize,
        /// Stored columns.
        cols: usize,
    },
    /// A layout that the geometry does not allow.
    #[error(
        "{geometry} cannot be interleaved, expected axis 0, k=3, T=256, L=12 and an even number of blocks a row"
    )]
    Interleave {
        /// The geometry refused.
        geometry: Box<Geometry>,
    },
}

/// States or codes that do not fit their geometry.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackError {
    /// A slice of the wrong length.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length the geometry asks for.
        expected: usize,
    },
    /// A state of more than `L` bits.
    #[error("state {state:#x} of weight {weight} does not fit {state_bits} bits")]
    StateRange {
        /// Index in the block.
        weight: usize,
        /// The state.
        state: u32,
        /// `L`.
        state_bits: u32,
    },
    /// Two neighbours that do not share their bits.
    #[error("state {state:#x} of weight {weight} is followed by {next:#x}, which does not continue it")]
    Broken {
        /// Index in the block of the first of the two.
        weight: usize,
        /// Its state.
        state: u32,
        /// The state after it (the first weight's after the last).
        next: u32,
    },
    /// A geometry that the format does not have.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}
