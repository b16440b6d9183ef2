#include <atomic>

#include <annulus/core/setup_counter.hpp>

namespace annulus {
namespace {

std::atomic<std::uint64_t> count{0};

}  // namespace

std::uint64_t setup_count() noexcept {
  return count.load(std::memory_order_relaxed);
}

void count_setup() noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace annulus
