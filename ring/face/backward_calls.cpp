#include "face/backward_calls.hpp"

#include <algorithm>
#include <utility>

#include <annulus/core/first_error.hpp>

namespace annulus {

BackwardCalls::BackwardCalls(Context& context, const ring::ShardedOperands& operands,
                             ring::ShardedAttentionOptions options)
    : context_(context), operands_(operands), options_(std::move(options)) {
  // The rest of an overlay is for the forward pass.
  ring::Choice overlay;
  overlay.transport = options_.overlay.transport;
  options_.overlay = overlay;
}

ring::ShardedAttention& BackwardCalls::of(const AttentionProblem& problem, const Mask& mask,
                                          const ring::BackwardRequest& request) {
  std::unique_ptr<ring::ShardedAttention>& one = planned_[index(request)];
  if (!one) {
    ring::ShardedAttentionOptions options = options_;
    options.backward = request;
    if (const auto& kept = kept_[index(request)]) {
      options.schedule = ring::name_of(kept->schedule);
      options.plan = ring::with_variant(*options.plan, *kept);
    }
    one = std::make_unique<ring::ShardedAttention>(problem, operands_, context_.mesh(),
                                                   context_.registry(), context_.device(), options);
    one->set_values(mask);
  }
  return *one;
}

void BackwardCalls::set_values(const Mask& mask) {
  for (auto& one : planned_) {
    if (one) one->set_values(mask);
  }
}

ring::ShardedAttention* BackwardCalls::planned(
    const ring::BackwardRequest& request) const noexcept {
  return planned_[index(request)].get();
}

void BackwardCalls::drop(ring::NextSchedule next) {
  std::erase_if(captured_, [](const auto& one) { return !one->is_captured(); });
  for (std::size_t i = 0; i < kKinds; ++i) {
    std::unique_ptr<ring::ShardedAttention>& one = planned_[i];
    if (next == ring::NextSchedule::chosen) {
      kept_[i].reset();
    } else if (one) {
      kept_[i] = one->schedule();
    }
    if (one && one->is_captured()) captured_.push_back(std::move(one));
    one.reset();
  }
}

bool BackwardCalls::is_captured() {
  const auto captured = [](const auto& one) { return one && one->is_captured(); };
  return std::ranges::any_of(captured_, captured) || std::ranges::any_of(planned_, captured);
}

void BackwardCalls::wait() {
  FirstError error;
  for (const auto& one : captured_) error.of([&] { one->wait(); });
  for (const auto& one : planned_) {
    if (one) error.of([&] { one->wait(); });
  }
  error.rethrow();
}

}  // namespace annulus
