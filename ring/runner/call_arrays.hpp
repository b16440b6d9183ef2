#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// The call arguments of a rank, in memory that its kernels read. Their addresses never change, so
/// recorded calls serve all values.
class CallArrays {
 public:
  /// For the global `batches` of the rank. The lengths of `planned` are the largest allowed ones.
  /// Does nothing on CPUs, or if the problem has no call arguments.
  CallArrays(const AttentionProblem& planned, BatchRange batches, Device& device, Stream& stream);

  /// The addresses that kernels read.
  [[nodiscard]] const CallArgumentArrays& arrays() const noexcept { return arrays_; }
  /// Sets the arguments of the next call, in the order of `stream`: `values` in device memory,
  /// everything else from `called`.
  void write(const AttentionProblem& called, const CallValues& values,
             const LocalOperations& operations, Stream& stream) const;
  /// Throws ArgumentError if a length read from device memory since the last check was not allowed.
  /// Calls must be done.
  void check() const;

 private:
  enum class Row : std::uint8_t { query_lengths, kv_lengths, offsets, most_queries, most_keys };
  static constexpr std::int64_t kRows = 5;

  [[nodiscard]] std::int32_t* row(Row row, std::int64_t batch = 0) const;
  [[nodiscard]] volatile std::uint64_t* refused(Row row) const;
  [[nodiscard]] std::int32_t most(Row row, std::int64_t batch) const;

  CallArguments arguments_;
  BatchRange batches_;
  AttentionShape shape_;
  std::vector<std::int32_t> planned_query_lengths_;  // empty: T
  std::vector<std::int32_t> planned_kv_lengths_;     // empty: S
  Tensor numbers_;                                   // int32 [kRows, B], by Row
  Tensor dropout_key_;                               // two words
  annulus::Buffer
      refused_;  // two words of host memory that the device writes, for queries and for keys
  CallArgumentArrays arrays_;
};

}  // namespace annulus::ring
