// Force-included before every file of mlx-c, both when it is compiled (C++) and when its headers are read by bindgen
// (C). It supplies the two things that mlx-c takes for granted on a Mac and lacks here:
//
// * Half-precision accessors. mlx-c's half.h declares float16_t and bfloat16_t for Arm only, and leaves out
//   `mlx_array_item_float16` and its three siblings elsewhere; mlx-rs calls them everywhere. Taking half.h's place,
//   with the guard macros it would have set, makes mlx-c compile its own accessors.
// * `std::format`, which gcc has from version 13 on.

#ifndef XTASK_LINUX_H
#define XTASK_LINUX_H

#define MLX_HALF_H
#define HAS_FLOAT16
#define HAS_BFLOAT16

#ifdef __cplusplus

#include <type_traits>
#include <utility>

#include "mlx/types/half_types.h"

using mlx::core::bfloat16_t;
using mlx::core::float16_t;

#if __has_include(<format>)
#include <format>
#else

#include <sstream>
#include <string>
#include <string_view>

namespace std {

// Knows plain "{}" only, the one form that mlx-c uses.
template <class... Args>
string format(string_view pattern, const Args&... args) {
  ostringstream out;
  auto text_before_field = [&] {
    const size_t field = pattern.find("{}");
    out << pattern.substr(0, field);
    pattern.remove_prefix(field == string_view::npos ? pattern.size() : field + 2);
  };
  ((text_before_field(), out << args), ...);
  out << pattern;
  return out.str();
}

} // namespace std

#endif // __has_include(<format>)

#else // C: what bindgen reads

#include <stdint.h>

// mlx-rs wants what bindgen makes of these on a Mac: a tuple struct of the bits for the first, u16 for the second.
typedef _Float16 float16_t;
typedef uint16_t bfloat16_t;

#endif // __cplusplus

#endif // XTASK_LINUX_H
