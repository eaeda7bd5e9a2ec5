//! Tensors of a file as MLX arrays.
