#include <functional>
#include <memory>
#include <new>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/mesh/agreement.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

struct Outcome {
  bool user = false;
  std::string text = "no error";
};

// Runs `body`, which gets the rank, on every rank and tells how it ended here.
Outcome outcome_of(Control& ranks, const std::function<void(int rank)>& body) {
  try {
    collectively(ranks, [&] { body(ranks.rank()); });
  } catch (const UserError& error) {
    return {true, error.what()};
  } catch (const LibraryError& error) {
    return {false, error.what()};
  }
  return {};
}

class AgreementTest : public ::testing::Test {
 protected:
  const std::shared_ptr<Control> group_ = test::make_world_group()->shared_control();
  const int size_ = group_->size();
};

TEST_F(AgreementTest, NoErrorNoThrow) {
  EXPECT_EQ(outcome_of(*group_, [](int) {}).text, "no error");
  EXPECT_EQ(collectively(*group_, [&] { return group_->rank() * 10; }), group_->rank() * 10);
  const auto moved = collectively(*group_, [] { return std::make_unique<int>(5); });
  EXPECT_EQ(*moved, 5);
  EXPECT_NO_THROW(agree(*group_, nullptr));
}

TEST_F(AgreementTest, OneRankFails) {
  for (int failing = 0; failing < size_; ++failing) {
    const Outcome outcome = outcome_of(*group_, [&](int rank) {
      if (rank == failing) throw ArgumentError("window", "-3", "-1 or more");
    });
    EXPECT_TRUE(outcome.user);
    const std::string prefix = size_ == 1 ? "" : "rank " + std::to_string(failing) + ": ";
    EXPECT_EQ(outcome.text, prefix + "window: got -3, expected -1 or more");
  }
}

TEST_F(AgreementTest, AllRanksFailAlike) {
  const Outcome outcome =
      outcome_of(*group_, [](int) { throw FileError("q.npy", "no such file"); });
  EXPECT_TRUE(outcome.user);
  EXPECT_EQ(outcome.text, "q.npy: no such file");
}

// A failure happens on a machine, so a rank is named even if all have failed alike.
TEST_F(AgreementTest, AFailureOfAllRanksNamesOne) {
  const Outcome outcome = outcome_of(*group_, [](int) { throw LibraryError("no memory"); });
  EXPECT_FALSE(outcome.user);
  EXPECT_EQ(outcome.text, size_ == 1 ? "no memory" : "rank 0: no memory (the same on all ranks)");
}

TEST_F(AgreementTest, TheSameErrorOfAllRanksKeepsItsFields) {
  const auto fail = [&](const auto& error) { collectively(*group_, [&] { throw error; }); };
  const auto error =
      test::thrown_by<ArgumentError>([&] { fail(ArgumentError("window", "-3", "-1 or more")); });
  EXPECT_EQ(error.argument(), "window");
  EXPECT_THROW(fail(FileError("q.npy", "no such file")), FileError);
  EXPECT_THROW(fail(UnsupportedError("no")), UnsupportedError);
}

TEST_F(AgreementTest, ASharedErrorOfSomeRanksNamesTheFirst) {
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  const Outcome outcome = outcome_of(*group_, [](int rank) {
    if (rank != 0) throw UserError("same");
  });
  EXPECT_EQ(outcome.text, "rank 1: same");
}

TEST_F(AgreementTest, TwoRanksFailDifferently) {
  if (size_ < 2) GTEST_SKIP() << "needs 2 ranks";
  const Outcome outcome = outcome_of(*group_, [&](int rank) {
    if (rank == 0) throw UserError("first");
    if (rank == size_ - 1) throw UserError("second");
  });
  EXPECT_TRUE(outcome.user);
  EXPECT_EQ(outcome.text, "rank 0: first (1 more rank has a different error)");
}

TEST_F(AgreementTest, EveryRankFailsDifferently) {
  const Outcome outcome =
      outcome_of(*group_, [](int rank) { throw UserError("error " + std::to_string(rank)); });
  if (size_ == 1) {
    EXPECT_EQ(outcome.text, "error 0");
  } else if (size_ == 2) {
    EXPECT_EQ(outcome.text, "rank 0: error 0 (1 more rank has a different error)");
  } else {
    EXPECT_EQ(outcome.text, "rank 0: error 0 (" + std::to_string(size_ - 1) +
                                " more ranks have a different error)");
  }
}

TEST_F(AgreementTest, OneLibraryErrorMakesItTheLibrarys) {
  const Outcome mixed = outcome_of(*group_, [&](int rank) {
    if (rank == size_ - 1) throw LibraryError("broken");
    throw UserError("wrong");
  });
  EXPECT_FALSE(mixed.user);
  if (size_ > 1) {
    EXPECT_EQ(mixed.text, "rank 0: wrong (1 more rank has a different error)");
  }
  const Outcome other = outcome_of(*group_, [&](int rank) {
    if (rank == 0) throw std::bad_alloc();
  });
  EXPECT_FALSE(other.user);
  EXPECT_THAT(other.text, ::testing::StartsWith((size_ == 1 ? "" : "rank 0: ") +
                                                std::string("out of memory: ")));
  EXPECT_THAT(other.text, ::testing::HasSubstr("of the host's "));
  // The step says what the memory was for.
  EXPECT_THAT(test::message_of<AgreedFailure>(
                  [&] { collectively(*group_, "planning", [] { throw std::bad_alloc(); }); }),
              ::testing::HasSubstr("planning: out of memory"));
}

TEST_F(AgreementTest, AnEmptyOrLongMessageIsStillAnError) {
  const Outcome empty = outcome_of(*group_, [](int) { throw UserError(""); });
  EXPECT_TRUE(empty.user);
  EXPECT_EQ(empty.text, "");
  const std::string text(100000, 'x');
  EXPECT_EQ(outcome_of(*group_, [&](int) { throw UserError(text); }).text, text);
}

TEST_F(AgreementTest, TheGroupWorksAfterAnAgreedError) {
  (void)outcome_of(*group_, [](int) { throw UserError("x"); });
  EXPECT_EQ(group_->gather_text("ok").size(), static_cast<std::size_t>(size_));
}

}  // namespace
}  // namespace annulus
