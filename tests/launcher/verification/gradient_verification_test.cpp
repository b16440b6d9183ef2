// Verification of the backward pass: right gradients pass, and wrong ones fail on every rank.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/launcher/verification/spoiled_kernel.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::verification {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class VerifyGradients : public SpoiledVerification {
 protected:
  VerifyGradients() {
    case_.problem.mask.set_causal(true);
    case_.problem.mask.set_query_lengths({40, 30});
    case_.layout.sequence = LayoutKind::zigzag;
    case_.backward.emplace();
  }

  Verification verify_with(const SpoilGradients& spoil) { return verify_spoiled({}, spoil); }
  [[nodiscard]] bool on(int rank) const { return context_.rank() == rank; }
};

float& first_of(const TensorView& gradient) {
  return gradient.at<float>({0, 0, 0, 0});
}

TEST_F(VerifyGradients, PassesWhatIsRight) {
  for (const bool grad_lse : {false, true}) {
    for (const bool adds : {false, true}) {
      case_.backward->request = {grad_lse, adds};
      for (const char* schedule : {"auto", "ring", "allgather", "ulysses"}) {
        SCOPED_TRACE(schedule);
        case_.backward->schedule = schedule;
        const Verification found = verify();
        EXPECT_EQ(found.failure(), "");
        ASSERT_TRUE(found.gradients);
        EXPECT_EQ(found.gradients->request, case_.backward->request);
        EXPECT_EQ(found.gradients->implementations, "spoiled");
        EXPECT_GT(found.gradients->share(), 0);
        EXPECT_LT(found.gradients->ratio().value(), 2);
        if (std::string("auto") == schedule) continue;
        EXPECT_EQ(ring::name_of(found.gradients->schedule.schedule), schedule);
      }
    }
  }
}

TEST_F(VerifyGradients, FailsBitsThatDependOnTheNumberOfRanks) {
  case_.problem.reproducible = Reproducible::world;
  case_.schedule = "auto";
  for (const bool adds : {false, true}) {
    case_.backward->request.adds = adds;
    EXPECT_EQ(verify().failure(), "");
  }
  // The last bit, where a call has not all heads.
  const Verification found = verify_with([&](const auto& block, const Gradients& gradients) {
    if (block.query.size(2) == case_.problem.shape.heads) return;
    first_of(gradients.value) = std::nextafter(first_of(gradients.value), 1e9F);
  });
  EXPECT_TRUE(found.reproduces);
  ASSERT_TRUE(found.gradients);
  EXPECT_EQ(found.gradients->reproduces, alone());
  EXPECT_THAT(found.failure(), HasSubstr(alone() ? "" : "unsharded backward pass gave different"));
}

TEST_F(VerifyGradients, ComputesNoneUnlessAsked) {
  case_.backward.reset();
  EXPECT_FALSE(verify().gradients);
}

TEST_F(VerifyGradients, FailsAWrongGradientOnAnyRank) {
  const std::array<std::pair<TensorView Gradients::*, const char*>, 3> gradients{
      {{&Gradients::query, "gradient of query"},
       {&Gradients::key, "gradient of key"},
       {&Gradients::value, "gradient of value"}}};
  for (const auto& [gradient, name] : gradients) {
    for (int rank = 0; rank < context_.size(); ++rank) {
      const Verification found =
          verify_with([&, wrong = gradient](const auto&, const Gradients& all) {
            if (on(rank)) first_of(all.*wrong) += 0.01F;
          });
      EXPECT_THAT(found.failure(), HasSubstr(name)) << rank;
    }
  }
}

TEST_F(VerifyGradients, FailsAGradientThatIsNotANumber) {
  const Verification found = verify_with([](const auto&, const Gradients& all) {
    first_of(all.value) = std::numeric_limits<float>::quiet_NaN();
  });
  EXPECT_THAT(found.failure(), HasSubstr("gradient of value nan"));
}

// However small: rows that see nothing have none.
TEST_F(VerifyGradients, FailsAGradientWhereThereIsNone) {
  const Verification found = verify_with([](const BackwardBlock& block, const Gradients& all) {
    for (std::int64_t t = 0; t < block.rows.size(); ++t) {
      if (block.query.size(0) < 2 || block.rows.global(LocalPosition(t)).value() < 30) continue;
      all.query.at<float>({1, t, 0, 0}) = 1e-30F;
    }
  });
  EXPECT_THAT(found.failure(), HasSubstr("gradient of query inf"));
}

// Within the bound against the oracle, but far worse than unsharded.
TEST_F(VerifyGradients, FailsALossByShardingAlone) {
  if (alone()) GTEST_SKIP() << "one rank has one block";
  const std::int64_t whole = case_.problem.shape.kv_length;
  const Verification found = verify_with([&](const BackwardBlock& block, const Gradients& all) {
    if (block.columns.size() == whole) return;
    for_all(all.value.slice(0, 0, 1).slice(2, 0, 1),
            [](float& gradient, auto...) { gradient *= 1 + 1e-5F; });
  });
  EXPECT_LT(found.gradients->share(), 1);
  EXPECT_THAT(found.failure(), AllOf(HasSubstr("gradient of value"), HasSubstr("unsharded")));
}

// Where the forward pass merges nothing, a large LSE excuses no loss by sharding.
TEST_F(VerifyGradients, AllowsRoundingsOfTheLseOnlyWhereItIsMerged) {
  if (alone()) GTEST_SKIP() << "one rank has one block";
  case_.problem.shape = {1, 64, 256, 4, 2, 8, 8};
  case_.problem.mask = {};
  case_.problem.bias = Extents{1, 1, 1, 1};
  case_.fills.bias = [](const TensorView& part, std::span<const PositionRanges> /*index*/) {
    part.at<float>({0, 0, 0, 0}) = 60;  // and so is the LSE
  };
  case_.backward->schedule = "ring";
  const auto failure = [&](const char* forward) {
    case_.schedule = forward;
    return verify_with([&](const BackwardBlock& block, const Gradients& all) {
             if (block.columns.size() == 256) return;
             for_all(all.value, [](float& gradient, auto...) { gradient *= 1 + 6e-6F; });
           })
        .failure();
  };
  EXPECT_EQ(failure("ring"), "");
  EXPECT_THAT(failure("ulysses"), HasSubstr("unsharded"));
  // Other tiles round large products differently.
  case_.problem.scale = 20;
  EXPECT_EQ(failure("ulysses"), "");
}

TEST_F(VerifyGradients, FailsABackwardPassThatDoesNotRepeat) {
  int calls = 0;
  const Verification found = verify_with([&](const auto&, const Gradients& all) {
    first_of(all.value) *= 1 + static_cast<float>(++calls) * 1.2e-7F;
  });
  EXPECT_THAT(found.failure(), HasSubstr("a repeated backward pass gave different bits"));
}

TEST_F(VerifyGradients, KeepsTheOraclesGradientsForOtherCases) {
  case_.backward->truth = std::make_shared<std::optional<OracleGradients>>();
  const Verification first = verify();
  ASSERT_TRUE(case_.backward->truth->has_value());
  const Verification again = verify();
  EXPECT_EQ(first.failure(), "");
  EXPECT_EQ(again.gradients->sharded, first.gradients->sharded);
  for (double& gradient : (*case_.backward->truth)->value.values) gradient *= 1.1;
  EXPECT_THAT(verify().failure(), HasSubstr("gradient of value"));
}

// The LSE that gradients are computed from is float32 for every dtype.
TEST_F(VerifyGradients, Float64IsJudgedAsFloat32) {
  context_.registry() = Registry::standard();
  case_.problem.dtype = DType::float64;
  const Verification found = verify_sharded(case_, context_);
  EXPECT_EQ(found.failure(), "");
  EXPECT_EQ(found.gradients->implementations, "vanilla");
  EXPECT_EQ(found.gradients->ratio(), std::nullopt);
  EXPECT_LT(found.gradients->share(), 0.5);
}

TEST_F(VerifyGradients, GradientOfSinks) {
  for (const bool shared : {false, true}) {
    case_.problem.sinks =
        shared ? Sinks({2}, {0.5F, 1}) : Sinks::random(case_.problem.shape.heads, 3, 1);
    for (const bool adds : {false, true}) {
      case_.backward->request = {true, adds, true};
      const Verification found = verify();
      EXPECT_EQ(found.failure(), "");
      ASSERT_TRUE(found.gradients);
      EXPECT_GT(found.gradients->sharded[3], 0) << "rounding shows that it was compared";
    }
  }
}

void clear(const TensorView& output) {
  const std::size_t row = static_cast<std::size_t>(output.size(3)) * size_of(output.dtype());
  for (std::int64_t t = 0; t < output.size(1); ++t) {
    for (std::int64_t n = 0; n < output.size(2); ++n) {
      std::memset(output.address({0, t, n, 0}), 0, row);
    }
  }
}

// Rows' terms cancel, so the gradient of many rows is small beside the sum of their magnitudes.
// With an output of 0, delta is 0, and so is what the rows give to the gradient.
TEST_F(VerifyGradients, FailsAGradientOfSinksThatLacksRows) {
  case_.problem.shape = {1, 16384, 16, 2, 1, 8, 8};
  case_.problem.dtype = DType::bfloat16;
  case_.problem.mask = {};
  case_.problem.sinks = Sinks({2, 2}, {0.5F, 1, 0, -1});
  for (const bool adds : {false, true}) {
    case_.backward->request = {false, adds, true};
    const auto error_without = [&](const auto& lacks_rank) {
      const auto spoil = [&](const AttentionBlock&, const SoftmaxState& result) {
        if (lacks_rank(context_.rank())) clear(result.output);
      };
      const Verification found = verify_spoiled(spoil, {});
      return found.gradients->sharded[3] / found.gradients->bound;
    };
    EXPECT_LT(error_without([](int /*rank*/) { return false; }), 0.5);
    EXPECT_GT(error_without([](int /*rank*/) { return true; }), 2);
    for (int lacking = 0; lacking < context_.size(); ++lacking) {
      EXPECT_GT(error_without([&](int rank) { return rank == lacking; }), 2) << lacking;
    }
  }
}

// Biases of every shape, and a gradient that is wrong in one entry.
TEST_F(VerifyGradients, GradientOfBias) {
  for (const Extents& shape :
       {Extents{2, 4, 40, 40}, Extents{1, 1, 40, 40}, Extents{1, 4, 1, 40}, Extents{2, 1, 40, 1}}) {
    case_.problem.bias = shape;
    const bool adds = shape[0] == 1;
    case_.backward->request = {true, adds, false, true};
    for (const char* schedule : {"ring", "ulysses"}) {
      SCOPED_TRACE(to_string(shape) + ", " + schedule);
      case_.backward->schedule = schedule;
      const Verification found = verify();
      EXPECT_EQ(found.failure(), "");
      ASSERT_TRUE(found.gradients);
      EXPECT_GT(found.gradients->sharded[4], 0) << "rounding shows that it was compared";
    }
    const int last = context_.size() - 1;
    const Verification wrong = verify_with([&](const auto&, const Gradients& all) {
      if (on(last)) first_of(all.bias) += 1;
    });
    EXPECT_THAT(wrong.failure(), HasSubstr("error of the gradient of bias"));
  }
}

// As of the sinks: the terms of rows that share an entry cancel.
TEST_F(VerifyGradients, FailsAGradientOfABiasThatLacksRows) {
  case_.problem.shape = {1, 16384, 16, 2, 1, 8, 8};
  case_.problem.dtype = DType::bfloat16;
  case_.problem.mask = {};
  case_.problem.bias = Extents{1, 2, 1, 16};
  case_.backward->request = {false, false, false, true};
  const auto error_without = [&](int lacking) {
    const Verification found = verify_with([&](const auto&, const Gradients& all) {
      if (!on(lacking)) return;
      for_all(all.bias, [](float& gradient, auto...) { gradient = 0; });
    });
    return found.gradients->sharded[4] / found.gradients->bound;
  };
  EXPECT_LT(error_without(-1), 0.5);
  for (int lacking = 0; lacking < context_.size(); ++lacking) {
    EXPECT_GT(error_without(lacking), 2) << lacking;
  }
}

TEST_F(VerifyGradients, RefusesWhatItCannotCompute) {
  case_.problem.normalize_output = false;
  EXPECT_THROW(static_cast<void>(verify()), UserError);
  case_.problem.normalize_output = true;
  case_.problem.mask = {};
  case_.problem.shape = {1, 1 << 20, 1 << 20, 8, 8, 64, 64};
  EXPECT_THAT(test::message_of<UserError>([&] { static_cast<void>(verify()); }),
              HasSubstr("expected at most 67108864 in query, key and value"));
  // The gradient of a bias may be the largest.
  case_.problem.shape = {1, 1 << 14, 1 << 14, 8, 8, 64, 64};
  case_.problem.bias = Extents{1, 1, 1 << 14, 1 << 14};
  case_.backward->request.grad_bias = true;
  EXPECT_THROW(static_cast<void>(verify()), UserError);
}

TEST(GradientVerification, NamesWhatFailed) {
  GradientVerification found;
  found.bound = 1e-6;
  found.sharded = {4e-7, 5e-7, 3e-7};
  found.unsharded = {4e-7, 4e-7, 4e-7};
  constexpr double kAny = std::numeric_limits<double>::infinity();
  found.allowance = GradientErrors{6e-7, 6e-7, 6e-7, kAny, 6e-7};
  EXPECT_THAT(found.failures(), IsEmpty());
  EXPECT_DOUBLE_EQ(found.share(), 0.5);
  EXPECT_DOUBLE_EQ(found.ratio().value(), 1.25);
  found.sharded[3] = 9e-7;  // not compared with the unsharded run
  EXPECT_THAT(found.failures(), IsEmpty());
  found.sharded[3] = 3e-6;
  EXPECT_THAT(found.failures().front().text, HasSubstr("of sinks 3.00e-06 above 1.00e-06"));
  found.sharded[3] = 0;
  found.sharded[4] = 8e-7;
  EXPECT_THAT(found.failures().front().text,
              HasSubstr("of bias 8.00e-07 against 0.00e+00 unsharded"));
  found.sharded[4] = 0;
  found.repeats = false;
  EXPECT_THAT(found.failures(),
              ElementsAre(Field(&Failure::text, "a repeated backward pass gave different bits")));
  found.sharded[2] = 7e-7;
  EXPECT_THAT(found.failures().front().text,
              HasSubstr("of value 7.00e-07 against 4.00e-07 unsharded"));
  found.sharded[1] = 2e-6;
  EXPECT_THAT(found.failures().front().text, HasSubstr("of key 2.00e-06 above 1.00e-06"));
  found.sharded[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(found.failures().front().text, HasSubstr("of query nan"));
}

}  // namespace
}  // namespace annulus::verification
