// Two MLX primitives that run on the CPU: the product with a trellis-coded matrix, and its expansion. They make
// the graph nodes, their shapes and their gradients; the numbers are made by Rust, called on the stream's own
// thread. Nothing is computed before MLX evaluates.

#include "cpu_primitive.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "guarded.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/c/private/array.h"
#include "mlx/c/private/stream.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace {

trellis_dtype dtype_code(mx::Dtype dtype) {
  if (dtype == mx::float32) return TRELLIS_F32;
  if (dtype == mx::float16) return TRELLIS_F16;
  if (dtype == mx::bfloat16) return TRELLIS_BF16;
  throw std::invalid_argument("[trellis] expected float32, float16 or bfloat16");
}

mx::Dtype dtype_of(trellis_dtype code) {
  switch (code) {
    case TRELLIS_F32: return mx::float32;
    case TRELLIS_F16: return mx::float16;
    case TRELLIS_BF16: return mx::bfloat16;
  }
  throw std::invalid_argument("[trellis] unknown dtype code");
}

bool same(const trellis_problem& a, const trellis_problem& b) {
  return a.rows == b.rows && a.cols == b.cols && a.block == b.block && a.axis == b.axis && a.bits == b.bits &&
      a.state_bits == b.state_bits && a.interleaved == b.interleaved && a.contract == b.contract;
}

uint64_t in_features(const trellis_problem& p) {
  return p.axis == 0 ? p.rows : p.cols;
}

uint64_t out_features(const trellis_problem& p) {
  return p.axis == 0 ? p.cols : p.rows;
}

// A program may replace a layer's parameters or replay a compiled graph with other arrays, so what Rust will read
// is measured again when the node runs.
void check_weights(const trellis_problem& p, const mx::array& codes, const mx::array& scales) {
  if (codes.dtype() != mx::uint32 || codes.size() != p.rows * (p.cols * p.bits / 32) ||
      scales.dtype() != mx::float16 || scales.size() != p.rows) {
    throw std::invalid_argument("[trellis] codes or scales do not fit the geometry");
  }
  if (!codes.flags().row_contiguous || !scales.flags().row_contiguous) {
    throw std::invalid_argument("[trellis] codes and scales must be row-contiguous");
  }
}

class TrellisMatmul : public mx::UnaryPrimitive {
 public:
  TrellisMatmul(mx::Stream stream, const trellis_problem& problem)
      : mx::UnaryPrimitive(stream), problem_(problem) {}

  // Every leading dimension of x goes into M. x, codes and scales are row-contiguous.
  static mx::array make(
      mx::Stream stream, const trellis_problem& problem, const mx::array& x, const mx::array& codes,
      const mx::array& scales) {
    mx::Shape shape = output_shape(problem, x);
    dtype_code(x.dtype());
    return mx::array(
        std::move(shape),
        x.dtype(),
        std::make_shared<TrellisMatmul>(stream, problem),
        {mx::contiguous(x, false, stream), mx::contiguous(codes, false, stream),
         mx::contiguous(scales, false, stream)});
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& x = inputs[0];
    const auto& codes = inputs[1];
    const auto& scales = inputs[2];
    check_weights(problem_, codes, scales);
    if (!x.flags().row_contiguous || static_cast<uint64_t>(x.shape(-1)) != in_features(problem_)) {
      throw std::invalid_argument("[trellis] x does not fit the geometry or is not row-contiguous");
    }
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const uint64_t m = x.size() / in_features(problem_);
    if (m == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(x);
    encoder.set_input_array(codes);
    encoder.set_input_array(scales);
    encoder.set_output_array(out);
    encoder.dispatch([problem = problem_,
                      codes = codes.data<uint32_t>(),
                      scales = reinterpret_cast<const uint16_t*>(scales.data<char>()),
                      x = static_cast<const void*>(x.data<char>()),
                      m,
                      dtype = dtype_code(x.dtype()),
                      out = static_cast<void*>(out.data<char>())]() {
      if (trellis_cpu_matmul(&problem, codes, scales, x, m, dtype, out) != 0) {
        throw std::runtime_error("[trellis] the CPU product refused its inputs");
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("[trellis] TrellisMatmul runs on a CPU stream only");
  }

  // The map is linear in x; codes and scales have no gradient.
  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
      const std::vector<int>& argnums) override {
    if (argnums.size() != 1 || argnums[0] != 0) {
      throw std::invalid_argument("[trellis] codes and scales have no gradient");
    }
    return {make(stream(), problem_, tangents[0], primals[1], primals[2])};
  }

  // dx = dy · W: the same stored matrix taken the other way round.
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    if (argnums.size() != 1 || argnums[0] != 0) {
      throw std::invalid_argument("[trellis] codes and scales have no gradient");
    }
    trellis_problem back = problem_;
    back.axis = 1 - back.axis;
    return {make(stream(), back, cotangents[0], primals[1], primals[2])};
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    if (axes[1] != -1 || axes[2] != -1) {
      throw std::invalid_argument("[trellis] codes and scales cannot be mapped over");
    }
    auto x = mx::moveaxis(inputs[0], axes[0], 0, stream());
    return {{make(stream(), problem_, x, inputs[1], inputs[2])}, {0}};
  }

  const char* name() const override {
    return "TrellisMatmul";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return same(problem_, static_cast<const TrellisMatmul&>(other).problem_);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {output_shape(problem_, inputs[0])};
  }

 private:
  static mx::Shape output_shape(const trellis_problem& problem, const mx::array& x) {
    if (x.ndim() == 0 || static_cast<uint64_t>(x.shape(-1)) != in_features(problem)) {
      throw std::invalid_argument(
          "[trellis] expected the last dimension of x to be " + std::to_string(in_features(problem)));
    }
    mx::Shape shape = x.shape();
    shape.back() = static_cast<int>(out_features(problem));
    return shape;
  }

  const trellis_problem problem_;
};

class TrellisExpand : public mx::UnaryPrimitive {
 public:
  TrellisExpand(mx::Stream stream, const trellis_problem& problem)
      : mx::UnaryPrimitive(stream), problem_(problem) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& codes = inputs[0];
    const auto& scales = inputs[1];
    check_weights(problem_, codes, scales);
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(codes);
    encoder.set_input_array(scales);
    encoder.set_output_array(out);
    encoder.dispatch([problem = problem_,
                      codes = codes.data<uint32_t>(),
                      scales = reinterpret_cast<const uint16_t*>(scales.data<char>()),
                      dtype = dtype_code(out.dtype()),
                      out = static_cast<void*>(out.data<char>())]() {
      if (trellis_cpu_expand(&problem, codes, scales, dtype, out) != 0) {
        throw std::runtime_error("[trellis] the CPU expansion refused its inputs");
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("[trellis] TrellisExpand runs on a CPU stream only");
  }

  const char* name() const override {
    return "TrellisExpand";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return same(problem_, static_cast<const TrellisExpand&>(other).problem_);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override {
    return {{static_cast<int>(problem_.rows), static_cast<int>(problem_.cols)}};
  }

 private:
  const trellis_problem problem_;
};

// The caller's stream if it is a CPU stream, else this thread's default CPU stream; MLX orders work across streams.
mx::Stream cpu_stream(mlx_stream stream) {
  const mx::Stream& s = mlx_stream_get_(stream);
  return s.device == mx::Device::cpu ? s : mx::default_stream(mx::Device::cpu);
}

} // namespace

extern "C" int trellis_mlx_matmul(
    mlx_array* result, const trellis_problem* problem, mlx_array x, mlx_array codes, mlx_array scales,
    mlx_stream stream, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    mlx_array_set_(
        *result,
        TrellisMatmul::make(
            cpu_stream(stream), *problem, mlx_array_get_(x), mlx_array_get_(codes), mlx_array_get_(scales)));
  });
}

extern "C" int trellis_mlx_expand(
    mlx_array* result, const trellis_problem* problem, mlx_array codes, mlx_array scales, trellis_dtype dtype,
    mlx_stream stream, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    const mx::Stream s = cpu_stream(stream);
    mlx_array_set_(
        *result,
        mx::array(
            mx::Shape{static_cast<int>(problem->rows), static_cast<int>(problem->cols)},
            dtype_of(dtype),
            std::make_shared<TrellisExpand>(s, *problem),
            {mx::contiguous(mlx_array_get_(codes), false, s), mx::contiguous(mlx_array_get_(scales), false, s)}));
  });
}
