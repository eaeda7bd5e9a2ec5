//! What a kernel is: the arguments of MLX's `fast.metal_kernel` and of one call of it.

use std::fmt;

/// Element type of an array, as MLX names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool,
    /// 8-bit unsigned.
    Uint8,
    /// 16-bit unsigned.
    Uint16,
    /// 32-bit unsigned.
    Uint32,
    /// 64-bit unsigned.
    Uint64,
    /// 8-bit signed.
    Int8,
    /// 16-bit signed.
    Int16,
    /// 32-bit signed.
    Int32,
    /// 64-bit signed.
    Int64,
    /// IEEE binary16.
    Float16,
    /// IEEE binary32.
    Float32,
    /// The upper half of a binary32.
    Bfloat16,
    /// Two binary32.
    Complex64,
}

impl Dtype {
    /// Every element type.
    pub const ALL: [Dtype; 13] = [
        Dtype::Bool,
        Dtype::Uint8,
        Dtype::Uint16,
        Dtype::Uint32,
        Dtype::Uint64,
        Dtype::Int8,
        Dtype::Int16,
        Dtype::Int32,
        Dtype::Int64,
        Dtype::Float16,
        Dtype::Float32,
        Dtype::Bfloat16,
        Dtype::Complex64,
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => 1,
            Dtype::Uint16 | Dtype::Int16 | Dtype::Float16 | Dtype::Bfloat16 => 2,
            Dtype::Uint32 | Dtype::Int32 | Dtype::Float32 => 4,
            Dtype::Uint64 | Dtype::Int64 | Dtype::Complex64 => 8,
        }
    }

    /// The type's name in the Metal source that MLX writes.
    pub fn metal(self) -> &'static str {
        match self {
            Dtype::Bool => "bool",
            Dtype::Uint8 => "uint8_t",
            Dtype::Uint16 => "uint16_t",
            Dtype::Uint32 => "uint32_t",
            Dtype::Uint64 => "uint64_t",
            Dtype::Int8 => "int8_t",
            Dtype::Int16 => "int16_t",
            Dtype::Int32 => "int32_t",
            Dtype::Int64 => "int64_t",
            Dtype::Float16 => "float16_t",
            Dtype::Float32 => "float",
            Dtype::Bfloat16 => "bfloat16_t",
            Dtype::Complex64 => "complex64_t",
        }
    }
}

/// One input or output: a row-contiguous array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    /// Its name in the kernel's body.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extent of each dimension; empty for a scalar.
    pub shape: Vec<usize>,
}

impl Array {
    /// An array by its name, element type and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Array { name: name.into(), dtype, shape: shape.into() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// The value of one template parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateArg {
    /// An `int` parameter.
    Int(i32),
    /// A `bool` parameter.
    Bool(bool),
    /// A `typename` parameter.
    Dtype(Dtype),
}

impl From<i32> for TemplateArg {
    fn from(value: i32) -> Self {
        TemplateArg::Int(value)
    }
}

impl From<bool> for TemplateArg {
    fn from(value: bool) -> Self {
        TemplateArg::Bool(value)
    }
}

impl From<Dtype> for TemplateArg {
    fn from(value: Dtype) -> Self {
        TemplateArg::Dtype(value)
    }
}

impl fmt::Display for TemplateArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateArg::Int(value) => write!(f, "{value}"),
            TemplateArg::Bool(value) => write!(f, "{}", i32::from(*value)),
            TemplateArg::Dtype(value) => f.write_str(value.metal()),
        }
    }
}

/// A kernel and one launch of it, with the names that MLX's `metal_kernel` gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// The kernel's name, without the parts that MLX adds to it.
    pub name: String,
    /// Inputs, in order.
    pub inputs: Vec<Array>,
    /// Outputs, in order.
    pub outputs: Vec<Array>,
    /// Text before the kernel: helper functions, pragmas.
    pub header: String,
    /// The kernel's body.
    pub source: String,
    /// Template parameters, in order.
    pub template: Vec<(String, TemplateArg)>,
    /// Grid, in threads.
    pub grid: [u32; 3],
    /// Threadgroup, in threads; clamped to the grid as MLX does.
    pub threadgroup: [u32; 3],
    /// What every output element holds before the launch; `None` leaves it undefined.
    pub init_value: Option<f32>,
    /// Whether outputs are declared `atomic<T>`.
    pub atomic_outputs: bool,
}

impl Kernel {
    /// A kernel with a name and a body, no arrays, and a grid of one thread.
    pub fn new(name: impl Into<String>, source: impl Into<String>) -> Self {
        Kernel {
            name: name.into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            header: String::new(),
            source: source.into(),
            template: Vec::new(),
            grid: [1, 1, 1],
            threadgroup: [1, 1, 1],
            init_value: None,
            atomic_outputs: false,
        }
    }

    /// Adds an input.
    pub fn input(mut self, name: &str, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        self.inputs.push(Array::new(name, dtype, shape));
        self
    }

    /// Adds an output.
    pub fn output(mut self, name: &str, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        self.outputs.push(Array::new(name, dtype, shape));
        self
    }

    /// Adds a template parameter.
    pub fn template(mut self, name: &str, value: impl Into<TemplateArg>) -> Self {
        self.template.push((name.to_owned(), value.into()));
        self
    }

    /// Sets the header.
    pub fn header(mut self, header: impl Into<String>) -> Self {
        self.header = header.into();
        self
    }

    /// Sets grid and threadgroup, in threads.
    pub fn launch(mut self, grid: [u32; 3], threadgroup: [u32; 3]) -> Self {
        self.grid = grid;
        self.threadgroup = threadgroup;
        self
    }

    /// Threads of a full threadgroup along each axis: never more than the grid has.
    pub fn clamped_threadgroup(&self) -> [u32; 3] {
        std::array::from_fn(|d| self.threadgroup[d].min(self.grid[d]))
    }
}
