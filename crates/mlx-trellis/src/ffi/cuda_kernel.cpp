// MLX's custom CUDA kernels, called directly rather than through mlx-c: mlx-c hands an exception's text to a global
// handler that mlx-rs keeps to itself, and here it is wanted beside the status.

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "guarded.h"
#include "mlx/array.h"
#include "mlx/c/private/array.h"
#include "mlx/c/private/stream.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

extern "C" {

// What `cuda_kernel.rs` repeats in Rust.
enum trellis_type : uint32_t { TRELLIS_FLOAT32 = 0, TRELLIS_FLOAT16 = 1, TRELLIS_BFLOAT16 = 2, TRELLIS_UINT32 = 3 };
enum trellis_template_kind : uint32_t { TRELLIS_INT = 0, TRELLIS_BOOL = 1, TRELLIS_TYPE = 2 };

struct trellis_kernel_text {
  const char* name;
  const char* header;
  const char* source;
  const char* const* inputs;
  uint64_t input_count;
  const char* const* outputs;
  uint64_t output_count;
  int32_t shared_memory;
  bool ensure_row_contiguous;
};

struct trellis_output {
  const int32_t* shape;
  uint64_t ndim;
  uint32_t type;
};

struct trellis_template {
  const char* name;
  uint32_t kind;
  int32_t value;
};

struct trellis_kernel_launch {
  const mlx_array* inputs;
  uint64_t input_count;
  const trellis_output* outputs;
  uint64_t output_count;
  const trellis_template* arguments;
  uint64_t argument_count;
  int32_t grid[3];
  int32_t block[3];
  const float* init_value; // or null
};
}

namespace {

mx::Dtype dtype_of(uint32_t type) {
  switch (type) {
    case TRELLIS_FLOAT32: return mx::float32;
    case TRELLIS_FLOAT16: return mx::float16;
    case TRELLIS_BFLOAT16: return mx::bfloat16;
    case TRELLIS_UINT32: return mx::uint32;
  }
  throw std::invalid_argument("[trellis] unknown type code");
}

std::pair<std::string, mx::fast::TemplateArg> argument(const trellis_template& t) {
  switch (t.kind) {
    case TRELLIS_INT: return {t.name, static_cast<int>(t.value)};
    case TRELLIS_BOOL: return {t.name, t.value != 0};
    case TRELLIS_TYPE: return {t.name, dtype_of(static_cast<uint32_t>(t.value))};
  }
  throw std::invalid_argument("[trellis] unknown kind of template argument");
}

// A custom kernel whose forward derivative is zero. A product's derivatives stand in `gradient.cpp`; MLX's jvp, unlike
// its vjp, still walks the graph behind them, where a bare custom kernel would refuse.
class Underived : public mx::Primitive {
 public:
  Underived(std::shared_ptr<mx::Primitive> kernel, std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes)
      : Primitive(kernel->stream()), kernel_(std::move(kernel)), shapes_(std::move(shapes)), dtypes_(std::move(dtypes)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    kernel_->eval_cpu(inputs, outputs);
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    kernel_->eval_gpu(inputs, outputs);
  }
  std::vector<mx::array> jvp(
      const std::vector<mx::array>&, const std::vector<mx::array>&, const std::vector<int>&) override {
    std::vector<mx::array> zeros;
    for (size_t i = 0; i < shapes_.size(); ++i) zeros.push_back(mx::zeros(shapes_[i], dtypes_[i], stream()));
    return zeros;
  }
  const char* name() const override {
    return kernel_->name();
  }

 private:
  std::shared_ptr<mx::Primitive> kernel_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
};

} // namespace

// Stores a new kernel in `*kernel`.
extern "C" int trellis_mlx_cuda_kernel_new(
    void** kernel, const trellis_kernel_text* text, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    auto function = std::make_unique<mx::fast::CustomKernelFunction>(mx::fast::cuda_kernel(
        text->name,
        std::vector<std::string>(text->inputs, text->inputs + text->input_count),
        std::vector<std::string>(text->outputs, text->outputs + text->output_count),
        text->source,
        text->header,
        text->ensure_row_contiguous,
        text->shared_memory));
    *kernel = function.release();
  });
}

extern "C" void trellis_mlx_cuda_kernel_free(void* kernel) {
  delete static_cast<mx::fast::CustomKernelFunction*>(kernel);
}

// Stores a lazy array in each of `output_count` empty handles at `results`, or leaves all of them empty.
extern "C" int trellis_mlx_cuda_kernel_apply(
    mlx_array* results, const void* kernel, const trellis_kernel_launch* launch, mlx_stream stream, char* message,
    uint64_t message_len) {
  return guarded(message, message_len, [&] {
    std::vector<mx::array> inputs;
    for (uint64_t i = 0; i < launch->input_count; ++i) inputs.push_back(mlx_array_get_(launch->inputs[i]));
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (uint64_t i = 0; i < launch->output_count; ++i) {
      const trellis_output& o = launch->outputs[i];
      shapes.emplace_back(o.shape, o.shape + o.ndim);
      dtypes.push_back(dtype_of(o.type));
    }
    std::vector<std::pair<std::string, mx::fast::TemplateArg>> arguments;
    for (uint64_t i = 0; i < launch->argument_count; ++i) arguments.push_back(argument(launch->arguments[i]));
    auto outputs = (*static_cast<const mx::fast::CustomKernelFunction*>(kernel))(
        inputs,
        shapes,
        dtypes,
        std::make_tuple(launch->grid[0], launch->grid[1], launch->grid[2]),
        std::make_tuple(launch->block[0], launch->block[1], launch->block[2]),
        std::move(arguments),
        launch->init_value ? std::optional<float>(*launch->init_value) : std::nullopt,
        false,
        mlx_stream_get_(stream));
    if (outputs.empty() || outputs.size() != launch->output_count) {
      throw std::runtime_error("[trellis] wrong number of outputs");
    }
    outputs = mx::array::make_arrays(
        shapes, dtypes, std::make_shared<Underived>(outputs[0].primitive_ptr(), shapes, dtypes), outputs[0].inputs());
    for (uint64_t i = 0; i < launch->output_count; ++i) mlx_array_set_(results[i], std::move(outputs[i]));
  });
}

// Stores `array`, to be used only once `dependency` has been computed.
extern "C" int trellis_mlx_after(
    mlx_array* result, mlx_array array, mlx_array dependency, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    mlx_array_set_(*result, mx::depends({mlx_array_get_(array)}, {mlx_array_get_(dependency)}).at(0));
  });
}
