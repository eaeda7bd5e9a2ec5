// mlx-rs seeds its random generator with this function of macOS's kernel interface.

#include <cstdint>
#include <ctime>

extern "C" std::uint64_t mach_approximate_time() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}
