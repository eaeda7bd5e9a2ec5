//! Runs a [`Launch`] as one of MLX's custom CUDA kernels, in the image of mlx-rs's `MetalKernel`. A kernel is compiled
//! when its outputs are evaluated: errors of the launch's form surface here, those of its source from an evaluation.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{self, NonNull};

use mlx_rs::error::Exception;
use mlx_rs::{Array, Stream};
use trellis_kernels::{Launch, TemplateValue, Type};

use super::launch::{check, dims};
use super::message::{self, Message};

/// `trellis_kernel_text` of `cuda_kernel.cpp`.
#[repr(C)]
struct Text {
    name: *const c_char,
    header: *const c_char,
    source: *const c_char,
    inputs: *const *const c_char,
    input_count: u64,
    outputs: *const *const c_char,
    output_count: u64,
    shared_memory: i32,
    ensure_row_contiguous: bool,
}

/// `trellis_output` of `cuda_kernel.cpp`.
#[repr(C)]
struct Output {
    shape: *const i32,
    ndim: u64,
    ty: u32,
}

/// `trellis_template` of `cuda_kernel.cpp`.
#[repr(C)]
struct Template {
    name: *const c_char,
    kind: u32,
    value: i32,
}

/// `trellis_kernel_launch` of `cuda_kernel.cpp`.
#[repr(C)]
struct Call {
    inputs: *const mlx_sys::mlx_array,
    input_count: u64,
    outputs: *const Output,
    output_count: u64,
    arguments: *const Template,
    argument_count: u64,
    grid: [i32; 3],
    block: [i32; 3],
    init_value: *const f32,
}

unsafe extern "C" {
    fn trellis_mlx_cuda_kernel_new(
        kernel: *mut *mut c_void,
        text: *const Text,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;

    fn trellis_mlx_cuda_kernel_free(kernel: *mut c_void);

    fn trellis_mlx_cuda_kernel_apply(
        results: *mut mlx_sys::mlx_array,
        kernel: *const c_void,
        launch: *const Call,
        stream: mlx_sys::mlx_stream,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;

    fn trellis_mlx_after(
        result: *mut mlx_sys::mlx_array,
        array: mlx_sys::mlx_array,
        dependency: mlx_sys::mlx_array,
        message: *mut c_char,
        message_len: u64,
    ) -> c_int;
}

thread_local! {
    /// Kernels by name and shared memory: building one is cheap but not free.
    static KERNELS: RefCell<HashMap<(String, u32), CudaKernel>> = RefCell::new(HashMap::new());
}

/// The lazy outputs of a launch on `inputs`, on the caller's stream or else the default one, which must be a GPU's.
///
/// `launch` must come from `trellis-kernels`; `inputs` are checked against it.
pub(crate) fn apply(launch: &Launch, inputs: &[&Array]) -> Result<Vec<Array>, Exception> {
    check(launch, inputs)?;
    KERNELS.with_borrow_mut(|kernels| {
        let key = (launch.name.clone().into_owned(), launch.shared_memory);
        if !kernels.contains_key(&key) {
            kernels.insert(key.clone(), CudaKernel::new(launch)?);
        }
        // SAFETY: `check` found inputs of the shapes and dtypes that `launch` was made for, and MLX makes them
        // row-contiguous (`ensure_row_contiguous`). For those, the kernels of `trellis-kernels` stay inside their
        // buffers, write no input, write every output element and race on nothing: its tests prove the coverage of
        // every launch, and NVIDIA's memory and race checkers were run on each kernel.
        unsafe { kernels[&key].apply(launch, inputs, &Stream::thread_local_or_default()) }
    })
}

/// `array`, to be used only once `dependency` has been computed: bounds what a lazy graph holds at a time.
pub(crate) fn after(array: &Array, dependency: &Array) -> Result<Array, Exception> {
    let mut results = Results::new(1);
    message::status(|Message { text, len }| {
        // SAFETY: the handles are borrowed from live arrays, the result is a fresh handle; C++ catches its exceptions.
        unsafe { trellis_mlx_after(results.0.as_mut_ptr(), array.as_ptr(), dependency.as_ptr(), text, len) }
    })
    .map_err(Exception::custom)?;
    results.into_arrays().pop().ok_or_else(|| Exception::custom("MLX gave no array"))
}

/// A kernel of MLX's, freed when dropped. It stays on the thread that made it, as streams do.
struct CudaKernel(NonNull<c_void>);

impl CudaKernel {
    /// The kernel of a launch's name, header, source and argument names.
    fn new(launch: &Launch) -> Result<Self, Exception> {
        let names = |arrays: &[trellis_kernels::Array]| -> Result<Vec<CString>, Exception> {
            arrays.iter().map(|a| c_string(&a.name)).collect()
        };
        let (name, header, source) =
            (c_string(&launch.name)?, c_string(&launch.header)?, c_string(&launch.source)?);
        let (inputs, outputs) = (names(&launch.inputs)?, names(&launch.outputs)?);
        let pointers = |names: &[CString]| names.iter().map(|n| n.as_ptr()).collect::<Vec<_>>();
        let (inputs_at, outputs_at) = (pointers(&inputs), pointers(&outputs));
        let text = Text {
            name: name.as_ptr(),
            header: header.as_ptr(),
            source: source.as_ptr(),
            inputs: inputs_at.as_ptr(),
            input_count: inputs_at.len() as u64,
            outputs: outputs_at.as_ptr(),
            output_count: outputs_at.len() as u64,
            shared_memory: launch.shared_memory as i32,
            ensure_row_contiguous: launch.ensure_row_contiguous,
        };
        let mut kernel = ptr::null_mut();
        message::status(|Message { text: message, len }| {
            // SAFETY: every string and list that `text` points to outlives the call, which copies them; C++ catches
            // its exceptions.
            unsafe { trellis_mlx_cuda_kernel_new(&mut kernel, &text, message, len) }
        })
        .map_err(Exception::custom)?;
        NonNull::new(kernel).map(Self).ok_or_else(|| Exception::custom("MLX gave no kernel"))
    }

    /// Lazy outputs.
    ///
    /// # Safety
    /// On row-contiguous inputs of the launch's shapes and dtypes, the kernel's source stays inside its buffers, writes
    /// no input and every output element, and races on nothing.
    unsafe fn apply(
        &self,
        launch: &Launch,
        inputs: &[&Array],
        stream: &Stream,
    ) -> Result<Vec<Array>, Exception> {
        let handles: Vec<_> = inputs.iter().map(|a| a.as_ptr()).collect();
        let shapes: Vec<_> = launch.outputs.iter().map(|o| dims(&o.shape)).collect();
        let outputs: Vec<_> = std::iter::zip(&launch.outputs, &shapes)
            .map(|(o, shape)| Output { shape: shape.as_ptr(), ndim: shape.len() as u64, ty: code(o.dtype) })
            .collect();
        let names = launch.template.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>, _>>()?;
        let arguments: Vec<_> = std::iter::zip(&names, &launch.template)
            .map(|(name, (_, value))| {
                let (kind, value) = match *value {
                    TemplateValue::Int(int) => (0, int),
                    TemplateValue::Bool(bool) => (1, i32::from(bool)),
                    TemplateValue::Type(ty) => (2, code(ty) as i32),
                };
                Template { name: name.as_ptr(), kind, value }
            })
            .collect();
        let call = Call {
            inputs: handles.as_ptr(),
            input_count: handles.len() as u64,
            outputs: outputs.as_ptr(),
            output_count: outputs.len() as u64,
            arguments: arguments.as_ptr(),
            argument_count: arguments.len() as u64,
            grid: launch.grid.map(|n| n as i32),
            block: launch.threadgroup.map(|n| n as i32),
            init_value: launch.init_value.as_ref().map_or(ptr::null(), ptr::from_ref),
        };
        let mut results = Results::new(outputs.len());
        message::status(|Message { text, len }| {
            // SAFETY: `self` holds a live kernel; everything that `call` points to and the handles in `results` outlive
            // the call; C++ catches its exceptions. What the kernel does is the caller's promise.
            unsafe {
                trellis_mlx_cuda_kernel_apply(
                    results.0.as_mut_ptr(),
                    self.0.as_ptr(),
                    &call,
                    stream.as_ptr(),
                    text,
                    len,
                )
            }
        })
        .map_err(Exception::custom)?;
        Ok(results.into_arrays())
    }
}

impl Drop for CudaKernel {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `trellis_mlx_cuda_kernel_new`, is freed once, and is not used after.
        unsafe { trellis_mlx_cuda_kernel_free(self.0.as_ptr()) }
    }
}

/// Handles for C++ to fill, freed unless they become arrays.
struct Results(Vec<mlx_sys::mlx_array>);

impl Results {
    fn new(n: usize) -> Self {
        // SAFETY: makes empty handles; it has no precondition.
        Self((0..n).map(|_| unsafe { mlx_sys::mlx_array_new() }).collect())
    }

    fn into_arrays(mut self) -> Vec<Array> {
        let handles = std::mem::take(&mut self.0);
        // SAFETY: C++ succeeded, so each handle holds an array that nobody else owns.
        handles.into_iter().map(|handle| unsafe { Array::from_ptr(handle) }).collect()
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        for &handle in &self.0 {
            // SAFETY: still owned here, freed once.
            unsafe { mlx_sys::mlx_array_free(handle) };
        }
    }
}

/// `trellis_type` of `cuda_kernel.cpp`.
fn code(ty: Type) -> u32 {
    match ty {
        Type::Float32 => 0,
        Type::Float16 => 1,
        Type::Bfloat16 => 2,
        Type::Uint32 => 3,
    }
}

fn c_string(text: &str) -> Result<CString, Exception> {
    CString::new(text).map_err(|_| Exception::custom("a kernel's text holds a NUL byte"))
}

/// Whether the MLX that is linked was built with CUDA, with or without a GPU to run on.
pub(crate) fn is_built() -> bool {
    let problem = trellis_kernels::Array { name: "out".into(), dtype: Type::Float32, shape: vec![1] };
    let launch = Launch {
        name: "trellis_cuda_nothing".into(),
        header: "".into(),
        source: "".into(),
        inputs: Vec::new(),
        outputs: vec![problem],
        template: Vec::new(),
        grid: [1; 3],
        threadgroup: [1; 3],
        init_value: None,
        ensure_row_contiguous: true,
        shared_memory: 0,
    };
    CudaKernel::new(&launch).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_cuda_the_message_arrives() {
        if is_built() {
            println!("skipped: MLX was built with CUDA");
            return;
        }
        use trellis_codec::{Axis, Geometry, reference::Dtype};
        let geometry = Geometry::new(Axis::Output, 3, 12, 256, 2, 256).expect("a geometry");
        let gpu =
            trellis_kernels::Gpu::Cuda(trellis_kernels::Cuda { multiprocessors: 1, capability: (9, 0) });
        let problem = trellis_kernels::Problem::new(geometry, 1, Dtype::F32).on(gpu);
        let launch = trellis_kernels::expand::cuda::EXPAND.launch(&problem).expect("a launch");
        let codes = Array::from_slice(&[0u32; 48], &[2, 24]);
        let scales = Array::from_slice(&[trellis_codec::f16::ONE; 2], &[2]);
        let error = apply(&launch, &[&codes, &scales]).expect_err("no CUDA").to_string();
        assert!(error.contains("CUDA"), "{error}");
        let error = apply(&launch, &[&scales, &codes]).expect_err("inputs the wrong way round").to_string();
        assert!(error.contains("codes is Float16 [2], expected Uint32 [2, 24]"), "{error}");
    }

    #[test]
    fn an_array_waits_for_another() {
        let (a, b) = (Array::from_slice(&[1.0f32, 2.0], &[2]), Array::from_slice(&[3.0f32], &[1]));
        let waits = after(&a, &b).expect("a graph node");
        assert_eq!(waits.to_vec_exact::<f32>().expect("an evaluation"), [1.0, 2.0]);
    }
}
