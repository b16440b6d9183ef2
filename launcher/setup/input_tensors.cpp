#include "launcher/setup/input_tensors.hpp"

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/setup/hints.hpp"

namespace annulus::launcher {
namespace {

/// A tensor and the option that names its file.
struct Operand {
  const char* name;
  std::string Options::*file;
};
constexpr Operand kQuery{"query", &Options::query};
constexpr Operand kKey{"key", &Options::key};
constexpr Operand kValue{"value", &Options::value};

// A tensor's option and file, as messages name them.
std::string shown(const Options& options, const Operand& operand) {
  if (!options.input.empty()) return "--input " + options.input;
  return fmt::format("--{} {}", operand.name, options.*operand.file);
}

files::ArrayFile open(const Options& options, const Operand& operand) {
  std::vector<DType> accepted{DType::float32, DType::float16, DType::bfloat16, DType::float64};
  if (options.dtype) accepted = {*options.dtype};
  return as_option(shown(options, operand), [&] {
    return files::ArrayFile(options.input.empty() ? options.*operand.file : options.input,
                            operand.name, accepted);
  });
}

/// Sizes of one tensor, independent of the order in its file.
struct TensorSizes {
  std::int64_t batch;
  std::int64_t length;
  std::int64_t heads;
  std::int64_t dim;
};

TensorSizes sizes_of(const files::ArrayFile& file, const char* name, bool bhtd) {
  const Extents& shape = file.shape();
  if (shape.rank() != 4) {
    throw FileError(file.path(),
                    fmt::format("{}: shape {}, expected 4 dimensions, {}", name, to_string(shape),
                                bhtd ? "batch, heads, length, head dimension"
                                     : "batch, length, heads, head dimension"));
  }
  const Extents ordered = file_order(shape, bhtd);  // the swap is its own inverse
  return {ordered[0], ordered[1], ordered[2], ordered[3]};
}

/// Compares one size of a tensor with that of the tensor that it must match.
void check_size(const files::ArrayFile& file, const char* name, const char* what,
                std::int64_t found, std::int64_t expected, const files::ArrayFile& other,
                const char* other_name) {
  if (found == expected) return;
  throw FileError(file.path(),
                  fmt::format("{}: {} is {} (shape {}), expected {} as {} has in {} (shape {})",
                              name, what, found, to_string(file.shape()), expected, other_name,
                              other.path(), to_string(other.shape())));
}

void check_dtype(const files::ArrayFile& file, const char* name, DType expected,
                 const files::ArrayFile& query) {
  if (file.dtype() == expected) return;
  throw FileError(file.path(), fmt::format("{}: {}, expected {} as query has in {}", name,
                                           annulus::name_of(file.dtype()),
                                           annulus::name_of(expected), query.path()));
}

}  // namespace

Extents file_order(const Extents& shape, bool bhtd) {
  return bhtd ? Extents{shape[0], shape[2], shape[1], shape[3]} : shape;
}

std::vector<PositionRanges> file_order(std::vector<PositionRanges> index, bool bhtd) {
  if (bhtd) std::swap(index[1], index[2]);
  return index;
}

TensorView file_order(const TensorView& view, bool bhtd) {
  return bhtd ? view.permute({0, 2, 1, 3}) : view;
}

namespace {

InputTensors open_in_order(const Options& options) {
  InputTensors inputs{
      open(options, kQuery), open(options, kKey), open(options, kValue), {}, DType::float32};
  inputs.dtype = inputs.query.dtype();
  const auto against_query = [&](const files::ArrayFile& file, const char* name, const char* what,
                                 std::int64_t found, std::int64_t expected) {
    check_size(file, name, what, found, expected, inputs.query, "query");
  };

  const auto query = as_option(shown(options, kQuery), [&] {
    const TensorSizes sizes = sizes_of(inputs.query, "query", options.bhtd);
    if (sizes.heads < 1 || sizes.dim < 1) {
      throw FileError(inputs.query.path(), fmt::format("query: shape {}, expected heads N and head "
                                                       "dimension D of 1 or more",
                                                       to_string(inputs.query.shape())));
    }
    return sizes;
  });
  const auto key = as_option(shown(options, kKey), [&] {
    check_dtype(inputs.key, "key", inputs.dtype, inputs.query);
    const TensorSizes sizes = sizes_of(inputs.key, "key", options.bhtd);
    against_query(inputs.key, "key", "batch B", sizes.batch, query.batch);
    against_query(inputs.key, "key", "head dimension D", sizes.dim, query.dim);
    if (sizes.heads < 1 || query.heads % sizes.heads != 0) {
      throw FileError(inputs.key.path(),
                      fmt::format("key: heads K is {}, expected a divisor of the {} heads N that "
                                  "query has in {}",
                                  sizes.heads, query.heads, inputs.query.path()));
    }
    return sizes;
  });
  const auto value = as_option(shown(options, kValue), [&] {
    check_dtype(inputs.value, "value", inputs.dtype, inputs.query);
    const TensorSizes sizes = sizes_of(inputs.value, "value", options.bhtd);
    against_query(inputs.value, "value", "batch B", sizes.batch, query.batch);
    check_size(inputs.value, "value", "heads K", sizes.heads, key.heads, inputs.key, "key");
    if (sizes.dim < 1) {
      throw FileError(inputs.value.path(),
                      fmt::format("value: shape {}, expected a head dimension Dv of 1 or more",
                                  to_string(inputs.value.shape())));
    }
    return sizes;
  });
  if (value.length == query.length) {  // then a key of another length is at fault
    as_option(shown(options, kKey), [&] {
      check_size(inputs.key, "key", "length S", key.length, value.length, inputs.value, "value");
    });
  }
  as_option(shown(options, kValue), [&] {
    check_size(inputs.value, "value", "length S", value.length, key.length, inputs.key, "key");
  });
  inputs.shape = {query.batch, query.length, key.length, query.heads,
                  key.heads,   query.dim,    value.dim};
  return inputs;
}

// Throws UserError if the tensors do not have the sizes of --model-config.
void check_model(const Options& options, const AttentionShape& shape) {
  if (!options.model_sizes) return;
  const ModelSizes& model = *options.model_sizes;
  const ModelSizes found{shape.heads, shape.kv_heads, shape.head_dim};
  if (found == model) return;
  throw ArgumentError(
      options.input.empty() ? "--query/--key" : "--input", to_string(found),
      fmt::format("{} as in --model-config {}", to_string(model), options.model_config));
}

// The shapes of all three files, even if they do not fit each other; empty if one is not an array
// of 4 dimensions.
std::vector<Extents> shapes_in_files(const Options& options) {
  std::vector<Extents> shapes;
  for (const Operand& operand : {kQuery, kKey, kValue}) {
    try {
      shapes.push_back(open(options, operand).shape());
    } catch (const UserError&) {
      return {};
    }
    if (shapes.back().rank() != 4) return {};
  }
  return shapes;
}

// " (with --layout bhtd they fit each other)", or the like; "" unless exactly one other order of
// the files makes sense.
std::string hint_of_order(const Options& options) {
  const std::vector<Extents> shapes = shapes_in_files(options);
  if (shapes.empty()) return {};
  const auto fit = [&](bool query_bhtd, bool others_bhtd) {
    const Extents q = file_order(shapes[0], query_bhtd);
    const Extents k = file_order(shapes[1], others_bhtd);
    const Extents v = file_order(shapes[2], others_bhtd);
    return q[0] == k[0] && q[3] == k[3] && k[0] == v[0] && k[1] == v[1] && k[2] == v[2] &&
           k[2] >= 1 && q[2] % k[2] == 0 && q[2] <= kMaximumHeads;
  };
  const bool other = !options.bhtd;
  const char* const layout = other ? "bhtd" : "bthd";
  const bool all = fit(other, other);
  const bool query_alone = fit(other, options.bhtd);
  const bool others_alone = fit(options.bhtd, other);
  if (all + query_alone + others_alone != 1) return {};
  if (all) return fmt::format(" (with --layout {} they fit each other)", layout);
  return fmt::format(" ({} in the order {}: all files need one, that of --layout)",
                     query_alone ? "query seems to be" : "key and value seem to be", layout);
}

}  // namespace

InputTensors open_inputs(const Options& options) {
  try {
    InputTensors inputs = open_in_order(options);
    check_model(options, inputs.shape);
    return inputs;
  } catch (const UserError& error) {
    const std::string hint = hint_of_order(options);
    if (hint.empty()) throw;
    throw UserError(error.what() + hint);
  }
}

Tensor read_shard(const files::ArrayFile& file, const NamedSharding& sharding, int rank, bool bhtd,
                  MemoryPool& memory) {
  Tensor shard(file.dtype(), sharding.local_shape(rank), memory);
  file.read_slice(file_order(sharding.index(rank), bhtd), file_order(shard.view(), bhtd));
  return shard;
}

}  // namespace annulus::launcher
