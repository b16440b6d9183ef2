#include <algorithm>
#include <cstdlib>
#include <string>

#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/setup_counter.hpp>

namespace annulus {

Buffer::~Buffer() {
  if (pool_ != nullptr) pool_->give_back(data_, bytes_);
}

Place Buffer::place() const noexcept {
  return pool_ == nullptr ? Place::host() : pool_->place();
}

std::size_t MemoryPool::block_bytes(std::size_t bytes) const noexcept {
  const std::size_t at_least_one = std::max<std::size_t>(bytes, 1);
  return (at_least_one + kAlignment - 1) / kAlignment * kAlignment;
}

Buffer MemoryPool::allocate(std::size_t bytes) {
  const std::size_t block = block_bytes(bytes);
  const std::lock_guard lock(mutex_);
  void* data = nullptr;
  if (const auto found = free_.find(block); found != free_.end() && !found->second.empty()) {
    data = found->second.back();
    found->second.pop_back();
  } else {
    data = system_allocate(block);
    // Giving back must not allocate: the free list keeps room for every block it may get.
    auto& list = free_[block];
    list.reserve(list.capacity() + 1);
    statistics_.reserved += block;
    ++statistics_.system_calls;
    count_setup();
  }
  statistics_.in_use += block;
  statistics_.peak_in_use = std::max(statistics_.peak_in_use, statistics_.in_use);
  return {this, data, bytes};
}

void MemoryPool::give_back(void* data, std::size_t bytes) noexcept {
  const std::size_t block = block_bytes(bytes);
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

void MemoryPool::trim() {
  const std::lock_guard lock(mutex_);
  for (auto& [block, list] : free_) {
    for (void* data : list) system_free(data, block);
    statistics_.reserved -= block * list.size();
    list.clear();
  }
}

// The one place that takes memory from the system: what owns it is the pool.
// NOLINTBEGIN(cppcoreguidelines-owning-memory)
void* HostMemoryPool::system_allocate(std::size_t bytes) {
  void* data = std::aligned_alloc(kAlignment, bytes);
  if (data == nullptr) {
    throw LibraryError("out of host memory: asked for " + std::to_string(bytes) + " bytes");
  }
  return data;
}

void HostMemoryPool::system_free(void* data, std::size_t /*bytes*/) noexcept {
  std::free(data);
}
// NOLINTEND(cppcoreguidelines-owning-memory)

}  // namespace annulus
