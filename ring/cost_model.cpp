#include <annulus/ring/cost_model.hpp>

namespace annulus::ring {

CostModel CostModel::cpu_core() {
  return {.flops_per_second = 5e10,
          .transfer_bytes_per_second = 3e9,
          .transfer_latency = 2e-6,
          .merge_bytes_per_second = 8e9,
          .call_latency = 1e-6,
          .source = "assumed: one CPU core per rank, ranks of one node"};
}

}  // namespace annulus::ring
