#include <algorithm>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/host_memory.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/setup_counter.hpp>

namespace annulus {

Buffer::~Buffer() {
  if (pool_ != nullptr) pool_->give_back(data_, block_);
}

Place Buffer::place() const noexcept {
  return pool_ == nullptr ? Place::host() : pool_->place();
}

std::size_t MemoryPool::block_bytes(std::size_t bytes) const noexcept {
  const std::size_t at_least_one = std::max<std::size_t>(bytes, 1);
  return (at_least_one + kAlignment - 1) / kAlignment * kAlignment;
}

std::pair<void*, std::size_t> MemoryPool::take_free(std::size_t block) noexcept {
  const std::size_t most = block + block / 4;
  for (auto found = free_.lower_bound(block); found != free_.end() && found->first <= most;
       ++found) {
    if (found->second.empty()) continue;
    void* const data = found->second.back();
    found->second.pop_back();
    return {data, found->first};
  }
  return {nullptr, 0};
}

Buffer MemoryPool::allocate(std::size_t bytes, std::string_view what) {
  const std::size_t wanted = block_bytes(bytes);
  const std::lock_guard lock(mutex_);
  auto [data, block] = take_free(wanted);
  if (data == nullptr) {
    block = wanted;
    data = system_allocate(block);
    if (data == nullptr) {
      release_locked();
      data = system_allocate(block);
    }
    if (data == nullptr) {
      std::string state = system_state();
      if (state.empty() && place_.is_host()) state = host_memory_state();
      throw LibraryError(fmt::format(
          "{}: no memory for {}{}{}: this pool has handed out {} and keeps {}{}{}",
          to_string(place_), human_bytes(bytes), what.empty() ? "" : " of ", what,
          human_bytes(statistics_.in_use), human_bytes(statistics_.reserved - statistics_.in_use),
          state.empty() ? "" : "; ", state));
    }
    // Returning memory must not allocate, so the free list has room for every block.
    auto& list = free_[block];
    list.reserve(list.capacity() + 1);
    statistics_.reserved += block;
    ++statistics_.system_calls;
    count_setup();
  }
  statistics_.in_use += block;
  statistics_.peak_in_use = std::max(statistics_.peak_in_use, statistics_.in_use);
  return {this, data, bytes, block};
}

void MemoryPool::give_back(void* data, std::size_t block) noexcept {
  const std::lock_guard lock(mutex_);
  free_[block].push_back(data);
  statistics_.in_use -= block;
}

MemoryStatistics MemoryPool::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void MemoryPool::reset_peak() {
  const std::lock_guard lock(mutex_);
  statistics_.peak_in_use = statistics_.in_use;
}

void MemoryPool::release() noexcept {
  const std::lock_guard lock(mutex_);
  release_locked();
}

void MemoryPool::release_locked() noexcept {
  for (auto& [block, list] : free_) {
    std::erase_if(list, [&, bytes = block](void* data) {
      if (!may_free(data)) return false;
      system_free(data, bytes);
      statistics_.reserved -= bytes;
      return true;
    });
  }
}

// The only place that takes memory from the system; the pool owns it.
// NOLINTBEGIN(cppcoreguidelines-owning-memory)
void* HostMemoryPool::system_allocate(std::size_t bytes) {
  return std::aligned_alloc(kAlignment, bytes);
}

void HostMemoryPool::system_free(void* data, std::size_t /*bytes*/) noexcept {
  std::free(data);
}
// NOLINTEND(cppcoreguidelines-owning-memory)

}  // namespace annulus
