//! The one rule that says which kernel computes a product: pure, without MLX types, so that it is tested as a table.
//!
//! [`choose`] tries kernels in order of preference and takes the first that takes the problem; every one that was
//! passed over says why. A choice also says what its place in the order rests on: a measurement, or none yet.

use std::fmt;

pub use trellis_codec::format::MAX_PACKED_ROWS;
use trellis_codec::reference::{Contract, Dtype};
use trellis_codec::{Axis, Geometry};
use trellis_cpu::Level;
use trellis_kernels::{Cuda, Gpu, Launch, Unsupported, Variant, cuda, expand, reduce, scatter, splitk};

/// The product for which the TypeScript original found split-K faster than expansion and matmul: 17408 inputs, 5120
/// outputs, M = 5..=8. Not measured by this project.
const SPLIT_K_SHAPE: (usize, usize) = (17408, 5120);

/// Most rows of activations for which CUDA's exact kernels, which take up to [`cuda::EXACT_ROWS`], are preferred: every
/// row costs them several columns of digits. See [`CUDA_MEASURED`].
pub const MAX_CUDA_EXACT_ROWS: usize = 2;

/// Most rows of activations for which CUDA's tensor-core kernels run, in passes of [`cuda::TENSOR_ROWS`], each of which
/// decodes the matrix again; above, it is decoded once into memory. See [`CUDA_MEASURED`].
pub const MAX_CUDA_TENSOR_ROWS: usize = 2 * cuda::TENSOR_ROWS;

/// What the order of the CUDA kernels, [`MAX_CUDA_EXACT_ROWS`] and [`MAX_CUDA_TENSOR_ROWS`] rest on.
pub const CUDA_MEASURED: &str = "NVIDIA H200, driver 580.159, MLX 0.32.2, 2026-12-01: trellis bench matmul --backend cuda \
     --dtype bfloat16 at 17408 x 5120";

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// The stored matrix.
    pub geometry: Geometry,
    /// Rows of activations: all leading dimensions of x multiplied together.
    pub m: usize,
    /// Type of activations and outputs.
    pub dtype: Dtype,
    /// Whether the caller accepts contract F (scale and divisor outside the sum) for speed. On CUDA, where it costs no
    /// accuracy, it is what is taken anyway.
    pub factored: bool,
    /// Whether the caller insists on contract P, whatever it costs. Wins over `factored`.
    pub packed: bool,
    /// Decode arithmetic and set of Metal kernels.
    pub variant: Variant,
    /// Whether the layer asks for the `CODEBOOK` representation of Metal's scatter.
    pub shared_codebook: bool,
}

impl Problem {
    /// A product with default options.
    pub const fn new(geometry: Geometry, m: usize, dtype: Dtype) -> Self {
        Self {
            geometry,
            m,
            dtype,
            factored: false,
            packed: false,
            variant: Variant::DEFAULT,
            shared_codebook: false,
        }
    }

    /// The same product as the GPU kernels see it.
    pub fn on(&self, gpu: Gpu) -> trellis_kernels::Problem {
        let mut problem = trellis_kernels::Problem::new(self.geometry, self.m, self.dtype)
            .with_variant(self.variant)
            .on(gpu);
        problem.shared_codebook = self.shared_codebook;
        problem
    }
}

/// What there is to multiply with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The SIMD level of the CPU.
    pub cpu: Level,
    /// The Metal GPU, if products are to run on one.
    pub metal: Option<Gpu>,
    /// The CUDA GPU, if products are to run on one.
    pub cuda: Option<Cuda>,
}

impl Device {
    /// Where operations built now on this thread run: MLX's Metal or CUDA GPU if that is its device, else the CPU.
    pub fn current() -> Self {
        Self {
            cpu: Level::best(),
            metal: crate::backend::metal::current(),
            cuda: crate::backend::cuda::current(),
        }
    }

    /// The CPU alone.
    pub fn cpu() -> Self {
        Self { cpu: Level::best(), metal: None, cuda: None }
    }
}

/// The ways of computing a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// No launch: there are no rows.
    Empty,
    /// Metal, weights straight from the codes, partial sums added by MLX.
    MetalScatter,
    /// Metal, weights decoded tile by tile, no dense weight.
    MetalSplitK,
    /// Metal, the dense weight decoded whole, then MLX's matmul.
    MetalExpand,
    /// CUDA, tensor cores on integers: activations as digits, the sum itself exact.
    CudaExact,
    /// CUDA, tensor cores on floating-point numbers, with what rounding leaves over.
    CudaFloat,
    /// CUDA, weights straight from the codes, one fma each.
    CudaPacked,
    /// CUDA, the dense weight decoded in slices, each followed by MLX's matmul.
    CudaExpand,
    /// CPU, `y` itself with the scale outside the sum.
    CpuFactored,
    /// CPU, weights straight from the codes.
    CpuPacked,
    /// CPU, a tile of weights decoded once for all rows.
    CpuTiled,
}

impl Kernel {
    /// The numerical contract it keeps.
    pub const fn contract(self) -> Contract {
        match self {
            Kernel::Empty | Kernel::MetalScatter | Kernel::CudaPacked | Kernel::CpuPacked => Contract::Packed,
            Kernel::MetalSplitK | Kernel::MetalExpand | Kernel::CudaExpand | Kernel::CpuTiled => {
                Contract::Expanded
            }
            Kernel::CudaExact | Kernel::CudaFloat | Kernel::CpuFactored => Contract::Factored,
        }
    }

    /// Whether its products go through tf32 or the like, for which the contract allows a little more.
    pub const fn takes_tf32_allowance(self) -> bool {
        matches!(self, Kernel::CudaFloat)
    }

    /// Whether it runs on CUDA.
    pub const fn is_cuda(self) -> bool {
        matches!(self, Kernel::CudaExact | Kernel::CudaFloat | Kernel::CudaPacked | Kernel::CudaExpand)
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kernel::Empty => "empty",
            Kernel::MetalScatter => "metal scatter",
            Kernel::MetalSplitK => "metal split-K",
            Kernel::MetalExpand => "metal expand and matmul",
            Kernel::CudaExact => "cuda exact",
            Kernel::CudaFloat => "cuda float",
            Kernel::CudaPacked => "cuda packed",
            Kernel::CudaExpand => "cuda expand and matmul",
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
    /// The SIMD level it runs at, for a CPU kernel.
    pub level: Level,
    /// The GPU it runs on, for a Metal or CUDA kernel.
    pub gpu: Option<Gpu>,
    /// What its place in the order of preference rests on.
    pub basis: &'static str,
    /// The kernels preferred to it, each with its reason.
    pub refused: Vec<Refused>,
}

impl Choice {
    /// The custom-kernel launches of the choice, in order; none for a CPU kernel.
    ///
    /// # Errors
    /// A problem that the chosen kernel does not take, which is not the one it was chosen for.
    pub fn launches(&self, problem: &Problem) -> Result<Vec<Launch>, Unsupported> {
        let on = problem.on(self.gpu.unwrap_or_default());
        Ok(match self.kernel {
            Kernel::MetalScatter => vec![scatter::launch(&on)?],
            Kernel::MetalSplitK => splitk::launch(&on)?.into(),
            Kernel::MetalExpand => vec![expand::launch(&on)?],
            Kernel::CudaExact | Kernel::CudaFloat | Kernel::CudaPacked => {
                let mut all = Vec::new();
                for m in passes(self.kernel, problem.m) {
                    all.extend(cuda::launches(
                        cuda_kernel(self.kernel, &on),
                        &trellis_kernels::Problem { m, ..on },
                    )?);
                }
                all
            }
            // One slice; a large matrix takes several.
            Kernel::CudaExpand => vec![expand::cuda::EXPAND.launch(&on)?],
            _ => Vec::new(),
        })
    }
}

/// The rows of activations of each pass of a CUDA product: at most 8 for a tensor-core kernel, all of them otherwise.
pub(crate) fn passes(kernel: Kernel, m: usize) -> Vec<usize> {
    let most = match kernel {
        Kernel::CudaExact => cuda::EXACT_ROWS,
        Kernel::CudaFloat => cuda::TENSOR_ROWS,
        _ => m.max(1),
    };
    (0..m).step_by(most).map(|first| most.min(m - first)).collect()
}

/// The launch of a CUDA choice for its matrix's axis.
pub(crate) fn cuda_kernel(
    kernel: Kernel,
    problem: &trellis_kernels::Problem,
) -> &'static trellis_kernels::Kernel {
    match (kernel, problem.geometry.axis()) {
        (Kernel::CudaExact, Axis::Output) => &scatter::cuda::EXACT,
        (Kernel::CudaExact, Axis::Input) => &reduce::cuda::EXACT,
        (Kernel::CudaFloat, Axis::Output) => &scatter::cuda::FLOAT,
        (Kernel::CudaFloat, Axis::Input) => &reduce::cuda::FLOAT,
        (Kernel::CudaPacked, Axis::Output) => &scatter::cuda::PACKED,
        (Kernel::CudaPacked, Axis::Input) => &reduce::cuda::PACKED,
        _ => &expand::cuda::EXPAND,
    }
}

/// The kernel for a problem on a device: the first in order of preference that takes it.
pub fn choose(problem: &Problem, device: &Device) -> Choice {
    let mut refused = Vec::new();
    let (kernel, gpu, basis) = if problem.m == 0 {
        (Kernel::Empty, None, "nothing to compute")
    } else if let Some((kernel, gpu, basis)) = metal(problem, device, &mut refused) {
        (kernel, Some(gpu), basis)
    } else if let Some((kernel, gpu, basis)) = on_cuda(problem, device, &mut refused) {
        (kernel, Some(gpu), basis)
    } else {
        let (kernel, basis) = cpu(problem, &mut refused);
        (kernel, None, basis)
    };
    Choice { kernel, contract: kernel.contract(), level: device.cpu, gpu, basis, refused }
}

/// A CUDA kernel for a problem whether or not it would be chosen, so that each can be tested and timed; `None` without
/// a CUDA GPU or for a kernel of another back end.
///
/// # Errors
/// Why the kernel does not take the problem.
pub fn choose_cuda(
    kernel: Kernel,
    problem: &Problem,
    device: &Device,
) -> Option<Result<Choice, Unsupported>> {
    let gpu = Gpu::Cuda(device.cuda?);
    kernel.is_cuda().then(|| {
        cuda_supports(kernel, &problem.on(gpu))?;
        let basis = "asked for";
        Ok(Choice {
            kernel,
            contract: kernel.contract(),
            level: device.cpu,
            gpu: Some(gpu),
            basis,
            refused: Vec::new(),
        })
    })
}

/// Whether a CUDA kernel takes a problem, in passes where it has to.
fn cuda_supports(kernel: Kernel, on: &trellis_kernels::Problem) -> Result<(), Unsupported> {
    let m = passes(kernel, on.m).first().copied().unwrap_or(on.m);
    cuda_kernel(kernel, on).supports(&trellis_kernels::Problem { m, ..*on })
}

fn on_cuda(
    problem: &Problem,
    device: &Device,
    refused: &mut Vec<Refused>,
) -> Option<(Kernel, Gpu, &'static str)> {
    let gpu = Gpu::Cuda(device.cuda?);
    let on = problem.on(gpu);
    let wide = problem.dtype == Dtype::F32;
    for kernel in [Kernel::CudaExact, Kernel::CudaFloat, Kernel::CudaPacked, Kernel::CudaExpand] {
        let unwanted = match kernel {
            Kernel::CudaPacked if problem.packed => None,
            _ if problem.packed => Some("contract P was asked for".to_owned()),
            Kernel::CudaExact if problem.m > MAX_CUDA_EXACT_ROWS => {
                Some(format!("M is {}, expected 1 to {MAX_CUDA_EXACT_ROWS}", problem.m))
            }
            Kernel::CudaFloat if problem.m > MAX_CUDA_TENSOR_ROWS => {
                Some(format!("M is {}, expected 1 to {MAX_CUDA_TENSOR_ROWS}", problem.m))
            }
            Kernel::CudaPacked if problem.m > MAX_PACKED_ROWS && !wide => {
                Some(format!("M is {}, at most {MAX_PACKED_ROWS} rows keep contract P", problem.m))
            }
            Kernel::CudaExpand if wide => Some("MLX's matmul rounds float32 to tf32".to_owned()),
            _ => None,
        };
        let reason = match unwanted {
            None => match cuda_supports(kernel, &on) {
                Ok(()) => {
                    let basis = match kernel {
                        Kernel::CudaPacked if problem.packed => "contract P was asked for",
                        Kernel::CudaPacked => "takes any geometry",
                        _ => CUDA_MEASURED,
                    };
                    return Some((kernel, gpu, basis));
                }
                Err(unsupported) => unsupported.reason.to_string(),
            },
            Some(reason) => reason,
        };
        refused.push(Refused { kernel, reason });
    }
    None
}

fn metal(
    problem: &Problem,
    device: &Device,
    refused: &mut Vec<Refused>,
) -> Option<(Kernel, Gpu, &'static str)> {
    let gpu = device.metal?;
    let on = problem.on(gpu);
    let mut takes = |kernel, verdict: Result<(), Unsupported>| match verdict {
        Ok(()) => true,
        Err(unsupported) => {
            refused.push(Refused { kernel, reason: unsupported.reason.to_string() });
            false
        }
    };
    if takes(Kernel::MetalScatter, scatter::supports(&on)) {
        return Some((
            Kernel::MetalScatter,
            gpu,
            "the TypeScript original's rule; not measured by this project",
        ));
    }
    if takes(Kernel::MetalSplitK, splitk::supports(&on)) {
        let g = &problem.geometry;
        let basis = if g.axis() == Axis::Output && (g.rows(), g.cols()) == SPLIT_K_SHAPE {
            "the TypeScript original's measurement of this shape; not measured by this project"
        } else {
            "widened from 17408 x 5120 to every shape the kernel takes; not measured"
        };
        return Some((Kernel::MetalSplitK, gpu, basis));
    }
    if takes(Kernel::MetalExpand, expand::supports(&on)) {
        return Some((Kernel::MetalExpand, gpu, "takes any M; not measured by this project"));
    }
    None
}

// The texts of `cpu` spell the limit.
const _: () = assert!(MAX_PACKED_ROWS == 4);

fn cpu(problem: &Problem, refused: &mut Vec<Refused>) -> (Kernel, &'static str) {
    if problem.packed {
        return (Kernel::CpuPacked, "contract P was asked for");
    }
    if problem.factored {
        return (Kernel::CpuFactored, "asked for");
    }
    let mut refuse = |kernel, reason| refused.push(Refused { kernel, reason });
    refuse(Kernel::CpuFactored, "contract F was not asked for".to_owned());
    if problem.m <= MAX_PACKED_ROWS {
        return (Kernel::CpuPacked, "the format's contract for M <= 4");
    }
    refuse(Kernel::CpuPacked, format!("M is {}, at most {MAX_PACKED_ROWS} rows keep contract P", problem.m));
    (Kernel::CpuTiled, "the format's contract for M > 4")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(axis: Axis, rows: usize, cols: usize, m: usize, dtype: Dtype) -> Problem {
        Problem::new(Geometry::new(axis, 3, 12, 256, rows, cols).unwrap(), m, dtype)
    }

    #[test]
    fn the_cpu_table() {
        let device = Device { cpu: Level::Scalar, metal: None, cuda: None };
        for (m, factored, kernel, contract, passed_over) in [
            (0, false, Kernel::Empty, Contract::Packed, 0),
            (1, false, Kernel::CpuPacked, Contract::Packed, 1),
            (4, false, Kernel::CpuPacked, Contract::Packed, 1),
            (5, false, Kernel::CpuTiled, Contract::Expanded, 2),
            (512, false, Kernel::CpuTiled, Contract::Expanded, 2),
            (1, true, Kernel::CpuFactored, Contract::Factored, 0),
            (64, true, Kernel::CpuFactored, Contract::Factored, 0),
        ] {
            let problem = Problem { factored, ..problem(Axis::Output, 17408, 5120, m, Dtype::Bf16) };
            let choice = choose(&problem, &device);
            assert_eq!(
                (choice.kernel, choice.contract),
                (kernel, contract),
                "m = {m}, factored = {factored}"
            );
            assert_eq!(choice.refused.len(), passed_over, "m = {m}, factored = {factored}");
            assert_eq!(choice.level, Level::Scalar);
            assert!(choice.launches(&problem).unwrap().is_empty());
        }
    }

    #[test]
    fn the_metal_table() {
        use Axis::{Input, Output};
        let device = Device { cpu: Level::Scalar, metal: Some(Gpu::Other), cuda: None };
        for (axis, rows, cols, m, dtype, kernel, launches, basis) in [
            (Output, 17408, 5120, 0, Dtype::Bf16, Kernel::Empty, 0, "nothing"),
            (Output, 17408, 5120, 1, Dtype::Bf16, Kernel::MetalScatter, 1, "original's rule"),
            (Output, 17408, 5120, 4, Dtype::F32, Kernel::MetalScatter, 1, "original's rule"),
            (Output, 17408, 5120, 5, Dtype::Bf16, Kernel::MetalSplitK, 2, "measurement of this shape"),
            (Output, 17408, 5120, 8, Dtype::Bf16, Kernel::MetalSplitK, 2, "measurement of this shape"),
            (Output, 4096, 2560, 8, Dtype::Bf16, Kernel::MetalSplitK, 2, "widened"),
            // Fewer inputs than outputs, another dtype, more rows: no split-K.
            (Output, 2560, 4096, 8, Dtype::Bf16, Kernel::MetalExpand, 1, "any M"),
            (Output, 17408, 5120, 8, Dtype::F16, Kernel::MetalExpand, 1, "any M"),
            (Output, 17408, 5120, 9, Dtype::Bf16, Kernel::MetalExpand, 1, "any M"),
            (Input, 17408, 5120, 1, Dtype::Bf16, Kernel::MetalExpand, 1, "any M"),
        ] {
            let problem = problem(axis, rows, cols, m, dtype);
            let choice = choose(&problem, &device);
            let what = format!("{rows}x{cols} m = {m} {dtype:?}");
            assert_eq!(choice.kernel, kernel, "{what}");
            assert_eq!(choice.launches(&problem).unwrap().len(), launches, "{what}");
            assert!(choice.basis.contains(basis), "{what}: {}", choice.basis);
            assert!(choice.refused.iter().all(|r| !r.reason.is_empty()));
        }
    }

    fn h200() -> Device {
        Device {
            cpu: Level::Scalar,
            metal: None,
            cuda: Some(Cuda { multiprocessors: 132, capability: (9, 0) }),
        }
    }

    #[test]
    fn the_cuda_table() {
        use Axis::{Input, Output};
        for axis in [Output, Input] {
            for (m, dtype, kernel, launches, basis) in [
                (0, Dtype::Bf16, Kernel::Empty, 0, "nothing"),
                (1, Dtype::Bf16, Kernel::CudaExact, 2, CUDA_MEASURED),
                (2, Dtype::F32, Kernel::CudaExact, 2, CUDA_MEASURED),
                (3, Dtype::F32, Kernel::CudaFloat, 2, CUDA_MEASURED),
                (5, Dtype::F16, Kernel::CudaFloat, 2, CUDA_MEASURED),
                (8, Dtype::Bf16, Kernel::CudaFloat, 2, CUDA_MEASURED),
                (9, Dtype::Bf16, Kernel::CudaFloat, 4, CUDA_MEASURED),
                (16, Dtype::F32, Kernel::CudaFloat, 4, CUDA_MEASURED),
                (17, Dtype::Bf16, Kernel::CudaExpand, 1, CUDA_MEASURED),
                (512, Dtype::F16, Kernel::CudaExpand, 1, CUDA_MEASURED),
                (17, Dtype::F32, Kernel::CudaPacked, if axis == Output { 2 } else { 1 }, "any geometry"),
            ] {
                let problem = problem(axis, 17408, 5120, m, dtype);
                let choice = choose(&problem, &h200());
                let what = format!("{axis:?} m = {m} {dtype:?}");
                assert_eq!((choice.kernel, choice.contract), (kernel, kernel.contract()), "{what}");
                assert_eq!(choice.launches(&problem).unwrap().len(), launches, "{what}");
                assert!(choice.basis.contains(basis), "{what}: {}", choice.basis);
                assert!(choice.refused.iter().all(|r| !r.reason.is_empty()));
            }
            // Blocks that no tile holds, and contract P where it is asked for.
            let odd = Problem::new(Geometry::new(axis, 3, 12, 96, 512, 96).unwrap(), 1, Dtype::Bf16);
            assert_eq!(choose(&odd, &h200()).kernel, Kernel::CudaPacked);
            assert_eq!(choose(&Problem { m: 5, ..odd }, &h200()).kernel, Kernel::CudaExpand);
            let packed = Problem { packed: true, ..problem(axis, 17408, 5120, 1, Dtype::Bf16) };
            assert_eq!(choose(&packed, &h200()).kernel, Kernel::CudaPacked);
            assert_eq!(choose(&packed, &Device { cuda: None, ..h200() }).kernel, Kernel::CpuPacked);
        }
    }

    #[test]
    fn any_cuda_kernel_can_be_asked_for() {
        let problem = problem(Axis::Input, 512, 512, 3, Dtype::Bf16);
        for kernel in [Kernel::CudaExact, Kernel::CudaFloat, Kernel::CudaPacked, Kernel::CudaExpand] {
            assert_eq!(choose_cuda(kernel, &problem, &h200()).unwrap().unwrap().kernel, kernel);
        }
        assert!(choose_cuda(Kernel::CpuTiled, &problem, &h200()).is_none());
        assert!(choose_cuda(Kernel::CudaExact, &problem, &Device { cuda: None, ..h200() }).is_none());
        let odd = Problem::new(Geometry::new(Axis::Input, 3, 12, 96, 512, 96).unwrap(), 1, Dtype::Bf16);
        assert!(choose_cuda(Kernel::CudaExact, &odd, &h200()).unwrap().is_err());
        assert_eq!(passes(Kernel::CudaFloat, 17), [8, 8, 1]);
        assert_eq!(passes(Kernel::CudaPacked, 17), [17]);
    }

    #[test]
    fn what_is_refused_says_why() {
        let device = Device { cpu: Level::Scalar, metal: Some(Gpu::Other), cuda: None };
        let choice = choose(&problem(Axis::Output, 17408, 5120, 9, Dtype::Bf16), &device);
        let reasons: Vec<_> = choice.refused.iter().map(|r| (r.kernel, r.reason.as_str())).collect();
        assert_eq!(
            reasons,
            [
                (Kernel::MetalScatter, "M is 9, expected 1 to 4"),
                (Kernel::MetalSplitK, "M is 9, expected 5 to 8")
            ]
        );
    }
}
