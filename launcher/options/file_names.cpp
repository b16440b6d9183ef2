#include "launcher/options/file_names.hpp"

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

#include "launcher/options/option_table.hpp"

namespace annulus::launcher {
namespace {

struct NamedFile {
  std::string option;
  std::string path;
  Writes writes = Writes::nothing;
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

bool is_array_name(const std::string& path) {
  return files::is_safetensors(path) || path.ends_with(".npy");
}

void check_name(const NamedFile& file) {
  const bool is_array = file.writes == Writes::result || file.writes == Writes::gradient ||
                        file.writes == Writes::array;
  if (is_array && !is_array_name(file.path)) {
    throw ArgumentError(file.option, fmt::format("'{}'", file.path), "a .npy or .safetensors file");
  }
  // A file of this name would be a surprise.
  if (file.writes == Writes::text && file.path == "-") {
    throw ArgumentError(file.option, "'-'",
                        "a file (./- if that is its name): only --json and --csv can be standard "
                        "output");
  }
}

// True if the two may be arrays of one .safetensors file.
bool may_share(const NamedFile& output, const NamedFile& other) {
  const bool several = output.writes == Writes::result || output.writes == Writes::gradient;
  return several && other.writes == output.writes && are_one_safetensors(output.path, other.path);
}

}  // namespace

void check_file_names(const Options& options) {
  if (!options.input.empty() && !files::is_safetensors(options.input)) {
    throw FileError("--input " + options.input, "is not a .safetensors file");
  }
  std::vector<NamedFile> taken;
  std::vector<NamedFile> outputs;
  // Written under `measure`, read otherwise.
  const bool tunes = options.tuning != ring::TuningPolicy::off;
  const std::string cache =
      tunes && options.tuning_cache.empty() ? ring::default_tuning_file() : options.tuning_cache;
  if (!cache.empty()) {
    const bool measures = options.tuning == ring::TuningPolicy::measure;
    (measures ? outputs : taken).push_back({"--tuning-cache", cache, Writes::nothing});
  }
  for (const auto& [name, text] : options.given_values) {
    const OptionEntry& entry = *find_option(name);
    const NamedFile file{"--" + name, text, entry.uses.writes};
    check_name(file);
    if (file.writes != Writes::nothing) {
      if (text != "-") outputs.push_back(file);
    } else if (name != "tuning-cache" && (entry.value == "FILE" || is_array_name(text))) {
      taken.push_back(file);
    }
  }
  for (const NamedFile& output : outputs) {
    for (const NamedFile& other : taken) {
      if (may_share(output, other) || !same_file(output.path, other.path)) continue;
      throw UserError(fmt::format("{} {}: is the same file as {} {}", output.option, output.path,
                                  other.option, other.path));
    }
    taken.push_back(output);
  }
}

void check_files_are_given(const Options& options) {
  std::vector<std::string> missing;
  const auto need = [&](const char* option, const std::string& path) {
    if (path.empty()) missing.emplace_back(option);
  };
  if (options.input.empty()) {
    need("--query", options.query);
    need("--key", options.key);
    need("--value", options.value);
  }
  const bool lacks_operands = !missing.empty();
  if (options.forward_output.empty() && options.forward_lse.empty()) {
    need("--output", options.output);
  } else {
    need("--forward-output", options.forward_output);
    need("--forward-lse", options.forward_lse);
  }
  if (!missing.empty()) {
    throw UserError(fmt::format(
        "annulus run lacks {}{}; see annulus run --help", fmt::join(missing, ", "),
        lacks_operands ? " (a .safetensors file of --input may hold query, key and value)" : ""));
  }
  if (options.grad_output.empty()) return;
  need("--grad-query", options.grad_query);
  need("--grad-key", options.grad_key);
  need("--grad-value", options.grad_value);
  if (missing.empty()) return;
  throw UserError(fmt::format("--grad-output {}: annulus run lacks {}, where the gradients go",
                              options.grad_output, fmt::join(missing, ", ")));
}

bool are_one_safetensors(const std::string& first, const std::string& second) {
  return !first.empty() && !second.empty() && files::is_safetensors(first) &&
         files::is_safetensors(second) && same_file(first, second);
}

}  // namespace annulus::launcher
