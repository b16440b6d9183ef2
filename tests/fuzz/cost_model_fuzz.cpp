// Cost models (--cost-model), and what they predict.

#include <cmath>

#include <annulus/ring/cost_model.hpp>

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
  require(again.source == model->source && again.kernels == model->kernels &&
              again.call_latency == model->call_latency &&
              again.merge_bytes_per_second == model->merge_bytes_per_second &&
              again.transports == model->transports && again.transport == model->transport,
          "a cost model is what its text says");
  for (const double amount : {0.0, 1.0, 4096.0, 1e9, 0x1p62}) {
    for (const auto& [name, curve] : model->kernels) {
      require_time(model->kernel_seconds(name, amount, amount));
    }
    require_time(model->memory_seconds(amount));
    require_time(model->transfer_seconds(amount));
  }
  return 0;
}
