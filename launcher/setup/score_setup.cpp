#include "launcher/setup/score_setup.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/options/option_values.hpp"

namespace annulus::launcher {
namespace {

using verification::FillPart;

/// A bias or a mask: its shape [B,N,T,S], with 1 where it is broadcast, and the function that fills
/// it.
struct Scores {
  Extents shape;
  FillPart fill;
};

Extents last_dims(const Extents& extents, int rank) {
  Extents last(std::vector<std::int64_t>(static_cast<std::size_t>(rank)));
  for (int dim = 0; dim < rank; ++dim) last[dim] = extents[extents.rank() - rank + dim];
  return last;
}

void read_part(const files::ArrayFile& file, const TensorView& part,
               std::span<const PositionRanges> index) {
  const int rank = file.shape().rank();
  const TensorView entries(part.data(), file.dtype(), last_dims(part.shape(), rank));
  index = index.last(static_cast<std::size_t>(rank));
  if (is_floating(file.dtype())) {
    file.read_slice(index, entries);
  } else {
    file.read_flags(index, entries);
  }
}

// Opens the file of a bias or a mask. Missing leading dimensions count as 1.
Scores open_scores(const OperandFile& from, const std::vector<DType>& accepted) {
  return as_option(from.shown, [&] {
    auto file = std::make_shared<const files::ArrayFile>(from.path, from.tensor, accepted);
    const int rank = file->shape().rank();
    if (rank > 4) {
      throw FileError(from.path, fmt::format("shape {}, expected one that can be broadcast to "
                                             "[B,N,T,S]",
                                             to_string(file->shape())));
    }
    Extents shape{1, 1, 1, 1};
    for (int dim = 0; dim < rank; ++dim) shape[4 - rank + dim] = file->shape()[dim];
    return Scores{shape, [file = std::move(file), shown = from.shown](
                             const TensorView& part, std::span<const PositionRanges> index) {
                    as_option(shown, [&] { read_part(*file, part, index); });
                  }};
  });
}

Scores set_up_bias(const OperandFile& file, const Options& options, const AttentionShape& shape) {
  const char* const deviation = random_value(options.bias);
  if (deviation == nullptr) return open_scores(file, {DType::float32});
  const Extents whole{1, shape.heads, shape.query_length, shape.kv_length};
  const double number = parse_number(file.shown, deviation);
  if (!(number >= 0)) {
    throw ArgumentError(file.shown, fmt::format("'{}'", deviation),
                        "a standard deviation of 0 or more");
  }
  return {whole,
          verification::random_bias(whole, number, options.seed, std::max(1, options.threads))};
}

Scores set_up_mask(const OperandFile& file, const Options& options, const AttentionShape& shape) {
  const char* const density = random_value(options.mask);
  if (density == nullptr) return open_scores(file, {DType::boolean, DType::uint8});
  const Extents whole{shape.batch, 1, shape.query_length, shape.kv_length};
  const double number = parse_number(file.shown, density);
  return {whole, as_option(file.shown,
                           [&] { return verification::random_mask(whole, number, options.seed); })};
}

}  // namespace

verification::OperandFills set_up_scores(const OperandFiles& files, const Options& options,
                                         AttentionProblem& problem) {
  verification::OperandFills fills;
  const AttentionShape& shape = problem.shape;
  if (const auto file = files.locate("--mask", options.mask); !file.empty()) {
    Scores mask = set_up_mask(file, options, shape);
    problem.dense_mask = mask.shape;
    fills.mask = std::move(mask.fill);
    as_option(file.shown, [&] { problem.validate(); });
  }
  if (const auto file = files.locate("--bias", options.bias); !file.empty()) {
    Scores bias = set_up_bias(file, options, shape);
    problem.bias = bias.shape;
    fills.bias = std::move(bias.fill);
    as_option(file.shown, [&] { problem.validate(); });
  } else if (options.named.contains("bias-policy")) {
    throw UserError("--bias-policy: there is no bias to apply it to; it needs --bias");
  }
  problem = under_policy(options.bias_policy, std::move(problem));
  return fills;
}

}  // namespace annulus::launcher
