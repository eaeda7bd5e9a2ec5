use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::CpuError;

/// A set of instructions that products can be computed with.
///
/// All levels give the same weights, bit for bit; the order in which a product's terms are added differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust, one weight at a time. Every machine has it.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C: 8 weights at a time.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VBMI and VNNI: 16 weights at a time. Blocks that are no multiple of 16 weights
    /// (possible only for `k` = 4) run as [`Level::Avx2`].
    Avx512,
    /// AArch64 with Advanced SIMD: 8 weights at a time.
    Neon,
}

impl Level {
    /// Every level, on any machine, slowest first.
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Neon, Level::Avx2, Level::Avx512];

    /// Whether this machine can run the level.
    pub fn is_available(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => crate::avx2::Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => crate::avx512::Avx512::new().is_some(),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Level::Neon => crate::neon::Neon::new().is_some(),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The levels this machine can run, slowest first; never empty.
    pub fn available() -> Vec<Level> {
        Level::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    /// The fastest level this machine can run, found out once.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Level::available().pop().unwrap_or(Level::Scalar))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        })
    }
}

impl FromStr for Level {
    type Err = CpuError;

    fn from_str(name: &str) -> Result<Self, CpuError> {
        Level::ALL
            .into_iter()
            .find(|level| level.to_string() == name)
            .ok_or_else(|| CpuError::UnknownLevel { found: name.to_owned() })
    }
}
