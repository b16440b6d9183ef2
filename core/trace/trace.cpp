#include <array>
#include <chrono>
#include <cstddef>
#include <utility>

#include <annulus/core/trace.hpp>

namespace annulus {

std::string_view name_of(TraceCategory category) noexcept {
  constexpr std::array<std::string_view, 8> kNames{"call", "kernel", "merge", "transfer",
                                                   "wait", "plan",   "file",  "other"};
  return kNames[static_cast<std::size_t>(category)];
}

std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

TraceScope::TraceScope(Tracer* tracer, std::string_view stream, TraceLabel label)
    : tracer_(tracer != nullptr && tracer->enabled() ? tracer : nullptr) {
  if (tracer_ == nullptr) return;
  span_.label = std::move(label);
  span_.stream = stream;
  span_.begin_ns = monotonic_ns();
}

TraceScope::~TraceScope() {
  if (tracer_ == nullptr) return;
  span_.end_ns = monotonic_ns();
  tracer_->record(span_);
}

}  // namespace annulus
