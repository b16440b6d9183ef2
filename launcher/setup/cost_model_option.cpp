#include "launcher/setup/cost_model_option.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

std::string read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  try {
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure&) {
    file.setstate(std::ios_base::badbit);  // a directory, a disk that fails
  }
  if (!file) {
    throw FileError(path, fmt::format("cannot be read: {}",
                                      errno != 0 ? std::strerror(errno) : "unknown reason"));
  }
  return text;
}

}  // namespace

ring::CostModel cost_model_of(const Options& options, Place place) {
  const auto chosen = [&] {
    if (options.cost_model.empty()) return ring::CostModel::for_place(place);
    return as_option("--cost-model " + options.cost_model, [&] {
      return ring::parse_cost_model(read_text(options.cost_model), options.cost_model);
    });
  };
  ring::CostModel model = chosen();
  if (!place.is_host() && options.transport != Transport::automatic) {
    as_option("--transport", [&] { model.use_transport(annulus::name_of(options.transport)); });
  }
  return model;
}

}  // namespace annulus::launcher
