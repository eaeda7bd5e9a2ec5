//! Every level this machine has against cases written by an independent program.

use std::path::Path;

use rstest::rstest;
use trellis_codec::reference::{self, Contract, Dtype, Product};
use trellis_codec::{bf16, cases, f16};
use trellis_cpu::{Element, Level, Matrix, decode_packed, expand, matmul};

fn golden() -> Vec<cases::Case> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let cases = cases::read_cases(&dir).unwrap();
    assert_eq!(cases.len(), 14);
    cases
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn weights_are_bit_equal() {
    for case in golden() {
        let matrix = Matrix::new(case.geometry, &case.codes, &case.scales).unwrap();
        for level in Level::available() {
            let mut found = vec![0f32; case.packed.len()];
            decode_packed(&matrix, level, &mut found).unwrap();
            assert_eq!(bits(&found), bits(&case.packed), "{} {level} packed", case.name);

            expand(&matrix, level, &mut found).unwrap();
            assert_eq!(bits(&found), bits(&case.expanded), "{} {level} f32", case.name);

            let mut narrow = vec![bf16::ZERO; case.packed.len()];
            expand(&matrix, level, &mut narrow).unwrap();
            let found: Vec<f32> = narrow.iter().map(|w| w.to_f32()).collect();
            assert_eq!(bits(&found), bits(&case.expanded_bf16), "{} {level} bf16", case.name);

            let mut narrow = vec![f16::ZERO; case.packed.len()];
            expand(&matrix, level, &mut narrow).unwrap();
            let expected: Vec<u16> = case.expanded.iter().map(|&w| f16::from_f32(w).to_bits()).collect();
            let found: Vec<u16> = narrow.iter().map(|w| w.to_bits()).collect();
            assert_eq!(found, expected, "{} {level} f16", case.name);
        }
    }
}

/// The worst share of the error allowance over all cases, against the cases' own products where they have them.
fn worst<E: Element>(level: Level, contract: Contract, from: fn(f32) -> E, to: fn(E) -> f32) -> f64 {
    let mut worst = 0f64;
    for case in golden() {
        let matrix = Matrix::new(case.geometry, &case.codes, &case.scales).unwrap();
        let x: Vec<E> = case.x.iter().map(|&x| from(x)).collect();
        let mut out = vec![from(0.0); case.m * case.geometry.out_features()];
        matmul(&matrix, &x, case.m, contract, level, &mut out).unwrap();

        let wide: Vec<f32> = x.iter().map(|&x| to(x)).collect();
        let product =
            reference::matmul(&case.geometry, &case.codes, &case.scales, &wide, case.m, contract, E::DTYPE)
                .unwrap();
        let product = match (contract, E::DTYPE) {
            (Contract::Packed, Dtype::F32 | Dtype::Bf16) => Product { y: case.y_packed, ..product },
            (Contract::Expanded, Dtype::Bf16) => Product { y: case.y_expanded_bf16, ..product },
            _ => product,
        };
        let found: Vec<f32> = out.iter().map(|&y| to(y)).collect();
        let (ratio, at) = product.worst(&found, E::DTYPE, false);
        assert!(ratio <= 1.0, "{} {level} {contract:?} output {at}: {ratio} of the allowance", case.name);
        worst = worst.max(ratio);
    }
    worst
}

#[rstest]
fn products_are_within_the_bound(
    #[values(Contract::Packed, Contract::Factored, Contract::Expanded)] contract: Contract,
) {
    for level in Level::available() {
        let ratios = [
            worst::<f32>(level, contract, |x| x, |x| x),
            worst::<f16>(level, contract, f16::from_f32, f16::to_f32),
            worst::<bf16>(level, contract, bf16::from_f32, bf16::to_f32),
        ];
        println!("{level:>6} {contract:?}: worst share of the allowance, f32 f16 bf16: {ratios:.3?}");
    }
}
