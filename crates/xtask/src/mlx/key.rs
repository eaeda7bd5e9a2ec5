//! What is set up, and the name of the folder that holds it: whatever changes the result changes the name.

use std::fmt;
use std::path::PathBuf;

use clap::ValueEnum;

use crate::python::Dependencies;

/// A published build of MLX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// For the CPU only.
    Cpu,
    /// For NVIDIA GPUs, CUDA 12.
    Cuda12,
    /// For NVIDIA GPUs, CUDA 13.
    Cuda13,
}

impl Backend {
    /// The name of its wheel.
    pub(crate) fn wheel(self) -> &'static str {
        match self {
            Self::Cpu => "mlx-cpu",
            Self::Cuda12 => "mlx-cuda-12",
            Self::Cuda13 => "mlx-cuda-13",
        }
    }

    /// CUDA's own libraries come as wheels of their own, which unpack beside MLX, where libmlx.so's run path
    /// (`$ORIGIN/../../nvidia/*/lib`) looks for them.
    pub(crate) fn dependencies(self) -> Dependencies {
        match self {
            Self::Cpu => Dependencies::Without,
            Self::Cuda12 | Self::Cuda13 => Dependencies::With,
        }
    }

    /// For the user's patience.
    pub(crate) fn download_size(self) -> &'static str {
        match self {
            Self::Cpu => "10 MB",
            Self::Cuda12 | Self::Cuda13 => "with NVIDIA's libraries about 2 GB",
        }
    }
}

/// Where MLX comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// A published build.
    Wheel(Backend),
    /// A folder that has it already.
    From(PathBuf),
}

/// As `.cargo/mlx-linux.toml` records it.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wheel(Backend::Cpu) => f.write_str("cpu"),
            Self::Wheel(Backend::Cuda12) => f.write_str("cuda12"),
            Self::Wheel(Backend::Cuda13) => f.write_str("cuda13"),
            Self::From(folder) => write!(f, "from {}", folder.display()),
        }
    }
}

impl Choice {
    /// Reads what `Display` wrote.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix("from ") {
            Some(folder) => Some(Self::From(folder.into())),
            None => Backend::from_str(text, false).ok().map(Self::Wheel),
        }
    }
}

/// The folder name for a combination of versions; `recipe` stands for all of our own files and flags.
pub(crate) fn of(mlx: &str, choice: &Choice, mlx_sys: &str, recipe: &str) -> String {
    let choice = match choice {
        Choice::Wheel(_) => choice.to_string(),
        Choice::From(folder) => format!("from{:08x}", hash(&folder.to_string_lossy()) as u32),
    };
    format!("{mlx}-{choice}-sys{mlx_sys}-{:08x}", hash(recipe) as u32)
}

/// FNV-1a, because it has to be the same in every build of this program.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The MLX version that mlx-c's CMakeLists.txt pins, from its line `GIT_TAG v0.32.2)`.
pub(crate) fn version_in_cmake(text: &str) -> Option<String> {
    let tag = text.lines().find_map(|line| line.trim().strip_prefix("GIT_TAG v"))?;
    let version: String = tag.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
    version.starts_with(|c: char| c.is_ascii_digit()).then_some(version)
}

/// The version that MLX's own version.h states.
pub(crate) fn version_in_header(text: &str) -> Option<String> {
    let part = |name: &str| {
        text.lines().find_map(|line| {
            line.trim().strip_prefix("#define MLX_VERSION_")?.strip_prefix(name)?.trim().parse::<u32>().ok()
        })
    };
    Some(format!("{}.{}.{}", part("MAJOR")?, part("MINOR")?, part("PATCH")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_pinned_version() {
        let cmake = "FetchContent_Declare(\n mlx\n GIT_REPOSITORY \"example.org/mlx\"\n GIT_TAG v0.32.2)\n";
        assert_eq!(version_in_cmake(cmake).as_deref(), Some("0.32.2"));
        assert_eq!(version_in_cmake("  GIT_TAG v1.2.3 # why\n").as_deref(), Some("1.2.3"));
        assert_eq!(version_in_cmake("  GIT_TAG main)\n"), None);
        assert_eq!(version_in_cmake("  GIT_TAG v)\n"), None);
        assert_eq!(version_in_cmake(""), None);
    }

    #[test]
    fn reads_the_version_header() {
        let header = "#define MLX_VERSION_MAJOR 0\n#define MLX_VERSION_MINOR 32\n#define MLX_VERSION_PATCH 2\n\
                      #define MLX_VERSION_NUMERIC \\\n  (100000 * MLX_VERSION_MAJOR)\n";
        assert_eq!(version_in_header(header).as_deref(), Some("0.32.2"));
        assert_eq!(version_in_header("#define MLX_VERSION_MAJOR 0\n"), None);
    }

    #[test]
    fn choice_survives_being_recorded() {
        let choices = [Backend::Cpu, Backend::Cuda12, Backend::Cuda13].map(Choice::Wheel);
        for choice in choices.into_iter().chain([Choice::From("/opt/my mlx".into())]) {
            assert_eq!(Choice::parse(&choice.to_string()), Some(choice));
        }
        assert_eq!(Choice::parse("metal"), None);
    }

    #[test]
    fn key_names_all_that_matters() {
        let cpu = Choice::Wheel(Backend::Cpu);
        let key = of("0.32.2", &cpu, "0.7.0", "recipe");
        assert!(key.starts_with("0.32.2-cpu-sys0.7.0-"), "{key}");
        let from = |folder: &str| of("0.32.2", &Choice::From(folder.into()), "0.7.0", "recipe");
        let others = [
            of("0.32.3", &cpu, "0.7.0", "recipe"),
            of("0.32.2", &Choice::Wheel(Backend::Cuda13), "0.7.0", "recipe"),
            of("0.32.2", &cpu, "0.7.1", "recipe"),
            of("0.32.2", &cpu, "0.7.0", "another recipe"),
            from("/a"),
            from("/b"),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(*other, key);
            assert!(!others[..index].contains(other), "{other}");
            assert!(other.chars().all(|c| c.is_ascii_alphanumeric() || ".-".contains(c)), "{other}");
        }
    }

    #[test]
    fn hash_is_fnv_1a() {
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
    }
}
