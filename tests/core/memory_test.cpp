#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/call_memory.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/workspace.hpp>

#include "tests/support/message_of.hpp"

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
  ~CoarsePool() override { release(); }
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

TEST(MemoryPool, TakesTheSmallestFreeBlockThatFits) {
  HostMemoryPool pool;
  const void* large = nullptr;
  const void* fitting = nullptr;
  {
    const Buffer a = pool.allocate(5120);
    const Buffer b = pool.allocate(4864);
    large = a.data();
    fitting = b.data();
  }
  const Buffer first = pool.allocate(4608);
  EXPECT_EQ(first.data(), fitting);
  const Buffer second = pool.allocate(4608);
  EXPECT_EQ(second.data(), large);
  EXPECT_EQ(pool.statistics().system_calls, 2U);
  EXPECT_EQ(pool.statistics().in_use, 5120U + 4864U);
}

TEST(MemoryPool, WastesNoMoreThanAQuarter) {
  HostMemoryPool pool;
  (void)pool.allocate(8192);
  const Buffer small = pool.allocate(6144);
  EXPECT_EQ(pool.statistics().system_calls, 2U);
  const Buffer close = pool.allocate(6656);
  EXPECT_EQ(pool.statistics().system_calls, 2U);
  EXPECT_EQ(pool.statistics().in_use, 6144U + 8192U);
}

TEST(CallMemory, ObjectsHoldTheSamePieces) {
  HostMemoryPool pool;
  HostMemoryPool other;
  CallMemory memory;
  const auto take = [&](const std::vector<CallMemory::Request>& requests) {
    return memory.take(requests);
  };
  const auto first = take({{pool, 4096}, {pool, 4096}, {other, 4096}, {pool, 0}});
  EXPECT_NE(first[0]->data(), first[1]->data());  // one object uses both at once
  EXPECT_EQ(first[3]->data(), nullptr);
  auto second = take({{other, 4096}, {pool, 3500}, {pool, 3400}, {pool, 4096}});
  EXPECT_EQ(second[0], first[2]);
  EXPECT_TRUE(second[1] == first[0] || second[1] == first[1]);
  EXPECT_TRUE(second[2] == first[0] || second[2] == first[1]);
  EXPECT_NE(second[1], second[2]);
  EXPECT_EQ(pool.statistics().in_use, 3U * 4096);
  const auto small = take({{pool, 3072}});  // a third larger would be wasteful
  EXPECT_EQ(pool.statistics().in_use, 3U * 4096 + 3072);
  second.clear();
  EXPECT_EQ(pool.statistics().in_use, 2U * 4096 + 3072);
}

TEST(Workspace, KernelsHoldTheSame) {
  HostDevice device;
  const auto in_use = [&] { return device.memory().statistics().in_use; };
  const std::array requests{CallMemory::Request{device.memory(), 4096}};
  const auto of_a_call = device.call_memory().take(requests);
  std::list<Workspace> workspaces;
  for (int kernel = 0; kernel < 64; ++kernel) {
    Workspace& workspace = workspaces.emplace_back(device);
    EXPECT_EQ(workspace.data(), nullptr);
    workspace.reserve(0);
    workspace.reserve(4096);
    EXPECT_EQ(workspace.data(), workspaces.front().data());
    EXPECT_NE(workspace.data(), of_a_call.front()->data());  // a call uses both at once
    workspace.reserve(100);
  }
  EXPECT_EQ(in_use(), 2U * 4096);
  // Outgrown memory stays, as recordings may use it.
  workspaces.front().reserve(8192);
  EXPECT_NE(workspaces.front().data(), workspaces.back().data());
  while (workspaces.size() > 1) workspaces.pop_back();
  EXPECT_EQ(in_use(), 2U * 4096 + 8192);
  workspaces.clear();
  EXPECT_EQ(in_use(), 4096U);
}

/// A system with this many bytes, which cannot give again what is in use.
class SmallPool final : public MemoryPool {
 public:
  explicit SmallPool(std::size_t bytes) : MemoryPool(Place::host()), left_(bytes) {}
  ~SmallPool() override {
    kept_ = nullptr;
    release();
  }
  /// Not to be freed before the pool ends.
  void keep(const void* data) { kept_ = data; }

 protected:
  void* system_allocate(std::size_t bytes) override {
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    return std::aligned_alloc(kAlignment, bytes);
  }
  void system_free(void* data, std::size_t bytes) noexcept override {
    left_ += bytes;
    std::free(data);
  }
  [[nodiscard]] bool may_free(const void* data) const noexcept override { return data != kept_; }
  [[nodiscard]] std::string system_state() const override {
    return std::to_string(left_) + " bytes are left";
  }

 private:
  std::size_t left_;
  const void* kept_ = nullptr;
};

TEST(MemoryPool, GivesFreeBlocksBackBeforeItFails) {
  SmallPool pool(10 << 20);
  const Buffer kept = pool.allocate(1 << 20);
  (void)pool.allocate(4 << 20);
  (void)pool.allocate(2 << 20);
  const Buffer large = pool.allocate(9 << 20);
  EXPECT_NE(large.data(), nullptr);
  EXPECT_EQ(pool.statistics().reserved, std::size_t{10} << 20);
}

std::string error_of(MemoryPool& pool, std::size_t bytes, std::string_view what) {
  return test::message_of<LibraryError>([&] { (void)pool.allocate(bytes, what); });
}

TEST(MemoryPool, SaysWhatItHadNoMemoryFor) {
  SmallPool pool(std::size_t{3} << 20);
  const Buffer kept = pool.allocate(std::size_t{1} << 20);
  EXPECT_EQ(
      error_of(pool, std::size_t{5} << 29, "key/value blocks"),
      "cpu: no memory for 2.5 GiB of key/value blocks: this pool has handed out 1 MiB and keeps "
      "0 B; 2097152 bytes are left");
  EXPECT_EQ(error_of(pool, 3 << 20, {}),
            "cpu: no memory for 3 MiB: this pool has handed out 1 MiB and keeps 0 B; 2097152 bytes "
            "are left");
  EXPECT_EQ(pool.statistics().in_use, std::size_t{1} << 20);
  EXPECT_NE(pool.allocate(std::size_t{2} << 20).data(), nullptr) << "the pool works on";
}

TEST(MemoryPool, KeepsWhatOthersMayHaveMapped) {
  SmallPool pool(std::size_t{4} << 20);
  {
    const Buffer mapped = pool.allocate(std::size_t{2} << 20);
    const Buffer own = pool.allocate(std::size_t{1} << 20);
    pool.keep(mapped.data());
  }
  pool.trim();
  EXPECT_EQ(pool.statistics().reserved, std::size_t{2} << 20);
  EXPECT_THAT(error_of(pool, 3 << 20, {}), ::testing::HasSubstr("keeps 2 MiB"));
  EXPECT_EQ(pool.allocate(std::size_t{1} << 20).bytes(), std::size_t{1} << 20);
}

TEST(MemoryPool, NoHostHasSoMuch) {
  HostMemoryPool pool;
  EXPECT_THAT(error_of(pool, std::size_t{1} << 60, "query"),
              ::testing::ContainsRegex("no memory for 1024 PiB of query: .*; [0-9.]+ .iB of the "
                                       "host's [0-9.]+ .iB are available"));
}

TEST(HumanBytes, ScaleByPowersOfTwo) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(std::uint64_t{5} << 29), "2.5 GiB");
  EXPECT_EQ(human_bytes(std::uint64_t{1} << 60), "1024 PiB");
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
