// What the two halves of the CPU primitive say to each other; `cpu_primitive.rs` repeats it in Rust.
#pragma once

#include <cstdint>

#include "mlx/c/array.h"
#include "mlx/c/stream.h"

extern "C" {

// A geometry with a contract. Numbers as in the file format; `contract`: 0 packed, 1 factored, 2 expanded.
struct trellis_problem {
  uint64_t rows;
  uint64_t cols;
  uint64_t block;
  uint32_t axis;
  uint32_t bits;
  uint32_t state_bits;
  uint32_t interleaved;
  uint32_t contract;
};

// Types of activations and outputs.
enum trellis_dtype : uint32_t { TRELLIS_F32 = 0, TRELLIS_F16 = 1, TRELLIS_BF16 = 2 };

// Rust half. Both return 0, or another number if the slices do not fit the problem.
int trellis_cpu_matmul(
    const trellis_problem* problem, const uint32_t* codes, const uint16_t* scales, const void* x, uint64_t m,
    trellis_dtype dtype, void* out);
int trellis_cpu_expand(
    const trellis_problem* problem, const uint32_t* codes, const uint16_t* scales, trellis_dtype dtype, void* out);

// C++ half. Both store a lazy array in `*result` and return 0, or return 1 with a message in `message`.
int trellis_mlx_matmul(
    mlx_array* result, const trellis_problem* problem, mlx_array x, mlx_array codes, mlx_array scales,
    mlx_stream stream, char* message, uint64_t message_len);
int trellis_mlx_expand(
    mlx_array* result, const trellis_problem* problem, mlx_array codes, mlx_array scales, trellis_dtype dtype,
    mlx_stream stream, char* message, uint64_t message_len);
}
