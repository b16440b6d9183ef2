#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/handle.hpp>

namespace annulus {
namespace {

struct CountingTraits {
  using Raw = int;
  static Raw null() noexcept { return -1; }
  static void release(Raw raw) noexcept { released.push_back(raw); }
  static inline std::vector<int> released;
};
using Counting = Handle<CountingTraits>;

class HandleTest : public ::testing::Test {
 protected:
  void SetUp() override { CountingTraits::released.clear(); }
  const std::vector<int>& released = CountingTraits::released;
};

static_assert(!std::is_copy_constructible_v<Counting>);
static_assert(!std::is_copy_assignable_v<Counting>);
static_assert(std::is_nothrow_move_constructible_v<Counting>);

TEST_F(HandleTest, EmptyReleasesNothing) {
  {
    const Counting empty;
    EXPECT_FALSE(empty);
    EXPECT_EQ(empty.get(), -1);
  }
  EXPECT_TRUE(released.empty());
}

TEST_F(HandleTest, ReleasesOnceAtTheEnd) {
  {
    // Zero is an ordinary value here: only null() owns nothing.
    const Counting handle(0);
    EXPECT_TRUE(handle);
    EXPECT_TRUE(released.empty());
  }
  EXPECT_EQ(released, std::vector<int>{0});
}

TEST_F(HandleTest, MoveConstructionTransfers) {
  {
    Counting first(7);
    const Counting second(std::move(first));
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(second.get(), 7);
  }
  EXPECT_EQ(released, std::vector<int>{7});
}

TEST_F(HandleTest, MoveAssignmentReleasesTheOldOne) {
  {
    Counting target(1);
    target = Counting(2);
    EXPECT_EQ(released, std::vector<int>{1});
    EXPECT_EQ(target.get(), 2);
    Counting& same = target;
    target = std::move(same);
    EXPECT_EQ(target.get(), 2);
    EXPECT_EQ(released.size(), 1U);
  }
  EXPECT_EQ(released, (std::vector<int>{1, 2}));
}

TEST_F(HandleTest, ResetAndRelease) {
  Counting handle(3);
  handle.reset(4);
  EXPECT_EQ(released, std::vector<int>{3});
  EXPECT_EQ(handle.release(), 4);
  EXPECT_FALSE(handle);
  handle.reset();
  EXPECT_EQ(released, std::vector<int>{3});
}

}  // namespace
}  // namespace annulus
