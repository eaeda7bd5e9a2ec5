//! Runs a [`Launch`] through mlx-rs's `MetalKernel`.

use std::cell::RefCell;
use std::collections::HashMap;

use mlx_rs::Array;
use mlx_rs::error::Exception;
use mlx_rs::fast::{
    MetalKernel, MetalKernelApplyOptions, MetalKernelOptions, MetalKernelOutput, TemplateArg,
};
use trellis_kernels::{Launch, TemplateValue};

use super::launch::{check, dims, dtype};

thread_local! {
    /// Kernels by name: building one is cheap but not free, and `MetalKernel` belongs to its thread as streams do.
    static KERNELS: RefCell<HashMap<String, MetalKernel>> = RefCell::new(HashMap::new());
}

/// The lazy outputs of a launch on `inputs`, on the caller's stream or else the default GPU stream.
///
/// `launch` must come from `trellis-kernels`; `inputs` are checked against it.
pub(crate) fn apply(launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>, Exception> {
    check(launch, inputs)?;
    let outputs: Vec<MetalKernelOutput> = launch
        .outputs
        .iter()
        .map(|o| MetalKernelOutput { shape: dims(&o.shape), dtype: dtype(o.dtype) })
        .collect();
    let options = MetalKernelApplyOptions {
        template_args: launch
            .template
            .iter()
            .map(|(name, value)| {
                let value = match *value {
                    TemplateValue::Bool(bool) => TemplateArg::Bool(bool),
                    TemplateValue::Int(int) => TemplateArg::Int(int),
                    TemplateValue::Type(ty) => TemplateArg::Dtype(dtype(ty)),
                };
                (name.clone().into_owned(), value)
            })
            .collect(),
        init_value: launch.init_value,
        verbose: false,
    };
    let triple = |[x, y, z]: [u32; 3]| (x as i32, y as i32, z as i32);
    KERNELS.with_borrow_mut(|kernels| {
        if !kernels.contains_key(launch.name.as_ref()) {
            kernels.insert(launch.name.clone().into_owned(), build(launch)?);
        }
        let kernel = &kernels[launch.name.as_ref()];
        // SAFETY: `check` found inputs of the shapes and dtypes that `launch` was made for, and MLX makes them
        // row-contiguous (`ensure_row_contiguous`). For those, the kernels of `trellis-kernels` stay inside their
        // buffers, write no input, write every output element once and race on nothing: its tests run each of them
        // in an emulator that checks exactly this, and prove the coverage of every launch.
        unsafe { kernel.apply(inputs, &outputs, triple(launch.grid), triple(launch.threadgroup), options) }
    })
}

fn build(launch: &Launch) -> Result<MetalKernel, Exception> {
    let names = |arrays: &[trellis_kernels::Array]| arrays.iter().map(|a| a.name.clone()).collect::<Vec<_>>();
    let (inputs, outputs) = (names(&launch.inputs), names(&launch.outputs));
    MetalKernel::new(
        &launch.name,
        &inputs.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        &outputs.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        &launch.source,
        MetalKernelOptions {
            header: launch.header.clone().into_owned(),
            ensure_row_contiguous: launch.ensure_row_contiguous,
            atomic_outputs: false,
        },
    )
}
