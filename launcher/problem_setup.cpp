#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/launcher/files/array_file.hpp>
#include <annulus/launcher/files/array_info.hpp>
#include <annulus/launcher/problem_setup.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus::launcher {
namespace {

// Lower floors name their own arguments; the user knows the options.
template <class Body>
auto as_option(const std::string& option, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const ArgumentError& error) {
    throw ArgumentError(option, error.value(), error.expected());
  }
}

/// The small int32 arrays that masks need: each from its own option, else from --input.
class MaskFiles {
 public:
  explicit MaskFiles(const Options& options) : input_(options.input) {
    if (input_.empty()) return;
    input_tensors_ = tensor_names(input_);
    for (const char* later : {"bias", "mask", "block_mask", "sinks"}) {
      if (in_input(later)) {
        throw NotAvailableError(fmt::format("tensor {} of {}", later, input_));
      }
    }
  }

  /// The file that holds a tensor; empty if there is none. `given` is what its option says.
  [[nodiscard]] std::string locate(const std::string& given, const std::string& tensor) const {
    if (!given.empty() || !in_input(tensor)) return given;
    return input_;
  }

 private:
  [[nodiscard]] bool in_input(const std::string& tensor) const {
    return std::find(input_tensors_.begin(), input_tensors_.end(), tensor) != input_tensors_.end();
  }

  std::string input_;
  std::vector<std::string> input_tensors_;
};

/// Reads a whole int32 array; `dimensions` is "[B, T]" for the message.
std::vector<std::int32_t> read_int32(const std::string& path, const std::string& tensor,
                                     const Extents& shape, const char* dimensions) {
  const ArrayFile file(path, tensor, DType::int32);
  if (file.shape() != shape) {
    throw FileError(path, fmt::format("{}: shape {}, expected {} = {}", tensor,
                                      to_string(file.shape()), dimensions, to_string(shape)));
  }
  std::vector<std::int32_t> values(static_cast<std::size_t>(shape.product()));
  file.read_slice(whole(shape), TensorView(values.data(), DType::int32, shape));
  return values;
}

std::vector<std::int32_t> read_cu_seqlens(const std::string& path) {
  const ArrayFile file(path, "cu_seqlens", DType::int32);
  if (file.shape().rank() != 1) {
    throw FileError(path, fmt::format("cu_seqlens: shape {}, expected [documents + 1]",
                                      to_string(file.shape())));
  }
  std::vector<std::int32_t> values(static_cast<std::size_t>(file.shape()[0]));
  file.read_slice(whole(file.shape()), TensorView(values.data(), DType::int32, file.shape()));
  return values;
}

// The same packing for every batch row.
void set_packing(Mask& mask, const std::string& path, const AttentionShape& shape) {
  if (shape.query_length != shape.kv_length) {
    throw ArgumentError("--cu-seqlens",
                        fmt::format("T = {} and S = {}", shape.query_length, shape.kv_length),
                        "T equal to S; use --q-segments and --kv-segments for two packings");
  }
  const std::vector<std::int32_t> row = as_option("--cu-seqlens (" + path + ")", [&] {
    return segments_from_cu_seqlens(read_cu_seqlens(path), shape.query_length);
  });
  std::vector<std::int32_t> ids;
  ids.reserve(row.size() * static_cast<std::size_t>(shape.batch));
  for (std::int64_t b = 0; b < shape.batch; ++b) ids.insert(ids.end(), row.begin(), row.end());
  mask.set_segments(shape.batch, ids, ids);
}

void set_segments(Mask& mask, const MaskFiles& files, const Options& options,
                  const AttentionShape& shape) {
  const std::string queries = files.locate(options.query_segments, "q_segments");
  const std::string keys = files.locate(options.kv_segments, "kv_segments");
  const std::string packing = files.locate(options.cu_seqlens, "cu_seqlens");
  if (!packing.empty()) {
    if (!queries.empty() || !keys.empty()) {
      throw UserError(
          "--cu-seqlens: makes segment ids itself, so --q-segments and --kv-segments "
          "cannot stand beside it");
    }
    set_packing(mask, packing, shape);
    return;
  }
  if (queries.empty() != keys.empty()) {
    throw ArgumentError(queries.empty() ? "--q-segments" : "--kv-segments", "nothing",
                        "segment ids of both sides, or of neither");
  }
  if (queries.empty()) return;
  mask.set_segments(shape.batch,
                    read_int32(queries, "q_segments", {shape.batch, shape.query_length}, "[B, T]"),
                    read_int32(keys, "kv_segments", {shape.batch, shape.kv_length}, "[B, S]"));
}

Mask set_up_mask(const Options& options, const AttentionShape& shape) {
  Mask mask;
  mask.set_causal(options.causal);
  if (options.causal_offset) {
    if (!options.causal && !options.window) {
      throw UserError("--causal-offset: shifts --causal or --window, and neither is given");
    }
    const std::int64_t offset = options.causal_offset->bottom_right
                                    ? shape.kv_length - shape.query_length
                                    : options.causal_offset->value;
    as_option("--causal-offset", [&] { mask.set_offset(offset); });
  }
  if (options.window) {
    as_option("--window", [&] { mask.set_window(options.window->left, options.window->right); });
  }
  const MaskFiles files(options);
  set_segments(mask, files, options, shape);
  if (const auto path = files.locate(options.query_lengths, "q_lengths"); !path.empty()) {
    as_option("--q-lengths (" + path + ")",
              [&] { mask.set_query_lengths(read_int32(path, "q_lengths", {shape.batch}, "[B]")); });
  }
  if (const auto path = files.locate(options.kv_lengths, "kv_lengths"); !path.empty()) {
    as_option("--kv-lengths (" + path + ")",
              [&] { mask.set_kv_lengths(read_int32(path, "kv_lengths", {shape.batch}, "[B]")); });
  }
  return mask;
}

LayoutKind sequence_layout(const Options& options) {
  if (options.sequence_layout != "auto") return parse_layout(options.sequence_layout);
  return options.causal ? LayoutKind::zigzag : LayoutKind::contiguous;
}

}  // namespace

MeshShape set_up_mesh(const Options& options, int ranks) {
  if (options.mesh) {
    return as_option("--mesh", [&] { return MeshShape::parse(*options.mesh, ranks); });
  }
  if (ranks == 0) {
    throw ArgumentError("--mesh", "nothing", "the axes and their sizes, such as dp=1,sp=4,tp=1");
  }
  return MeshShape({{"sp", ranks}});
}

ProblemSetup set_up_problem(const Options& options, const AttentionShape& shape, DType dtype,
                            int ranks) {
  ProblemSetup setup;
  setup.mesh = set_up_mesh(options, ranks);
  setup.problem.shape = shape;
  setup.problem.dtype = dtype;
  setup.problem.scale = options.scale;
  setup.problem.soft_cap = options.soft_cap;
  setup.problem.mask = set_up_mask(options, shape);
  setup.problem.validate();

  const AttentionMode mode =
      options.mode ? parse_attention_mode(*options.mode) : infer_attention_mode(shape.query_length);
  const ShardingRules rules = ShardingRules().for_mesh(setup.mesh);
  const auto spec = [](const std::optional<std::string>& given, const char* option,
                       const PartitionSpec& otherwise) {
    return given ? PartitionSpec::parse(*given, option) : otherwise;
  };
  setup.layout.query = spec(options.query_spec, "--query-spec", rules.query_spec(mode));
  setup.layout.kv = spec(options.kv_spec, "--kv-spec", rules.kv_spec(mode));
  setup.layout.sequence = sequence_layout(options);
  return setup;
}

}  // namespace annulus::launcher
