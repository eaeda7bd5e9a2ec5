//! Files on disk to layers in MLX.

use mlx_rs::Array;
use mlx_rs::module::Module;
use mlx_trellis::{
    Error, QuantizeOptions, Rotation, TrellisLinear, TrellisWeights, quantize_weight, trellis_matmul,
};
use mlx_trellis_tests::*;
use trellis_codec::ArtifactError;
use trellis_codec::artifact::{ArtifactWriter, Dtype, RawTensor, WriteOptions};

fn bf16_array(case: &trellis_codec::cases::Case) -> Array {
    array(
        &case.x,
        &[case.m as i32, case.geometry.in_features() as i32],
        trellis_codec::reference::Dtype::Bf16,
    )
}

#[test]
fn golden_cases_as_layers_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let cases = golden();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    for (i, case) in cases.iter().enumerate() {
        let bias: Vec<u8> =
            (0..case.geometry.out_features()).flat_map(|j| (j as f32).to_le_bytes()).collect();
        let shape = [case.geometry.out_features()];
        let bias = RawTensor { dtype: Dtype::F32, shape: &shape, bytes: &bias };
        let bias = i.is_multiple_of(2).then_some(bias);
        writer.add_module(&format!("layers.{i}"), &case.geometry, &case.codes, &case.scales, bias).unwrap();
    }
    writer.finish().unwrap();
    for (i, case) in cases.iter().enumerate() {
        let mut layer = TrellisLinear::from_artifact(&path, &format!("layers.{i}")).unwrap();
        assert_eq!(*layer.geometry(), case.geometry);
        assert_eq!(layer.bias.value.is_some(), i.is_multiple_of(2));
        let x = bf16_array(case);
        let product = trellis_matmul(&x, &Matrix::of_case(case).weights()).unwrap();
        let expected = match &layer.bias.value {
            Some(bias) => &product + bias,
            None => product,
        };
        assert_eq!(values(&layer.forward(&x).unwrap()), values(&expected), "{}", case.name);
    }
}

#[test]
fn a_rotated_layer_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let weight: Vec<f32> = (0..64 * 96).map(|i| (i as f32 * 0.37).sin()).collect();
    let rotation = Some(Rotation::new(1024, 3).unwrap());
    let options = QuantizeOptions { rotation, ..QuantizeOptions::with_bits(4) };
    let encoded = quantize_weight(&weight, 64, 96, &options, "a", None).unwrap();
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.add_encoded("a", &encoded, None).unwrap();
    writer.finish().unwrap();
    let layer = TrellisLinear::from_artifact(&path, "a").unwrap();
    assert_eq!(layer.rotation(), Some(Rotation::new(32, 3).unwrap()));
    let x = Array::from_slice(&weight[..2 * 96], &[2, 96]);
    let expected = trellis_matmul(&x, &TrellisWeights::from_encoded(&encoded).unwrap()).unwrap();
    assert_eq!(values(&layer.try_forward(&x).unwrap()), values(&expected));
    let error: f32 = values(&layer.dequantize(mlx_rs::Dtype::Float32).unwrap())
        .iter()
        .zip(&weight)
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    let energy: f32 = weight.iter().map(|w| w * w).sum();
    assert!(error < 0.01 * energy, "{error} of {energy}");
}

#[test]
fn a_missing_module_or_file_is_a_typed_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let case = &golden()[2];
    let mut writer = ArtifactWriter::create(&path, WriteOptions::default()).unwrap();
    writer.add_module("a", &case.geometry, &case.codes, &case.scales, None).unwrap();
    writer.finish().unwrap();
    let missing = TrellisLinear::from_artifact(&path, "b").unwrap_err();
    assert!(matches!(missing, Error::Artifact(ArtifactError::NoModule { .. })), "{missing}");
    let nowhere = TrellisLinear::from_artifact(folder.path().join("nowhere"), "a").unwrap_err();
    assert!(matches!(nowhere, Error::Artifact(ArtifactError::Io { .. })), "{nowhere}");
}
