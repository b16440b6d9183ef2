// Results that are sums over ranks, and gradients by shard_map's transpose.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/partition/shard_map_fixture.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::int64_t kTokens = 48;  // in tiles of kTile, shared out by 1, 2, 3, 4 and 8 ranks
constexpr std::int64_t kTile = 2;
constexpr std::int64_t kFeatures = 5;

float number(std::int64_t i, std::int64_t j) {
  return std::sin(static_cast<float>(i * 7 + j)) * 1e3F;
}

class ShardMapSums : public ShardMapFixture {
 protected:
  // x[i,j] = number(i, j), of `size` rows.
  ShardedTensor array(const char* spec, std::int64_t rows, DType dtype = DType::float32) {
    const NamedSharding sharding(mesh_.shape(), PartitionSpec::parse(spec), {rows, kFeatures});
    ShardedTensor tensor(sharding, mesh_.rank(), dtype, device_.memory());
    const PositionRanges rows_here = sharding.positions(mesh_.rank(), 0);
    for (std::int64_t i = 0; i < rows_here.size(); ++i) {
      for (std::int64_t j = 0; j < kFeatures; ++j) {
        tensor.local().at<float>({i, j}) = number(rows_here.global(LocalPosition(i)).value(), j);
      }
    }
    return tensor;
  }

  Tensor row(DType dtype) { return zeros(dtype, {kFeatures}); }

  ShardSpec summed(std::vector<std::string> axes, bool stacked = false) {
    ShardSpec spec{PartitionSpec()};
    spec.summed = std::move(axes);
    spec.stacked = stacked;
    return spec;
  }
};

TEST_F(ShardMapSums, TermsAddUpInOrderOfRank) {
  const auto body = [&](Shards) {
    Tensor term = row(DType::float32);
    for (std::int64_t j = 0; j < kFeatures; ++j) {
      term.view().at<float>({j}) = number(mesh_.rank(), j);
    }
    return one(std::move(term));
  };
  const auto results = run({body, {}, {summed({"dp", "sp"})}});
  EXPECT_EQ(results[0].global_shape(), (Extents{kFeatures}));
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    float expected = number(0, j);
    for (int rank = 1; rank < mesh_.size(); ++rank) expected += number(rank, j);
    EXPECT_EQ(results[0].local().at<float>({j}), expected);
  }
}

TEST_F(ShardMapSums, AnAxisThatIsNotSummedKeepsItsParts) {
  const auto body = [&](Shards) {
    Tensor term = zeros(DType::float64, {1, kFeatures});
    term.view().at<double>({0, 2}) = 1 + mesh_.shape().coordinate(mesh_.rank(), "dp");
    return one(std::move(term));
  };
  ShardSpec by_dp = summed({"sp"});
  by_dp.spec = PartitionSpec::parse("dp");
  const auto results = run({body, {}, {by_dp}});
  const int sp = mesh_.shape().axis_size("sp");
  EXPECT_EQ(results[0].global_shape(), (Extents{mesh_.shape().axis_size("dp"), kFeatures}));
  EXPECT_EQ(results[0].local().at<double>({0, 2}),
            sp * (1 + mesh_.shape().coordinate(mesh_.rank(), "dp")));
}

// One term for each tile of the tokens: the order of additions is that of one rank.
TEST_F(ShardMapSums, TermsOfTilesHaveTheBitsOfOneRank) {
  const ShardedTensor tokens = array("dp+sp,-", kTokens);
  const auto body = [&](Shards shards) {
    Tensor terms = zeros(DType::float32, {shards[0].size(0) / kTile, kFeatures});
    for (std::int64_t i = 0; i < shards[0].size(0); ++i) {
      for (std::int64_t j = 0; j < kFeatures; ++j) {
        terms.view().at<float>({i / kTile, j}) += shards[0].at<float>({i, j});
      }
    }
    return one(std::move(terms));
  };
  const auto results =
      run({body, {PartitionSpec::parse("dp+sp,-")}, {summed({"dp", "sp"}, true)}}, {tokens});
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    float expected = 0;
    for (std::int64_t begin = 0; begin < kTokens; begin += kTile) {
      float tile = 0;
      for (std::int64_t i = begin; i < begin + kTile; ++i) tile += number(i, j);
      expected = begin == 0 ? tile : expected + tile;
    }
    EXPECT_EQ(results[0].local().at<float>({j}), expected);
  }
}

TEST_F(ShardMapSums, HalfTypesAreRoundedOnce) {
  const auto body = [&](Shards) {
    Tensor terms(DType::bfloat16, {3, 1}, device_.memory());
    const std::vector<std::uint16_t> values{0x4380, 0x3F80, 0x3F80};
    for (std::int64_t i = 0; i < 3; ++i) {  // 256, 1 and 1
      terms.view().at<std::uint16_t>({i, 0}) =
          mesh_.rank() == 0 ? values[static_cast<std::size_t>(i)] : 0;
    }
    return one(std::move(terms));
  };
  const auto results = run({body, {}, {summed({"dp", "sp"}, true)}});
  EXPECT_EQ(results[0].local().at<std::uint16_t>({0}), 0x4381);  // 258
}

TEST_F(ShardMapSums, RanksMayHaveNoTerms) {
  const auto body = [&](Shards) {
    Tensor terms = zeros(DType::float32, {mesh_.rank() == 0 ? 2 : 0, 1});
    if (mesh_.rank() == 0) terms.view().at<float>({1, 0}) = 4;
    return one(std::move(terms));
  };
  EXPECT_EQ(run({body, {}, {summed({"dp", "sp"}, true)}})[0].local().at<float>({0}), 4);
}

// y[i] = Σ_j x[i,j] w[j], with tokens on sp; along dp everything is replicated.
TEST_F(ShardMapSums, TheTransposeSumsWhatRanksUseForDifferentWork) {
  const std::int64_t rows = 2 * mesh_.shape().axis_size("sp");
  const ShardedTensor x = array("sp,-", rows);
  const ShardedTensor w = array("-,-", 1);
  const PartitionSpec tokens = PartitionSpec::parse("sp");
  const auto product = [&](Shards shards) {
    Tensor y = zeros(DType::float32, {shards[0].size(0)});
    for (std::int64_t i = 0; i < shards[0].size(0); ++i) {
      for (std::int64_t j = 0; j < kFeatures; ++j) {
        y.view().at<float>({i}) += shards[0].at<float>({i, j}) * shards[1].at<float>({0, j});
      }
    }
    return one(std::move(y));
  };
  const ShardMap map{product, {tokens, PartitionSpec()}, {tokens}};
  const std::vector<ShardedTensor> y = run(map, {x, w});
  const ShardMap gradients = transpose(map, [&](Shards shards) {
    std::vector<Tensor> results;
    results.emplace_back(DType::float32, shards[0].shape(), device_.memory());
    results.push_back(zeros(DType::float32, shards[1].shape()));
    for (std::int64_t i = 0; i < shards[0].size(0); ++i) {
      for (std::int64_t j = 0; j < kFeatures; ++j) {
        const float grad = shards[2].at<float>({i});
        results[0].view().at<float>({i, j}) = grad * shards[1].at<float>({0, j});
        results[1].view().at<float>({0, j}) += grad * shards[0].at<float>({i, j});
      }
    }
    return results;
  });
  EXPECT_EQ(gradients.in_specs.size(), 3U);
  EXPECT_TRUE(gradients.out_specs[0].summed.empty());
  EXPECT_EQ(gradients.out_specs[1].summed, AxisNames{"sp"});
  // The loss is Σ y² / 2, whose gradient by y is y.
  const auto results = run(gradients, {x, w, y[0]});
  EXPECT_EQ(results[0].sharding().spec(), tokens);
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    double expected = 0;
    double scale = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (std::int64_t k = 0; k < kFeatures; ++k) sum += double{number(i, k)} * number(0, k);
      expected += sum * number(i, j);
      scale += std::abs(sum * number(i, j));
    }
    EXPECT_NEAR(results[1].local().at<float>({0, j}), expected, 1e-6 * scale);
  }
}

TEST_F(ShardMapSums, RefusesWhatCannotBeSummed) {
  const auto body = [&](Shards) { return one(row(DType::float32)); };
  const auto run_with = [&](ShardBody of, ShardSpec spec) {
    return [this, of = std::move(of), spec = std::move(spec)] { (void)run({of, {}, {spec}}); };
  };
  ShardSpec named = summed({"sp"});
  named.spec = PartitionSpec::parse("sp");
  EXPECT_THAT(run_with(body, named),
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("result 0"), HasSubstr("'sp'"))));
  EXPECT_THROW(run_with(body, summed({"tp"}))(), UnknownAxisError);
  EXPECT_THAT(run_with([&](Shards) { return one(row(DType::int32)); }, summed({"sp"})),
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("result 0"), HasSubstr("int32"))));
  if (mesh_.size() == 1) return;
  const std::string last = "rank " + std::to_string(mesh_.size() - 1);
  const auto shapes = [&](Shards) {
    return one(zeros(DType::float32, {mesh_.rank() == mesh_.size() - 1 ? 2 : 1}));
  };
  EXPECT_THAT(run_with(shapes, summed({"dp", "sp"})),
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr(last), HasSubstr("[2]"))));
  const auto scalars = [&](Shards) { return one(zeros(DType::float32, Extents())); };
  EXPECT_THROW(run_with(scalars, summed({"sp"}, true))(), ArgumentError);
  const auto dtypes = [&](Shards) {
    return one(row(mesh_.rank() == 0 ? DType::float32 : DType::float64));
  };
  EXPECT_THROW(run_with(dtypes, summed({"dp", "sp"}))(), ArgumentError);
}

}  // namespace
}  // namespace annulus
