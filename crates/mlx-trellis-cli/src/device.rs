//! Where a command runs.

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use mlx_rs::Device;
use mlx_trellis::{cuda_is_available, cuda_preflight, gpu_name, metal_is_available, mlx_version};
use serde::Serialize;

/// Exit code for a back end that this machine does not have.
pub(crate) const NO_DEVICE: u8 = 3;

/// What MLX runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// The CPU
    Cpu,
    /// The Metal GPU; exits 3 where there is none
    Metal,
    /// The CUDA GPU; exits 3 where there is none
    Cuda,
}

/// Takes the names of these back ends alone, for a command that does not run on all.
pub(crate) fn one_of<const N: usize>(backends: [Backend; N]) -> impl TypedValueParser<Value = Backend> {
    PossibleValuesParser::new(backends.map(|b| b.to_possible_value()).into_iter().flatten())
        .try_map(|name| Backend::from_str(&name, false))
}

/// Makes a back end MLX's default, the best there is if none is asked for, and says what it is; says so and returns
/// `None` where this machine has none. To be called before anything else of MLX's.
pub(crate) fn select(backend: Option<Backend>) -> Option<String> {
    let backend = backend.unwrap_or_else(|| {
        if metal_is_available() {
            Backend::Metal
        } else if cuda_is_available() {
            Backend::Cuda
        } else {
            Backend::Cpu
        }
    });
    match backend {
        Backend::Cpu => {
            Device::set_default(&Device::cpu());
            return Some(format!("CPU, {}", trellis_cpu::Level::best()));
        }
        Backend::Metal if !metal_is_available() => {
            eprintln!("no Metal device: MLX {} has none on this machine", mlx_version());
            return None;
        }
        Backend::Cuda => {
            if let Err(missing) = cuda_preflight() {
                eprintln!("no CUDA: {missing}");
                return None;
            }
        }
        Backend::Metal => {}
    }
    Device::set_default(&Device::gpu());
    Some(gpu_name().unwrap_or_else(|| "GPU".to_owned()))
}
