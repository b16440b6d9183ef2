#include "launcher/options/file_names.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>
#include <annulus/core/temporary_file.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus::launcher {
namespace {

struct NamedFile {
  const char* option;
  const std::string& path;
};

bool same_file(const std::string& first, const std::string& second) {
  if (first == second) return true;
  const std::string a = files::link_target(first);
  const std::string b = files::link_target(second);
  std::error_code error;
  // Compares device and inode if both files exist.
  if (std::filesystem::equivalent(a, b, error) && !error) return true;
  const std::filesystem::path canonical_a =
      std::filesystem::weakly_canonical(std::filesystem::absolute(a), error);
  if (error) return false;
  const std::filesystem::path canonical_b =
      std::filesystem::weakly_canonical(std::filesystem::absolute(b), error);
  return !error && canonical_a == canonical_b;
}

std::vector<NamedFile> inputs_of(const Options& options) {
  static const std::string kNone;
  return {{"--query", options.query},
          {"--key", options.key},
          {"--value", options.value},
          {"--input", options.input},
          {"--q-segments", options.query_segments},
          {"--kv-segments", options.kv_segments},
          {"--cu-seqlens", options.cu_seqlens},
          {"--cu-seqlens-q", options.query_cu_seqlens},
          {"--cu-seqlens-kv", options.kv_cu_seqlens},
          {"--causal-offset", options.causal_offset ? options.causal_offset->file : kNone},
          {"--prefix", options.prefix ? options.prefix->file : kNone},
          {"--block-mask", options.block_mask},
          {"--q-lengths", options.query_lengths},
          {"--kv-lengths", options.kv_lengths},
          {"--sinks", options.sinks},
          {"--bias", options.bias},
          {"--mask", options.mask},
          {"--grad-output", options.grad_output},
          {"--grad-lse", options.grad_lse},
          {"--forward-output", options.forward_output},
          {"--forward-lse", options.forward_lse},
          {"--cost-model", options.cost_model},
          {"--config", options.config},
          {"--metadata", options.metadata},
          {"--model-config", options.model_config}};
}

void check_array_name(const NamedFile& file) {
  if (file.path.empty() || files::is_safetensors(file.path) || file.path.ends_with(".npy")) return;
  throw ArgumentError(file.option, fmt::format("'{}'", file.path), "a .npy or .safetensors file");
}

// Refuses "-", since a file of this name would be a surprise.
void check_not_standard_output(const NamedFile& file) {
  if (file.path != "-") return;
  throw ArgumentError(file.option, "'-'",
                      "a file (./- if that is its name): only --json and --csv can be standard "
                      "output");
}

// Compares `output` with all files before it.
void check_distinct(const NamedFile& output, const std::vector<NamedFile>& others) {
  for (const NamedFile& other : others) {
    if (other.path.empty() || !same_file(output.path, other.path)) continue;
    throw UserError(fmt::format("{} {}: is the same file as {} {}", output.option, output.path,
                                other.option, other.path));
  }
}

}  // namespace

void check_file_names(const Options& options) {
  if (!options.input.empty() && !files::is_safetensors(options.input)) {
    throw FileError("--input " + options.input, "is not a .safetensors file");
  }
  const NamedFile output{"--output", options.output};
  const std::array of_rows{NamedFile{"--lse", options.lse}, NamedFile{"--maximum", options.maximum},
                           NamedFile{"--sum", options.sum}};
  const NamedFile weights{"--weights", options.weights};
  check_array_name(output);
  for (const NamedFile& file : of_rows) check_array_name(file);
  check_array_name(weights);
  const std::array gradients{
      NamedFile{"--grad-query", options.grad_query}, NamedFile{"--grad-key", options.grad_key},
      NamedFile{"--grad-value", options.grad_value}, NamedFile{"--grad-sinks", options.grad_sinks},
      NamedFile{"--grad-bias", options.grad_bias}};
  for (const NamedFile& file : gradients) check_array_name(file);
  const NamedFile trace{"--trace", options.trace};
  const NamedFile calibration{"--calibrate", options.calibrate};
  check_not_standard_output(trace);
  check_not_standard_output(calibration);
  std::vector<NamedFile> taken = inputs_of(options);
  // Written under `measure`, read otherwise.
  const bool tunes = options.tuning != ring::TuningPolicy::off;
  const std::string cache =
      tunes && options.tuning_cache.empty() ? ring::default_tuning_file() : options.tuning_cache;
  const NamedFile tuning_cache{"--tuning-cache", cache};
  const bool measures = options.tuning == ring::TuningPolicy::measure;
  if (!measures) taken.push_back(tuning_cache);
  const auto take = [&taken](const NamedFile& file) {
    if (file.path.empty() || file.path == "-") return;
    check_distinct(file, taken);
    taken.push_back(file);
  };
  if (measures) take(tuning_cache);
  take(output);
  for (const NamedFile& file : of_rows) {
    if (!beside_output(options, file.path)) take(file);
  }
  take(weights);
  std::vector<std::string> of_gradients;
  for (const NamedFile& file : gradients) {
    const bool shared = std::any_of(
        of_gradients.begin(), of_gradients.end(),
        [&](const std::string& other) { return are_one_safetensors(file.path, other); });
    if (!shared) take(file);
    of_gradients.push_back(file.path);
  }
  take(trace);
  take(calibration);
  take({"--json", options.json});
  take({"--csv", options.csv});
}

void check_files_are_given(const Options& options) {
  std::vector<std::string> missing;
  const auto need = [&](const NamedFile& file) {
    if (file.path.empty()) missing.emplace_back(file.option);
  };
  if (options.input.empty()) {
    need({"--query", options.query});
    need({"--key", options.key});
    need({"--value", options.value});
  }
  const bool lacks_operands = !missing.empty();
  if (options.forward_output.empty() && options.forward_lse.empty()) {
    need({"--output", options.output});
  } else {
    need({"--forward-output", options.forward_output});
    need({"--forward-lse", options.forward_lse});
  }
  if (!options.grad_output.empty()) {
    need({"--grad-query", options.grad_query});
    need({"--grad-key", options.grad_key});
    need({"--grad-value", options.grad_value});
  }
  if (missing.empty()) return;
  throw UserError(fmt::format(
      "annulus run lacks {}{}; see annulus run --help", fmt::join(missing, ", "),
      lacks_operands ? " (a .safetensors file of --input may hold query, key and value)" : ""));
}

bool are_one_safetensors(const std::string& first, const std::string& second) {
  return !first.empty() && !second.empty() && files::is_safetensors(first) &&
         files::is_safetensors(second) && same_file(first, second);
}

bool beside_output(const Options& options, const std::string& path) {
  return are_one_safetensors(path, options.output);
}

}  // namespace annulus::launcher
