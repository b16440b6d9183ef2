#include "launcher/setup/input_tensors.hpp"

#include <exception>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

// A tensor's option and file, as messages name them.
std::string shown(const Options& options, const char* option, const std::string& given) {
  if (!options.input.empty()) return "--input " + options.input;
  return fmt::format("{} {}", option, given);
}

files::ArrayFile open(const Options& options, const char* option, const std::string& given,
                      const char* name) {
  std::vector<DType> accepted{DType::float32, DType::float16, DType::bfloat16, DType::float64};
  if (options.dtype) accepted = {*options.dtype};
  return as_option(shown(options, option, given), [&] {
    return files::ArrayFile(options.input.empty() ? given : options.input, name, accepted);
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
  InputTensors inputs{open(options, "--query", options.query, "query"),
                      open(options, "--key", options.key, "key"),
                      open(options, "--value", options.value, "value"),
                      {},
                      DType::float32};
  inputs.dtype = inputs.query.dtype();
  const auto against_query = [&](const files::ArrayFile& file, const char* name, const char* what,
                                 std::int64_t found, std::int64_t expected) {
    check_size(file, name, what, found, expected, inputs.query, "query");
  };

  const auto query = as_option(shown(options, "--query", options.query), [&] {
    const TensorSizes sizes = sizes_of(inputs.query, "query", options.bhtd);
    if (sizes.heads < 1 || sizes.dim < 1) {
      throw FileError(inputs.query.path(), fmt::format("query: shape {}, expected heads N and head "
                                                       "dimension D of 1 or more",
                                                       to_string(inputs.query.shape())));
    }
    return sizes;
  });
  const auto key = as_option(shown(options, "--key", options.key), [&] {
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
  const auto value = as_option(shown(options, "--value", options.value), [&] {
    check_dtype(inputs.value, "value", inputs.dtype, inputs.query);
    const TensorSizes sizes = sizes_of(inputs.value, "value", options.bhtd);
    against_query(inputs.value, "value", "batch B", sizes.batch, query.batch);
    check_size(inputs.value, "value", "length S", sizes.length, key.length, inputs.key, "key");
    check_size(inputs.value, "value", "heads K", sizes.heads, key.heads, inputs.key, "key");
    if (sizes.dim < 1) {
      throw FileError(inputs.value.path(),
                      fmt::format("value: shape {}, expected a head dimension Dv of 1 or more",
                                  to_string(inputs.value.shape())));
    }
    return sizes;
  });
  inputs.shape = {query.batch, query.length, key.length, query.heads,
                  key.heads,   query.dim,    value.dim};
  return inputs;
}

}  // namespace

InputTensors open_inputs(const Options& options) {
  try {
    return open_in_order(options);
  } catch (const UserError& error) {
    const std::exception_ptr original = std::current_exception();
    // If the files fit in the other order, the error says so.
    Options swapped = options;
    swapped.bhtd = !options.bhtd;
    try {
      static_cast<void>(open_in_order(swapped));
    } catch (const UserError&) {
      std::rethrow_exception(original);
    }
    throw UserError(fmt::format("{} (with --layout {} they fit each other)", error.what(),
                                swapped.bhtd ? "bhtd" : "bthd"));
  }
}

Tensor read_shard(const files::ArrayFile& file, const NamedSharding& sharding, int rank, bool bhtd,
                  MemoryPool& memory) {
  Tensor shard(file.dtype(), sharding.local_shape(rank), memory);
  file.read_slice(file_order(sharding.index(rank), bhtd), file_order(shard.view(), bhtd));
  return shard;
}

}  // namespace annulus::launcher
