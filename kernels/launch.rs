//! A kernel launch as MLX's `metal_kernel` and `cuda_kernel` take it.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use trellis_codec::reference::Dtype;

use crate::prelude;

/// Element type of a kernel's arrays, named as MLX names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Type {
    /// IEEE binary32.
    Float32,
    /// IEEE binary16.
    Float16,
    /// bfloat16.
    Bfloat16,
    /// 32-bit unsigned.
    Uint32,
}

impl From<Dtype> for Type {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Type::Float32,
            Dtype::F16 => Type::Float16,
            Dtype::Bf16 => Type::Bfloat16,
        }
    }
}

/// A row-contiguous input or output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Array {
    /// Its name in the body.
    pub name: Cow<'static, str>,
    /// Element type.
    pub dtype: Type,
    /// Extent of each dimension.
    pub shape: Vec<usize>,
}

/// The value of a template parameter; a bare number or type name in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TemplateValue {
    /// A `bool`.
    Bool(bool),
    /// An `int`.
    Int(i32),
    /// A `typename`.
    Type(Type),
}

/// Everything that MLX needs to register a kernel and to run it once. As JSON, one object with these keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The kernel's name: one name, one header and source.
    pub name: Cow<'static, str>,
    /// What stands before the kernel.
    pub header: Cow<'static, str>,
    /// The kernel's body.
    pub source: Cow<'static, str>,
    /// Inputs, in order.
    pub inputs: Vec<Array>,
    /// Outputs, in order.
    pub outputs: Vec<Array>,
    /// Template parameters, in order.
    pub template: Vec<(Cow<'static, str>, TemplateValue)>,
    /// Grid in threads, always a multiple of a threadgroup that the body needs whole.
    pub grid: [u32; 3],
    /// Threadgroup in threads.
    pub threadgroup: [u32; 3],
    /// What outputs hold before the launch: nothing for every kernel here, as each writes all of them.
    pub init_value: Option<f32>,
    /// Whether MLX must make inputs row-contiguous first: every kernel here needs it.
    pub ensure_row_contiguous: bool,
    /// Bytes of shared memory beyond what the body declares; CUDA only, and left out of JSON when there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_memory: u32,
}

fn is_zero(bytes: &u32) -> bool {
    *bytes == 0
}

impl Launch {
    /// A launch on Metal.
    pub(crate) fn new(name: &'static str, source: &'static str) -> Self {
        Self::with_header(name.into(), prelude::header().into(), source)
    }

    /// A launch on CUDA.
    pub(crate) fn cuda(name: &'static str, source: &'static str) -> Self {
        Self::with_header(name.into(), prelude::cuda_header().into(), source)
    }

    /// A launch on CUDA whose registers are bounded so that `blocks` blocks of `threads` fit a multiprocessor. The
    /// bound stands in the header, and one name is one header, so the name tells it.
    pub(crate) fn cuda_bounded(name: &str, source: &'static str, threads: usize, blocks: usize) -> Self {
        let header = prelude::cuda_bounded_header(threads, blocks);
        Self::with_header(format!("{name}_{threads}x{blocks}").into(), header.into(), source)
    }

    fn with_header(name: Cow<'static, str>, header: Cow<'static, str>, source: &'static str) -> Self {
        Launch {
            name,
            header,
            source: source.into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            template: Vec::new(),
            grid: [1; 3],
            threadgroup: [1; 3],
            init_value: None,
            ensure_row_contiguous: true,
            shared_memory: 0,
        }
    }

    pub(crate) fn input(mut self, name: &'static str, dtype: impl Into<Type>, shape: &[usize]) -> Self {
        self.inputs.push(Array { name: name.into(), dtype: dtype.into(), shape: shape.to_vec() });
        self
    }

    pub(crate) fn output(mut self, name: &'static str, dtype: impl Into<Type>, shape: &[usize]) -> Self {
        self.outputs.push(Array { name: name.into(), dtype: dtype.into(), shape: shape.to_vec() });
        self
    }

    pub(crate) fn template_type(mut self, dtype: Dtype) -> Self {
        self.template.push(("T".into(), TemplateValue::Type(dtype.into())));
        self
    }

    /// Integers that eligibility has bounded by [`i32::MAX`].
    pub(crate) fn integers<const N: usize>(mut self, values: [(&'static str, usize); N]) -> Self {
        self.template.extend(values.map(|(name, value)| (name.into(), TemplateValue::Int(value as i32))));
        self
    }

    pub(crate) fn booleans<const N: usize>(mut self, values: [(&'static str, bool); N]) -> Self {
        self.template.extend(values.map(|(name, value)| (name.into(), TemplateValue::Bool(value))));
        self
    }

    pub(crate) fn over(mut self, grid: [usize; 3], threadgroup: [usize; 3]) -> Self {
        self.grid = grid.map(|n| n as u32);
        self.threadgroup = threadgroup.map(|n| n as u32);
        self
    }
}
