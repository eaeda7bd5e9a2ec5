use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use trellis_codec::reference::Dtype;

/// The types of activations and outputs: `f32`, [`struct@f16`] and [`bf16`].
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: Dtype;
}

/// A slice of one of the element types, for code that is not generic over them.
pub(crate) enum Slots<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

pub(crate) mod sealed {
    use super::{Cow, Slots};

    pub trait Sealed: Sized {
        /// The values as binary32, which holds them all.
        fn widen(values: &[Self]) -> Cow<'_, [f32]>;
        /// Rounds each value once, to nearest even. The slices are of one length.
        fn narrow(values: &[f32], out: &mut [Self]);
        /// The slice as one of the three it can be.
        #[allow(private_interfaces)]
        fn slots(out: &mut [Self]) -> Slots<'_>;
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

#[allow(private_interfaces)]
impl sealed::Sealed for f32 {
    fn widen(values: &[f32]) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }
    fn narrow(values: &[f32], out: &mut [f32]) {
        out.copy_from_slice(values);
    }
    fn slots(out: &mut [f32]) -> Slots<'_> {
        Slots::F32(out)
    }
}

macro_rules! half_element {
    ($type:ident, $dtype:ident) => {
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }

        #[allow(private_interfaces)]
        impl sealed::Sealed for $type {
            fn widen(values: &[$type]) -> Cow<'_, [f32]> {
                let mut wide = vec![0.0; values.len()];
                values.convert_to_f32_slice(&mut wide);
                Cow::Owned(wide)
            }
            fn narrow(values: &[f32], out: &mut [$type]) {
                out.convert_from_f32_slice(values);
            }
            fn slots(out: &mut [$type]) -> Slots<'_> {
                Slots::$dtype(out)
            }
        }
    };
}

half_element!(f16, F16);
half_element!(bf16, Bf16);
