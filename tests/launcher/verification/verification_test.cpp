#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/verification/non_finite_entries.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/launcher/verification/spoiled_kernel.hpp"

namespace annulus::verification {
namespace {

using ::testing::HasSubstr;

class VerifySharded : public SpoiledVerification {
 protected:
  // Every rank merges, with the diagonal in every shard.
  VerifySharded() { case_.problem.mask.set_window(30, 30); }

  Verification verify_with(const SpoilResult& spoil) { return verify_spoiled(spoil, {}); }

  static float& first_output(const SoftmaxState& result) {
    return result.output.at<float>({0, 0, 0, 0});
  }
};

TEST_F(VerifySharded, PassesWhatIsRight) {
  const Verification found = verify();
  EXPECT_EQ(found.failure(), "");
  EXPECT_GT(found.unsharded.output, 0);
  EXPECT_LT(found.ratio().value(), 2);
  EXPECT_EQ(found.schedule.schedule, ring::Schedule::ring);
  EXPECT_EQ(found.selection.candidates.front()->names().front(), "spoiled");
}

// Every value that may come with a call: right kernels pass, and kernels that use the planned value
// fail.
TEST_F(VerifySharded, FailsAKernelThatKeepsTheValuesOfThePlan) {
  case_.problem.mask.set_query_lengths({40, 33});
  case_.problem.mask.set_kv_lengths({17, 38});
  case_.problem.mask.set_offset(-3);
  case_.problem.dropout.emplace(0.3, 5);
  case_.backward.emplace();
  const auto failure = [&](bool keeps) {
    context_.registry() = Registry();
    test::WrappedNative& native = test::add_native(context_.registry(), "kept");
    if (keeps) native.keep_problem();
    return verify_sharded(case_, context_).failure();
  };
  for (const CallArguments& arguments :
       {CallArguments{true, false, false}, CallArguments{false, true, false},
        CallArguments{false, false, true}}) {
    case_.problem.call_arguments = arguments;
    EXPECT_EQ(failure(false), "") << to_string(arguments);
    EXPECT_THAT(failure(true), HasSubstr("output error")) << to_string(arguments);
  }
  case_.problem.mask.set_offsets({-3, 2});
  case_.problem.call_arguments = {true, true, true};
  case_.problem.sinks = Sinks::random(4, 2, 3);
  case_.called.sinks = true;
  case_.backward->request.grad_sinks = true;
  EXPECT_EQ(failure(false), "");
  EXPECT_THAT(failure(true), HasSubstr("output error"));
}

TEST_F(VerifySharded, FailsAWrongOutputOnAnyRank) {
  for (int rank = 0; rank < context_.size(); ++rank) {
    const Verification found = verify_with([&](const auto&, const SoftmaxState& result) {
      if (context_.rank() == rank) first_output(result) += 0.01F;
    });
    EXPECT_THAT(found.failure(), HasSubstr("output error")) << rank;
  }
}

TEST_F(VerifySharded, FailsAWrongLse) {
  const Verification found = verify_with([](const auto&, const SoftmaxState& result) {
    result.set_lse_at(0, 0, 0, result.lse_at(0, 0, 0) + 1e-3);
  });
  EXPECT_FALSE(found.failure().empty());
}

// Large terms of long dot products lose more than 10⁻⁵ of a float32 logit.
TEST_F(VerifySharded, TheBoundOfTheLseGrowsWithTheTermsOfDotProducts) {
  case_.problem.shape.head_dim = 256;
  case_.problem.scale = 16.0;
  const Verification right = verify();
  EXPECT_GT(right.sharded.lse, 1e-5);
  EXPECT_LE(right.sharded.lse_share, 1);
  EXPECT_LE(right.sharded.row_share, 1);
  const Verification wrong = verify_with([](const auto&, const SoftmaxState& result) {
    result.set_lse_at(0, 0, 0, result.lse_at(0, 0, 0) + 0.5);
  });
  EXPECT_GT(wrong.sharded.lse_share, 1);
}

// A float16 LSE is as good as a float32 one. A soft cap may cost it more.
TEST_F(VerifySharded, HalfTypesHaveATightLse) {
  case_.problem.dtype = DType::float16;
  const auto spoil = [](const auto&, const SoftmaxState& result) {
    result.set_lse_at(0, 0, 0, result.lse_at(0, 0, 0) + 5e-4);
  };
  EXPECT_THAT(verify_with(spoil).failure(), HasSubstr("LSE error"));
  case_.problem.soft_cap = 1e4;
  EXPECT_EQ(verify_with(spoil).failure(), "");
}

// The norm of the whole output does not show it: the first rows see one or two keys.
TEST_F(VerifySharded, FailsOneWrongRowOfMany) {
  case_.problem.shape = {1, 512, 512, 4, 2, 8, 8};
  case_.problem.mask = {};
  case_.problem.mask.set_causal(true);
  case_.problem.dtype = DType::bfloat16;
  const Verification found = verify_with([](const AttentionBlock& block, const auto& result) {
    for (std::int64_t t = 0; t < result.output.size(1); ++t) {
      if (block.rows.global(LocalPosition(t)).value() != 500) continue;
      for (std::int64_t d = 0; d < 8; ++d) result.output.template at<float>({0, t, 1, d}) *= 1.2F;
    }
  });
  EXPECT_LE(found.sharded.output, found.bound.output);
  EXPECT_THAT(found.failure(), HasSubstr("output error of a row"));
  EXPECT_EQ(verify().failure(), "");
}

TEST_F(VerifySharded, FailsWhatIsNotWritten) {
  case_.problem.shape.query_length = case_.problem.shape.kv_length = 3 * context_.size();
  case_.problem.mask = {};
  const Verification found = verify_with([](const auto&, const SoftmaxState& result) {
    first_output(result) = std::numeric_limits<float>::quiet_NaN();
  });
  EXPECT_FALSE(found.failure().empty());
}

// Within the bound against the oracle, but far worse than unsharded.
TEST_F(VerifySharded, FailsALossByShardingAlone) {
  if (alone()) GTEST_SKIP() << "one rank has one block";
  const std::int64_t whole = case_.problem.shape.kv_length;
  const Verification found = verify_with([&](const AttentionBlock& block, const auto& result) {
    if (block.columns.size() == whole) return;
    for_all(result.output, [](float& output, auto...) { output *= 1 + 2e-6F; });
  });
  EXPECT_TRUE(found.sharded.within(found.bound));
  EXPECT_THAT(found.failure(), HasSubstr("unsharded"));
}

// Rows that see no key are exact in every run, so the ratio is luck if few other rows are left.
TEST_F(VerifySharded, OnlyRowsThatSeeKeysMakeARatioMeaningful) {
  const auto factor = [&] {
    const Verification found = verify();
    EXPECT_EQ(found.failure(), "");
    const double merges = std::max(1, context_.size() - 1);
    return found.allowance.value() /
           std::hypot(found.unsharded.output, std::sqrt(merges) * 3 * 0x1p-24);
  };
  case_.problem.shape = {1, 160, 160, 4, 2, 8, 8};
  EXPECT_NEAR(factor(), 1.1, 1e-6);
  case_.problem.mask.set_query_lengths({127});
  EXPECT_NEAR(factor(), 2, 1e-6);
  case_.problem.mask.set_query_lengths({128});
  EXPECT_NEAR(factor(), 1.1, 1e-6);
  // Copies of a row do not count again.
  case_.problem.mask.set_query_lengths({127});
  case_.layout.query = PartitionSpec::parse("-,-");
  EXPECT_NEAR(factor(), 2, 1e-6);
}

TEST_F(VerifySharded, FailsARunThatDoesNotRepeat) {
  int calls = 0;
  const Verification found = verify_with([&](const auto&, const SoftmaxState& result) {
    first_output(result) *= 1 + static_cast<float>(++calls) * 1.2e-7F;
  });
  EXPECT_FALSE(found.repeats);
  EXPECT_THAT(found.failure(), HasSubstr("a repeated run gave different bits"));
}

TEST_F(VerifySharded, FailsBitsThatDependOnTheNumberOfRanks) {
  case_.problem.reproducible = Reproducible::world;
  case_.schedule = "auto";
  EXPECT_EQ(verify().failure(), "");
  // The last bit, where a call has not all heads.
  const Verification found = verify_with([&](const auto& block, const SoftmaxState& result) {
    if (block.query.size(2) == case_.problem.shape.heads) return;
    first_output(result) = std::nextafter(first_output(result), 1e9F);
  });
  EXPECT_EQ(found.reproduces, alone());
  EXPECT_TRUE(found.repeats);
  EXPECT_THAT(found.failure(), HasSubstr(alone() ? "" : "unsharded run gave different bits"));
}

TEST_F(VerifySharded, FailsACopyThatDiffers) {
  case_.layout.query = PartitionSpec();
  const Verification found = verify_with([&](const auto&, const SoftmaxState& result) {
    if (context_.rank() == context_.size() - 1) first_output(result) += 0.01F;
  });
  EXPECT_FALSE(found.failure().empty());
}

// Keys and values that are not finite, some hidden from every row and some seen by a few.
class VerifyNonFinite : public VerifySharded {
 protected:
  VerifyNonFinite() {
    case_.problem.mask.set_window(5, 5);
    case_.problem.mask.set_kv_lengths({30, 40});
    case_.fills = with_non_finite_entries(case_.problem, {}, case_.seed, Place::Kind::host);
  }
};

TEST_F(VerifyNonFinite, PassesWhatIsRight) {
  EXPECT_EQ(verify().failure(), "");
}

TEST_F(VerifyNonFinite, FailsAKernelThatMultipliesHiddenValuesIn) {
  const auto spoil = [](const AttentionBlock& block, const SoftmaxState& result) {
    for_all(result.output, [&](float& output, std::int64_t b, std::int64_t d) {
      for (std::int64_t j = 0; j < block.value.size(1); ++j) {
        output += 0 * block.value.at<float>({b, j, 0, d});
      }
    });
  };
  EXPECT_FALSE(verify_with(spoil).failure().empty());
  case_.fills = {};
  EXPECT_EQ(verify_with(spoil).failure(), "");
}

TEST_F(VerifyNonFinite, FailsAKernelThatHidesANanThatRowsSee) {
  const Verification found = verify_with([](const auto&, const SoftmaxState& result) {
    for_all(result.output, [](float& output, std::int64_t, std::int64_t) {
      if (std::isnan(output)) output = 0;
    });
  });
  EXPECT_FALSE(found.failure().empty());
}

// Entries of all kinds, in queries too.
TEST_F(VerifyNonFinite, PassesWhatIsRightAtEverySeed) {
  for (case_.seed = 0; case_.seed < 140; case_.seed += 7) {
    case_.fills = with_non_finite_entries(case_.problem, {}, case_.seed, Place::Kind::host);
    EXPECT_EQ(verify().failure(), "") << case_.seed;
  }
}

// A non-finite entry of one query spoils the next query in the same tile.
TEST_F(VerifyNonFinite, FailsAKernelThatSpreadsWhatAQueryHolds) {
  case_.seed = 11;
  case_.fills = with_non_finite_entries(case_.problem, {}, case_.seed, Place::Kind::host);
  ASSERT_TRUE(case_.fills.query);
  const auto spread = [](const AttentionBlock& block, const SoftmaxState& result) {
    for_all(result.output, [&](float& output, std::int64_t b, std::int64_t) {
      for_all(block.query.slice(0, b, 1), [&](float query, auto...) { output += 0 * query; });
    });
  };
  EXPECT_FALSE(verify_with(spread).failure().empty());
  case_.fills.query = {};
  EXPECT_EQ(verify_with(spread).failure(), "");
}

TEST_F(VerifySharded, ErrorsAreTheSameOnAllRanks) {
  case_.problem.shape.heads = 3;
  EXPECT_THROW(static_cast<void>(verify()), UserError);
  case_.problem.shape.heads = 4;
  case_.implementation = "unheard of";
  EXPECT_THROW(static_cast<void>(verify()), UserError);
}

TEST_F(VerifySharded, Float64HasABoundOfItsOwn) {
  context_.registry() = Registry::standard();
  case_.problem.dtype = DType::float64;
  for (const bool normalised : {true, false}) {
    case_.problem.normalize_output = normalised;
    const Verification found = verify_sharded(case_, context_);
    EXPECT_EQ(found.failure(), "");
    EXPECT_EQ(found.implementations, "vanilla");
    EXPECT_EQ(found.ratio(), std::nullopt);
    EXPECT_LT(found.bound.output, normalised ? 1e-13 : 1e-5);
    EXPECT_LT(found.sharded.output, normalised ? 1e-14 : 2e-7);
  }
}

TEST(Verification, NamesWhatFailed) {
  Verification found;
  found.bound = {1e-6, 1e-5};
  found.allowance = 5e-7;
  found.sharded = {4e-7, 1e-6};
  found.unsharded = {4e-7, 1e-6};
  EXPECT_EQ(found.failure(), "");
  EXPECT_EQ(found.ratio(), 1);
  found.repeats = false;
  EXPECT_THAT(found.failure(), HasSubstr("different bits"));
  found.sharded.output = 6e-7;
  EXPECT_THAT(found.failure(), HasSubstr("against 4.00e-07 unsharded"));
  found.sharded.lse = 1e-4;
  found.sharded.lse_share = 5;
  EXPECT_THAT(found.failure(), HasSubstr("LSE error 1.00e-04, of a row 5.00 times its bound"));
  found.sharded.row_share = 1.25;
  EXPECT_THAT(found.failure(), HasSubstr("output error of a row 1.25 times its bound"));
  found.sharded.output = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(found.failure(), HasSubstr("output error nan"));
}

}  // namespace
}  // namespace annulus::verification
