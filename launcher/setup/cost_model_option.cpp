#include "launcher/setup/cost_model_option.hpp"

#include <annulus/files/text_file.hpp>
#include <annulus/mesh/transport.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
ring::CostModel cost_model_of(const Options& options, Place place) {
  const auto chosen = [&] {
    if (options.cost_model.empty()) return ring::CostModel::for_place(place);
    return as_option("--cost-model " + options.cost_model, [&] {
      ring::CostModel model =
          ring::parse_cost_model(files::read_text(options.cost_model), options.cost_model);
      model.check_place(place);
      return model;
    });
  };
  ring::CostModel model = chosen();
  if (options.threads > 0) model.use_threads(options.threads);
  if (!place.is_host() && options.transport != Transport::automatic) {
    as_option("--transport", [&] { model.use_transport(annulus::name_of(options.transport)); });
  }
  return model;
}

}  // namespace annulus::launcher
