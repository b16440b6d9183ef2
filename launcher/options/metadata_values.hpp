#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <annulus/ring/metadata.hpp>

#include "launcher/options/given_values.hpp"

namespace annulus::launcher {

/// The prefix of environment variables for metadata fields; options have another prefix.
inline constexpr std::string_view kMetadataPrefix = "ANNULUS_METADATA_";

/// Metadata from the file of --metadata and from the environment, as values of the corresponding
/// options.
struct MetadataValues {
  GivenValues file;
  GivenValues environment;
  std::vector<std::string> warnings;  ///< unknown keys, and fields without effect
};

/// `file` is the value of --metadata, or null. Throws FileError and ArgumentError, which name the
/// file or the variable and what was expected.
[[nodiscard]] MetadataValues read_metadata(const GivenValue* file);

}  // namespace annulus::launcher
