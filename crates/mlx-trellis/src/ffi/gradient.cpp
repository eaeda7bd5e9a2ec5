// Custom kernels have no gradient of their own. A product y = x · W is linear in x, so its derivatives are products
// with the same stored matrix, the other way round for the vjp; Rust builds them when MLX asks.

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "guarded.h"
#include "mlx/array.h"
#include "mlx/c/private/array.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace mx = mlx::core;

extern "C" {
// Builds x · W, or x · Wᵀ if `back`, into the empty handle `result`; not 0 with a message on failure. Any thread.
using trellis_product = int (*)(
    const void* payload, bool back, mlx_array x, mlx_array codes, mlx_array scales, mlx_array* result, char* message,
    uint64_t message_len);
using trellis_drop = void (*)(void* payload);
}

namespace {

struct Product {
  std::shared_ptr<void> payload;
  trellis_product build;

  mx::array operator()(bool back, mx::array x, mx::array codes, mx::array scales) const {
    char message[512] = {};
    mlx_array result{nullptr};
    const int status =
        build(payload.get(), back, mlx_array{&x}, mlx_array{&codes}, mlx_array{&scales}, &result, message, sizeof message);
    if (status != 0) {
      mlx_array_free_(result);
      throw std::runtime_error(message);
    }
    mx::array built = mlx_array_get_(result);
    mlx_array_free_(result);
    return built;
  }
};

} // namespace

// Whether a transformation is looking at `x`.
extern "C" bool trellis_mlx_is_traced(mlx_array x) {
  return x.ctx && static_cast<mx::array*>(x.ctx)->is_tracer();
}

// Stores `y`, which is x · W, with derivatives for x. `drop` is called on `payload` once, also on failure.
extern "C" int trellis_mlx_with_gradient(
    mlx_array* result, mlx_array y, mlx_array x, mlx_array codes, mlx_array scales, void* payload,
    trellis_product build, trellis_drop drop, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    const Product product{std::shared_ptr<void>(payload, drop), build};
    using Arrays = std::vector<mx::array>;
    auto function = mx::custom_function(
        [y = mlx_array_get_(y)](const Arrays&) -> Arrays { return {y}; },
        [product](const Arrays& primals, const Arrays& cotangents, const Arrays&) -> Arrays {
          return {
              product(true, cotangents[0], primals[1], primals[2]),
              mx::zeros_like(primals[1]),
              mx::zeros_like(primals[2])};
        },
        [product](const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) -> Arrays {
          if (argnums.size() != 1 || argnums[0] != 0) {
            throw std::invalid_argument("[trellis] codes and scales have no gradient");
          }
          return {product(false, tangents[0], primals[1], primals[2])};
        },
        [product](const Arrays& inputs, const std::vector<int>& axes) -> std::pair<Arrays, std::vector<int>> {
          if (axes[1] != -1 || axes[2] != -1) {
            throw std::invalid_argument("[trellis] codes and scales cannot be mapped over");
          }
          const mx::array x = axes[0] <= 0 ? inputs[0] : mx::moveaxis(inputs[0], axes[0], 0);
          return {{product(false, x, inputs[1], inputs[2])}, {axes[0] < 0 ? -1 : 0}};
        });
    mlx_array_set_(*result, function({mlx_array_get_(x), mlx_array_get_(codes), mlx_array_get_(scales)}).at(0));
  });
}
