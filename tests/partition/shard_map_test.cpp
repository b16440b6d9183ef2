#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "random_sharding.hpp"
#include "tests/partition/shard_map_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ShardMapTest : public ShardMapFixture {
 protected:
  // A [4, length] array of its own element numbers.
  ShardedTensor numbers(std::int64_t length, const char* spec, Distribution sequence = {}) {
    NamedSharding sharding(mesh_.shape(), PartitionSpec::parse(spec), {4, length},
                           {Distribution::block(), sequence});
    ShardedTensor tensor(sharding, mesh_.rank(), DType::int32, device_.memory());
    test::number_elements(sharding, mesh_.rank(), tensor.local());
    return tensor;
  }

  void expect_numbers(const ShardedTensor& tensor) {
    const NamedSharding& sharding = tensor.sharding();
    EXPECT_EQ(test::wrong_numbers(sharding, mesh_.rank(), tensor.local()), 0)
        << to_string(sharding);
  }

  Tensor copy_of(const ConstTensorView& view) {
    Tensor result(view.dtype(), view.shape(), device_.memory());
    copy(view, result.view());
    return result;
  }

  Tensor single(std::int32_t value) {
    Tensor result(DType::int32, {1}, device_.memory());
    result.view().at<std::int32_t>({0}) = value;
    return result;
  }

  template <class Error>
  std::string error_of(const ShardMap& map, const ShardedArguments& arguments = {}) {
    return test::message_of<Error>([&] { (void)run(map, arguments); });
  }

  [[nodiscard]] bool last() const { return mesh_.rank() == mesh_.size() - 1; }
  // How an error that only the last rank has begins.
  [[nodiscard]] std::string blame() const {
    return mesh_.size() == 1 ? "" : "rank " + std::to_string(mesh_.size() - 1) + ": ";
  }
};

const Distribution kZigzag = Distribution::sequence(LayoutKind::zigzag);
const Distribution kStriped = Distribution::sequence(LayoutKind::striped);

TEST_F(ShardMapTest, IdentityKeepsTheArray) {
  for (const std::int64_t length : {0, 1, 7, 16}) {
    const ShardedTensor array = numbers(length, "dp,sp", kZigzag);
    const ShardSpec spec(PartitionSpec::parse("dp,sp"), {{}, kZigzag});
    const void* seen = nullptr;
    const auto body = [&](Shards shards) {
      seen = shards[0].data();
      return one(copy_of(shards[0]));
    };
    const auto results = run({body, {spec}, {spec}}, {array});
    ASSERT_EQ(results.size(), 1U);
    EXPECT_EQ(results[0].global_shape(), (Extents{4, length}));
    EXPECT_EQ(seen, array.local().data());  // nothing moved
    expect_numbers(results[0]);
  }
}

TEST_F(ShardMapTest, ReshardsArgumentsToTheirSpecs) {
  const ShardedTensor array = numbers(11, "dp,sp", kZigzag);
  const auto body = [&](Shards shards) {
    std::vector<Tensor> results = one(copy_of(shards[0]));
    results.push_back(copy_of(shards[1]));
    return results;
  };
  const std::vector<ShardSpec> specs{{PartitionSpec::parse("-,sp"), {{}, kStriped}},
                                     PartitionSpec()};
  const auto results = run({body, specs, specs}, {array, array});
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0].sharding().spec(), PartitionSpec::parse("-,sp"));
  EXPECT_EQ(results[1].sharding().spec(), PartitionSpec());
  expect_numbers(results[0]);
  expect_numbers(results[1]);
}

TEST_F(ShardMapTest, ReshardsEvenWhereTheShapesAgree) {
  const ShardedTensor array = numbers(4 * mesh_.size(), "dp,sp", kZigzag);
  const ShardSpec striped(PartitionSpec::parse("dp,sp"), {{}, kStriped});
  const auto body = [&](Shards shards) { return one(copy_of(shards[0])); };
  expect_numbers(run({body, {striped}, {striped}}, {array})[0]);
}

TEST_F(ShardMapTest, ABodyMayCommunicateAlongAnAxis) {
  const ShardedTensor array = numbers(12, "dp,sp", kStriped);
  const AxisNames axes{"dp", "sp"};
  const auto body = [&](Shards shards) {
    double sum = 0;
    for (std::int64_t i = 0; i < shards[0].size(0); ++i) {
      for (std::int64_t j = 0; j < shards[0].size(1); ++j) {
        sum += shards[0].at<std::int32_t>({i, j});
      }
    }
    const double total = mesh_.group(axes).control().sum({&sum, 1}).front();
    return one(single(static_cast<std::int32_t>(total)));
  };
  const ShardSpec striped(PartitionSpec::parse("dp,sp"), {{}, kStriped});
  const auto results = run({body, {striped}, {PartitionSpec()}}, {array});
  EXPECT_EQ(results[0].global_shape(), (Extents{1}));
  EXPECT_EQ(results[0].local().at<std::int32_t>({0}), 47 * 48 / 2);
}

TEST_F(ShardMapTest, ResultsGrowWithTheAxesThatTheyName) {
  const auto body = [&](Shards) { return one(single(mesh_.rank())); };
  const auto results = run({body, {}, {PartitionSpec::parse("dp+sp")}});
  EXPECT_EQ(results[0].global_shape(), (Extents{mesh_.size()}));
}

TEST_F(ShardMapTest, FindsWhatIsNotReplicated) {
  const auto body = [&](Shards) {
    std::vector<Tensor> results = one(single(5));
    results.push_back(single(last() ? 6 : 5));
    return results;
  };
  ShardMap map{body, {}, {PartitionSpec(), PartitionSpec()}};
  if (mesh_.size() == 1) {
    EXPECT_NO_THROW((void)run(map));
    return;
  }
  const int sp = mesh_.shape().axis_size("sp");
  const std::string axis = mesh_.shape().axis_size("dp") > 1 ? "dp" : "sp";  // the first that shows
  const int partner = axis == "dp" ? mesh_.size() - 1 - sp : 0;
  const std::string ranks =
      "rank " + std::to_string(mesh_.size() - 1) + " against rank " + std::to_string(partner);
  EXPECT_THAT(error_of<UserError>(map),
              AllOf(HasSubstr("result 1"), HasSubstr("'" + axis + "'"), HasSubstr(ranks)));
  map.check_replication = false;
  EXPECT_NO_THROW((void)run(map));
}

TEST_F(ShardMapTest, AnAxisThatTheSpecNamesMayDiffer) {
  // Equal along dp, different along sp.
  const auto body = [&](Shards) {
    return one(single(mesh_.shape().coordinate(mesh_.rank(), "sp")));
  };
  EXPECT_NO_THROW((void)run({body, {}, {PartitionSpec::parse("sp")}}));
  if (mesh_.shape().axis_size("sp") == 1) return;
  EXPECT_THAT(error_of<UserError>({body, {}, {PartitionSpec::parse("dp")}}),
              AllOf(HasSubstr("result 0"), HasSubstr("'sp'")));
}

TEST_F(ShardMapTest, OneBitIsADifference) {
  const auto body = [&](Shards) {
    Tensor result = zeros(DType::uint8, {1027});
    if (last()) result.view().at<std::uint8_t>({1026}) = 128;
    return one(std::move(result));
  };
  const ShardMap map{body, {}, {PartitionSpec()}};
  if (mesh_.size() == 1) {
    EXPECT_NO_THROW((void)run(map));
  } else {
    EXPECT_THROW((void)run(map), UserError);
  }
}

TEST_F(ShardMapTest, CountsItsSpecs) {
  const ShardedTensor array = numbers(8, "-");
  const auto body = [&](Shards shards) { return one(copy_of(shards[0])); };
  const PartitionSpec whole;
  EXPECT_THAT(error_of<UserError>({body, {whole, whole}, {whole}}, {array}),
              HasSubstr("in_specs: got 2 specs, expected one for each of 1 "
                        "arguments"));
  EXPECT_THAT(error_of<UserError>({body, {whole}, {whole, whole}}, {array}),
              HasSubstr("out_specs: got 2 specs, expected one for each of 1 "
                        "results"));
}

TEST_F(ShardMapTest, AllRanksThrowWhatOneBodyThrows) {
  const auto user_error = [&](Shards) -> std::vector<Tensor> {
    if (last()) throw ArgumentError("window", "-3", "-1 or more");
    return one(single(1));
  };
  const PartitionSpec whole;
  EXPECT_THAT(error_of<UserError>({user_error, {}, {whole}}),
              HasSubstr(blame() + "window: got -3, expected -1 or more"));
  const auto other_error = [&](Shards) -> std::vector<Tensor> {
    if (last()) throw std::runtime_error("disk on fire");
    return one(single(1));
  };
  EXPECT_THAT(error_of<LibraryError>({other_error, {}, {whole}}),
              HasSubstr(blame() + "disk on fire"));
}

TEST_F(ShardMapTest, ResultsMustFitTogether) {
  if (mesh_.size() == 1) GTEST_SKIP() << "needs two ranks";
  const std::string rank = "rank " + std::to_string(mesh_.size() - 1);
  const PartitionSpec whole;
  const auto dtypes = [&](Shards) {
    return one(zeros(last() ? DType::float32 : DType::int32, {1}));
  };
  EXPECT_THAT(error_of<UserError>({dtypes, {}, {whole}}),
              AllOf(HasSubstr(rank), HasSubstr("float32")));
  const auto shapes = [&](Shards) { return one(zeros(DType::int32, {last() ? 2 : 1})); };
  EXPECT_THAT(error_of<UserError>({shapes, {}, {whole}}), AllOf(HasSubstr(rank), HasSubstr("[2]")));
}

TEST_F(ShardMapTest, BadSpecsAreErrorsOnAllRanks) {
  const ShardedTensor array = numbers(8, "-");
  const auto body = [&](Shards shards) { return one(copy_of(shards[0])); };
  const PartitionSpec whole;
  EXPECT_THAT(error_of<UserError>({body, {PartitionSpec::parse("tp")}, {whole}}, {array}),
              HasSubstr("unknown mesh axis 'tp'"));
  EXPECT_THAT(error_of<UserError>({body, {PartitionSpec::parse("-,-,sp")}, {whole}}, {array}),
              HasSubstr("3 entries"));
  EXPECT_THAT(error_of<UserError>({body, {whole}, {PartitionSpec::parse("-,-,sp")}}, {array}),
              HasSubstr("3 entries"));
}

TEST_F(ShardMapTest, ShardsMustHaveTheShapeOfTheirSharding) {
  const NamedSharding sharding(mesh_.shape(), PartitionSpec(), {2, 2});
  EXPECT_THAT(test::message_of<ArgumentError>([&] {
                const ShardedTensor tensor(sharding, mesh_.rank(),
                                           Tensor(DType::int32, {2, 3}, device_.memory()));
              }),
              HasSubstr("shard: got shape [2, 3], expected [2, 2]"));
}

}  // namespace
}  // namespace annulus
