//! The oracle against cases written by an independent program.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use trellis_codec::reference::{self, Contract, Dtype};
use trellis_codec::{Axis, Geometry, Layout, cases, codebook, f16, pack};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn codebook_is_bit_equal() {
    let cases::Codebook { y, exact, unrefined } = cases::read_codebook(&golden()).unwrap();
    assert_eq!(y.len(), 4096);
    for (s, &y) in y.iter().enumerate() {
        let y = i32::from(y);
        assert_eq!(codebook::y(s as u32), y);
        assert_eq!(codebook::exact(y).to_bits(), exact[s].to_bits());
        assert_eq!(codebook::unrefined(y).to_bits(), unrefined[s].to_bits());
    }
    assert_eq!(bits(&codebook::table(12)), bits(&exact));
}

#[test]
fn cases_are_bit_equal() {
    let cases = cases::read_cases(&golden()).unwrap();
    assert_eq!(cases.len(), 14);
    for case in &cases {
        let g = &case.geometry;
        assert_eq!(pack::unpack(g, &case.codes).unwrap(), case.states, "{}", case.name);
        assert_eq!(pack::pack(g, &case.states).unwrap(), case.codes, "{}", case.name);
        let decode = |contract, dtype| {
            reference::decode(g, &case.codes, &case.scales, contract, dtype)
                .unwrap()
                .iter()
                .map(|&w| {
                    assert_eq!(f64::from(w as f32), w, "a weight of contract P or E is a binary32");
                    (w as f32).to_bits()
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(decode(Contract::Packed, Dtype::Bf16), bits(&case.packed), "{}", case.name);
        assert_eq!(decode(Contract::Expanded, Dtype::F32), bits(&case.expanded), "{}", case.name);
        assert_eq!(decode(Contract::Expanded, Dtype::Bf16), bits(&case.expanded_bf16), "{}", case.name);
        for (contract, expected) in
            [(Contract::Packed, &case.y_packed), (Contract::Expanded, &case.y_expanded_bf16)]
        {
            let product =
                reference::matmul(g, &case.codes, &case.scales, &case.x, case.m, contract, Dtype::Bf16)
                    .unwrap();
            for (i, (&found, &expected)) in product.y.iter().zip(expected).enumerate() {
                let slack = 1e-12 * product.magnitude[i];
                assert!((found - expected).abs() <= slack, "{} output {i}: {found} {expected}", case.name);
            }
        }
    }
}

#[test]
fn interleave_goes_both_ways() {
    let g = Geometry::new(Axis::Output, 3, 12, 256, 5, 1024).unwrap();
    let codes: Vec<u32> = (0..g.words() as u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
    let (interleaved, gi) = pack::relayout(&g, &codes, Layout::Interleaved).unwrap();
    assert_eq!(gi.codes_shape(), [2, 5, 48]);
    // Pair 1 (blocks 2 and 3), row 4: 24 words of block 2, then 24 of block 3.
    assert_eq!(interleaved[(5 + 4) * 48..][..48], codes[4 * 96 + 48..][..48]);
    assert_eq!(pack::unpack(&g, &codes).unwrap(), pack::unpack(&gi, &interleaved).unwrap());
    assert_eq!(pack::relayout(&gi, &interleaved, Layout::RowMajor).unwrap(), (codes, g));
}

#[test]
fn geometries_outside_the_format_are_refused() {
    use trellis_codec::GeometryError as E;
    let new = |k, l, t, rows, cols| Geometry::new(Axis::Output, k, l, t, rows, cols).unwrap_err();
    assert_eq!(new(0, 12, 256, 1, 256), E::Bits { found: 0 });
    assert_eq!(new(5, 12, 256, 1, 256), E::Bits { found: 5 });
    assert_eq!(new(3, 3, 256, 1, 256), E::StateBits { found: 3, bits: 3 });
    assert_eq!(new(3, 17, 256, 1, 256), E::StateBits { found: 17, bits: 3 });
    assert_eq!(new(3, 12, 100, 1, 200), E::Block { found: 100, bits: 3 });
    assert_eq!(new(3, 12, 0, 1, 256), E::Block { found: 0, bits: 3 });
    assert_eq!(new(3, 12, 256, 0, 256), E::Empty { rows: 0, cols: 256 });
    assert_eq!(new(3, 12, 256, 1, 300), E::Cols { found: 300, block: 256 });
    assert_eq!(new(3, 12, 256, usize::MAX, 256), E::TooLarge { rows: usize::MAX, cols: 256 });
    let cols = usize::MAX - 255;
    assert_eq!(new(3, 12, 256, usize::MAX, cols), E::TooLarge { rows: usize::MAX, cols });
    for (axis, k, cols) in [(Axis::Input, 3, 512), (Axis::Output, 2, 512), (Axis::Output, 3, 256)] {
        let g = Geometry::new(axis, k, 12, 256, 4, cols).unwrap();
        assert!(matches!(g.with_layout(Layout::Interleaved), Err(E::Interleave { .. })));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any words are a valid block: unpacking and packing gives them back.
    #[test]
    fn any_words_are_a_block(
        k in 1u32..=4, l in 5u32..=16, t in prop::sample::select(vec![32usize, 64, 96, 128, 256]),
        rows in 1usize..4, blocks in 1usize..4, seed in any::<u32>(),
    ) {
        let g = Geometry::new(Axis::Input, k, l, t, rows, blocks * t).unwrap();
        let codes: Vec<u32> =
            (0..g.words() as u32).map(|i| (i ^ seed).wrapping_mul(0x9E37_79B9).rotate_left(i % 32)).collect();
        let states = pack::unpack(&g, &codes).unwrap();
        for (i, &s) in states.iter().enumerate() {
            prop_assert_eq!(reference::state(&g, &codes, i / g.cols(), i % g.cols()), s);
        }
        prop_assert_eq!(pack::pack(&g, &states).unwrap(), codes);
    }
}

#[test]
fn a_zero_scale_and_infinities_propagate() {
    let g = Geometry::new(Axis::Output, 2, 12, 32, 2, 32).unwrap();
    let codes = vec![0x1234_5678; g.words()];
    let scales = [f16::ZERO, f16::ONE];
    let run =
        |x: [f32; 2]| reference::matmul(&g, &codes, &scales, &x, 1, Contract::Packed, Dtype::F32).unwrap().y;
    assert!(run([1.0, 0.0]).iter().all(|&y| y == 0.0));
    assert!(run([f32::INFINITY, 0.0]).iter().all(|y| y.is_nan()));
    assert!(run([0.0, f32::INFINITY]).iter().all(|y| !y.is_finite()));
}
