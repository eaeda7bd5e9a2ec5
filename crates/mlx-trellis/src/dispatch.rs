//! The one rule that says which kernel computes a product: pure, without MLX types, so that it is tested as a table.
//!
//! Today there is one back end, the CPU; a kernel is named by how it uses the decoded weights. The order of
//! preference stands in [`choose`]; every kernel that was passed over says why.

use std::fmt;

use trellis_codec::Geometry;
use trellis_codec::reference::{Contract, Dtype};
use trellis_cpu::Level;

/// Most rows of activations for which weights are used straight from the codes (contract P); above, a tile of them
/// is decoded once for all rows (contract E). The limit of the format's numerical contracts (`kernels.md`,
/// "Scatter" and "Reduce": M = 1..=4).
pub const MAX_PACKED_ROWS: usize = 4;

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// The stored matrix.
    pub geometry: Geometry,
    /// Rows of activations: all leading dimensions of x multiplied together.
    pub m: usize,
    /// Type of activations and outputs.
    pub dtype: Dtype,
    /// Whether the caller accepts contract F (scale and divisor outside the sum) for speed.
    pub factored: bool,
}

/// What there is to multiply with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The SIMD level of the CPU.
    pub cpu: Level,
}

impl Device {
    /// This machine.
    pub fn current() -> Self {
        Self { cpu: Level::best() }
    }
}

/// The ways of computing a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// No launch: there are no rows.
    Empty,
    /// CPU, `y` itself with the scale outside the sum.
    CpuFactored,
    /// CPU, weights straight from the codes.
    CpuPacked,
    /// CPU, a tile of weights decoded once for all rows.
    CpuTiled,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kernel::Empty => "empty",
            Kernel::CpuFactored => "cpu factored",
            Kernel::CpuPacked => "cpu packed",
            Kernel::CpuTiled => "cpu tiled",
        })
    }
}

/// A kernel that was passed over, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The kernel.
    pub kernel: Kernel,
    /// Why not.
    pub reason: String,
}

/// The outcome of [`choose`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The kernel that runs.
    pub kernel: Kernel,
    /// The numerical contract it keeps.
    pub contract: Contract,
    /// The SIMD level it runs at.
    pub level: Level,
    /// The kernels preferred to it, each with its reason.
    pub refused: Vec<Refused>,
}

/// The kernel for a problem on a device: the first in order of preference that takes it.
pub fn choose(problem: &Problem, device: &Device) -> Choice {
    let mut refused = Vec::new();
    let mut refuse = |kernel, reason: String| refused.push(Refused { kernel, reason });
    let (kernel, contract) = 'found: {
        if problem.m == 0 {
            break 'found (Kernel::Empty, Contract::Packed);
        }
        if problem.factored {
            break 'found (Kernel::CpuFactored, Contract::Factored);
        }
        refuse(Kernel::CpuFactored, "contract F was not asked for".to_owned());
        if problem.m <= MAX_PACKED_ROWS {
            break 'found (Kernel::CpuPacked, Contract::Packed);
        }
        refuse(
            Kernel::CpuPacked,
            format!("M is {}, at most {MAX_PACKED_ROWS} rows keep contract P", problem.m),
        );
        (Kernel::CpuTiled, Contract::Expanded)
    };
    Choice { kernel, contract, level: device.cpu, refused }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_codec::Axis;

    #[test]
    fn the_table() {
        let geometry = Geometry::new(Axis::Output, 3, 12, 256, 17408, 5120).unwrap();
        let device = Device { cpu: Level::Scalar };
        for (m, factored, kernel, contract, passed_over) in [
            (0, false, Kernel::Empty, Contract::Packed, 0),
            (1, false, Kernel::CpuPacked, Contract::Packed, 1),
            (4, false, Kernel::CpuPacked, Contract::Packed, 1),
            (5, false, Kernel::CpuTiled, Contract::Expanded, 2),
            (512, false, Kernel::CpuTiled, Contract::Expanded, 2),
            (1, true, Kernel::CpuFactored, Contract::Factored, 0),
            (64, true, Kernel::CpuFactored, Contract::Factored, 0),
        ] {
            let problem = Problem { geometry, m, dtype: Dtype::Bf16, factored };
            let choice = choose(&problem, &device);
            assert_eq!(
                (choice.kernel, choice.contract),
                (kernel, contract),
                "m = {m}, factored = {factored}"
            );
            assert_eq!(choice.refused.len(), passed_over, "m = {m}, factored = {factored}");
            assert_eq!(choice.level, Level::Scalar);
        }
    }
}
