// Cost models (--cost-model), and what they predict.

#include <cmath>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/prices.hpp>

#include "fuzzing.hpp"

using namespace annulus;
using namespace annulus::ring;
using namespace annulus::test;

namespace {

void require_time(double seconds) {
  require(std::isfinite(seconds) && seconds >= 0, "a prediction is a time");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto model = taken([&] { return parse_cost_model(text_of(data, size), "input.json"); });
  if (!model) return 0;
  const CostModel again = parse_cost_model(to_json(*model), "again.json");
  require(again.source == model->source && again.device == model->device &&
              again.kernels == model->kernels &&
              again.merge_bytes_per_second == model->merge_bytes_per_second &&
              again.read_bytes_per_second == model->read_bytes_per_second &&
              again.transports == model->transports && again.transport == model->transport &&
              again.transfer_share == model->transfer_share && again.network == model->network &&
              again.node_bytes_per_second == model->node_bytes_per_second &&
              again.launch_seconds == model->launch_seconds && again.assumed == model->assumed,
          "a cost model is what its text says");
  // Measured, of the nearest class or assumed.
  static const Registry registry = Registry::standard();
  AttentionProblem problem;
  problem.dtype = DType::bfloat16;
  const Prices prices = make_prices(
      *model, problem, {&registry.get("native"), &registry.get("flash_attn2")}, {model->device, 0});
  for (const double amount : {0.0, 1.0, 4096.0, 1e9, 0x1p62}) {
    for (const auto& [name, classes] : model->kernels) {
      for (const auto& [measured, cost] : classes)
        require_time(cost.seconds(amount, amount, 1, amount));
    }
    require_time(prices.kernel("native").seconds(amount, amount, 1, 0));
    require_time(prices.kernel("flash_attn2").seconds(amount, amount, 1, 0));
    require_time(model->memory_seconds(amount));
    require_time(model->reading_seconds(amount));
    for (const bool across : {false, true}) {
      const double one = model->transfer_seconds(amount, across);
      require_time(one);
      const std::vector<double> three{amount, 1, amount};
      const double together = model->transfer_seconds(three, across);
      require_time(together);
      require(together >= one && together >= model->transfer_seconds(2 * amount + 1, across),
              "messages take no less than one of them, nor than one of all their bytes");
    }
  }
  return 0;
}
