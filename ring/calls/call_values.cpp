#include "calls/call_values.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::ring {
namespace {

using Numbers = std::vector<std::int32_t>;

bool fits(const Numbers& lengths, const Numbers& planned, std::int64_t batch, std::int64_t limit) {
  if (lengths.empty()) return planned.empty();
  if (std::ssize(lengths) != batch) return false;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] > (planned.empty() ? limit : planned[b])) return false;
  }
  return true;
}

void check_declared(const char* name, bool declared, const AttentionProblem& planned) {
  if (declared) return;
  throw ArgumentError(
      name, "a value for this call",
      fmt::format("none: the problem's call arguments are {}", to_string(planned.call_arguments)));
}

// The values of the given batches, and `others` for batches that the rank does not have. If the
// values lie on the device, `others` for all.
Numbers numbers_of(const char* name, const ConstTensorView& values, Numbers others,
                   BatchRange batches, Place device) {
  const std::int64_t count = values.rank() == 1 ? values.size(0) : 0;
  if (values.rank() != 1 || (count != 1 && count != batches.count)) {
    throw ArgumentError(name, "shape " + to_string(values.shape()),
                        fmt::format("[1], or [{}] with the batches of the rank", batches.count));
  }
  if (values.dtype() != DType::int32) {
    throw ArgumentError(name, std::string(annulus::name_of(values.dtype())), "int32");
  }
  if (!values.place().is_host() && values.place() != device) {
    throw ArgumentError(
        name, "memory of " + to_string(values.place()),
        "host memory" + (device.is_host() ? "" : " or that of " + to_string(device)));
  }
  if (batches.count == 0) return others;
  if (values.data() == nullptr) throw ArgumentError(name, "a null pointer", "memory");
  if (!values.place().is_host()) return others;
  for (std::int64_t b = 0; b < batches.count; ++b) {
    others[static_cast<std::size_t>(batches.begin + b)] =
        values.at<std::int32_t>({count == 1 ? 0 : b});
  }
  return others;
}

Numbers lengths_of(const char* name, const ConstTensorView& values, const Numbers& otherwise,
                   const Numbers& planned, std::int64_t longest, const AttentionProblem& problem,
                   BatchRange batches, Place device) {
  if (values.rank() == 0) return otherwise;
  check_declared(name, problem.call_arguments.lengths, problem);
  // Any int32 length fits into a sequence too long for int32.
  const auto limit = static_cast<std::int32_t>(
      std::min<std::int64_t>(longest, std::numeric_limits<std::int32_t>::max()));
  const auto batch = static_cast<std::size_t>(problem.shape.batch);
  Numbers lengths = numbers_of(name, values, otherwise.empty() ? Numbers(batch, limit) : otherwise,
                               batches, device);
  for (std::int64_t b = batches.begin; b < batches.end(); ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int32_t most = planned.empty() ? limit : planned[at];
    if (lengths[at] < 0 || lengths[at] > most) {
      throw ArgumentError(name, fmt::format("{} in batch {}", lengths[at], b),
                          fmt::format("0 to {}, as planned", most));
    }
  }
  return lengths;
}

// Checks the view only: the device reads the numbers when the call runs.
void check_sinks(const ConstTensorView& sinks, const AttentionProblem& planned, std::int64_t heads,
                 Place device) {
  if (sinks.rank() == 0) return;
  if (!planned.sinks)
    throw ArgumentError("sinks", "a value for this call", "none: the problem has no sinks");
  const std::int64_t per_head = planned.sinks->per_head();
  const Extents expected =
      planned.sinks->shape().rank() == 1 ? Extents{per_head} : Extents{heads, per_head};
  if (sinks.shape() != expected) {
    throw ArgumentError("sinks", "shape " + to_string(sinks.shape()), to_string(expected));
  }
  if (sinks.dtype() != DType::float32) {
    throw ArgumentError("sinks", std::string(annulus::name_of(sinks.dtype())), "float32");
  }
  if (sinks.place() != device) {
    throw ArgumentError("sinks", "memory of " + to_string(sinks.place()),
                        "that of " + to_string(device));
  }
  if (sinks.data() == nullptr && sinks.elements() > 0) {
    throw ArgumentError("sinks", "a null pointer", "memory");
  }
  if (sinks.stride(sinks.rank() - 1) != 1 && per_head > 1) {
    throw ArgumentError("sinks", "a stride of the last dimension", "stride 1");
  }
}

}  // namespace

bool differs_in_values_only(const Mask& mask, const AttentionProblem& planned) {
  const CallArguments& arguments = planned.call_arguments;
  const AttentionShape& shape = planned.shape;
  Mask rest = mask;
  if (arguments.lengths) {
    if (!fits(mask.query_lengths(), planned.mask.query_lengths(), shape.batch,
              shape.query_length) ||
        !fits(mask.kv_lengths(), planned.mask.kv_lengths(), shape.batch, shape.kv_length)) {
      return false;
    }
    rest.set_query_lengths(planned.mask.query_lengths());
    rest.set_kv_lengths(planned.mask.kv_lengths());
  }
  if (arguments.offsets) {
    if (!mask.offsets().empty() && std::ssize(mask.offsets()) != shape.batch) return false;
    rest.set_offset(planned.mask.offset());
    if (!planned.mask.offsets().empty()) rest.set_offsets(planned.mask.offsets());
  }
  return arguments.change_visibility() && rest.digest() == planned.mask.digest();
}

void apply_values(const CallValues& values, const AttentionProblem& planned, const Mask& mask,
                  BatchRange batches, std::int64_t heads, Place device, AttentionProblem& problem) {
  if (!planned.call_arguments.any() && values == CallValues()) return;  // calls allocate nothing
  check_sinks(values.sinks, planned, heads, device);
  const Mask& bound = planned.mask;
  Mask& called = problem.mask;
  Numbers query =
      lengths_of("q_lengths", values.query_lengths, mask.query_lengths(), bound.query_lengths(),
                 planned.shape.query_length, planned, batches, device);
  Numbers kv = lengths_of("kv_lengths", values.kv_lengths, mask.kv_lengths(), bound.kv_lengths(),
                          planned.shape.kv_length, planned, batches, device);
  if (planned.call_arguments.lengths) {
    called.set_query_lengths(std::move(query));
    called.set_kv_lengths(std::move(kv));
  }
  if (values.offsets.rank() > 0) {
    check_declared("causal offset", planned.call_arguments.offsets, planned);
    const auto batch = static_cast<std::size_t>(planned.shape.batch);
    called.set_offsets(numbers_of("causal offset", values.offsets,
                                  mask.offsets().empty() ? Numbers(batch) : mask.offsets(), batches,
                                  device));
  } else if (planned.call_arguments.offsets) {
    // The arrays of a device hold int32.
    if (!device.is_host() && mask.offset() != static_cast<std::int32_t>(mask.offset())) {
      throw ArgumentError("causal offset", std::to_string(mask.offset()),
                          "a 32-bit number where offsets are call arguments on a device");
    }
    called.set_offset(mask.offset());
    if (!mask.offsets().empty()) called.set_offsets(mask.offsets());
  }
  const bool in_device_memory = values.device_dropout_seed != nullptr;
  if (values.dropout_seed || in_device_memory) {
    check_declared("dropout seed", planned.call_arguments.dropout_seed, planned);
  }
  if (in_device_memory && (device.is_host() || values.dropout_seed)) {
    throw ArgumentError(
        "dropout seed", "an address in the memory of a device",
        device.is_host() ? "a number, as the CPU computes" : "none beside a seed as a number");
  }
  if (planned.call_arguments.dropout_seed) {
    problem.dropout.emplace(planned.dropout->probability(),
                            values.dropout_seed.value_or(planned.dropout->seed()));
  }
}

Sinks called_sinks(const Sinks& planned, const ConstTensorView& called, HeadRange heads) {
  const bool shared = called.rank() == 1;
  const std::int64_t per_head = planned.per_head();
  std::vector<float> logits;
  for (std::int64_t head = 0; head < (shared ? 1 : planned.shape()[0]); ++head) {
    const std::int64_t own = shared ? 0 : head - heads.begin;
    const bool is_called = shared || (own >= 0 && own < heads.count);
    const auto* const from = is_called
                                 ? static_cast<const float*>(called.data()) + own * called.stride(0)
                                 : planned.of_head(head).data();
    logits.insert(logits.end(), from, from + per_head);
  }
  return {planned.shape(), std::move(logits)};
}

}  // namespace annulus::ring
