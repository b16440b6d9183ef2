// Tests of the key-value store that connects ranks without MPI. Control calls are tested elsewhere,
// with and without MPI.

#include <array>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/key_value_store.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;

/// A store in this process. Ranks are threads; their calls are counted.
class MemoryStore {
 public:
  class OfRank final : public KeyValueStore {
   public:
    explicit OfRank(MemoryStore& store) : store_(store) {}
    void set(const std::string& key, const std::string& value) override {
      const std::lock_guard lock(store_.mutex_);
      EXPECT_LE(value.size(), kMaximumBytes);
      ++sets;
      bytes += value.size();
      store_.values_[key] = value;
      store_.changed_.notify_all();
    }
    [[nodiscard]] std::optional<std::string> get(const std::string& key, double seconds) override {
      ++gets;
      std::unique_lock lock(store_.mutex_);
      const auto there = [&] { return store_.values_.contains(key); };
      if (!store_.changed_.wait_for(lock, std::chrono::duration<double>(seconds), there)) return {};
      return store_.values_.at(key);
    }
    void remove(const std::string& key) override {
      const std::lock_guard lock(store_.mutex_);
      store_.values_.erase(key);
    }

    std::size_t gets = 0;
    std::size_t sets = 0;
    std::size_t bytes = 0;

   private:
    MemoryStore& store_;
  };

  [[nodiscard]] std::size_t keys() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

class Store : public ::testing::TestWithParam<int> {
 protected:
  /// Runs `body` on every rank, each a thread.
  void run(const std::function<void(Mesh&, MemoryStore::OfRank&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < GetParam(); ++rank) {
      threads.emplace_back([&, rank] {
        const auto mine = std::make_shared<MemoryStore::OfRank>(store_);
        for (int round = 0; round < kRounds; ++round) {
          Mesh mesh("sp=-1", make_store_bootstrap(mine, rank, GetParam()), test::kWatchdog);
          body(mesh, *mine);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static constexpr int kRounds = 3;  // meshes, one after the other
  MemoryStore store_;
};

TEST_P(Store, ACallCostsFewShortMessagesAndLeavesNothing) {
  const auto most = static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(GetParam())));
  run([&](Mesh& mesh, MemoryStore::OfRank& store) {
    Control& ranks = mesh.world();
    const auto cost = [&](const std::function<void()>& call) {
      constexpr std::size_t kCalls = 10;
      const std::size_t sets = store.sets;
      const std::size_t bytes = store.bytes;
      for (std::size_t i = 0; i < kCalls; ++i) call();
      // Heartbeats, two sets a second, may come on top.
      EXPECT_LE(store.sets - sets, kCalls * most + 30);
      EXPECT_LE(store.bytes - bytes, kCalls * most * 100 + 1000);
    };
    cost([&] { ranks.barrier(); });
    cost([&] { agree(ranks, nullptr); });
    cost([&] { EXPECT_EQ(ranks.sum(std::array{1.0})[0], mesh.size()); });
    cost([&] { (void)ranks.collect_text("x", "texts"); });
    ranks.barrier();
    EXPECT_LE(store_.keys(), 4 * static_cast<std::size_t>(GetParam()) + 2);
  });
  EXPECT_LE(store_.keys(), static_cast<std::size_t>(GetParam()) + 1);
}

TEST_P(Store, LongTextsTravelInPieces) {
  run([&](Mesh& mesh, MemoryStore::OfRank& /*store*/) {
    const auto text_of = [](int rank) {
      return std::string(300'000 + static_cast<std::size_t>(rank), static_cast<char>('a' + rank));
    };
    if (mesh.size() > 8) return;
    const auto texts = mesh.world().gather_text(text_of(mesh.rank()));
    for (int rank = 0; rank < mesh.size(); ++rank) {
      EXPECT_EQ(texts[static_cast<std::size_t>(rank)], text_of(rank));
    }
  });
}

TEST_P(Store, ASenderAsksForRoomNowAndThen) {
  if (GetParam() != 2) return;
  run([&](Mesh& mesh, MemoryStore::OfRank& store) {
    const std::size_t gets = store.gets;
    if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    const std::size_t most = 2 * KeyValueStore::kAhead * KeyValueStore::kMaximumBytes;
    (void)mesh.world().broadcast(std::string(mesh.rank() == 0 ? most : 0, 'x'), "a long text");
    if (mesh.rank() == 0) {
      EXPECT_LE(store.gets - gets, 250);
    }
    mesh.world().barrier();
  });
}

TEST_P(Store, DataBetweenCpusNeedsMpi) {
  run([&](Mesh& mesh, MemoryStore::OfRank& /*store*/) {
    const AxisNames axes{"sp"};
    if (mesh.size() == 1) {
      EXPECT_EQ(mesh.group(axes, Place::host()).transport(), "self");
      return;
    }
    EXPECT_THAT(test::message_of<UnsupportedError>([&] { (void)mesh.group(axes, Place::host()); }),
                HasSubstr("needs MPI"));
    HostStream stream("communication", mesh.watchdog(), nullptr);
    const std::string data(KeyValueStore::kMaximumBytes, 'x');
    const Send message{(mesh.rank() + 1) % mesh.size(), data.data(), data.size()};
    EXPECT_THAT(test::message_of<UnsupportedError>([&] {
                  test::send(mesh.group(axes), message, stream, {"key/value", 1});
                }),
                HasSubstr("64 KiB of key/value"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Store, ::testing::Values(1, 2, 3, 4, 8, 64));

TEST(StoreErrors, RanksAreNumbersBelowTheirSize) {
  MemoryStore store;
  const auto make = [&](int rank, int size) {
    (void)make_store_bootstrap(std::make_shared<MemoryStore::OfRank>(store), rank, size);
  };
  EXPECT_THROW(make(-1, 2), ArgumentError);
  EXPECT_THROW(make(2, 2), ArgumentError);
  EXPECT_THROW(make(0, 0), ArgumentError);
  EXPECT_THROW((void)make_store_bootstrap(nullptr, 0, 1), ArgumentError);
}

TEST(StoreErrors, KeysOfAnotherGroupOrJobAreRefused) {
  MemoryStore store;
  const auto mine = std::make_shared<MemoryStore::OfRank>(store);
  mine->set("annulus/0/rank/0", "of another job");
  const auto make = [&] {
    const Mesh mesh("sp=-1", make_store_bootstrap(mine, 0, 1), test::kWatchdog);
  };
  EXPECT_THAT(test::message_of<LibraryError>(make), HasSubstr("annulus/0/rank/0"));
  EXPECT_NO_THROW(make());  // the next mesh has other keys
}

TEST(StoreErrors, AStoreThatFailsEndsTheWait) {
  class Broken final : public KeyValueStore {
    void set(const std::string& /*key*/, const std::string& /*value*/) override {}
    std::optional<std::string> get(const std::string& /*key*/, double /*seconds*/) override {
      throw LibraryError("connection lost");
    }
    void remove(const std::string& /*key*/) override { throw LibraryError("connection lost"); }
  };
  EXPECT_THAT(test::message_of<LibraryError>([&] {
                const Mesh mesh("sp=-1", make_store_bootstrap(std::make_shared<Broken>(), 0, 2),
                                test::kWatchdog);
              }),
              HasSubstr("connection lost"));
}

}  // namespace
}  // namespace annulus
