//! Launches for the emulator of Metal kernels, `msl-emu`: behind the feature `emulator`, since products need none.

use crate::{Array, Launch, TemplateValue, Type};

/// A launch on Metal as the emulator takes it.
///
/// [`Launch::init_value`] and [`Launch::ensure_row_contiguous`] stay behind: every kernel here writes all of its outputs,
/// and is run on contiguous inputs.
pub fn kernel(launch: &Launch) -> msl_emu::Kernel {
    let mut kernel = msl_emu::Kernel::new(launch.name.clone(), launch.source.clone())
        .header(launch.header.clone())
        .launch(launch.grid, launch.threadgroup);
    kernel.inputs = launch.inputs.iter().map(array).collect();
    kernel.outputs = launch.outputs.iter().map(array).collect();
    for (name, value) in &launch.template {
        kernel = match *value {
            TemplateValue::Bool(v) => kernel.template(name, v),
            TemplateValue::Int(v) => kernel.template(name, v),
            TemplateValue::Type(t) => kernel.template(name, dtype(t)),
        };
    }
    kernel
}

fn array(array: &Array) -> msl_emu::Array {
    msl_emu::Array::new(array.name.clone(), dtype(array.dtype), array.shape.clone())
}

fn dtype(dtype: Type) -> msl_emu::Dtype {
    match dtype {
        Type::Float32 => msl_emu::Dtype::Float32,
        Type::Float16 => msl_emu::Dtype::Float16,
        Type::Bfloat16 => msl_emu::Dtype::Bfloat16,
        Type::Uint32 => msl_emu::Dtype::Uint32,
    }
}
