#include "tests/attention/references/reference_case.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/files/integer_file.hpp>
#include <annulus/files/text_file.hpp>

#include "tests/attention/random_tensor.hpp"

namespace annulus::test {
namespace {

using nlohmann::json;

constexpr const char* kCases = ANNULUS_TEST_REFERENCES "/cases";
constexpr const char* kGradients = ANNULUS_TEST_REFERENCES "/gradients";

std::string path_of(const std::string& folder, const std::string& name, const char* ending) {
  return folder + "/" + name + ending;
}

// The tensors of one case.
class TensorFile {
 public:
  TensorFile(const std::string& folder, const std::string& name)
      : path_(path_of(folder, name, ".safetensors")), names_(files::tensor_names(path_)) {
    for (const std::string& tensor : names_) check_known(tensor);
  }

  [[nodiscard]] bool has(std::string_view tensor) const {
    return !removed_.contains(std::string(tensor)) &&
           std::find(names_.begin(), names_.end(), tensor) != names_.end();
  }
  /// A bias or a mask [B,N,T,S]; of rank 0 if there is none.
  [[nodiscard]] Tensor scores(const std::string& tensor, DType dtype) const {
    return has(tensor) ? read(tensor, {dtype}) : Tensor();
  }
  [[nodiscard]] Tensor read(const std::string& tensor, const std::vector<DType>& accepted) const {
    const auto replaced = replaced_.find(tensor);
    const std::string& name = replaced == replaced_.end() ? tensor : replaced->second;
    const files::ArrayFile file(path_, name, accepted);
    Tensor result(file.dtype(), file.shape(), test_memory());
    file.read_slice(files::whole(file.shape()), result.view());
    return result;
  }
  /// Reads `other` where `tensor` is asked for.
  void replace(const std::string& tensor, const std::string& other) { replaced_[tensor] = other; }
  void remove(const std::string& tensor) { removed_.insert(tensor); }
  [[nodiscard]] std::vector<std::int32_t> integers(const char* tensor) const {
    return files::IntegerFile(path_, tensor).read();
  }

 private:
  void check_known(const std::string& tensor) const {
    constexpr std::array kKnown{
        "query",          "key",        "value",      "output",        "lse",         "q_segments",
        "kv_segments",    "cu_seqlens", "q_lengths",  "kv_lengths",    "block_mask",  "sinks",
        "sinks_as_taken", "bias",       "mask",       "bias_as_taken", "grad_output", "grad_lse",
        "grad_query",     "grad_key",   "grad_value", "grad_bias",     "grad_sinks"};
    if (std::find(kKnown.begin(), kKnown.end(), tensor) == kKnown.end()) {
      throw UserError(path_ + ": tensor " + tensor + " is not taken");
    }
  }

  std::string path_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> replaced_;
  std::set<std::string> removed_;
};

Sinks sinks_of(const TensorFile& file) {
  const Tensor logits = file.read("sinks", {DType::float32});
  const auto* values = logits.view().as<float>();
  return {logits.shape(), {values, values + logits.shape().product()}};
}

Mask mask_of(const json& options, const TensorFile& file, const AttentionShape& shape) {
  Mask mask;
  mask.set_causal(options.value("causal", false));
  mask.set_offset(options.value("causal-offset", 0));
  if (const auto window = options.find("window"); window != options.end()) {
    mask.set_window(window->front(), window->back());
  }
  if (file.has("q_segments")) {
    mask.set_segments(shape.batch, file.integers("q_segments"), file.integers("kv_segments"));
  }
  if (file.has("cu_seqlens")) {
    const auto row = segments_from_cu_seqlens(file.integers("cu_seqlens"), shape.query_length);
    std::vector<std::int32_t> ids;
    for (std::int64_t b = 0; b < shape.batch; ++b) ids.insert(ids.end(), row.begin(), row.end());
    mask.set_segments(shape.batch, ids, ids);
  }
  if (file.has("q_lengths")) mask.set_query_lengths(file.integers("q_lengths"));
  if (file.has("kv_lengths")) mask.set_kv_lengths(file.integers("kv_lengths"));
  if (file.has("block_mask")) {
    const Tensor entries = file.read("block_mask", {DType::boolean});
    const json& size = options.at("block-size");
    const auto* bytes = static_cast<const std::uint8_t*>(entries.view().data());
    mask.set_block_mask(BlockMask(entries.shape(), {size.at(0), size.at(1)},
                                  {bytes, static_cast<std::size_t>(entries.shape().product())}));
  }
  return mask;
}

AttentionProblem problem_of(const json& options, const TensorFile& file,
                            const AttentionShape& shape, DType dtype) {
  constexpr std::array kKnown{"causal",     "causal-offset", "window",
                              "block-size", "scale",         "soft-cap"};
  for (const auto& [option, value] : options.items()) {
    if (std::find(kKnown.begin(), kKnown.end(), option) == kKnown.end()) {
      throw UserError("option " + option + " is not taken");
    }
  }
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  if (options.contains("scale")) problem.scale = options.at("scale").get<double>();
  if (options.contains("soft-cap")) problem.soft_cap = options.at("soft-cap").get<double>();
  problem.mask = mask_of(options, file, shape);
  if (file.has("sinks")) problem.sinks = sinks_of(file);
  if (file.has("bias")) problem.bias = file.scores("bias", DType::float32).shape();
  if (file.has("mask")) problem.dense_mask = file.scores("mask", DType::boolean).shape();
  problem.validate();
  return problem;
}

DType float_type(const std::string& name) {
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
    if (name_of(dtype) == name) return dtype;
  }
  throw UserError("no floating-point dtype: " + name);
}

void read_differences(const json& differs, const json& options, const TensorFile& file,
                      ReferenceCase& result) {
  for (const auto& [key, value] : differs.items()) {
    if (key == "says") continue;
    if (key == "empty_rows" && value == "mean") {
      result.differs_in_empty_rows = true;
    } else if (key == "lse_rounded_to") {
      result.lse_dtype = float_type(value);
    } else if (key == "equals_with") {
      json changed = options;
      changed.update(value.value("options", json::object()));
      TensorFile other = file;
      const json tensors = value.value("tensors", json::object());
      for (const auto& [tensor, name] : tensors.items()) {
        if (name.is_null()) {
          other.remove(tensor);
        } else {
          other.replace(tensor, name);
        }
      }
      result.taken_for = problem_of(changed, other, result.problem.shape, result.problem.dtype);
      result.bias_as_taken = other.scores("bias", DType::float32);
      result.mask_as_taken = other.scores("mask", DType::boolean);
    } else {
      throw UserError("difference " + key + " is not known");
    }
  }
}

const std::vector<DType>& floats_of_files() {
  static const std::vector<DType> floats{DType::float32, DType::float16, DType::bfloat16};
  return floats;
}

ReferenceCase read(const std::string& folder, const std::string& name) {
  const json description = json::parse(files::read_text(path_of(folder, name, ".json")));
  const TensorFile file(folder, name);
  const std::vector<DType>& floats = floats_of_files();
  ReferenceCase result{name,
                       {},
                       file.read("query", floats),
                       file.read("key", floats),
                       file.read("value", floats),
                       file.read("output", floats)};
  result.bias = file.scores("bias", DType::float32);
  result.mask = file.scores("mask", DType::boolean);
  if (file.has("lse")) result.lse = file.read("lse", {DType::float32});
  const Extents& query = result.query.shape();
  const Extents& value = result.value.shape();
  const json options = description.value("options", json::object());
  result.problem = problem_of(
      options, file, {query[0], query[1], value[1], query[2], value[2], query[3], value[3]},
      result.query.view().dtype());
  read_differences(description.value("differs", json::object()), options, file, result);
  if (const auto found = description.find("sharding"); found != description.end()) {
    result.sharding = {found->at("mesh"), found->at("query_spec"), found->at("kv_spec"),
                       found->at("devices")};
  }
  return result;
}

}  // namespace

ScoreTensors ReferenceCase::scores(const AttentionProblem& of) const {
  const bool taken = &of != &problem;
  const AttentionShape& s = of.shape;
  return broadcast_scores((taken ? bias_as_taken : bias).view(),
                          (taken ? mask_as_taken : mask).view(),
                          {s.batch, s.heads, s.query_length, s.kv_length});
}

namespace {

// Returns what `make` returns; errors in the description name its file.
template <class Make>
auto named(const std::string& folder, const std::string& name, const Make& make) {
  try {
    return make();
  } catch (const json::exception& error) {
    throw UserError(path_of(folder, name, ".json") + ": " + error.what());
  }
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

ReferenceCase read_reference(const std::string& name) {
  return named(kCases, name, [&] { return read(kCases, name); });
}

ReferenceGradients read_reference_gradients(const std::string& name) {
  return named(kGradients, name, [&] {
    const TensorFile file(kGradients, name);
    const auto tensor = [&](const char* which) {
      return file.has(which) ? file.read(which, floats_of_files()) : Tensor();
    };
    return ReferenceGradients{read(kGradients, name), tensor("grad_output"), tensor("grad_lse"),
                              tensor("grad_query"),   tensor("grad_key"),    tensor("grad_value"),
                              tensor("grad_bias"),    tensor("grad_sinks")};
  });
}

std::vector<std::string> reference_names() {
  return names_in(kCases);
}

std::vector<std::string> reference_gradient_names() {
  return names_in(kGradients);
}

}  // namespace annulus::test
