#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/options/command_context.hpp"

namespace annulus::launcher {

/// A fact about how a report's rows were made, which CSV and JSON repeat in each row.
struct RecordField {
  std::string name;
  std::variant<std::string, std::int64_t> value;
};
using Record = std::vector<RecordField>;

/// The field as text.
[[nodiscard]] std::string text_of(const RecordField& field);

/// Date (UTC, ISO 8601), version and commit of the program, libraries, options, ranks, nodes,
/// threads per rank, device and its name: always these fields in this order. Not collective.
[[nodiscard]] Record make_record(const CommandContext& context, const Mesh& mesh, Place place,
                                 int threads);

}  // namespace annulus::launcher
