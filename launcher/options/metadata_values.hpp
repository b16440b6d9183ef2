#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/ring/metadata.hpp>

#include "launcher/options/model_config.hpp"

namespace annulus::launcher {

/// A value and its source: "--window", "window in run.cfg".
struct GivenValue {
  std::string option;
  std::string text;
  bool is_none = false;  ///< an explicit none: the default, which overrides weaker sources
};

/// By the option's name.
using GivenValues = std::map<std::string, GivenValue>;

/// The prefix of environment variables for metadata fields; options have another prefix.
inline constexpr std::string_view kMetadataPrefix = "ANNULUS_METADATA_";

/// Metadata from the file of --metadata and from the environment, as values of the corresponding
/// options.
struct MetadataValues {
  GivenValues file;
  GivenValues environment;
  std::vector<std::string> warnings;  ///< unknown keys, and fields without effect
};

/// `file` is the value of --metadata, or null; `lenient` makes its unknown keys warnings. Throws
/// FileError and ArgumentError, which name the file or the variable and what was expected.
[[nodiscard]] MetadataValues read_metadata(const GivenValue* file, bool lenient);

/// The layer of --model-config as values of options.
struct ModelValues {
  GivenValues values;
  /// --window with and without --causal, which may come from elsewhere.
  std::optional<GivenValue> causal_window;
  std::optional<GivenValue> two_sided_window;
  std::optional<ModelSizes> sizes;
  bool has_sinks = false;    ///< the model has sinks, which the file does not hold
  bool says_causal = false;  ///< the file says whether the attention is causal
};

/// `file` and `layer` are the values of --model-config and --layer, or null. `wants_dtype`: the
/// command makes tensors; tensors in files have their own dtype. Throws FileError and
/// ArgumentError, which name the option.
[[nodiscard]] ModelValues read_model(const GivenValue* file, const GivenValue* layer,
                                     bool wants_dtype);

}  // namespace annulus::launcher
