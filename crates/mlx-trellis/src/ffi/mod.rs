//! All of this crate's unsafe code: C++ primitives made into lazy arrays.
#![allow(unsafe_code)]

mod cpu_primitive;

pub(crate) use cpu_primitive::{expand, matmul};
