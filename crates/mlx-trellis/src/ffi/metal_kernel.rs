//! Runs a [`Launch`] through mlx-rs's `MetalKernel`, and asks MLX about Metal.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;

use mlx_rs::error::Exception;
use mlx_rs::fast::{
    MetalKernel, MetalKernelApplyOptions, MetalKernelOptions, MetalKernelOutput, TemplateArg,
};
use mlx_rs::{Array, Dtype, Stream};
use trellis_kernels::{Launch, TemplateValue, Type};

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

fn check(launch: &Launch, inputs: &[&Array]) -> Result<(), Exception> {
    let found = inputs.len();
    if found != launch.inputs.len() {
        return Err(Exception::custom(format!(
            "{}: found {found} inputs, expected {}",
            launch.name,
            launch.inputs.len()
        )));
    }
    for (array, expected) in inputs.iter().zip(&launch.inputs) {
        if array.dtype() != dtype(expected.dtype) || array.shape() != dims(&expected.shape) {
            return Err(Exception::custom(format!(
                "{}: {} is {:?} {:?}, expected {:?} {:?}",
                launch.name,
                expected.name,
                array.dtype(),
                array.shape(),
                expected.dtype,
                expected.shape
            )));
        }
    }
    Ok(())
}

fn dims(shape: &[usize]) -> Vec<i32> {
    shape.iter().map(|&d| d as i32).collect()
}

fn dtype(ty: Type) -> Dtype {
    match ty {
        Type::Float32 => Dtype::Float32,
        Type::Float16 => Dtype::Float16,
        Type::Bfloat16 => Dtype::Bfloat16,
        Type::Uint32 => Dtype::Uint32,
    }
}

/// Whether MLX has a Metal device.
pub(crate) fn is_available() -> bool {
    let mut available = false;
    // SAFETY: writes a bool to a live place; it has no other precondition.
    unsafe { mlx_sys::mlx_metal_is_available(&mut available) == 0 && available }
}

/// Whether operations built now on this thread go to a GPU.
pub(crate) fn on_gpu() -> bool {
    let stream = Stream::thread_local_or_default();
    // SAFETY: makes an empty handle, which the next call fills.
    let mut device = unsafe { mlx_sys::mlx_device_new() };
    let mut kind = mlx_sys::mlx_device_type__MLX_CPU;
    // SAFETY: `stream` is live and `device` the handle made above.
    let known = unsafe {
        mlx_sys::mlx_stream_get_device(&mut device, stream.as_ptr()) == 0
            && mlx_sys::mlx_device_get_type(&mut kind, device) == 0
    };
    // SAFETY: freed once, not used after.
    unsafe { mlx_sys::mlx_device_free(device) };
    known && kind == mlx_sys::mlx_device_type__MLX_GPU
}

/// The GPU's architecture, such as `applegpu_g13s`, or nothing if MLX does not say.
pub(crate) fn architecture() -> Option<String> {
    // SAFETY: makes a device handle; it has no precondition.
    let device = unsafe { mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0) };
    // SAFETY: makes an empty handle, which the next call fills.
    let mut info = unsafe { mlx_sys::mlx_device_info_new() };
    let mut value = std::ptr::null();
    // SAFETY: the handles are live, the key is NUL-terminated, and `value` is read only when the call says that it
    // points to a string, which lives as long as `info`.
    let text = unsafe {
        let found = mlx_sys::mlx_device_info_get(&mut info, device) == 0
            && mlx_sys::mlx_device_info_get_string(&mut value, info, c"architecture".as_ptr()) == 0;
        (found && !value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
    };
    // SAFETY: each freed once, not used after.
    unsafe {
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(device);
    }
    text
}
