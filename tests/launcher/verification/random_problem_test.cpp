#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <annulus/attention/modifiers.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/verification/random_problem.hpp>

namespace annulus::verification {
namespace {

// Everything that a draw decides, mask and all.
std::string description(const RandomProblem& drawn) {
  const AttentionProblem& p = drawn.problem;
  std::string text = fmt::format(
      "{} {} mesh {} query {} kv {} layout {} schedule {} by {} "
      "gather {} results {} seed {}, {} {}",
      to_string(p.shape), name_of(p.dtype), to_string(drawn.mesh), to_string(drawn.layout.query),
      to_string(drawn.layout.kv), ring::layout_text(drawn.layout), drawn.schedule,
      drawn.implementation, drawn.plan->gather_bytes, drawn.plan->result_bytes, drawn.seed,
      mask_and_modifiers_text(p), p.mask.digest());
  for (const Modifier& modifier : modifiers_of(p)) text += fmt::format(" {}", modifier.digest);
  if (drawn.fills.key) text += " with columns that are not finite";
  if (drawn.fills.query) text += " and a query";
  if (drawn.called.sinks) text += " sinks with calls";
  if (drawn.called.in_device_memory) text += " on the device";
  return text + " " + drawn.command;
}

std::uint64_t fnv1a(const std::string& text, std::uint64_t hash) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

TEST(RandomProblem, IsAFunctionOfSeedIndexAndRanks) {
  EXPECT_EQ(description(draw_problem(3, 5, 4)), description(draw_problem(3, 5, 4)));
  std::set<std::string> different;
  for (const std::uint64_t seed : {1ULL, 2ULL, 1ULL << 40U}) {
    for (int index = 0; index < 50; ++index) {
      different.insert(description(draw_problem(seed, index, 4)));
    }
  }
  EXPECT_EQ(different.size(), 150U);
}

// The same problems on every machine, so that a reported seed can be tried elsewhere. Changing what
// is drawn changes this number, which is fine but should be noticed.
TEST(RandomProblem, DrawsWhatItDrewBefore) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (int index = 0; index < 200; ++index)
    hash = fnv1a(description(draw_problem(1, index, 8)), hash);
  EXPECT_EQ(hash, 13253955323802279758U);
}

// Each of 1000 draws for a kind of processor, often enough to be met by `verify --random 60`.
TEST(RandomProblem, ValuesComeWithCalls) {
  for (const Place::Kind kind : {Place::Kind::host, Place::Kind::cuda}) {
    int lengths = 0, offsets = 0, seeds = 0, sinks = 0, on_device = 0, backward = 0;
    for (int index = 0; index < 1000; ++index) {
      const RandomProblem drawn = draw_problem(5, index, 4, kind);
      const CallArguments& arguments = drawn.problem.call_arguments;
      lengths += arguments.lengths ? 1 : 0;
      offsets += arguments.offsets ? 1 : 0;
      seeds += arguments.dropout_seed ? 1 : 0;
      sinks += drawn.called.sinks ? 1 : 0;
      const bool any = arguments.any() || drawn.called.sinks;
      on_device += any && drawn.called.in_device_memory ? 1 : 0;
      backward += any && drawn.draws_backward ? 1 : 0;
    }
    for (const int count : {lengths, offsets}) EXPECT_GT(count, 80);
    EXPECT_GT(seeds, 20);
    EXPECT_GT(sinks, 30);
    EXPECT_GT(backward, 50);
    EXPECT_EQ(on_device > 100, kind == Place::Kind::cuda) << on_device;
  }
}

TEST(RandomProblem, NamesTheCommandThatRepeatsIt) {
  EXPECT_EQ(draw_problem(7, 17, 8).command,
            "mpirun -np 8 annulus verify --random-case 7:17 --device cpu");
  EXPECT_EQ(draw_problem(7, 17, 8, Place::Kind::cuda).command,
            "mpirun -np 8 annulus verify --random-case 7:17 --device cuda");
}

std::int64_t longest_of(const RandomProblem& drawn) {
  return std::max(drawn.problem.shape.query_length, drawn.problem.shape.kv_length);
}

void expect_legal(const RandomProblem& drawn, int ranks) {
  SCOPED_TRACE(description(drawn));
  ASSERT_EQ(drawn.mesh.ranks(), ranks);
  EXPECT_LE(drawn.problem.shape.heads, std::max(8, ranks));
  ASSERT_NO_THROW(drawn.problem.validate());
  const ring::ShardedOperands operands =
      ring::shard_operands(drawn.problem, drawn.mesh, drawn.layout);
  static const Registry registry = Registry::standard();
  const ring::PlanInput input =
      ring::make_plan_input(drawn.problem, operands, {&registry.get("native")}, Place::host(),
                            ring::CostModel::cpu_core(), *drawn.plan);
  ASSERT_NO_THROW(static_cast<void>(ring::choose_schedule(input, drawn.schedule)));
}

TEST(RandomProblem, EveryDrawIsLegalAndNearlyAllAreSmall) {
  for (const int ranks : {1, 2, 3, 4, 6, 7, 8, 16}) {
    int longer = 0;
    for (int index = 0; index < 300; ++index) {
      const RandomProblem drawn = draw_problem(9, index, ranks);
      expect_legal(drawn, ranks);
      EXPECT_LE(longest_of(drawn), 1200);
      if (longest_of(drawn) > 200) ++longer;
    }
    EXPECT_GT(longer, 0) << ranks;
    EXPECT_LT(longer, 30) << ranks;
  }
}

// The fast kernel of CPUs is what is verified most; vanilla is there for what only it computes.
TEST(RandomProblem, MostDrawsForCpusAreNotForVanilla) {
  int vanilla = 0;
  for (int index = 0; index < 500; ++index) {
    if (draw_problem(2, index, 8).implementation == "vanilla") ++vanilla;
  }
  EXPECT_GT(vanilla, 40);
  EXPECT_LT(vanilla, 120);
}

// Nobody else computes in float64.
TEST(RandomProblem, Float64IsForVanillaOnCpus) {
  const Registry registry = Registry::standard();
  for (int index = 0; index < 600; ++index) {
    for (const Place::Kind device : {Place::Kind::host, Place::Kind::cuda}) {
      const RandomProblem drawn = draw_problem(9, index, 4, device);
      const bool wide =
          drawn.problem.dtype == DType::float64 || drawn.problem.softmax_dtype == DType::float64;
      if (drawn.implementation == "auto") {
        EXPECT_FALSE(wide) << drawn.command;
        continue;
      }
      EXPECT_EQ(device, Place::Kind::host);
      EXPECT_TRUE(registry.get(drawn.implementation).capability(drawn.problem, Place::host()))
          << drawn.command;
    }
  }
}

// Head dimensions of fast kernels; lengths may be anything.
bool suits_fast_kernels(const RandomProblem& drawn) {
  const AttentionProblem& p = drawn.problem;
  const auto suits = [](std::int64_t dim) { return dim == 64 || dim == 128 || dim == 256; };
  return suits(p.shape.head_dim) && suits(p.shape.value_dim);
}

TEST(RandomProblem, MostDrawsForGpusSuitFastKernels) {
  constexpr int kDraws = 600;
  for (const int ranks : {1, 2, 4}) {
    std::map<std::string, int> counts;
    for (int index = 0; index < kDraws; ++index) {
      const RandomProblem drawn = draw_problem(9, index, ranks, Place::Kind::cuda);
      expect_legal(drawn, ranks);
      EXPECT_LE(longest_of(drawn), 2048);
      if (!suits_fast_kernels(drawn)) continue;
      const AttentionShape& shape = drawn.problem.shape;
      ++counts["fast"];
      ++counts[fmt::format("D = {}", shape.head_dim)];
      ++counts[std::string(name_of(drawn.problem.dtype))];
      for (const std::int64_t length : {shape.query_length, shape.kv_length}) {
        if (length == 1) ++counts["one position"];
        if (length > 100 && (length + 1) % 128 < 3) ++counts["around a tile"];
        if (length > 1500) ++counts["long"];
      }
      if (drawn.problem.mask.causal()) ++counts["causal"];
      if (drawn.problem.mask.has_segments()) ++counts["segments"];
      if (drawn.problem.mask.block_mask()) ++counts["blocks"];
    }
    EXPECT_GT(counts["fast"], kDraws * 7 / 10) << ranks;
    EXPECT_GT(kDraws - counts["fast"], 20) << ranks;
    EXPECT_GT(counts["blocks"], kDraws * 3 / 10) << ranks;
    EXPECT_GT(counts["fast"] - counts["blocks"], kDraws * 3 / 10) << ranks;
    for (const char* kind : {"D = 64", "D = 128", "D = 256", "float16", "bfloat16", "float32",
                             "one position", "around a tile", "long", "causal", "segments"}) {
      EXPECT_GT(counts[kind], 5) << kind << " on " << ranks;
    }
  }
}

bool is_prime(std::int64_t n) {
  for (std::int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return n > 1;
}

// Counts the features of a draw by name: shapes, masks and shardings. Features that it lacks get an
// entry, too.
void count_features(const RandomProblem& drawn, std::map<std::string, int>& counts) {
  const auto note = [&](bool has, const std::string& name) { counts[name] += has ? 1 : 0; };
  const AttentionProblem& p = drawn.problem;
  const AttentionShape& s = p.shape;
  const int ranks = drawn.mesh.ranks();
  const int query_shards = drawn.mesh.size(drawn.layout.query[1]);
  const int kv_shards = drawn.mesh.size(drawn.layout.kv[1]);
  const int head_shards = drawn.mesh.size(drawn.layout.query[2]);
  note(s.batch == 0, "B = 0");
  note(s.batch > 1, "B > 1");
  note(s.query_length == 0, "T = 0");
  note(s.kv_length == 0, "S = 0");
  note(s.query_length == 1 && s.kv_length > 1, "T = 1");
  note(s.kv_length == 1, "S = 1");
  note(s.query_length > s.kv_length, "T > S");
  note(s.query_length < s.kv_length, "T < S");
  note(s.query_length == s.kv_length, "T = S");
  note(is_prime(s.query_length) && s.query_length > ranks, "T prime");
  note(is_prime(s.kv_length) && s.kv_length > ranks, "S prime");
  note(s.query_length > 0 && s.query_length < query_shards, "T < shards");
  note(s.kv_length > 0 && s.kv_length < kv_shards, "S < shards");
  note(s.query_length > query_shards && s.query_length % query_shards != 0, "T uneven");
  note(s.kv_length > kv_shards && s.kv_length % kv_shards != 0, "S uneven");
  note(s.heads == s.kv_heads && s.heads > 1, "MHA");
  note(s.kv_heads == 1 && s.heads > 1, "MQA");
  note(s.heads > s.kv_heads && s.kv_heads > 1, "GQA");
  note(s.kv_heads < head_shards, "shared kv heads");
  note(s.head_dim != s.value_dim, "Dv != D");
  note(s.head_dim % 8 != 0, "odd D");
  note(s.head_dim == 64, "D = 64");
  note(true, std::string(name_of(p.dtype)));
  note(p.scale.has_value(), "scale");
  note(p.soft_cap.has_value(), "soft cap");
  note(p.sinks && p.sinks->shape().rank() == 1, "shared sinks");
  note(p.sinks && p.sinks->shape().rank() == 2 && head_shards > 1, "sinks of sharded heads");
  note(p.sinks && p.soft_cap, "sinks + soft cap");
  note(p.dropout.has_value(), "dropout");
  note(p.dropout && p.sinks, "dropout + sinks");
  note(p.dropout && kv_shards > 1, "dropout of sharded keys");
  note(!p.normalize_output, "unnormalised");
  note(!p.normalize_output && p.sinks, "unnormalised + sinks");
  note(!p.normalize_output && p.dropout, "unnormalised + dropout");
  note(!p.normalize_output && kv_shards > 1, "unnormalised, of sharded keys");
  const auto note_scores = [&](const std::optional<Extents>& scores, const std::string& name) {
    if (!scores) return;
    const Extents whole{s.batch, s.heads, s.query_length, s.kv_length};
    constexpr std::array kDims{"batches", "heads", "rows", "keys"};
    for (int dim = 0; dim < 4; ++dim) {
      const std::string of = fmt::format("{} of {}", name, kDims.at(static_cast<std::size_t>(dim)));
      note(whole[dim] > 1 && (*scores)[dim] > 1, of);
      note(whole[dim] > 1 && (*scores)[dim] == 1, of + ", broadcast");
    }
    note(query_shards > 1 && (*scores)[2] > 1, name + " of sharded rows");
    note(head_shards > 1 && (*scores)[1] > 1, name + " of sharded heads");
    if (query_shards > 1 && kv_shards > 1 && (*scores)[2] > 1) {
      note(true, fmt::format("{} of rows, {}", name, drawn.schedule));
    }
  };
  note_scores(p.bias, "bias");
  note_scores(p.dense_mask, "dense mask");
  note(p.bias && p.sinks, "bias + sinks");
  note(p.bias && p.dropout, "bias + dropout");
  note(p.bias && p.soft_cap, "bias + soft cap");
  note(p.dense_mask && p.sinks, "dense mask + sinks");
  note(p.dense_mask && p.dropout, "dense mask + dropout");

  const Mask& mask = p.mask;
  const bool window = mask.window_left() >= 0 || mask.window_right() >= 0;
  note(mask.causal(), "causal");
  note(mask.causal() && mask.offset() == 0, "causal, offset 0");
  note(mask.causal() && mask.offset() < 0, "negative offset");
  note(mask.causal() && mask.offset() > 0, "positive offset");
  note(mask.offset() != 0 && mask.offset() == s.kv_length - s.query_length, "bottom right");
  note(window && mask.window_left() < 0, "right window");
  note(window && mask.window_right() < 0, "left window");
  note(mask.window_left() >= 0 && mask.window_right() >= 0, "two-sided window");
  bool padding = false;
  bool out_of_order = false;
  for (std::int64_t b = 0; mask.has_segments() && b < s.batch; ++b) {
    const auto ids = mask.kv_segments(b);
    padding = padding || std::find(ids.begin(), ids.end(), -1) != ids.end();
    out_of_order = out_of_order || !std::is_sorted(ids.begin(), ids.end());
  }
  note(padding, "padding ids");
  note(out_of_order, "segments in any order");
  const bool documents = mask.has_segments() && !padding && !out_of_order;
  note(documents, "documents");
  bool differ = false;
  for (std::int64_t b = 1; documents && b < s.batch; ++b) {
    const auto first = mask.kv_segments(0);
    const auto ids = mask.kv_segments(b);
    differ = differ || !std::equal(first.begin(), first.end(), ids.begin(), ids.end());
  }
  note(differ, "documents that differ by batch");
  const std::map<std::string, bool> parts{{"causal", mask.causal()},
                                          {"window", window},
                                          {"segments", mask.has_segments()},
                                          {"q_lengths", !mask.query_lengths().empty()},
                                          {"kv_lengths", !mask.kv_lengths().empty()},
                                          {"blocks", mask.block_mask().has_value()},
                                          {"dense", p.dense_mask.has_value()},
                                          {"bias", p.bias.has_value()}};
  note(mask.prefix() > 0, "prefix");
  note(!mask.prefixes().empty(), "prefix by batch");
  note(!mask.offsets().empty(), "offset by batch");
  note(mask.position_parts().sink_tokens > 0, "sink tokens");
  note(mask.position_parts().chunk > 0, "chunk");
  note(mask.alignment() == DocumentAlignment::top_left, "packings top-left");
  note(mask.alignment() == DocumentAlignment::bottom_right, "packings bottom-right");
  int count = 0;
  for (const auto& [a, has_a] : parts) {
    count += has_a ? 1 : 0;
    for (const auto& [b, has_b] : parts) {
      if (a < b) note(has_a && has_b, a + " + " + b);
    }
  }
  note(true, fmt::format("{} masks", count));
  note(mask.depends_on_head(), "blocks by head");
  note(mask.block_mask() && mask.block_mask()->batch() > 1, "blocks by batch");
  note(mask.block_mask() && mask.block_mask()->batch() == 1 && s.batch > 1, "blocks for all");

  note(query_shards > 1 && kv_shards > 1, "sharded sequences");
  note(query_shards == 1 && kv_shards > 1, "replicated query");
  note(query_shards > 1 && kv_shards == 1, "whole key/value");
  note(drawn.layout.kv[1].size() > 1, "tuple of sequence axes");
  note(query_shards > 1 && kv_shards > 1 && drawn.layout.query[1] != drawn.layout.kv[1],
       "different sequence axes");
  note(head_shards > 1, "sharded heads");
  note(drawn.mesh.size(drawn.layout.query[0]) > 1, "sharded batch");
  note(drawn.mesh.size(drawn.layout.query.axes()) < ranks, "copies of the output");
  note(true, std::string(name_of(drawn.layout.sequence)));
  const LayoutKind keys = drawn.layout.kv_sequence.value_or(drawn.layout.sequence);
  note(keys != drawn.layout.sequence, "keys: " + std::string(name_of(keys)));
  note(drawn.layout.granule.has_value(), "granule");
  note(static_cast<bool>(drawn.fills.key), "non-finite columns");
  note(static_cast<bool>(drawn.fills.query), "a non-finite query");
  note(drawn.implementation == "vanilla", "vanilla");
  note(p.softmax_dtype == DType::float64, "softmax in float64");
  note(p.softmax_dtype == DType::float64 && kv_shards > 1, "softmax in float64, of sharded keys");
  note(true, "schedule " + drawn.schedule);
  note(drawn.plan->gather_bytes < 1 << 20, "small gather");
}

// Features whose names come from the draws, separated by bars.
constexpr const char* kDrawnNames =
    "0 masks|1 masks|2 masks|3 masks|float64|float32|float16|bfloat16|contiguous|zigzag|striped|"
    "balanced|keys: contiguous|keys: zigzag|keys: striped|keys: balanced|bias of rows, ulysses|"
    "bias of rows, hybrid|bias of rows, pass_q|dense mask of rows, ulysses|"
    "dense mask of rows, hybrid|dense mask of rows, pass_q|schedule local|schedule ring|"
    "schedule allgather|schedule auto";

TEST(RandomProblem, CoversEverythingIn500Draws) {
  std::map<std::string, int> counts;
  for (int index = 0; index < 500; ++index) count_features(draw_problem(1, index, 8), counts);
  std::istringstream names(kDrawnNames);
  for (std::string name; std::getline(names, name, '|');) counts.try_emplace(name, 0);
  for (const auto& [name, count] : counts) EXPECT_GT(count, 0) << name;
  EXPECT_GT(counts["sharded sequences"], 250) << "the point of it all";
  // All 20 ways to write 8 as a product of the four axes, and some of them without the ones.
  std::set<std::map<std::string, int>> factorizations;
  for (int index = 0; index < 500; ++index) {
    std::map<std::string, int> sizes;
    const MeshShape mesh = draw_problem(1, index, 8).mesh;
    for (const MeshAxis& axis : mesh.axes()) {
      if (axis.size > 1) sizes[axis.name] = axis.size;
    }
    factorizations.insert(sizes);
  }
  EXPECT_EQ(factorizations.size(), 20U);
}

}  // namespace
}  // namespace annulus::verification
