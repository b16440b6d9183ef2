#include "input_tensors.hpp"

#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

const std::string& path_of(const Options& options, const std::string& given, const char* option) {
  if (!options.input.empty()) return options.input;
  if (given.empty()) {
    throw ArgumentError(option, "nothing",
                        "a .npy or .safetensors file (or --input with query, key and value)");
  }
  return given;
}

/// Sizes of one tensor, whatever the order in its file.
struct TensorSizes {
  std::int64_t batch;
  std::int64_t length;
  std::int64_t heads;
  std::int64_t dim;
};

TensorSizes sizes_of(const ArrayFile& file, const char* name, bool bhtd) {
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

/// Compares one size of a tensor with the tensor that it has to fit.
void check_size(const ArrayFile& file, const char* name, const char* what, std::int64_t found,
                std::int64_t expected, const ArrayFile& other, const char* other_name) {
  if (found == expected) return;
  throw FileError(file.path(),
                  fmt::format("{}: {} is {} (shape {}), expected {} as {} has in {} (shape {})",
                              name, what, found, to_string(file.shape()), expected, other_name,
                              other.path(), to_string(other.shape())));
}

void check_dtype(const ArrayFile& file, const char* name, DType expected, const ArrayFile& query) {
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

InputTensors open_inputs(const Options& options) {
  InputTensors inputs{ArrayFile(path_of(options, options.query, "--query"), "query", options.dtype),
                      ArrayFile(path_of(options, options.key, "--key"), "key", options.dtype),
                      ArrayFile(path_of(options, options.value, "--value"), "value", options.dtype),
                      {},
                      DType::float32};
  inputs.dtype = inputs.query.dtype();
  if (inputs.dtype != DType::float32 && inputs.dtype != DType::float16 &&
      inputs.dtype != DType::bfloat16) {
    throw FileError(inputs.query.path(),
                    fmt::format("query: {}, expected float32, float16 or bfloat16",
                                annulus::name_of(inputs.dtype)));
  }
  check_dtype(inputs.key, "key", inputs.dtype, inputs.query);
  check_dtype(inputs.value, "value", inputs.dtype, inputs.query);

  const TensorSizes query = sizes_of(inputs.query, "query", options.bhtd);
  const TensorSizes key = sizes_of(inputs.key, "key", options.bhtd);
  const TensorSizes value = sizes_of(inputs.value, "value", options.bhtd);
  if (query.heads < 1 || query.dim < 1) {
    throw FileError(inputs.query.path(), fmt::format("query: shape {}, expected heads N and head "
                                                     "dimension D of 1 or more",
                                                     to_string(inputs.query.shape())));
  }
  const auto against_query = [&](const ArrayFile& file, const char* name, const char* what,
                                 std::int64_t found, std::int64_t expected) {
    check_size(file, name, what, found, expected, inputs.query, "query");
  };
  against_query(inputs.key, "key", "batch B", key.batch, query.batch);
  against_query(inputs.key, "key", "head dimension D", key.dim, query.dim);
  if (key.heads < 1 || query.heads % key.heads != 0) {
    throw FileError(inputs.key.path(),
                    fmt::format("key: heads K is {}, expected a divisor of the {} heads N that "
                                "query has in {}",
                                key.heads, query.heads, inputs.query.path()));
  }
  against_query(inputs.value, "value", "batch B", value.batch, query.batch);
  check_size(inputs.value, "value", "length S", value.length, key.length, inputs.key, "key");
  check_size(inputs.value, "value", "heads K", value.heads, key.heads, inputs.key, "key");
  if (value.dim < 1) {
    throw FileError(inputs.value.path(),
                    fmt::format("value: shape {}, expected a head dimension Dv "
                                "of 1 or more",
                                to_string(inputs.value.shape())));
  }
  inputs.shape = {query.batch, query.length, key.length, query.heads,
                  key.heads,   query.dim,    value.dim};
  return inputs;
}

Tensor read_shard(const ArrayFile& file, const NamedSharding& sharding, int rank, bool bhtd,
                  MemoryPool& memory) {
  Tensor shard(file.dtype(), sharding.local_shape(rank), memory);
  file.read_slice(file_order(sharding.index(rank), bhtd), file_order(shard.view(), bhtd));
  return shard;
}

}  // namespace annulus::launcher
