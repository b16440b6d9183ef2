#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/memory.hpp>

namespace annulus {
namespace {

TEST(MemoryPool, AlignsAndAllowsEveryByte) {
  HostMemoryPool pool;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{255},
                                  std::size_t{256}, std::size_t{257}, std::size_t{100000}}) {
    const Buffer buffer = pool.allocate(bytes);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % MemoryPool::kAlignment, 0U);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(buffer.place(), Place::host());
    std::memset(buffer.data(), 0xab, bytes);
  }
}

TEST(MemoryPool, ReusesWhatCameBack) {
  HostMemoryPool pool;
  void* first = nullptr;
  {
    const Buffer buffer = pool.allocate(1000);
    first = buffer.data();
  }
  EXPECT_EQ(pool.statistics().system_calls, 1U);
  // 1000 and 1024 round up to the same block.
  const Buffer again = pool.allocate(1024);
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(pool.statistics().system_calls, 1U);
  const Buffer other = pool.allocate(1024);
  EXPECT_NE(other.data(), first);
  EXPECT_EQ(pool.statistics().system_calls, 2U);
}

TEST(MemoryPool, CountsUseAndPeak) {
  HostMemoryPool pool;
  {
    const Buffer a = pool.allocate(256);
    {
      const Buffer b = pool.allocate(512);
      EXPECT_EQ(pool.statistics().in_use, 768U);
    }
    EXPECT_EQ(pool.statistics().in_use, 256U);
    EXPECT_EQ(pool.statistics().peak_in_use, 768U);
    EXPECT_EQ(pool.statistics().reserved, 768U);
    pool.trim();
    EXPECT_EQ(pool.statistics().reserved, 256U);
  }
  EXPECT_EQ(pool.statistics().in_use, 0U);
  EXPECT_EQ(pool.statistics().peak_in_use, 768U);
  pool.trim();
  EXPECT_EQ(pool.statistics().reserved, 0U);
}

TEST(MemoryPool, BuffersMove) {
  HostMemoryPool pool;
  Buffer a = pool.allocate(300);
  void* data = a.data();
  Buffer b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(b.data(), data);
  Buffer c = pool.allocate(5000);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(pool.statistics().in_use, 512U);
  c = Buffer();
  EXPECT_EQ(pool.statistics().in_use, 0U);
}

// Blocks of powers of two.
class CoarsePool final : public MemoryPool {
 public:
  CoarsePool() : MemoryPool(Place::host()) {}
  ~CoarsePool() override { trim(); }
  std::vector<std::size_t> asked;

 protected:
  [[nodiscard]] std::size_t block_bytes(std::size_t bytes) const noexcept override {
    return std::max(kAlignment, std::bit_ceil(bytes));
  }
  void* system_allocate(std::size_t bytes) override {
    asked.push_back(bytes);
    return std::aligned_alloc(kAlignment, bytes);
  }
  void system_free(void* data, std::size_t /*bytes*/) noexcept override { std::free(data); }
};

TEST(MemoryPool, ServesRequestsOfOneStepFromOneBlock) {
  CoarsePool pool;
  const void* first = pool.allocate(5000).data();
  EXPECT_EQ(pool.allocate(8192).data(), first);
  EXPECT_EQ(pool.allocate(4097).data(), first);
  EXPECT_EQ(pool.allocate(1).bytes(), 1U);
  EXPECT_EQ(pool.asked, (std::vector<std::size_t>{8192, 256}));
  EXPECT_EQ(pool.statistics().reserved, 8192U + 256U);
}

TEST(MemoryPool, ServesSeveralThreads) {
  HostMemoryPool pool;
  std::vector<std::thread> threads;
  for (unsigned char id = 1; id <= 4; ++id) {
    threads.emplace_back([&pool, id] {
      for (int i = 0; i < 500; ++i) {
        const Buffer buffer = pool.allocate(512);
        auto* bytes = static_cast<unsigned char*>(buffer.data());
        std::memset(bytes, id, 512);
        for (std::size_t k = 0; k < 512; ++k) {
          if (bytes[k] != id) ADD_FAILURE() << "block handed out twice";
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.statistics().in_use, 0U);
  EXPECT_LE(pool.statistics().system_calls, 4U);
}

}  // namespace
}  // namespace annulus
