#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <annulus/verification/random_problem.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/attention/random_mask.hpp"
#include "tests/ring/verified_on_host.hpp"

// Sharded attention against the oracle: drawn problems, and every combination that could interact.
namespace annulus::ring {
namespace {

using verification::ShardedCase;

using ShardedAttentionSweep = VerifiedOnHost;

TEST_F(ShardedAttentionSweep, DrawnProblems) {
  for (int index = 0; index < 150; ++index) {
    const verification::RandomProblem drawn = verification::draw_problem(2024, index, ranks());
    ShardedCase c;
    c.problem = drawn.problem;
    c.layout = drawn.layout;
    c.schedule = drawn.schedule;
    c.implementation = drawn.implementation;
    c.plan = drawn.plan;
    c.seed = drawn.seed;
    c.fills = drawn.fills;
    ASSERT_EQ(failure(c, drawn.mesh), "") << drawn.command;
  }
}

constexpr std::array kSchedules{"ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"};

// Small groups of heads, and two ranks in rings of heads and of columns where that is possible.
PlanOptions small_groups(int ranks) {
  PlanOptions plan{.head_group_bytes = 1};
  if (ranks % 2 == 0) plan.inner_size = plan.ulysses_degree = 2;
  return plan;
}

// Queries and keys in different layouts, with granules, on the same axis and on two axes; and
// queries replicated on every rank.
TEST_F(ShardedAttentionSweep, EveryPairOfLayouts) {
  constexpr std::array kLayouts{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                LayoutKind::balanced};
  const bool even = ranks() % 2 == 0;
  const MeshShape shape({{"a", even ? 2 : 1}, {"b", even ? ranks() / 2 : ranks()}});
  int number = 0;
  for (const LayoutKind queries : kLayouts) {
    for (const LayoutKind keys : kLayouts) {
      for (const char* specs : {"-,a+b", "-,-", "-,a", "-,b"}) {
        for (const std::optional<std::int64_t> granule :
             {std::optional<std::int64_t>(), std::optional<std::int64_t>(4)}) {
          const bool striped = queries == LayoutKind::striped || keys == LayoutKind::striped;
          if (granule && striped) continue;  // refused
          ShardedCase c;
          c.problem.shape = {1, 61, 83, 2, 1, 8, 8};
          c.problem.mask.set_causal(true);
          c.problem.mask.set_offset(22);
          c.layout.query = PartitionSpec::parse(specs);
          c.layout.kv = PartitionSpec::parse(std::string(specs) == "-,a" ? "-,b" : "-,a+b");
          c.layout.sequence = queries;
          c.layout.kv_sequence = keys;
          c.layout.granule = granule;
          // Queries that are not sharded as the keys are must stay where they are.
          const std::vector<const char*> schedules =
              specs == std::string("-,a+b")
                  ? std::vector<const char*>(kSchedules.begin(), kSchedules.end())
                  : std::vector{"ring", "allgather",
                                specs == std::string("-,-") ? "pass_q" : "ring"};
          c.schedule = schedules[static_cast<std::size_t>(number++) % schedules.size()];
          c.plan = small_groups(ranks());
          ASSERT_EQ(failure(c, shape), "")
              << layout_text(c.layout) << ' ' << specs << ' ' << c.schedule;
        }
      }
    }
  }
}

constexpr std::int64_t kBatch = 2;

// Kinds of masks. std::nullopt is a block mask whose blocks do not divide the chunks of the ranks.
using Kind = std::optional<test::MaskKind>;
constexpr std::array<Kind, 8> kMasks{test::MaskKind::causal,     test::MaskKind::offset,
                                     test::MaskKind::window,     test::MaskKind::segments,
                                     test::MaskKind::documents,  test::MaskKind::query_lengths,
                                     test::MaskKind::kv_lengths, std::nullopt};

// The same on every rank.
Mask mask_of(std::uint64_t seed, const std::vector<Kind>& kinds, const AttentionShape& shape) {
  test::Random random(seed);
  std::vector<test::MaskKind> parts;
  for (const Kind& kind : kinds) {
    if (kind) parts.push_back(*kind);
  }
  Mask mask = test::random_mask(random, parts, shape.batch, shape.query_length, shape.kv_length);
  if (parts.size() < kinds.size()) {
    mask.set_block_mask(
        BlockMask::random(shape.query_length, shape.kv_length, shape.heads, 0.4, 3, {7, 5}));
  }
  return mask;
}

// Every mask alone and in pairs, under every schedule, layout, grouping of heads and dtype, with
// lengths that no number of ranks divides.
TEST_F(ShardedAttentionSweep, EveryCombination) {
  const MeshShape shape({{"sp", ranks()}});
  std::uint64_t seed = 0;
  for (std::size_t first = 0; first < kMasks.size(); ++first) {
    for (std::size_t second = first; second < kMasks.size(); ++second) {
      const std::size_t pair = seed / 18;
      for (const char* schedule : kSchedules) {
        for (const LayoutKind layout :
             {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
          // Both change from pair to pair, and meet every schedule and layout.
          const DType dtype =
              std::vector{DType::float32, DType::float16, DType::bfloat16}[(seed + pair) % 3];
          const std::int64_t kv_heads = std::vector{1, 2, 4}[(seed / 3 + pair / 3) % 3];
          ShardedCase c;
          c.problem.shape = {kBatch, 29, 43, 4, kv_heads, 8, 6};
          if (seed % 2 == 1) std::swap(c.problem.shape.query_length, c.problem.shape.kv_length);
          c.problem.dtype = dtype;
          c.problem.mask = mask_of(seed, {kMasks[first], kMasks[second]}, c.problem.shape);
          c.layout = {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), layout, 1};
          c.schedule = schedule;
          c.plan = small_groups(ranks());
          c.seed = ++seed;
          ASSERT_EQ(failure(c, shape), "")
              << fmt::format("{}, {}, {}, {} kv heads, {}", to_string(c.problem.mask), schedule,
                             name_of(layout), kv_heads, name_of(dtype));
        }
      }
    }
  }
  EXPECT_EQ(seed, 36U * 6 * 3);
}

// Modifiers with every mask, with each other and under every schedule; heads have an axis of their
// own if there are enough ranks.
TEST_F(ShardedAttentionSweep, EveryModifier) {
  using Modify = void (*)(AttentionProblem&);
  const std::vector<std::pair<std::string, Modify>> modifiers{
      {"soft cap", [](AttentionProblem& p) { p.soft_cap = 2; }},
      {"sinks", [](AttentionProblem& p) { p.sinks = Sinks::random(p.shape.heads, 2, 8); }},
      {"dropout", [](AttentionProblem& p) { p.dropout.emplace(0.3, 5); }},
      {"bias",
       [](AttentionProblem& p) {
         p.bias = Extents{1, p.shape.heads, p.shape.query_length, p.shape.kv_length};
       }},
      {"bias of keys",
       [](AttentionProblem& p) {
         p.bias = Extents{p.shape.batch, 1, 1, p.shape.kv_length};
       }},
      {"dense mask",
       [](AttentionProblem& p) {
         p.dense_mask = Extents{p.shape.batch, 1, p.shape.query_length, p.shape.kv_length};
       }},
      {"dense mask of rows",
       [](AttentionProblem& p) {
         p.dense_mask = Extents{1, p.shape.heads, p.shape.query_length, 1};
       }},
      {"shared sinks",
       [](AttentionProblem& p) {
         p.sinks = Sinks({3}, {-1, 4, 2});
       }},
      {"unnormalised", [](AttentionProblem& p) { p.normalize_output = false; }},
  };
  const bool by_heads = ranks() % 2 == 0;
  const MeshShape shape({{"tp", by_heads ? 2 : 1}, {"sp", by_heads ? ranks() / 2 : ranks()}});
  std::uint64_t seed = 0;
  for (std::size_t first = 0; first < modifiers.size(); ++first) {
    for (std::size_t second = first; second < modifiers.size(); ++second) {
      for (const Kind& kind : kMasks) {
        for (int repeat = 0; repeat < 2; ++repeat) {
          // A multiplicative hash chooses, so that no other choice goes with it.
          const char* const schedule = kSchedules[(seed * 2654435761U >> 16U) % kSchedules.size()];
          const DType dtype =
              std::vector{DType::float32, DType::float16, DType::bfloat16}[seed % 3];
          ShardedCase c;
          c.problem.shape = {kBatch, 29, 43, 4, seed % 2 == 0 ? 2 : 4, 8, 6};
          c.problem.dtype = dtype;
          c.problem.mask = mask_of(seed, {kind}, c.problem.shape);
          modifiers[first].second(c.problem);
          modifiers[second].second(c.problem);
          c.plan = small_groups(std::max(1, shape.axis_size("sp")));
          c.layout = {PartitionSpec::parse("-,sp,tp"), PartitionSpec::parse("-,sp,tp"),
                      std::vector{LayoutKind::zigzag, LayoutKind::striped}[seed / 2 % 2], 1};
          c.schedule = schedule;
          c.seed = ++seed;
          ASSERT_EQ(failure(c, shape), "") << fmt::format(
              "{} and {}, {}, {}, {}", modifiers[first].first, modifiers[second].first,
              to_string(c.problem.mask), schedule, name_of(dtype));
        }
      }
    }
  }
}

// Every variation of a bias and a dense mask, under every schedule and pair of layouts; heads that
// ranks share unevenly; each tensor alone, and both together.
TEST_F(ShardedAttentionSweep, EveryFormOfBiasAndDenseMask) {
  constexpr std::array kLayouts{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                LayoutKind::balanced};
  const MeshShape shape({{"sp", ranks()}});
  const AttentionShape sizes{2, 31, 45, 6, 3, 8, 4};
  const auto form = [&](std::uint64_t bits) {
    Extents all{sizes.batch, sizes.heads, sizes.query_length, sizes.kv_length};
    for (int dim = 0; dim < 4; ++dim) {
      if ((bits >> static_cast<unsigned>(dim) & 1U) == 0) all[dim] = 1;
    }
    return all;
  };
  std::uint64_t seed = 0;
  for (const char* const schedule : kSchedules) {
    for (std::uint64_t bias = 0; bias <= 16; ++bias) {
      for (const bool both : {false, true}) {
        ShardedCase c;
        c.problem.shape = sizes;
        c.problem.mask.set_causal(seed % 2 == 0);
        c.problem.mask.set_offset(14);
        // The mask alone has the last of these forms.
        if (bias < 16) c.problem.bias = form(bias);
        if (both || bias == 16) c.problem.dense_mask = form(seed * 7 % 16);
        c.plan = small_groups(ranks());
        c.layout = {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"),
                    kLayouts[seed % kLayouts.size()]};
        if (seed % 3 == 0) c.layout.kv_sequence = kLayouts[seed / 3 % kLayouts.size()];
        c.schedule = schedule;
        c.seed = ++seed;
        const auto text = [](const std::optional<Extents>& scores) {
          return scores ? to_string(*scores) : std::string("none");
        };
        ASSERT_EQ(failure(c, shape), "")
            << fmt::format("bias {}, mask {}, {}, {}", text(c.problem.bias),
                           text(c.problem.dense_mask), schedule, layout_text(c.layout));
      }
    }
  }
}

// More of them than ranks get at once.
TEST_F(ShardedAttentionSweep, LargeBiasAndDenseMask) {
  const MeshShape shape({{"sp", ranks()}});
  constexpr std::int64_t kLength = 1153;
  for (const char* const schedule : {"ulysses", "hybrid", "pass_q"}) {
    for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
      ShardedCase c;
      c.problem.shape = {1, kLength, kLength, 8, 4, 8, 8};
      c.problem.dtype = DType::bfloat16;
      c.problem.mask.set_causal(true);
      c.problem.bias = Extents{1, 8, kLength, kLength};
      c.problem.dense_mask = Extents{1, 1, kLength, kLength};
      c.layout = {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), layout};
      c.schedule = schedule;
      ASSERT_EQ(failure(c, shape), "") << schedule << ", " << name_of(layout);
    }
  }
}

TEST_F(ShardedAttentionSweep, EveryLengthFromNothingOn) {
  const MeshShape shape({{"sp", ranks()}});
  for (const char* schedule : kSchedules) {
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      for (std::int64_t query_length = 0; query_length <= 2 * ranks() + 1; query_length += 2) {
        for (std::int64_t kv_length = 0; kv_length <= 2 * ranks() + 1; kv_length += 3) {
          ShardedCase c;
          c.problem.shape = {1, query_length, kv_length, 2, 1, 4, 4};
          c.problem.mask.set_causal(kv_length % 2 == 0);
          if (query_length % 4 == 0) c.problem.sinks = Sinks({2, 1}, {0.5F, -1});
          c.problem.normalize_output = kv_length % 6 != 3;
          if (query_length % 3 == 0) c.problem.bias = Extents{1, 2, query_length, kv_length};
          if (query_length % 3 == 1) c.problem.dense_mask = Extents{1, 1, query_length, kv_length};
          c.plan = small_groups(ranks());
          c.layout = {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), layout, 1};
          c.schedule = schedule;
          ASSERT_EQ(failure(c, shape), "")
              << fmt::format("{}, {}, {}", to_string(c.problem.shape), schedule, name_of(layout));
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::ring
