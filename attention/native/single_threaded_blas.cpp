#include "native/single_threaded_blas.hpp"

#include <cstddef>
#include <mutex>
#include <sys/mman.h>
#include <vector>

#include <cblas.h>
#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {
namespace {

// OpenBLAS maps a buffer for each thread that multiplies, and keeps it for later threads. Before
// that the thread itself maps a stack and an arena of malloc, and uses little of both.
constexpr std::size_t kBuffer = std::size_t{128} << 20;
constexpr std::size_t kThread = std::size_t{136} << 20;

struct Setting {
  std::mutex mutex;
  int users = 0;
  int threads = 1;  // before the first of them
  int callers = 0;  // of all users together
  int buffers = 0;  // that there was room for
};

// True if `count` threads find all that they take: maps it, and gives it back.
bool has_room_for(int count) {
  std::vector<std::pair<void*, std::size_t>> mapped;
  const auto map = [&](std::size_t bytes, int access) {
    void* const begin = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin != MAP_FAILED) mapped.emplace_back(begin, bytes);
    return begin != MAP_FAILED;
  };
  bool room = true;
  for (int i = 0; i < count && room; ++i) {
    room = map(kBuffer, PROT_READ | PROT_WRITE) && (i == 0 || map(kThread, PROT_NONE));
  }
  for (const auto& [begin, bytes] : mapped) munmap(begin, bytes);
  return room;
}

Setting& setting() {
  static Setting the_setting;
  return the_setting;
}

}  // namespace

SingleThreadedBlas::SingleThreadedBlas(int callers) : callers_(callers) {
  Setting& shared = setting();
  const std::lock_guard lock(shared.mutex);
  const int all = shared.callers + callers;
  if (all > shared.buffers) {
    if (!has_room_for(all - shared.buffers)) {
      throw LibraryError(
          fmt::format("cpu: no memory for OpenBLAS, which maps 128 MiB for each of {} threads: "
                      "raise the limit of the address space (ulimit -v), or use fewer threads",
                      all));
    }
    shared.buffers = all;
  }
  shared.callers = all;
  if (shared.users++ > 0) return;
  shared.threads = openblas_get_num_threads();
  if (shared.threads != 1) openblas_set_num_threads(1);
}

SingleThreadedBlas::~SingleThreadedBlas() {
  Setting& shared = setting();
  const std::lock_guard lock(shared.mutex);
  shared.callers -= callers_;
  if (--shared.users > 0 || shared.threads == 1) return;
  if (openblas_get_num_threads() == 1) openblas_set_num_threads(shared.threads);
}

}  // namespace annulus
