//! One module a back end: each runs a [`Choice`](crate::dispatch::Choice). Safe code only.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod metal;
