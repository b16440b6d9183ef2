#include "launcher/bench/kernel_blocks.hpp"

#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

// The problem on a rank of its own.
ProblemSetup set_up_alone(Options options, std::int64_t length) {
  AttentionShape shape = *options.shape;
  shape.query_length = shape.kv_length = length;
  options.mesh = "sp=1";
  options.query_spec = options.kv_spec = "-";
  return set_up_problem(options, shape, options.dtype.value_or(DType::float32), 1);
}

ConstTensorView first_rows(const ConstTensorView& tensor, std::int64_t rows) {
  return tensor.slice(1, 0, rows);
}

}  // namespace

KernelBlocks::KernelBlocks(const Options& options, std::int64_t length, Device& device,
                           Watchdog watchdog, int threads)
    : device_(device),
      threads_(threads),
      setup_(set_up_alone(options, length)),
      shards_(shard_operands(setup_), setup_.problem.dtype, options.seed, 0, device.staging(),
              threads, setup_.fills),
      tensors_(shards_.local_tensors(), device, watchdog),
      stream_(device.make_stream("compute", std::move(watchdog), nullptr)),
      selection_(registry_.select(options.implementation, setup_.problem, device.place())) {
  tensors_.upload();
  const AttentionShape& s = setup_.problem.shape;
  scores_ = broadcast_scores(tensors_.tensors().bias, tensors_.tensors().mask,
                             {s.batch, s.heads, s.query_length, s.kv_length});
}

void KernelBlocks::use(const Implementation& candidate) {
  const AttentionProblem& problem = setup_.problem;
  const AttentionShape& s = problem.shape;
  // Partial results, as the blocks of a ring have them.
  const DType dtype = candidate.declares().results == ResultForm::rounded
                          ? problem.dtype
                          : partial_dtype(problem.dtype);
  kernel_.reset();
  for (State& state : states_) {
    state = {};
    state.output = Tensor(dtype, {s.batch, s.query_length, s.heads, s.value_dim}, device_.memory());
    state.lse = Tensor(DType::float32, {s.batch, s.heads, s.query_length}, device_.memory());
  }
  kernel_ = candidate.make_kernel(problem, device_);
  candidate_ = &candidate;
}

std::string KernelBlocks::select(std::int64_t rows) {
  const AttentionProblem& problem = setup_.problem;
  const PositionRange range{GlobalPosition(0), rows, 1};
  const Visibility seen = problem.mask.examine(0, problem.shape.batch, range, range);
  if (seen.empty()) {
    throw ArgumentError("--calibrate", fmt::format("a mask that hides all of {} rows", rows),
                        "visible pairs to compute");
  }
  flops_ = forward_flops(problem.shape, static_cast<double>(seen.pairs));
  const ring::LocalTensors& tensors = tensors_.tensors();
  block_ = {first_rows(tensors.query, rows),
            first_rows(tensors.key, rows),
            first_rows(tensors.value, rows),
            PositionRanges::all(rows),
            PositionRanges::all(rows),
            0,
            0,
            seen.full,
            {},
            scores_.slice(2, 0, rows)};
  std::string obstacle = candidate_->takes(problem, geometry_of(block_)).reason();
  if (!obstacle.empty()) return obstacle;
  try {
    kernel_->prepare(block_, state(0));
  } catch (const UnsupportedError& refusal) {
    return refusal.what();
  }
  return {};
}

void KernelBlocks::compute(int calls) {
  for (int i = 0; i < calls; ++i) {
    kernel_->forward(block_, state(static_cast<std::size_t>(i % 2)), {*stream_, nullptr, threads_});
  }
  stream_->synchronize();
}

SoftmaxState KernelBlocks::state(std::size_t which) const {
  const State& chosen = states_.at(which);
  const std::int64_t rows = block_.rows.size();
  return {chosen.output.view().slice(1, 0, rows), chosen.lse.view().slice(2, 0, rows)};
}

}  // namespace annulus::launcher
