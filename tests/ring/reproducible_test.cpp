// The same bits on any number of ranks: every rank computes the whole problem alone, too, and
// compares its parts of results and gradients, bit for bit.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "tests/ring/face/face_cases.hpp"
#include "tests/support/for_each_index.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;
using Index = std::vector<PositionRanges>;

// Entries that depend on their global position alone. bfloat16 keeps the upper half.
Bytes filled(const Index& index, DType dtype, int which) {
  Bytes bytes;
  bytes.reserve(1);  // null would mean that nobody wants it
  test::for_each_entry(index, [&](const auto&, const std::vector<std::int64_t>& at) {
    float value = static_cast<float>(which);
    for (const std::int64_t i : at) value = value * 31.7F + static_cast<float>(i) * 1.3F;
    value = std::sin(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if (dtype == DType::bfloat16) bits >>= 16U;
    const auto* const first = reinterpret_cast<const std::byte*>(&bits);
    bytes.insert(bytes.end(), first, first + size_of(dtype));
  });
  return bytes;
}

// A rank's part of a whole tensor.
Bytes part_of(const Bytes& whole, const Extents& shape, const Index& index, DType dtype) {
  Bytes part;
  test::for_each_entry(index, [&](const auto&, const std::vector<std::int64_t>& at) {
    const std::byte* const first =
        whole.data() + test::linear(shape, at) * static_cast<std::int64_t>(size_of(dtype));
    part.insert(part.end(), first, first + size_of(dtype));
  });
  return part;
}

struct Named {
  std::string name;
  NamedSharding sharding;
  DType dtype;
  Bytes bytes;
};

struct Computed {
  std::vector<Named> tensors;
  std::vector<float> grad_sinks;  // [n,M] of the rank's heads, or [M]
};

struct Asked {
  bool backward = true;
  bool accumulate = false;
  bool grad_bias = false;
  bool grad_sinks = false;
};

// Results and gradients of this rank.
Computed computed(Attention& attention, const AttentionOptions& options, const Asked& asked) {
  const ring::ShardedOperands& operands = attention.operands();
  const int rank = attention.rank_plan().rank;
  const DType dtype = options.dtype;
  const auto input = [&](const NamedSharding& sharding, DType type, int which) {
    return filled(sharding.index(rank), type, which);
  };
  const Bytes query = input(operands.query, dtype, 1);
  const Bytes key = input(operands.key, dtype, 2);
  const Bytes value = input(operands.value, dtype, 3);
  const Bytes grad_output = input(operands.output, dtype, 4);
  const Bytes grad_lse = input(operands.lse, DType::float32, 5);
  const Bytes bias = operands.bias ? input(*operands.bias, DType::float32, 6) : Bytes{};
  Bytes mask;  // the last bits of as many numbers
  if (operands.dense_mask) {
    mask = input(*operands.dense_mask, DType::float32, 9);
    for (std::size_t i = 0; 4 * i < mask.size(); ++i) mask[i] = mask[4 * i] & std::byte{1};
  }
  std::vector<Named> results{
      {"output", operands.output, dtype, input(operands.output, dtype, 7)},
      {"LSE", operands.lse, DType::float32, input(operands.lse, DType::float32, 7)}};
  AttentionTensors tensors{query.data(), key.data(), value.data(), results[0].bytes.data(),
                           reinterpret_cast<float*>(results[1].bytes.data())};
  if (operands.bias) tensors.bias = reinterpret_cast<const float*>(bias.data());
  if (operands.dense_mask) tensors.mask = mask.data();
  attention.run(tensors);
  if (!asked.backward) return {results, {}};
  // The value that gradients are added to, if any.
  std::vector<Named> gradients{
      {"grad query", operands.query, dtype, input(operands.query, dtype, 8)},
      {"grad key", operands.key, dtype, input(operands.key, dtype, 8)},
      {"grad value", operands.value, dtype, input(operands.value, dtype, 8)}};
  if (asked.grad_bias) {
    gradients.push_back(
        {"grad bias", *operands.bias, DType::float32, input(*operands.bias, DType::float32, 8)});
  }
  BackwardTensors backward{query.data(),
                           key.data(),
                           value.data(),
                           results[0].bytes.data(),
                           reinterpret_cast<const float*>(results[1].bytes.data()),
                           grad_output.data(),
                           gradients[0].bytes.data(),
                           gradients[1].bytes.data(),
                           gradients[2].bytes.data()};
  backward.grad_lse = reinterpret_cast<const float*>(grad_lse.data());
  backward.accumulate = asked.accumulate;
  if (operands.bias) backward.bias = tensors.bias;
  backward.mask = tensors.mask;
  if (asked.grad_bias) backward.grad_bias = reinterpret_cast<float*>(gradients[3].bytes.data());
  std::vector<float> grad_sinks(static_cast<std::size_t>(attention.sinks_shape().product()), 0.7F);
  if (asked.grad_sinks) backward.grad_sinks = grad_sinks.data();
  attention.backward(backward);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return {results, grad_sinks};
}

// 4 query heads on 2 key/value heads.
AttentionOptions problem(std::int64_t length) {
  AttentionOptions options;
  options.shape = {2, length, length, 4, 2, 24, 16};
  options.mask.set_causal(true);
  options.reproducible = Reproducible::world;
  return options;
}

struct Case {
  std::string name;
  AttentionOptions options = problem(300);
  std::string mesh = "sp=-1";
  Asked asked = {};
  int threads = 3;
};

void expect_same_bits(const Case& one, const std::string& schedule = {},
                      const std::string& backward_schedule = {}) {
  SCOPED_TRACE(one.name);
  ContextOptions alone = on_host();
  Context single(alone);
  Attention unsharded(single, one.options);
  const auto [whole, whole_sinks] = computed(unsharded, one.options, one.asked);

  ContextOptions together = on_host();
  together.mesh = one.mesh;
  together.threads = one.threads;
  Context context(world(), together);
  AttentionOptions options = one.options;
  options.schedule = schedule;
  options.backward.schedule = backward_schedule;
  Attention attention(context, options);
  const auto [parts, sinks] = computed(attention, options, one.asked);
  ASSERT_EQ(parts.size(), whole.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Index index = parts[i].sharding.index(context.rank());
    EXPECT_TRUE(parts[i].bytes ==
                part_of(whole[i].bytes, whole[i].sharding.global_shape(), index, parts[i].dtype))
        << parts[i].name << " of rank " << context.rank() << " of " << context.size();
  }
  if (!one.asked.grad_sinks) return;
  // The sinks of all heads, or of the rank's heads.
  const auto first = sinks.size() == whole_sinks.size()
                         ? 0
                         : static_cast<std::size_t>(attention.rank_plan().first_head) *
                               whole_sinks.size() / static_cast<std::size_t>(options.shape.heads);
  EXPECT_EQ(std::memcmp(sinks.data(), whole_sinks.data() + first, sinks.size() * sizeof(float)), 0)
      << "grad sinks of rank " << context.rank() << " of " << context.size();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({"causal, contiguous"});
  all.back().options.layout = LayoutKind::contiguous;
  all.push_back({"causal, zigzag"});
  all.back().options.layout = LayoutKind::zigzag;
  all.push_back({"bfloat16"});
  all.back().options.dtype = DType::bfloat16;
  all.push_back({"added to what is there", problem(300), "sp=-1", {.accumulate = true}});
  all.push_back({"bfloat16, added", problem(300), "sp=-1", {.accumulate = true}});
  all.back().options.dtype = DType::bfloat16;
  all.push_back({"window, soft cap, dropout", problem(301)});
  all.back().options.mask.set_window(40, 3);
  all.back().options.soft_cap = 3;
  all.back().options.dropout.emplace(0.25, 9);
  all.push_back({"no mask, one head more than ranks have"});
  all.back().options.mask = {};
  all.back().options.shape.heads = 10;
  all.back().options.shape.kv_heads = 5;
  all.push_back({"one key/value head", problem(130)});
  all.back().options.shape.kv_heads = 1;
  all.push_back({"lengths that differ by batch", problem(280)});
  all.back().options.mask.set_kv_lengths({17, 280});
  all.push_back({"a bias of each head", problem(140), "sp=-1", {.grad_bias = true}});
  all.back().options.bias = Extents{1, 4, 140, 140};
  all.push_back({"a bias of all rows", problem(140), "sp=-1", {.grad_bias = true}});
  all.back().options.bias = Extents{1, 4, 1, 140};
  all.push_back({"sinks", problem(141), "sp=-1", {.grad_sinks = true}});
  all.back().options.sinks = Sinks({4, 2}, {0, 1, 2, 3, -1, -2, 5, 0.5F});
  all.push_back({"sinks of all heads, added",
                 problem(142),
                 "sp=-1",
                 {.accumulate = true, .grad_sinks = true}});
  all.back().options.sinks = Sinks({2}, {0.25F, 1});
  if (test::session().size() % 2 == 0) {
    all.push_back({"batches on ranks", problem(260), "dp=2,sp=-1"});
    all.back().options.mask.set_kv_lengths({260, 100});
    all.push_back({"heads on ranks", problem(260), "sp=-1,tp=2", {.grad_sinks = true}});
    all.back().options.sinks = Sinks({4, 1}, {0, 1, 2, 3});
    all.push_back({"heads and batches with the same sinks on ranks",
                   problem(100),
                   "dp=2,tp=-1",
                   {.grad_sinks = true}});
    all.back().options.sinks = Sinks({1}, {1});
    all.back().options.shape.heads = all.back().options.shape.kv_heads = 8;
  }
  return all;
}

TEST(Reproducible, EveryNumberOfRanksGivesTheBitsOfOne) {
  for (const Case& one : cases()) expect_same_bits(one);
}

// Rows stay where they are, cut at multiples of the tiles; head groups are gathered one by one. In
// the backward pass, rows are gathered, too.
TEST(Reproducible, KeysGatheredInOrderGiveTheBitsOfOneRank) {
  const int ranks = test::session().size();
  Case one{"gathered", problem(256 * ranks)};
  one.options.shape.head_dim = 8;
  one.options.layout = LayoutKind::contiguous;
  one.options.plan = ring::PlanOptions::for_place(Place::host());
  one.options.plan->gather_bytes = 1;
  expect_same_bits(one, "allgather", "allgather");
  one.name = "3 query heads of one key/value head, rows that end inside a tile, sinks";
  one.options.shape = {1, 256 * ranks - 37, 256 * ranks - 37, 3, 1, 16, 8};
  one.options.granule = 256;
  one.options.dtype = DType::bfloat16;
  one.options.sinks = Sinks({3, 1}, {0, 1, 2});
  one.options.dropout.emplace(0.25, 9);
  one.asked = {.accumulate = true, .grad_sinks = true};
  expect_same_bits(one, "allgather", "allgather");
}

// Masks and biases go with the rows; the gradient of a bias stays with them.
TEST(Reproducible, GatheredRowsBringTheirBiasAndMask) {
  const std::int64_t length = 256 * test::session().size();
  Case one{
      "a bias that all heads share, a dense mask", problem(length), "sp=-1", {.grad_bias = true}};
  one.options.shape = {1, length, length, 2, 2, 8, 8};
  one.options.layout = LayoutKind::contiguous;
  one.options.bias = Extents{1, 1, length, length};
  one.options.dense_mask = Extents{1, 1, length, length};
  expect_same_bits(one, "allgather", "allgather");
  one.name = "a bias of all rows, a mask of each head, blocks of 100 rows and 70 keys";
  one.asked.grad_bias = false;
  one.options.bias = Extents{1, 2, 1, length};
  one.options.dense_mask = Extents{1, 2, length, length};
  one.options.mask.set_block_mask(BlockMask::random(length, length, 2, 0.6, 7, {100, 70}));
  expect_same_bits(one, "allgather", "allgather");
}

TEST(Reproducible, FewRowsThatEveryRankHasGiveTheBitsOfOneRank) {
  const int ranks = test::session().size();
  Case one{"few rows", problem(384 * ranks), "sp=-1", {.backward = false}};
  one.options.layout = LayoutKind::contiguous;
  one.options.shape.query_length = 3;
  one.options.mask.set_offset(one.options.shape.kv_length - 3);
  one.options.query_spec = PartitionSpec();
  expect_same_bits(one, "allgather");
}

TEST(Reproducible, UnevenShardsDoNotMatter) {
  Case one{"uneven", problem(307)};
  one.options.granule = 64;  // some of 8 ranks have nothing
  expect_same_bits(one, "ulysses", "ulysses");
}

TEST(Reproducible, OtherSchedulesGiveOtherBits) {
  if (test::session().size() == 1) GTEST_SKIP() << "one rank has one schedule";
  AttentionOptions options = problem(300);
  options.reproducible.reset();
  Context single(on_host());
  Attention unsharded(single, options);
  const Bytes whole = computed(unsharded, options, {.backward = false}).tensors[0].bytes;
  Context context(world(), on_host());
  options.schedule = "ring";
  Attention ring(context, options);
  const Named part = computed(ring, options, {.backward = false}).tensors[0];
  EXPECT_FALSE(part.bytes == part_of(whole, part.sharding.global_shape(),
                                     part.sharding.index(context.rank()), part.dtype));
}

TEST(Reproducible, TheChoiceSaysWhatItCosts) {
  Context context(world(), on_host());
  AttentionOptions options = problem(300);
  Attention attention(context, options);
  attention.prepare_backward();
  for (const ring::ScheduleChoice* choice :
       {&attention.schedule(), &attention.backward_pass()->schedule()}) {
    // One rank chooses.
    ASSERT_EQ(choice->unrestricted.has_value(), context.rank() == 0);
    if (!choice->unrestricted) continue;
    EXPECT_GT(choice->seconds, 0);
    EXPECT_GT(choice->unrestricted->seconds, 0);
    EXPECT_EQ(choice->schedule,
              context.size() == 1 ? ring::Schedule::local : ring::Schedule::ulysses);
  }
  options.reproducible = Reproducible::run;
  EXPECT_FALSE(Attention(context, options).schedule().unrestricted);
}

struct Refusal {
  std::string why;
  std::function<void(AttentionOptions&)> change;
  ring::BackwardRequest request = {};
  std::string mesh = "sp=-1";
};

// `forward`: already the forward pass is refused.
void expect_refused(const Refusal& one, bool forward) {
  SCOPED_TRACE(one.why);
  ContextOptions on = on_host();
  on.mesh = one.mesh;
  Context context(world(), on);
  AttentionOptions options = problem(300);
  one.change(options);
  const auto plan = [&] {
    Attention attention(context, options);
    if (!forward) attention.prepare_backward(one.request);
  };
  if (!forward) Attention forward_pass(context, options);
  EXPECT_THAT(test::message_of<UserError>(plan),
              AllOf(HasSubstr(one.why), HasSubstr("--reproducible world wants"),
                    HasSubstr("--reproducible run")));
}

TEST(Reproducible, RefusesOtherKernels) {
  expect_refused({"vanilla", [](auto& o) { o.implementation = "vanilla"; }}, true);
  expect_refused({"float64", [](auto& o) { o.dtype = DType::float64; }}, true);
}

TEST(Reproducible, RefusesWhatDependsOnTheNumberOfRanks) {
  const int ranks = test::session().size();
  if (ranks == 1) GTEST_SKIP() << "one rank has all";
  const std::string columns = "are not all 300 in order";
  expect_refused({columns, [](auto& o) { o.schedule = "ring"; }}, true);
  expect_refused({columns,
                  [](auto& o) {
                    o.schedule = "pass_q";
                    o.query_spec = PartitionSpec();
                  }},
                 true);
  expect_refused({columns, [](auto& o) { o.layout = LayoutKind::striped; }}, true);
  expect_refused({"multiples of 128", [](auto& o) { o.schedule = "allgather"; }}, true);
  expect_refused({"multiples of 128", [](auto& o) { o.kv_spec = PartitionSpec(); }}, true);
  // Forward they are computed.
  expect_refused({"added up over rows",
                  [](auto& o) {
                    o.shape.query_length = o.shape.kv_length = 128 * test::session().size();
                    o.layout = LayoutKind::contiguous;
                    o.kv_spec = PartitionSpec();
                  }},
                 false);
  // Rows of whole tiles, but not keys.
  expect_refused({"multiples of 256",
                  [](auto& o) {
                    o.shape.query_length = o.shape.kv_length = 128 * test::session().size();
                    o.layout = LayoutKind::contiguous;
                    o.schedule = o.backward.schedule = "allgather";
                  }},
                 false);
  expect_refused({"bias that all rows share",
                  [](auto& o) {
                    o.shape.query_length = o.shape.kv_length = 256 * test::session().size();
                    o.bias = Extents{1, 4, 1, o.shape.kv_length};
                    o.layout = LayoutKind::contiguous;
                    o.backward.schedule = "allgather";
                  },
                  {.grad_bias = true}},
                 false);
  expect_refused({"bias that all heads share",
                  [](auto& o) {
                    o.bias = Extents{1, 1, 300, 300};
                  },
                  {.grad_bias = true}},
                 false);
  if (ranks % 2 != 0) return;
  const std::string batches = "dp=" + std::to_string(2) + ",sp=-1";
  expect_refused({"bias that all batches share",
                  [](auto& o) {
                    o.bias = Extents{1, 4, 300, 300};
                  },
                  {.grad_bias = true},
                  batches},
                 false);
  expect_refused(
      {"query heads of a group", [](auto& o) { o.shape.kv_heads = 1; }, {}, "sp=-1,tp=2"}, false);
}

}  // namespace
}  // namespace annulus
