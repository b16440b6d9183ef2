#pragma once

#include <annulus/core/place.hpp>
#include <annulus/ring/cost_model.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The model that --cost-model names, else the assumed one for ranks at `place`; --transport, if
/// given, sets its transport between GPUs. Reads the file; does not communicate. Throws UserErrors
/// naming option, file and key, and ArgumentError for a model of other devices than the ranks'.
[[nodiscard]] ring::CostModel cost_model_of(const Options& options, Place place);

}  // namespace annulus::launcher
