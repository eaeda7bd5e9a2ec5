//! The layer as a user meets it: laziness, shapes, models, compile, threads, gradients, memory.

use std::slice::from_ref;

use mlx_macros::ModuleParameters;
use mlx_rs::builder::Builder;
use mlx_rs::error::Exception;
use mlx_rs::module::{Module, ModuleParameters, ModuleParametersExt};
use mlx_rs::nn::{Linear, LinearBuilder};
use mlx_rs::ops::ones;
use mlx_rs::transforms::compile::compile;
use mlx_rs::{Array, Axes, Dtype as MlxDtype, memory};
use mlx_trellis::{
    Axis, AxisChoice, Encoded, Error, Geometry, HessianError, Layout, MatmulOptions, MaybeTrellis,
    QuantizeOptions, Rotation, ScaleRule, TrellisLinear, TrellisQuantizable, TrellisWeights, dequantize,
    quantize_weight_with, trellis_matmul,
};
use mlx_trellis_tests::*;
use rstest::rstest;
use trellis_codec::EncodeError;
use trellis_codec::reference::{Contract, Dtype};

fn matrix(axis: Axis) -> Matrix {
    Matrix::random(Geometry::for_linear(axis, 3, 12, 256, 512, 256).unwrap(), 3)
}

fn layer(axis: Axis) -> TrellisLinear {
    TrellisLinear::new(matrix(axis).weights(), None).unwrap()
}

fn x(shape: &[i32], seed: u64) -> Array {
    let n = shape.iter().product::<i32>() as usize;
    array(&activations(n, Dtype::F32, seed), shape, Dtype::F32)
}

fn close(a: &Array, b: &Array, tolerance: f32) {
    assert_eq!(a.shape(), b.shape());
    for (a, b) in values(a).iter().zip(values(b)) {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{a} {b}");
    }
}

#[test]
fn nothing_is_computed_before_eval() {
    let weights = Matrix::random(qwen(3), 1).weights();
    mlx_rs::transforms::eval([weights.codes(), weights.scales()]).unwrap();
    let x = ones::<f32>(&[64, 17408]).unwrap();
    x.eval().unwrap();
    let before = memory::active_memory().unwrap();
    let started = std::time::Instant::now();
    let y = trellis_matmul(&x, &weights).unwrap();
    let z = (&y + &y).sum(None).unwrap();
    let built = started.elapsed();
    assert_eq!(memory::active_memory().unwrap(), before, "building a graph allocates no output");
    y.eval().unwrap();
    let evaluated = started.elapsed();
    // 64 x 5120 float32.
    assert!(memory::active_memory().unwrap() >= before + 64 * 5120 * 4);
    assert!(built * 5 < evaluated, "built in {built:?}, evaluated after {evaluated:?}");
    drop(z);
}

#[rstest]
fn leading_dimensions(
    #[values(Axis::Output, Axis::Input)] axis: Axis,
    #[values(&[256], &[1, 256], &[7, 256], &[2, 3, 256], &[2, 1, 2, 256], &[0, 256], &[3, 0, 256])]
    shape: &[i32],
) {
    let m = matrix(axis);
    let x = x(shape, 1);
    let y = layer(axis).forward(&x).unwrap();
    let mut expected_shape = shape.to_vec();
    *expected_shape.last_mut().unwrap() = 512;
    assert_eq!(y.shape(), expected_shape);
    assert_eq!(y.dtype(), MlxDtype::Float32);
    let rows = shape[..shape.len() - 1].iter().product::<i32>() as usize;
    check_product(&values(&y), &m, &values(&x), rows, Dtype::F32, MatmulOptions::default());
}

#[rstest]
fn any_strides(#[values(Axis::Output, Axis::Input)] axis: Axis) {
    let mut layer = layer(axis);
    let base = x(&[4, 256], 5);
    let views = [
        ("transposed", x(&[256, 4], 5).transpose().unwrap()),
        ("reversed", base.flip(Axes::Axis(-1)).unwrap()),
        ("reversed rows", base.flip(Axes::Axis(0)).unwrap()),
        ("broadcast", mlx_rs::ops::broadcast_to(x(&[1, 256], 5), &[4, 256]).unwrap()),
        ("broadcast scalar", mlx_rs::ops::broadcast_to(Array::from_f32(0.5), &[3, 256]).unwrap()),
        ("every other row", x(&[8, 256], 5).as_strided(&[4, 256][..], &[512, 1][..], None).unwrap()),
        ("middle axis", x(&[256, 2, 3], 5).transpose_axes(&[1, 2, 0]).unwrap()),
    ];
    for (name, view) in views {
        let copy = Array::from_slice(&values(&view), view.shape());
        let (a, b) = (layer.forward(&view).unwrap(), layer.forward(&copy).unwrap());
        assert_eq!(values(&a), values(&b), "{name}");
    }
}

#[test]
fn a_dense_matmul_agrees() {
    for axis in [Axis::Output, Axis::Input] {
        for (m, layout) in [(1, Layout::RowMajor), (8, Layout::RowMajor), (4, Layout::Interleaved)] {
            if layout == Layout::Interleaved && axis == Axis::Input {
                continue;
            }
            let weights = matrix(axis).with_layout(layout).weights();
            let x = x(&[m, 256], 2);
            let dense = dequantize(&weights, MlxDtype::Float32).unwrap();
            close(&trellis_matmul(&x, &weights).unwrap(), &exact_matmul(&x, &dense.t()), 1e-4);
        }
    }
}

#[test]
fn wrong_input_is_a_typed_error() {
    let layer = layer(Axis::Input);
    let refused = |x: &Array| layer.try_forward(x).unwrap_err();
    assert!(matches!(refused(&x(&[2, 255], 1)), Error::Shape { in_features: 256, .. }));
    assert!(matches!(refused(&Array::from_f32(1.0)), Error::Scalar { in_features: 256 }));
    let int = Array::from_slice(&[1i32; 256], &[256]);
    assert!(matches!(refused(&int), Error::Dtype { what: "x", found: MlxDtype::Int32 }));
    let error = refused(&x(&[2, 255], 1)).to_string();
    assert_eq!(error, "x has shape [2, 255], expected 256 as its last dimension");
}

#[test]
fn wrong_parameters_are_a_typed_error() {
    let m = matrix(Axis::Input);
    let weights = m.weights();
    let new = |codes: Array, scales: Array| TrellisWeights::new(codes, scales, m.geometry).unwrap_err();
    let (codes, scales) = (weights.codes().clone(), weights.scales().clone());
    let floats = codes.as_dtype(MlxDtype::Float32).unwrap();
    assert!(matches!(new(floats, scales.clone()), Error::Parameter { what: "weight", .. }));
    let flat = codes.reshape(&[-1]).unwrap();
    assert!(matches!(new(flat, scales.clone()), Error::Parameter { what: "weight", .. }));
    let wide = scales.as_dtype(MlxDtype::Float32).unwrap();
    assert!(matches!(new(codes.clone(), wide), Error::Parameter { what: "scales", .. }));
    let bias = |b: Array| TrellisLinear::new(weights.clone(), Some(b)).unwrap_err();
    assert!(matches!(bias(ones::<f32>(&[511]).unwrap()), Error::Parameter { what: "bias", .. }));
    assert!(matches!(bias(Array::from_slice(&[1i32; 512], &[512])), Error::Dtype { what: "bias", .. }));
    // A parameter replaced after the layer was made.
    let mut layer = TrellisLinear::new(weights, None).unwrap();
    layer.weight.value = ones::<f32>(&[2, 2]).unwrap();
    assert!(matches!(layer.try_forward(&x(&[1, 256], 1)), Err(Error::Parameter { what: "weight", .. })));
}

#[test]
fn forward_compiles() {
    let weights = matrix(Axis::Output).weights();
    let geometry = *weights.geometry();
    let fun = move |args: &[Array]| -> Vec<Array> {
        let w = TrellisWeights::new(args[1].clone(), args[2].clone(), geometry).unwrap();
        let y = trellis_matmul(&args[0], &w).unwrap();
        vec![(&y * &y) + &y]
    };
    let mut compiled = compile(fun, None);
    for (m, seed) in [(1, 1), (1, 2), (6, 3)] {
        let x = x(&[m, 256], seed);
        let y = trellis_matmul(&x, &weights).unwrap();
        let args = [x, weights.codes().clone(), weights.scales().clone()];
        close(&compiled(&args[..]).unwrap()[0], &((&y * &y) + &y), 1e-6);
    }
}

/// The product alone: MLX 0.32.2's fused element-wise kernels divide by zero on an empty array on CUDA.
#[test]
fn an_empty_forward_compiles() {
    let weights = matrix(Axis::Output).weights();
    let mut compiled = compile(move |args: &[Array]| vec![trellis_matmul(&args[0], &weights).unwrap()], None);
    let args = [x(&[0, 256], 4)];
    assert_eq!(compiled(&args[..]).unwrap()[0].shape(), [0, 512]);
}

#[test]
fn a_layer_compiles_with_its_parameters_as_state() {
    let mut layer = layer(Axis::Input);
    let expected = layer.forward(&x(&[2, 256], 9)).unwrap();
    let step = |layer: &mut TrellisLinear, x: &Array| layer.forward(x);
    let mut compiled = mlx_rs::transforms::compile::compile_with_state(step, None);
    for _ in 0..2 {
        let y = compiled(&mut layer, &x(&[2, 256], 9)).unwrap();
        assert_eq!(values(&y), values(&expected));
    }
}

#[test]
fn any_thread() {
    let weights = matrix(Axis::Output).weights();
    let expected = values(&trellis_matmul(&x(&[3, 256], 1), &weights).unwrap());
    let codes = values(&weights.codes().as_dtype(MlxDtype::Float32).unwrap()).len();
    assert_eq!(codes, weights.geometry().words());
    let results: Vec<Vec<f32>> = (0..4)
        .map(|_| {
            let weights = weights.clone();
            std::thread::spawn(move || values(&trellis_matmul(&x(&[3, 256], 1), &weights).unwrap()))
        })
        .collect::<Vec<_>>()
        .into_iter()
        .map(|t| t.join().unwrap())
        .collect();
    for result in results {
        assert_eq!(result, expected);
    }
}

#[rstest]
fn gradient_of_x(
    #[values(Axis::Output, Axis::Input)] axis: Axis,
    #[values(Layout::RowMajor, Layout::Interleaved)] layout: Layout,
    #[values(2, 7)] m: i32,
) {
    if axis == Axis::Input && layout == Layout::Interleaved {
        return;
    }
    let weights = matrix(axis).with_layout(layout).weights();
    let dense = dequantize(&weights, MlxDtype::Float32).unwrap();
    let (x, dy) = (x(&[m, 256], 4), x(&[m, 512], 5));
    let product = {
        let weights = weights.clone();
        move |args: &[Array]| vec![trellis_matmul(&args[0], &weights).unwrap()]
    };
    let (_, dx) = mlx_rs::transforms::vjp(product.clone(), from_ref(&x), from_ref(&dy)).unwrap();
    close(&dx[0], &exact_matmul(&dy, &dense), 1e-4);
    let (y, tangent) = mlx_rs::transforms::jvp(product, from_ref(&x), from_ref(&x)).unwrap();
    assert_eq!(values(&y[0]), values(&tangent[0]));
}

#[derive(Debug, Clone, ModuleParameters)]
struct Mlp {
    #[param]
    up: MaybeTrellis<Linear>,
    #[param]
    down: MaybeTrellis<Linear>,
}

impl Module<&Array> for Mlp {
    type Output = Array;
    type Error = Exception;

    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let hidden = self.up.forward(x)?;
        self.down.forward(&mlx_rs::nn::silu(&hidden)?)
    }

    fn training_mode(&mut self, mode: bool) {
        self.up.training_mode(mode);
        self.down.training_mode(mode);
    }
}

fn mlp() -> Mlp {
    let linear = |i, o, bias| MaybeTrellis::new(LinearBuilder::new(i, o).bias(bias).build().unwrap());
    Mlp { up: linear(256, 512, true), down: linear(512, 64, false) }
}

#[test]
fn a_model_swaps_layer_by_layer() {
    let options = QuantizeOptions::with_bits(4);
    let mut model = mlp();
    let x = x(&[3, 256], 1);
    let dense = model.forward(&x).unwrap();
    model.up = model.up.try_into_trellis(&options).unwrap();
    assert!(model.up.is_quantized() && !model.down.is_quantized());
    model.down = model.down.try_into_trellis(&options).unwrap();
    let quantized = model.forward(&x).unwrap();
    let error: f32 = values(&dense).iter().zip(values(&quantized)).map(|(a, b)| (a - b).powi(2)).sum();
    let energy: f32 = values(&dense).iter().map(|a| a * a).sum();
    assert!(error < 0.05 * energy && error > 0.0, "{error} of {energy}");

    let mut names: Vec<String> = model.parameters().flatten().keys().map(|k| k.to_string()).collect();
    names.sort();
    assert_eq!(names, ["down.scales", "down.weight", "up.bias", "up.scales", "up.weight"]);
    assert_eq!(model.all_frozen(), Some(true));
    assert!(model.trainable_parameters().flatten().is_empty());
}

#[test]
fn a_model_saves_and_loads() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    // The geometry is the model's, not the file's: both must choose the same axis.
    let options = QuantizeOptions { axis: AxisChoice::Input, ..QuantizeOptions::with_bits(3) };
    let quantized = || {
        let m = mlp();
        Mlp { up: m.up.try_into_trellis(&options).unwrap(), down: m.down.try_into_trellis(&options).unwrap() }
    };
    let (mut saved, mut loaded) = (quantized(), quantized());
    let x = x(&[3, 256], 1);
    let expected = values(&saved.forward(&x).unwrap());
    assert_ne!(values(&loaded.forward(&x).unwrap()), expected, "two random models differ");
    saved.save_safetensors(&file).unwrap();
    loaded.load_safetensors(&file).unwrap();
    assert_eq!(values(&loaded.forward(&x).unwrap()), expected);
}

#[rstest]
fn quantize_keeps_bias_and_shape(
    #[values(AxisChoice::Input, AxisChoice::Output, AxisChoice::Auto)] axis: AxisChoice,
    #[values(1, 2, 3, 4)] bits: u32,
) {
    let dense = LinearBuilder::new(512, 256).build().unwrap();
    let options = QuantizeOptions { bits, axis, interleave: true, ..QuantizeOptions::default() };
    let (mut layer, report) = TrellisLinear::quantize_with_report(&dense, &options).unwrap();
    assert_eq!(layer.shape(), (256, 512));
    let w = values(&dense.weight.value);
    let q = values(&layer.dequantize(MlxDtype::Float32).unwrap());
    let error: f64 = w.iter().zip(&q).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    assert!((error - report.squared_error).abs() < 1e-3 * error, "{error} {}", report.squared_error);
    // Uniform weights, a little easier than Gaussian ones.
    assert!(
        report.relative_mse() < [0.29, 0.08, 0.022, 0.007][bits as usize - 1],
        "{}",
        report.relative_mse()
    );
    let x = x(&[2, 512], 3);
    let expected = exact_matmul(&x, &layer.dequantize(MlxDtype::Float32).unwrap().t());
    close(&layer.forward(&x).unwrap(), &(&expected + dense.bias.value.as_ref().unwrap()), 1e-4);
}

/// The product with a rotated x against the float64 product of the original x with the weight turned back: the bound of
/// the product itself, plus what rounding the rotated x (half an ulp each, and float32 butterflies) adds.
#[rstest]
fn a_rotated_layer_is_its_dense_weight(
    #[values(Axis::Output, Axis::Input)] axis: Axis,
    #[values(Dtype::F32, Dtype::F16, Dtype::Bf16)] dtype: Dtype,
    #[values(1, 3, 9)] m: usize,
) {
    let (out, inputs) = (512, 192);
    let geometry = Geometry::for_linear(axis, 3, 12, 64, out, inputs).unwrap();
    let matrix = Matrix::random(geometry, 5);
    let rotation = Rotation::new(64, 9).unwrap();
    for backend in BACKENDS.into_iter().filter(|b| b.present()) {
        let (y, dense, options) = backend.run(|| {
            let weights = matrix.weights().with_rotation(Some(rotation)).unwrap();
            let layer = TrellisLinear::new(weights, None).unwrap();
            assert_eq!(layer.rotation(), Some(rotation));
            let x = array(&activations(m * inputs, dtype, 3), &[m as i32, inputs as i32], dtype);
            let y = layer.try_forward(&x).unwrap();
            assert_eq!(y.dtype(), mlx_dtype(dtype));
            let choice = chosen(&geometry, m, dtype, MatmulOptions::default());
            (values(&y), values(&layer.dequantize(MlxDtype::Float32).unwrap()), choice)
        });
        let mut x = activations(m * inputs, dtype, 3);
        // In the original basis: the dense weight's own product.
        let expected: Vec<f64> = (0..m * out)
            .map(|at| {
                let (x, w) = (&x[at / out * inputs..][..inputs], &dense[at % out * inputs..][..inputs]);
                x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
            })
            .collect();
        // In the rotated one: the oracle's product and its allowance.
        rotation.apply(&mut x, inputs).unwrap();
        let product = matrix.product(&x, m, options.contract, dtype);
        // sum(|w * x|) bounds what relative errors of the rotated x and of the weights do.
        let relative = dtype.half_ulp(1.0) + 64.0 * 2f64.powi(-24);
        let weights =
            if options.contract == Contract::Expanded { dtype.half_ulp(1.0) } else { 2f64.powi(-23) };
        let mut worst = 0f64;
        for (at, (&y, expected)) in y.iter().zip(expected).enumerate() {
            let allowance = product.allowance(at, dtype, options.kernel.takes_tf32_allowance())
                + (relative + weights) * product.magnitude[at];
            worst = worst.max((f64::from(y) - expected).abs() / allowance);
        }
        println!("{backend:?} {geometry} {dtype:?} m={m}: {worst:.3} of the allowance");
        assert!(worst <= 1.0, "{backend:?}: {worst}");
    }
}

#[rstest]
fn a_rotated_layer_has_gradients(#[values(Axis::Output, Axis::Input)] axis: Axis) {
    let weights = matrix(axis).weights().with_rotation(Some(Rotation::new(256, 2).unwrap())).unwrap();
    let dense = dequantize(&weights, MlxDtype::Float32).unwrap();
    let product = move |args: &[Array]| vec![trellis_matmul(&args[0], &weights).unwrap()];
    let (x, dy) = (x(&[3, 256], 4), x(&[3, 512], 5));
    let (y, dx) = mlx_rs::transforms::vjp(product, from_ref(&x), from_ref(&dy)).unwrap();
    close(&y[0], &exact_matmul(&x, &dense.t()), 1e-4);
    close(&dx[0], &exact_matmul(&dy, &dense), 1e-4);
}

/// Quantized with a rotation and a searched scale, through a model's parameters, and from a file.
#[rstest]
fn a_layer_quantizes_rotated(#[values(AxisChoice::Input, AxisChoice::Output)] axis: AxisChoice) {
    let mut dense = LinearBuilder::new(192, 256).build().unwrap();
    // One input feature with weights ten times the others'.
    let spike: Vec<f32> = (0..192).map(|i| if i == 5 { 10.0 } else { 1.0 }).collect();
    dense.weight.value = &dense.weight.value * &Array::from_slice(&spike, &[192]);
    let plain = QuantizeOptions { axis, ..QuantizeOptions::with_bits(3) };
    let rotation = Rotation::new(1024, 7).unwrap();
    let options = QuantizeOptions { rotation: Some(rotation), scale: ScaleRule::Search, ..plain.clone() };
    let (_, before) = TrellisLinear::quantize_with_report(&dense, &plain).unwrap();
    let (layer, report) = TrellisLinear::quantize_with_report(&dense, &options).unwrap();
    assert_eq!(layer.rotation(), Some(rotation.fit(192).unwrap()));
    println!("{axis:?}: {:.4} plain, {:.4} rotated", before.relative_mse(), report.relative_mse());
    assert!(report.relative_mse() < 0.022, "{}", report.relative_mse());
    let (w, q) = (values(&dense.weight.value), values(&layer.dequantize(MlxDtype::Float32).unwrap()));
    let error: f64 = w.iter().zip(&q).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    assert!((error - report.squared_error).abs() < 1e-3 * error, "{error} {}", report.squared_error);

    let maybe = MaybeTrellis::new(dense).try_into_trellis(&options).unwrap();
    let mut names: Vec<String> = maybe.parameters().flatten().keys().map(|k| k.to_string()).collect();
    names.sort();
    assert_eq!(names, ["bias", "scales", "weight"]);
    assert_eq!(layer.try_forward(&ones::<f32>(&[0, 192]).unwrap()).unwrap().shape(), [0, 256]);
}

/// Moments of the layer's own inputs in, the loss of its outputs down; together with a rotation and a searched scale.
#[rstest]
fn error_feedback_lowers_the_output_error(
    #[values(None, Some(Rotation::new(1024, 7).unwrap()))] rotation: Option<Rotation>,
) {
    let (out, n, samples) = (64, 96, 400);
    let noise = activations(samples * n, Dtype::F32, 1);
    // A component that all features share, and one of each feature's own.
    let inputs: Vec<f32> = (0..samples * n).map(|at| noise[at / n * n] + 0.5 * noise[at]).collect();
    let mut moments = vec![0f32; n * n];
    for x in inputs.chunks(n) {
        for (at, m) in moments.iter_mut().enumerate() {
            *m += x[at / n] * x[at % n] / samples as f32;
        }
    }
    let weight = activations(out * n, Dtype::F32, 2);
    let options = QuantizeOptions { rotation, scale: ScaleRule::Search, ..QuantizeOptions::with_bits(2) };
    let quantize =
        |hessian: Option<&[f32]>| quantize_weight_with(&weight, out, n, &options, hessian, "w", None);
    let x = Array::from_slice(&inputs, &[samples as i32, n as i32]);
    let expected = values(&exact_matmul(&x, &Array::from_slice(&weight, &[out as i32, n as i32]).t()));
    let loss = |encoded: &Encoded| {
        let weights = TrellisWeights::from_encoded(encoded).unwrap();
        let y = values(&trellis_matmul(&x, &weights).unwrap());
        let error: f64 = y.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        error / expected.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>()
    };
    let fed = quantize(Some(&moments)).unwrap();
    assert_eq!(fed.geometry.axis(), Axis::Output);
    let report = fed.report.feedback.unwrap();
    assert_eq!(report.fallback, None);
    // The outputs of the very inputs that the moments are of.
    assert!((loss(&fed) / report.proxy_loss - 1.0).abs() < 1e-3, "{} {report:?}", loss(&fed));
    let plain = quantize(None).unwrap();
    assert_eq!(plain.report.feedback, None);
    println!("{rotation:?}: {:.5} plain, {:.5} fed", loss(&plain), loss(&fed));
    assert!(loss(&fed) < 0.5 * loss(&plain));

    assert!(matches!(
        quantize(Some(&moments[1..])),
        Err(Error::Encode(EncodeError::Hessian { reason: HessianError::Length { in_features: 96, .. }, .. }))
    ));
    moments[97] = f32::NAN;
    let nan = quantize(Some(&moments)).unwrap_err().to_string();
    assert_eq!(nan, r#"tensor "w": Hessian at row 1, column 1 is NaN, expected a finite number"#);
}

#[test]
fn interleave_where_the_format_allows_it() {
    let dense = LinearBuilder::new(64, 512).build().unwrap();
    let quantize = |bits, axis| {
        let options = QuantizeOptions { bits, axis, interleave: true, ..QuantizeOptions::default() };
        TrellisLinear::quantize(&dense, &options).unwrap()
    };
    assert_eq!(quantize(3, AxisChoice::Output).geometry().layout(), Layout::Interleaved);
    assert_eq!(quantize(2, AxisChoice::Output).geometry().layout(), Layout::RowMajor);
    assert_eq!(quantize(3, AxisChoice::Input).geometry().layout(), Layout::RowMajor);
}

#[test]
fn weights_that_cannot_be_coded_are_refused() {
    let mut dense = LinearBuilder::new(256, 64).build().unwrap();
    let options = |axis| QuantizeOptions { axis, ..QuantizeOptions::default() };
    dense.weight.value = ones::<f32>(&[30, 50]).unwrap();
    for axis in [AxisChoice::Auto, AxisChoice::Input, AxisChoice::Output] {
        let error = TrellisLinear::quantize(&dense, &options(axis)).unwrap_err();
        assert!(matches!(error, Error::NoBlock { out_features: 30, in_features: 50, .. }), "{error}");
    }
    dense.weight.value = Array::from_slice(&[f32::NAN; 256], &[1, 256]);
    let error = TrellisLinear::quantize(&dense, &options(AxisChoice::Input)).unwrap_err();
    assert!(matches!(error, Error::Encode(_)) && error.to_string().contains("weight"), "{error}");
    dense.weight.value = ones::<f32>(&[256]).unwrap();
    assert!(matches!(
        TrellisLinear::quantize(&dense, &options(AxisChoice::Auto)),
        Err(Error::NotAMatrix { .. })
    ));
    dense.weight.value = Array::from_slice(&[1i32; 256], &[1, 256]);
    assert!(matches!(TrellisLinear::quantize(&dense, &options(AxisChoice::Auto)), Err(Error::Dtype { .. })));
}

#[test]
fn other_dtypes_quantize_too() {
    for dtype in [MlxDtype::Float16, MlxDtype::Bfloat16] {
        let mut dense = LinearBuilder::new(256, 64).bias(false).build().unwrap();
        dense.weight.value = dense.weight.value.as_dtype(dtype).unwrap();
        let layer = TrellisLinear::quantize(&dense, &QuantizeOptions::default()).unwrap();
        let x = x(&[1, 256], 1).as_dtype(dtype).unwrap();
        assert_eq!(layer.try_forward(&x).unwrap().dtype(), dtype);
    }
}

/// On the CPU, where contract F is taken only if it is asked for.
#[test]
fn options_stay_with_the_layer() {
    Backend::Cpu.run(options_change_the_bits);
}

fn options_change_the_bits() {
    let plain = layer(Axis::Output);
    let factored =
        layer(Axis::Output).with_options(MatmulOptions { factored: true, ..MatmulOptions::default() });
    let x = x(&[2, 256], 1);
    let (a, b) = (plain.try_forward(&x).unwrap(), factored.try_forward(&x).unwrap());
    close(&a, &b, 1e-4);
    assert_ne!(values(&a), values(&b), "contract F rounds elsewhere");
}

/// A full-size layer holds its codes and scales, and a product at M = 1 makes nothing of the size of a dense weight.
#[test]
fn memory_of_a_full_size_layer() {
    memory::clear_cache().unwrap();
    let before = memory::active_memory().unwrap();
    let matrix = Matrix::random(qwen(3), 1);
    let mut layer = TrellisLinear::new(matrix.weights(), None).unwrap();
    layer.eval().unwrap();
    drop(matrix);
    let held = memory::active_memory().unwrap() - before;
    assert!(held <= 34_000_000, "{held} bytes");
    let x = ones::<f32>(&[1, 17408]).unwrap().as_dtype(MlxDtype::Bfloat16).unwrap();
    x.eval().unwrap();
    let start = memory::active_memory().unwrap();
    memory::reset_peak_memory().unwrap();
    layer.forward(&x).unwrap().eval().unwrap();
    let peak = memory::peak_memory().unwrap().saturating_sub(start);
    println!("layer {held} bytes, forward peak {peak} bytes above it");
    // A dense bfloat16 weight would be 178 MB; the output is 10 KB.
    assert!(peak < 1_000_000, "{peak} bytes");
}
