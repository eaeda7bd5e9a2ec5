// What the CUDA driver says of a GPU, asked without linking it, and where MLX's library lies.

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include <dlfcn.h>

#include "guarded.h"
#include "mlx/version.h"

namespace {

// From cuda.h, whose numbers are part of the driver's binary interface.
constexpr int MULTIPROCESSOR_COUNT = 16;
constexpr int COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int COMPUTE_CAPABILITY_MINOR = 76;

template <typename F>
F symbol(void* library, const char* name) {
  void* address = dlsym(library, name);
  if (!address) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
  return reinterpret_cast<F>(address);
}

void check(const char* what, int status) {
  if (status != 0) throw std::runtime_error(std::string(what) + " gives error " + std::to_string(status));
}

} // namespace

// Multiprocessors and compute capability of GPU `index`.
extern "C" int trellis_cuda_attributes(
    int index, int* multiprocessors, int* major, int* minor, char* message, uint64_t message_len) {
  return guarded(message, message_len, [&] {
    // Never closed: the driver stays loaded in a process that uses it.
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
      const char* why = dlerror();
      throw std::runtime_error(why ? why : "libcuda.so.1 cannot be loaded");
    }
    check("cuInit", symbol<int (*)(unsigned)>(library, "cuInit")(0));
    int device = 0, count = 0;
    check("cuDeviceGetCount", symbol<int (*)(int*)>(library, "cuDeviceGetCount")(&count));
    if (index >= count) throw std::runtime_error("the driver has no GPU " + std::to_string(index));
    check("cuDeviceGet", symbol<int (*)(int*, int)>(library, "cuDeviceGet")(&device, index));
    const auto attribute = symbol<int (*)(int*, int, int)>(library, "cuDeviceGetAttribute");
    check("cuDeviceGetAttribute", attribute(multiprocessors, MULTIPROCESSOR_COUNT, device));
    check("cuDeviceGetAttribute", attribute(major, COMPUTE_CAPABILITY_MAJOR, device));
    check("cuDeviceGetAttribute", attribute(minor, COMPUTE_CAPABILITY_MINOR, device));
  });
}

// The path of the library that holds MLX, or an empty string.
extern "C" void trellis_mlx_library(char* path, uint64_t path_len) {
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<void*>(&mlx::core::version), &info) != 0 && info.dli_fname;
  std::snprintf(path, path_len, "%s", found ? info.dli_fname : "");
}
