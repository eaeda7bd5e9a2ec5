// C++ exceptions do not cross into Rust: they become a status and a message.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

// 0, or 1 with the exception's text in `message`.
template <typename F>
int guarded(char* message, uint64_t message_len, F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(message, message_len, "%s", e.what());
  } catch (...) {
    std::snprintf(message, message_len, "%s", "unknown C++ exception");
  }
  return 1;
}
