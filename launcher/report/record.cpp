#include "launcher/report/record.hpp"

#include <ctime>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <annulus/ring/machine.hpp>

#include "launcher/options/version.hpp"

namespace annulus::launcher {

std::string text_of(const RecordField& field) {
  if (const auto* number = std::get_if<std::int64_t>(&field.value)) return std::to_string(*number);
  return std::get<std::string>(field.value);
}

Record make_record(const CommandContext& context, const Mesh& mesh, Place place, int threads) {
  return {{"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"version", std::string(kVersion)},
          {"commit", std::string(context.commit)},
          {"libraries", library_versions(place)},
          {"options", context.options.given},
          {"ranks", std::int64_t{mesh.size()}},
          {"nodes", std::int64_t{mesh.topology().nodes()}},
          {"threads", std::int64_t{threads}},
          {"device", place.is_host() ? "cpu" : "cuda"},
          {"device name", device_name(place)}};
}

}  // namespace annulus::launcher
