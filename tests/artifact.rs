//! Files on disk to layers in MLX.

use mlx_rs::Array;
use mlx_rs::module::Module;
use mlx_trellis::{Error, TrellisLinear, trellis_matmul};
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
