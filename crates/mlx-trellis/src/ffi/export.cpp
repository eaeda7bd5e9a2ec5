// Writes a function of arrays to a file. On a machine without Metal this is the one way to have MLX record Metal
// kernels: while it traces a function for export, a kernel may be applied on a GPU stream that no GPU is behind.

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/c/private/array.h"
#include "mlx/c/private/stream.h"
#include "mlx/c/private/vector.h"
#include "mlx/export.h"

namespace mx = mlx::core;

extern "C" {

// Makes `stream` name a GPU that need not exist. Only graphs that are traced and never evaluated may use it.
void trellis_mlx_placeholder_gpu(mlx_stream stream) {
  mlx_stream_get_(stream) = mx::Stream(-1, mx::Device::gpu);
}

// Calls `f(payload, inputs, &output)` on tracers shaped as `args` and writes what it built to `path`. Returns 0, or 1
// with a message; 2 if `f` failed, which then knows why.
int trellis_mlx_export(
    const char* path, mlx_vector_array args, int (*f)(void*, mlx_vector_array, mlx_array*), void* payload,
    char* message, uint64_t message_len) {
  bool failed = false;
  try {
    mx::export_function(
        path,
        [&](const std::vector<mx::array>& inputs) -> std::vector<mx::array> {
          std::vector<mx::array> copy = inputs;
          mlx_array output{nullptr};
          if (f(payload, mlx_vector_array{&copy}, &output) != 0) {
            failed = true;
            throw std::runtime_error("the function to export failed");
          }
          std::vector<mx::array> result{mlx_array_get_(output)};
          mlx_array_free_(output);
          return result;
        },
        mlx_vector_array_get_(args));
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(message, message_len, "%s", e.what());
  } catch (...) {
    std::snprintf(message, message_len, "%s", "unknown C++ exception");
  }
  return failed ? 2 : 1;
}
}
