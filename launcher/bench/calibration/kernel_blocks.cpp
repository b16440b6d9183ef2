#include "launcher/bench/calibration/kernel_blocks.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/verification/filled_part.hpp>

#include "launcher/bench/zero_tensor.hpp"
#include "launcher/report/operations.hpp"

namespace annulus::launcher {
namespace {

// The problem on a single rank.
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
      pass_(options.backward.value_or(false) ? Pass::backward : Pass::forward),
      setup_(set_up_alone(options, length)),
      shards_(shard_operands(setup_), setup_.problem.dtype, options.seed, 0, device.staging(),
              threads, setup_.fills),
      tensors_(shards_.local_tensors(), device, watchdog),
      stream_(device.make_stream("compute", watchdog, nullptr)),
      selection_(registry_.select(options.implementation, setup_.problem, device.place(),
                                  Presence::required, pass_)) {
  tensors_.upload();
  const AttentionShape& s = setup_.problem.shape;
  scores_ = broadcast_scores(tensors_.tensors().bias, tensors_.tensors().mask,
                             {s.batch, s.heads, s.query_length, s.kv_length});
  if (pass_ == Pass::backward) make_gradients(options, watchdog);
}

void KernelBlocks::make_gradients(const Options& options, const Watchdog& watchdog) {
  const AttentionProblem& problem = setup_.problem;
  const AttentionShape& s = problem.shape;
  const Extents rows{s.batch, s.heads, s.query_length};
  grad_output_ = {verification::random_grad_output(shard_operands(setup_), problem.dtype,
                                                   options.seed, 0, device_.staging(), threads_),
                  device_};
  // About the LSE of a row of random logits, so that probabilities have a realistic size.
  Tensor lse(DType::float32, rows, device_.staging());
  std::fill_n(lse.view().as<float>(), lse.view().elements(),
              std::log(static_cast<float>(s.kv_length)) + 0.5F);
  whole_lse_ = {std::move(lse), device_};
  const std::unique_ptr<Stream> copies = device_.make_stream("copies", watchdog, nullptr);
  for (const auto* twin : {&grad_output_, &whole_lse_}) twin->upload(device_, *copies);
  copies->synchronize();
  const auto zeros = [&](DType dtype, const Extents& shape) {
    return zero_tensor(dtype, shape, device_, *copies);
  };
  const DType dtype = partial_dtype(problem.dtype);
  delta_ = zeros(dtype, rows);
  grad_query_ = zeros(dtype, {s.batch, s.query_length, s.heads, s.head_dim});
  grad_key_ = zeros(dtype, {s.batch, s.kv_length, s.kv_heads, s.head_dim});
  grad_value_ = zeros(dtype, {s.batch, s.kv_length, s.kv_heads, s.value_dim});
}

void KernelBlocks::select(std::int64_t rows) {
  const AttentionProblem& problem = setup_.problem;
  const PositionRange range{GlobalPosition(0), rows, 1};
  const Visibility seen = problem.mask.examine(0, problem.shape.batch, range, range);
  if (seen.empty()) {
    throw ArgumentError("--calibrate", fmt::format("a mask that hides all of {} rows", rows),
                        "visible pairs to compute");
  }
  const auto pairs = static_cast<double>(seen.pairs);
  flops_ = pass_ == Pass::backward ? backward_flops(problem.shape, pairs)
                                   : forward_flops(problem.shape, pairs);
  extent_ = {rows, rows, problem.shape.heads, problem.shape.batch, seen.pairs};
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
  for (auto& [implementation, candidate] : candidates_) candidate.call.reset();
}

std::string KernelBlocks::prepare(const Implementation& candidate) {
  const AttentionProblem& problem = setup_.problem;
  const std::int64_t group = problem.shape.heads / problem.shape.kv_heads;
  const bool backward = pass_ == Pass::backward;
  if (block_.unmasked && !backward &&
      candidate.few_rows(problem).include(extent_.rows, group, extent_.heads * extent_.batches,
                                          extent_.columns)) {
    return "a separate kernel computes so few rows, and takes as long as reading";
  }
  const BlockGeometry geometry = geometry_of(block_);
  std::string obstacle =
      (backward ? candidate.takes_backward(problem, geometry) : candidate.takes(problem, geometry))
          .reason();
  if (!obstacle.empty()) return obstacle;
  Candidate& chosen = candidates_[&candidate];
  if (!chosen.kernel) {
    chosen.kernel = candidate.make_kernel(problem, device_);
    // Partial results, as in the blocks of a ring.
    chosen.results = candidate.declares().results == ResultForm::rounded
                         ? problem.dtype
                         : partial_dtype(problem.dtype);
  }
  try {
    if (backward) {
      prepare_backward(chosen);
    } else {
      prepare_forward(chosen);
    }
  } catch (const UnsupportedError& refusal) {
    return refusal.what();
  }
  return {};
}

void KernelBlocks::prepare_forward(Candidate& candidate) {
  (void)state(candidate.results, 1);  // recordings may not allocate
  candidate.kernel->prepare(block_, state(candidate.results, 0));
  candidate.call.emplace(device_, *stream_, [this, &candidate](int i) {
    candidate.kernel->forward(block_, state(candidate.results, i % 2),
                              {*stream_, nullptr, threads_});
  });
}

void KernelBlocks::prepare_backward(Candidate& candidate) {
  candidate.kernel->prepare_backward(backward_block(), gradients());
  candidate.call.emplace(device_, *stream_, [this, &candidate](int /*i*/) {
    candidate.kernel->backward(backward_block(), gradients(), {*stream_, nullptr, threads_});
  });
}

BackwardBlock KernelBlocks::backward_block() const {
  const std::int64_t rows = extent_.rows;
  return {.query = block_.query,
          .key = block_.key,
          .value = block_.value,
          .grad_output = grad_output_.view().slice(1, 0, rows),
          .lse = whole_lse_.view().slice(2, 0, rows),
          .delta = delta_.view().slice(2, 0, rows),
          .rows = block_.rows,
          .columns = block_.columns,
          .unmasked = block_.unmasked,
          .scores = block_.scores};
}

Gradients KernelBlocks::gradients() const {
  const std::int64_t rows = extent_.rows;
  return {.query = grad_query_.view().slice(1, 0, rows),
          .key = grad_key_.view().slice(1, 0, rows),
          .value = grad_value_.view().slice(1, 0, rows)};
}

double KernelBlocks::used_share(const Implementation& candidate) const {
  const Declaration& declares = candidate.declares();
  const Place::Kind kind = device_.place().kind;
  if (pass_ == Pass::forward) return ring::used_share(kind, extent_, declares.row_tile);
  const AttentionShape& s = setup_.problem.shape;
  return ring::used_share_backward(
      kind, extent_, declares.row_tile,
      declares.backward->joins_query_heads ? s.heads_per_kv_head() : 1);
}

void KernelBlocks::compute(const Implementation& candidate, int calls) {
  candidates_.at(&candidate).call.value().run(calls);
}

SoftmaxState KernelBlocks::state(DType dtype, int which) {
  const AttentionShape& s = setup_.problem.shape;
  Tensor& output = outputs_[{dtype, which}];
  if (output.shape().rank() == 0) {
    output = Tensor(dtype, {s.batch, s.query_length, s.heads, s.value_dim}, device_.memory());
  }
  Tensor& lse = lse_.at(static_cast<std::size_t>(which));
  if (lse.shape().rank() == 0) {
    lse = Tensor(DType::float32, {s.batch, s.heads, s.query_length}, device_.memory());
  }
  return {output.view().slice(1, 0, extent_.rows), lse.view().slice(2, 0, extent_.rows)};
}

}  // namespace annulus::launcher
