use thiserror::Error;
use trellis_codec::Geometry;

use crate::Level;

/// A call that cannot be carried out as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CpuError {
    /// A slice whose length does not fit the matrix.
    #[error("{what}: {found} elements, expected {expected} for a matrix of {geometry}")]
    Length {
        /// The slice: "codes", "scales", "x" or "out".
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length it must have.
        expected: usize,
        /// The matrix.
        geometry: Box<Geometry>,
    },
    /// A level whose instructions this machine lacks.
    #[error("level {level} is not available on this machine, which has {}", list(&Level::available()))]
    Unavailable {
        /// The level asked for.
        level: Level,
    },
    /// A name that is no level's.
    #[error("{found:?} is not a level, expected one of {}", list(&Level::ALL))]
    UnknownLevel {
        /// The name.
        found: String,
    },
}

fn list(levels: &[Level]) -> String {
    levels.iter().map(Level::to_string).collect::<Vec<_>>().join(", ")
}
