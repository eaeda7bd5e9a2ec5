//! Reduce: axis 1, M = 1..=8. A stored row of an axis-1 matrix holds all weights of one output, so a row is summed
//! across the lanes that decode it. CUDA only so far: [`cuda`]; on Metal such a product is expansion and matmul.

pub mod cuda;
