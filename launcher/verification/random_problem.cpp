#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/mask.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>
#include <annulus/verification/non_finite_entries.hpp>
#include <annulus/verification/random_problem.hpp>
#include <annulus/verification/random_scores.hpp>

#include "draws.hpp"
#include "random_backward.hpp"

namespace annulus::verification {
namespace {

/// Limits for the cost of a problem.
struct Size {
  double work;           ///< multiplications of the oracle, all ranks together
  std::int64_t longest;  ///< sequence
};
constexpr Size kSmall{1.5e7, 200};
constexpr Size kMedium{3e8, 1200};
constexpr Size kLarge{1.2e9, 2048};

/// The kind of problem that is drawn.
struct Kind {
  Size size = kSmall;
  bool fast = false;  ///< suits fast GPU kernels
};

MeshShape draw_mesh(Draws& draws, int ranks) {
  using Sizes = std::array<int, 4>;
  std::vector<Sizes> all;
  std::vector<Sizes> with_sequence;
  for (int dp = 1; dp <= ranks; ++dp) {
    for (int fsdp = 1; dp * fsdp <= ranks; ++fsdp) {
      for (int tp = 1; dp * fsdp * tp <= ranks; ++tp) {
        if (ranks % (dp * fsdp * tp) != 0) continue;
        const Sizes sizes{dp, fsdp, tp, ranks / (dp * fsdp * tp)};
        all.push_back(sizes);
        if (sizes[3] > 1) with_sequence.push_back(sizes);
      }
    }
  }
  const bool sequence = draws.chance(80) && !with_sequence.empty();
  const Sizes sizes = draws.pick(std::span<const Sizes>(sequence ? with_sequence : all));
  // Axes of size one are sometimes named and sometimes left out.
  const bool terse = draws.chance(50);
  const std::array names{"dp", "fsdp", "tp", "sp"};
  std::vector<MeshAxis> axes;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 || !terse) axes.push_back({names[i], sizes[i]});
  }
  return MeshShape(std::move(axes));
}

// The mesh axes of each kind of dimension.
struct Placement {
  AxisNames batch;
  AxisNames heads;
  AxisNames query_sequence;
  AxisNames kv_sequence;
};

Placement draw_placement(Draws& draws, const MeshShape& mesh) {
  Placement placement{{"fsdp", "dp"}, {"tp"}, {"sp"}, {"sp"}};
  const std::int64_t roll = draws.below(100);
  if (roll < 10) {  // a tuple of axes for the sequences
    placement.batch = {"dp"};
    placement.query_sequence = placement.kv_sequence =
        draws.chance(50) ? AxisNames{"fsdp", "sp"} : AxisNames{"sp", "fsdp"};
  } else if (roll < 16) {
    placement.heads = {};
    placement.query_sequence = placement.kv_sequence = {"sp", "tp"};
  } else if (roll < 24) {  // a replicated query, as in decoding
    placement.query_sequence = {};
  } else if (roll < 30) {
    placement.kv_sequence = {};
  } else if (roll < 36) {  // different axes for the two sequences
    placement.batch = {"dp"};
    placement.kv_sequence = {"fsdp"};
  } else if (roll < 40) {  // everything replicated along the batch's axes
    placement.batch = {};
  }
  for (AxisNames* axes :
       {&placement.batch, &placement.heads, &placement.query_sequence, &placement.kv_sequence}) {
    std::erase_if(*axes, [&](const std::string& axis) { return !mesh.has_axis(axis); });
  }
  return placement;
}

int draw_divisor(Draws& draws, int number, int most) {
  std::vector<int> divisors;
  for (int divisor = 1; divisor <= most; ++divisor) {
    if (number % divisor == 0) divisors.push_back(divisor);
  }
  return draws.pick(std::span<const int>(divisors));
}

void draw_heads(Draws& draws, int shards, AttentionShape& shape) {
  if (shards > 1 && draws.chance(40)) {  // fewer key/value heads than ranks: shared
    shape.kv_heads = draw_divisor(draws, shards, shards - 1);
    shape.heads = shards * draws.between(1, std::max(1, 8 / shards));
    return;
  }
  shape.kv_heads = shards * draws.between(1, std::max(1, 4 / shards));
  const auto ratio = draws.pick<std::int64_t>({1, 1, 2, 2, 3, 4, 8});
  shape.heads = shape.kv_heads * std::min(ratio, std::max<std::int64_t>(1, 8 / shape.kv_heads));
}

bool is_prime(std::int64_t n) {
  for (std::int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return n > 1;
}

// Rows and columns of the tiles of fast kernels; some have half or twice as many.
constexpr std::int64_t kTile = 128;

std::int64_t draw_length_around_tiles(Draws& draws, std::int64_t longest) {
  const std::int64_t roll = draws.below(100);
  if (roll < 5) return 1;
  if (roll < 40 || longest <= kTile) return draws.between(1, longest);
  const std::int64_t tiles = draws.between(1, longest / kTile);
  return std::min(longest, tiles * kTile + draws.between(-1, 1));
}

std::int64_t draw_length(Draws& draws, int ranks, std::int64_t longest) {
  const std::int64_t roll = draws.below(100);
  if (roll < 3) return 0;
  if (roll < 8) return 1;
  if (roll < 16) return draws.between(1, ranks);  // often fewer than one per rank
  std::int64_t length = draws.between(2, longest);
  if (roll < 40) {
    while (!is_prime(length)) --length;
  } else if (roll < 55) {
    length = std::max<std::int64_t>(8, length / 8 * 8);
  }
  return length;
}

AttentionShape draw_shape(Draws& draws, const Kind& kind, const MeshShape& mesh,
                          const Placement& placement) {
  AttentionShape shape;
  const int batch_shards = mesh.size(placement.batch);
  const int head_shards = mesh.size(placement.heads);
  const int most_rows = kind.fast ? 2 : 4;  // the work is better spent on positions
  shape.batch = batch_shards * draws.between(1, std::max(1, most_rows / batch_shards));
  if (draws.chance(1)) shape.batch = 0;
  draw_heads(draws, head_shards, shape);
  const auto draw_dim = [&] {
    if (kind.fast) return draws.pick<std::int64_t>({64, 64, 128, 128, 128, 256});
    return draws.pick<std::int64_t>({1, 4, 8, 13, 16, 16, 24, 31, 32, 32, 40, 64});
  };
  shape.head_dim = draw_dim();
  shape.value_dim = draws.chance(kind.fast ? 90 : 65) ? shape.head_dim : draw_dim();

  const double copies = mesh.ranks() / static_cast<double>(batch_shards) / head_shards /
                        mesh.size(placement.query_sequence);
  const double per_pair =
      copies * static_cast<double>(std::max<std::int64_t>(1, shape.batch) * shape.heads *
                                   (shape.head_dim + shape.value_dim));
  const auto longest = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(std::sqrt(kind.size.work / per_pair)), 16, kind.size.longest);
  const auto length = [&] {
    return kind.fast ? draw_length_around_tiles(draws, longest)
                     : draw_length(draws, mesh.ranks(), longest);
  };
  shape.query_length = length();
  shape.kv_length = draws.chance(50) ? shape.query_length : length();
  return shape;
}

// Ids of one batch row: ordered runs with padding at the end, runs in any order, or random ids.
void append_segment_ids(Draws& draws, std::int64_t length, std::vector<std::int32_t>& ids) {
  const std::int64_t kinds = draws.between(1, 4);
  const std::int64_t manner = draws.below(3);
  const auto any_id = [&] { return static_cast<std::int32_t>(draws.between(-1, kinds - 1)); };
  std::int32_t id = manner == 0 ? 0 : any_id();
  for (std::int64_t i = 0; i < length; ++i) {
    ids.push_back(id);
    if (manner == 2) {
      id = any_id();
    } else if (draws.below(std::max<std::int64_t>(2, length / 5)) == 0) {
      if (manner == 1) {
        id = any_id();
      } else if (id >= 0) {
        id = id + 1 < kinds ? id + 1 : -1;
      }
    }
  }
}

void draw_segments(Draws& draws, const AttentionShape& shape, Mask& mask) {
  std::vector<std::int32_t> query_ids;
  std::vector<std::int32_t> kv_ids;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    append_segment_ids(draws, shape.query_length, query_ids);
    append_segment_ids(draws, shape.kv_length, kv_ids);
  }
  if (shape.query_length == shape.kv_length && draws.chance(60)) kv_ids = query_ids;
  mask.set_segments(shape.batch, std::move(query_ids), std::move(kv_ids));
}

// Draws the ends of packed documents, some of them empty.
std::vector<std::int32_t> draw_cu_seqlens(Draws& draws, std::int64_t documents,
                                          std::int64_t length) {
  std::vector<std::int32_t> cu_seqlens{0, static_cast<std::int32_t>(length)};
  for (std::int64_t i = 1; i < documents; ++i) {
    cu_seqlens.push_back(static_cast<std::int32_t>(draws.between(0, length)));
  }
  std::ranges::sort(cu_seqlens);
  return cu_seqlens;
}

// Packed documents: the same in every batch row, or different ones.
void draw_documents(Draws& draws, const AttentionShape& shape, Mask& mask) {
  const bool same = draws.chance(50);
  std::int64_t documents = draws.between(1, 6);
  const auto row_of = [&](std::int64_t length) {
    return segments_from_cu_seqlens(draw_cu_seqlens(draws, documents, length), length);
  };
  const auto ids_of = [&](std::int64_t length) {
    std::vector<std::int32_t> row = row_of(length);
    std::vector<std::int32_t> ids;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      if (b > 0 && !same) {
        documents = draws.between(1, 6);
        row = row_of(length);
      }
      ids.insert(ids.end(), row.begin(), row.end());
    }
    return ids;
  };
  std::vector<std::int32_t> query_ids = ids_of(shape.query_length);
  std::vector<std::int32_t> kv_ids =
      shape.query_length == shape.kv_length ? query_ids : ids_of(shape.kv_length);
  mask.set_segments(shape.batch, std::move(query_ids), std::move(kv_ids));
}

std::vector<std::int32_t> draw_lengths(Draws& draws, std::int64_t batch, std::int64_t length) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t drawn = draws.between(0, length);
    lengths.push_back(static_cast<std::int32_t>(draws.chance(20) ? length : drawn));
  }
  return lengths;
}

void draw_window(Draws& draws, const AttentionShape& shape, Mask& mask) {
  const std::int64_t widest = std::max<std::int64_t>(1, shape.kv_length / 2);
  const std::int64_t left = draws.between(0, widest);
  const std::int64_t right = draws.between(0, widest);
  using Sides = std::pair<std::int64_t, std::int64_t>;
  const Sides sides = draws.pick<Sides>({{left, left}, {left, -1}, {-1, right}, {left, right}});
  mask.set_window(sides.first, sides.second);
}

// The diagonal of causal and window.
std::int64_t draw_offset(Draws& draws, const AttentionShape& shape) {
  const std::int64_t roll = draws.below(100);
  const std::int64_t distance =
      draws.between(1, std::max<std::int64_t>(1, (shape.query_length + shape.kv_length) / 4));
  if (roll < 40) return 0;
  if (roll < 65) return shape.kv_length - shape.query_length;
  return roll < 83 ? -distance : distance;
}

// Two packings with the same number of documents, alike in all batches, with either alignment.
void draw_packings(Draws& draws, const AttentionShape& shape, Mask& mask) {
  const std::int64_t documents = draws.between(1, 5);
  std::vector<std::int32_t> query = draw_cu_seqlens(draws, documents, shape.query_length);
  std::vector<std::int32_t> kv = draw_cu_seqlens(draws, documents, shape.kv_length);
  mask.set_offset(0);
  mask.set_packings(
      shape.batch, std::move(query), std::move(kv),
      draws.chance(50) ? DocumentAlignment::top_left : DocumentAlignment::bottom_right);
}

// Draws the parts of a mask that one band does not describe.
void draw_positions(Draws& draws, const AttentionShape& shape, Mask& mask) {
  if (draws.chance(30))
    mask.set_chunk(draws.between(1, std::max<std::int64_t>(1, shape.kv_length)));
  const PositionParts& parts = mask.position_parts();
  if (!parts.limited()) return;
  if (draws.chance(30)) {
    std::vector<std::int32_t> offsets;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      offsets.push_back(static_cast<std::int32_t>(draw_offset(draws, shape)));
    }
    mask.set_offsets(std::move(offsets));
  }
  if (draws.chance(30)) {
    mask.set_prefix(draws.between(1, std::max<std::int64_t>(1, shape.kv_length / 2)));
  } else if (draws.chance(30)) {
    mask.set_prefixes(draw_lengths(draws, shape.batch, shape.kv_length));
  }
  if ((parts.window() || parts.chunk > 0) && draws.chance(50)) {
    mask.set_sink_tokens(draws.between(1, std::max<std::int64_t>(1, shape.kv_length / 4)));
  }
  if (!mask.has_segments() && draws.chance(30)) draw_packings(draws, shape, mask);
}

Mask draw_mask(Draws& draws, const Kind& kind, const AttentionShape& shape) {
  enum class Part { causal, window, segments, query_lengths, kv_lengths };
  std::vector<Part> parts{Part::causal,   Part::causal,        Part::window,
                          Part::segments, Part::query_lengths, Part::kv_lengths};
  Mask mask;
  const int count = draws.pick({0, 1, 1, 2, 2, 3});
  for (int i = 0; i < count; ++i) {
    const Part part = draws.pick(std::span<const Part>(parts));
    std::erase(parts, part);
    switch (part) {
      case Part::causal:
        mask.set_causal(true);
        break;
      case Part::window:
        draw_window(draws, shape, mask);
        break;
      case Part::segments:
        if (draws.chance(kind.fast ? 20 : 60)) {
          draw_segments(draws, shape, mask);
        } else {
          draw_documents(draws, shape, mask);
        }
        break;
      case Part::query_lengths:
        mask.set_query_lengths(draw_lengths(draws, shape.batch, shape.query_length));
        break;
      case Part::kv_lengths:
        mask.set_kv_lengths(draw_lengths(draws, shape.batch, shape.kv_length));
        break;
    }
  }
  if (mask.band().limited()) mask.set_offset(draw_offset(draws, shape));
  if (draws.chance(40)) draw_positions(draws, shape, mask);
  return mask;
}

// Entries for each batch, head and block, broadcast over some of these dimensions.
BlockMask draw_block_mask(Draws& draws, const Kind& kind, const AttentionShape& shape) {
  const auto draw_size = [&](std::int64_t length) {
    if (kind.fast) return draws.pick<std::int64_t>({64, 96, 128, 128, 128, 256});
    return draws.between(1, std::max<std::int64_t>(1, length / 2));
  };
  BlockSize size;
  size.query = draw_size(shape.query_length);
  size.kv = draw_size(shape.kv_length);
  Extents entries{shape.batch, shape.heads, (shape.query_length + size.query - 1) / size.query,
                  (shape.kv_length + size.kv - 1) / size.kv};
  if (draws.chance(70)) entries[0] = 1;
  if (draws.chance(50)) entries[1] = 1;
  if (draws.chance(5)) entries[2] = 1;
  if (draws.chance(5)) entries[3] = 1;
  std::vector<std::uint8_t> visible(static_cast<std::size_t>(entries.product()));
  int percent = draws.pick({6, 25, 50, 80});
  // If a few blocks were all hidden, a fast kernel would have nothing to compute.
  if (kind.fast && visible.size() < 8) percent = std::max(percent, 50);
  for (std::uint8_t& one : visible) one = draws.chance(percent) ? 1 : 0;
  return BlockMask(entries, size, visible);
}

// Sinks for each head, or for all heads alike: small ones, some as large as any logit, and some −∞.
Sinks draw_sinks(Draws& draws, std::int64_t heads) {
  const std::int64_t per_head = draws.between(1, 4);
  const Extents shape = draws.chance(70) ? Extents{heads, per_head} : Extents{per_head};
  std::vector<float> logits;
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    const auto drawn = static_cast<float>(draws.between(-64, 64)) / 16;
    logits.push_back(draws.chance(5) ? -std::numeric_limits<float>::infinity() : drawn);
  }
  return {shape, std::move(logits)};
}

// Any shape that can be broadcast to [B,N,T,S].
Extents draw_scores(Draws& draws, const Kind& kind, const AttentionShape& shape) {
  Extents scores{shape.batch, shape.heads, shape.query_length, shape.kv_length};
  if (kind.fast || draws.chance(50)) scores[0] = 1;
  for (int dim = 1; dim < 4; ++dim) {
    if (draws.chance(30)) scores[dim] = 1;
  }
  return scores;
}

// Some biases hide pairs themselves, with −∞. For small problems, entries that the mask hides are
// not finite.
FillPart draw_bias(Draws& draws, const Kind& kind, RandomProblem& drawn) {
  const Extents shape = draw_scores(draws, kind, drawn.problem.shape);
  drawn.problem.bias = shape;
  const BiasPolicy policy =
      draws.pick({BiasPolicy::combine, BiasPolicy::combine, BiasPolicy::combine,
                  BiasPolicy::bias_wins, BiasPolicy::bias_disables_causal});
  drawn.problem = under_policy(policy, std::move(drawn.problem));
  FillPart fill = random_bias(shape, draws.pick({0.3, 1.0, 4.0}), drawn.seed);
  if (draws.chance(40)) fill = hiding_bias(std::move(fill), random_mask(shape, 0.8, ~drawn.seed));
  if (kind.fast) return fill;
  return non_finite_bias(drawn.problem, {std::move(fill), drawn.fills.mask});
}

// A bias may hide pairs too.
bool hides_any(const AttentionProblem& problem) {
  return problem.mask.hides_any() || problem.dense_mask || problem.bias;
}

std::string draw_schedule(Draws& draws, const RandomProblem& drawn, int kv_shards) {
  const std::string schedule =
      kv_shards == 1
          ? draws.pick({"local", "local", "auto", "ring", "allgather", "ulysses", "pass_q"})
          : draws.pick({"ring", "ring", "double_ring", "allgather", "allgather", "ulysses",
                        "ulysses", "hybrid", "hybrid", "pass_q", "pass_q", "auto"});
  return schedule == "auto" || is_planned(drawn, schedule) ? schedule : plain_schedule(kv_shards);
}

// Draws another layout for the keys.
void draw_kv_layout(Draws& draws, ring::OperandLayout& layout) {
  std::vector<LayoutKind> others{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                 LayoutKind::balanced};
  std::erase(others, layout.sequence);
  if (layout.granule) std::erase(others, LayoutKind::striped);
  layout.kv_sequence = draws.pick(std::span<const LayoutKind>(others));
}

// Draws `vanilla`, in the precision that only it has or in another.
void draw_vanilla(Draws& draws, RandomProblem& drawn) {
  drawn.implementation = "vanilla";
  if (draws.chance(50)) drawn.problem.softmax_dtype = DType::float64;
  if (draws.chance(25)) drawn.problem.dtype = DType::float64;
}

ring::PlanOptions draw_plan(Draws& draws, int kv_shards) {
  ring::PlanOptions plan;
  plan.ulysses_degree = draws.chance(50) ? 0 : draw_divisor(draws, kv_shards, kv_shards);
  plan.inner_size = draw_divisor(draws, kv_shards, kv_shards);
  if (draws.chance(50)) plan.head_group_bytes = draws.pick<std::int64_t>({1, 1024, 65536});
  if (draws.chance(40)) plan.gather_bytes = draws.pick<std::int64_t>({1, 4096, 65536});
  if (draws.chance(40)) plan.result_bytes = draws.pick<std::int64_t>({1, 4096, 65536});
  if (draws.chance(50)) plan.prefetch_bytes = std::int64_t{1} << 20;
  plan.direct = draws.chance(50);
  return plan;
}

// Draws which values come with calls.
void draw_called(Draws& draws, RandomProblem& drawn, bool on_gpus) {
  if (!draws.chance(50)) return;
  AttentionProblem& problem = drawn.problem;
  const Mask& mask = problem.mask;
  CallArguments& arguments = problem.call_arguments;
  const bool lengths = !mask.query_lengths().empty() || !mask.kv_lengths().empty();
  const bool offsets = mask.position_parts().limited() && !mask.has_packings();
  arguments.lengths = draws.chance(70) && lengths;
  arguments.offsets = draws.chance(70) && offsets;
  arguments.dropout_seed = draws.chance(70) && problem.dropout;
  drawn.called.sinks = draws.chance(70) && problem.sinks;
  drawn.called.in_device_memory = draws.chance(50) && on_gpus;
}

}  // namespace

RandomProblem draw_problem(std::uint64_t seed, int index, int ranks, Place::Kind device) {
  Draws draws(seed, index);
  const bool on_gpus = device == Place::Kind::cuda;
  Kind kind;
  if (on_gpus && draws.chance(95)) {
    kind = {kLarge, true};
  } else if (draws.chance(4)) {
    kind.size = kMedium;
  }
  RandomProblem drawn;
  drawn.mesh = draw_mesh(draws, ranks);
  const Placement placement = draw_placement(draws, drawn.mesh);
  drawn.layout.query = PartitionSpec({placement.batch, placement.query_sequence, placement.heads});
  drawn.layout.kv = PartitionSpec({placement.batch, placement.kv_sequence, placement.heads});
  drawn.layout.sequence = draws.pick(
      {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced});
  if (drawn.layout.sequence != LayoutKind::striped && draws.chance(30)) {
    drawn.layout.granule = draws.pick<std::int64_t>({2, 4, 16});
  }

  AttentionProblem& problem = drawn.problem;
  problem.shape = draw_shape(draws, kind, drawn.mesh, placement);
  problem.dtype =
      kind.fast ? draws.pick({DType::float16, DType::float16, DType::bfloat16, DType::bfloat16,
                              DType::float32})
                : draws.pick({DType::float32, DType::float32, DType::float16, DType::bfloat16});
  if (draws.chance(30)) {
    // Fast kernels of half types need positive scales.
    problem.scale = kind.fast ? draws.pick({0.0, 0.03125, 0.0625, 0.125, 0.2, 0.3, 0.93, -0.2})
                              : draws.pick({0.0, 0.03125, 0.125, 0.93, -0.2});
  }
  if (draws.chance(25)) problem.soft_cap = draws.pick({1.5, 13.0, 30.0});
  problem.mask = draw_mask(draws, kind, problem.shape);

  const int kv_shards = drawn.mesh.size(placement.kv_sequence);
  drawn.plan = draw_plan(draws, kv_shards);
  drawn.seed = std::uint64_t{draws.word()} << 32U;
  drawn.seed |= draws.word();
  if (draws.chance(kind.fast ? 50 : 15)) {
    problem.mask.set_block_mask(draw_block_mask(draws, kind, problem.shape));
  }
  if (draws.chance(15)) problem.sinks = draw_sinks(draws, problem.shape.heads);
  if (draws.chance(kind.fast ? 8 : 15)) {
    problem.dropout.emplace(draws.pick({0.05, 0.1, 0.3, 0.5, 0.9}), drawn.seed);
  }
  if (draws.chance(kind.fast ? 5 : 20)) {
    const Extents shape = draw_scores(draws, kind, problem.shape);
    problem.dense_mask = shape;
    drawn.fills.mask = random_mask(shape, draws.pick({0.05, 0.5, 0.9}), drawn.seed);
  }
  if (draws.chance(kind.fast ? 5 : 20)) drawn.fills.bias = draw_bias(draws, kind, drawn);
  if (draws.chance(kind.fast ? 4 : 12)) problem.normalize_output = false;
  if (draws.chance(30)) draw_kv_layout(draws, drawn.layout);
  if (!on_gpus && draws.chance(15)) draw_vanilla(draws, drawn);
  if (hides_any(problem) && draws.chance(33)) {
    drawn.fills = with_non_finite_entries(problem, std::move(drawn.fills), drawn.seed, device);
  }
  drawn.schedule = draw_schedule(draws, drawn, kv_shards);
  draw_backward(draws, drawn, kv_shards, device);
  draw_called(draws, drawn, on_gpus);
  drawn.command = fmt::format("mpirun -np {} annulus verify --random-case {}:{} --device {}", ranks,
                              seed, index, on_gpus ? "cuda" : "cpu");
  return drawn;
}

}  // namespace annulus::verification
