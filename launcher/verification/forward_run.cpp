#include "forward_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>

namespace annulus::verification {
namespace {

AttentionOptions attention_options(const ShardedCase& sharded_case, Place place) {
  const ring::OperandLayout& layout = sharded_case.layout;
  AttentionOptions options{planned_problem(sharded_case),
                           {.query_spec = layout.query,
                            .kv_spec = layout.kv,
                            .layout = layout.sequence,
                            .kv_layout = layout.kv_sequence,
                            .granule = layout.granule},
                           {.implementation = sharded_case.implementation,
                            .schedule = sharded_case.schedule,
                            .transport = sharded_case.transport}};
  options.tuning = sharded_case.tuning;
  options.plan = sharded_case.plan;
  if (sharded_case.cost_model) {
    options.cost_model = std::make_shared<ring::CostModel>(*sharded_case.cost_model);
  }
  if (sharded_case.backward) {
    options.backward = {.implementation = sharded_case.backward->implementation,
                        .schedule = sharded_case.backward->schedule,
                        .grad_wire = sharded_case.backward->grad_wire};
  }
  if (options.plan && !place.is_host()) {
    const ring::PlanOptions defaults = ring::PlanOptions::for_place(place);
    options.plan->lse_dtype = defaults.lse_dtype;
    if (options.plan->result_bytes == 0) options.plan->result_bytes = defaults.result_bytes;
  }
  return options;
}

CaseShards shards_of(const ShardedCase& sharded_case, const ring::ShardedOperands& operands,
                     Mesh& mesh, MemoryPool& host) {
  return collectively(mesh.world(), [&] {
    const Computing computing = mesh.world().computing();
    return CaseShards(operands, sharded_case.problem.dtype, sharded_case.seed, mesh.rank(), host, 1,
                      sharded_case.fills, sharded_case.problem.normalize_output);
  });
}

}  // namespace

ForwardRun::ForwardRun(const ShardedCase& sharded_case, Context& context)
    : attention(context, attention_options(sharded_case, context.place())),
      shards(shards_of(sharded_case, attention.operands(), context.mesh(), host)),
      moved(collectively(context.mesh().world(),
                         [&] {
                           return DeviceTensors(shards.local_tensors(), context.device(),
                                                context.mesh().watchdog());
                         })),
      called(sharded_case, attention.operands(), context) {}

ring::LocalTensors ForwardRun::with(const ring::CallValues& values) const {
  ring::LocalTensors tensors = moved.tensors();
  tensors.call_values = values;
  return tensors;
}

void ForwardRun::run(int unwritten, const ring::CallValues& values) {
  for (const Tensor* result : shards.results()) {
    std::memset(result->view().data(), unwritten, result->bytes());
  }
  moved.upload();
  attention.run_and_wait(with(values));
  moved.download();
}

bool on_any_rank(Control& ranks, bool fact, std::string_view what) {
  return ranks.max(std::array{fact ? 1.0 : 0.0}, what)[0] > 0;
}

double allowed_error(std::int64_t rows, double unsharded, int shards, double rounding,
                     double merge) {
  // A rounding error is uniform up to a unit roundoff, so its root mean square is 1/√3 of that.
  const double partial = rounding * rounding / 3;
  const double combination = merge * unit_roundoff(DType::float32);
  const double combined = std::max(1, shards - 1) * combination * combination;
  return sharded_error_factor(rows) * std::sqrt(unsharded * unsharded + partial + combined);
}

}  // namespace annulus::verification
