#include "runner/call_arrays.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::ring {

CallArrays::CallArrays(const AttentionProblem& planned, BatchRange batches, Device& device,
                       Stream& stream)
    : arguments_(device.place().is_host() ? CallArguments() : planned.call_arguments),
      batches_(batches),
      shape_(planned.shape) {
  if (!arguments_.any()) return;
  const auto current = device.make_current();
  numbers_ = Tensor(DType::int32, {kRows, shape_.batch}, device.memory());
  if (arguments_.lengths) {
    planned_query_lengths_ = planned.mask.query_lengths();
    planned_kv_lengths_ = planned.mask.kv_lengths();
    HostMemoryPool host;
    const Tensor most_numbers(DType::int32, {2, shape_.batch}, host);
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      most_numbers.view().at<std::int32_t>({0, b}) = most(Row::query_lengths, b);
      most_numbers.view().at<std::int32_t>({1, b}) = most(Row::kv_lengths, b);
    }
    device.copy(most_numbers.view(),
                numbers_.view().slice(0, static_cast<std::int64_t>(Row::most_queries), 2), stream);
    stream.synchronize();
    refused_ = device.staging().allocate(2 * sizeof(std::uint64_t), "refused call arguments");
    *refused(Row::query_lengths) = 0;
    *refused(Row::kv_lengths) = 0;
    arrays_.query_lengths = row(Row::query_lengths);
    arrays_.kv_lengths = row(Row::kv_lengths);
  }
  if (arguments_.offsets) arrays_.offsets = row(Row::offsets);
  if (arguments_.dropout_seed) {
    dropout_key_ = Tensor(DType::int32, {2}, device.memory());
    arrays_.dropout_key = static_cast<const std::uint32_t*>(dropout_key_.view().data());
  }
}

std::int32_t* CallArrays::row(Row row, std::int64_t batch) const {
  return static_cast<std::int32_t*>(numbers_.view().data()) +
         static_cast<std::int64_t>(row) * shape_.batch + batch;
}

volatile std::uint64_t* CallArrays::refused(Row row) const {
  return static_cast<volatile std::uint64_t*>(refused_.data()) + static_cast<std::ptrdiff_t>(row);
}

std::int32_t CallArrays::most(Row row, std::int64_t batch) const {
  const bool of_keys = row == Row::kv_lengths;
  const std::vector<std::int32_t>& planned = of_keys ? planned_kv_lengths_ : planned_query_lengths_;
  if (!planned.empty()) return planned[static_cast<std::size_t>(batch)];
  return static_cast<std::int32_t>(std::min<std::int64_t>(
      of_keys ? shape_.kv_length : shape_.query_length, std::numeric_limits<std::int32_t>::max()));
}

void CallArrays::write(const AttentionProblem& called, const CallValues& values,
                       const LocalOperations& operations, Stream& stream) const {
  if (!arguments_.any()) return;
  const auto in_device_memory = [](const ConstTensorView& view) {
    return view.rank() > 0 && !view.place().is_host();
  };
  constexpr std::int64_t kBatches = CallArgumentWrite::kMaximumBatches;
  std::int64_t first = batches_.begin;
  do {
    const std::int64_t count = std::min(kBatches, batches_.end() - first);
    CallArgumentWrite write;
    write.first_batch = static_cast<std::int32_t>(first);
    write.batches = static_cast<std::int32_t>(count);
    // `of_batch` returns the number of `called` for a batch.
    const auto set = [&](CallArgumentWrite::Numbers& numbers, Row to, const ConstTensorView& view,
                         const auto& of_batch) {
      numbers.to = row(to, first);
      if (in_device_memory(view)) {
        numbers.stride = view.size(0) == 1 ? 0 : view.stride(0);
        numbers.from = static_cast<const std::int32_t*>(view.data()) +
                       (first - batches_.begin) * numbers.stride;
        return;
      }
      for (std::int64_t b = 0; b < count; ++b) numbers.given[b] = of_batch(first + b);
    };
    const auto set_lengths = [&](CallArgumentWrite::Numbers& numbers, Row to, Row maximum,
                                 const ConstTensorView& view,
                                 const std::vector<std::int32_t>& lengths) {
      set(numbers, to, view, [&](std::int64_t b) {
        return lengths.empty() ? most(to, b) : lengths[static_cast<std::size_t>(b)];
      });
      numbers.maximum = row(maximum, first);
      numbers.refused = refused(to);
    };
    const Mask& mask = called.mask;
    if (arguments_.lengths) {
      set_lengths(write.query_lengths, Row::query_lengths, Row::most_queries, values.query_lengths,
                  mask.query_lengths());
      set_lengths(write.kv_lengths, Row::kv_lengths, Row::most_keys, values.kv_lengths,
                  mask.kv_lengths());
    }
    if (arguments_.offsets) {
      set(write.offsets, Row::offsets, values.offsets, [&](std::int64_t b) {
        return mask.offsets().empty() ? static_cast<std::int32_t>(mask.offset())
                                      : mask.offsets()[static_cast<std::size_t>(b)];
      });
    }
    if (arguments_.dropout_seed) {
      write.dropout_key = static_cast<std::uint32_t*>(dropout_key_.view().data());
      write.device_seed = values.device_dropout_seed;
      write.seed = called.dropout->seed();
    }
    operations.write(write, stream);
    first += count;
  } while (first < batches_.end());
}

void CallArrays::check() const {
  if (!arguments_.lengths) return;
  for (const auto& [row, name] :
       {std::pair(Row::query_lengths, "q_lengths"), std::pair(Row::kv_lengths, "kv_lengths")}) {
    const std::uint64_t found = *refused(row);
    if (found == 0) continue;
    *refused(row) = 0;
    const auto batch = static_cast<std::int64_t>(found >> 32U) - 1;
    throw ArgumentError(name,
                        fmt::format("{} in batch {}", static_cast<std::int32_t>(found), batch),
                        fmt::format("0 to {}, as planned", most(row, batch)));
  }
}

}  // namespace annulus::ring
