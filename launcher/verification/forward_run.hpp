#pragma once

#include <cstdint>
#include <string_view>

#include <annulus/core/memory.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/verification.hpp>

#include "called_values.hpp"

namespace annulus::verification {

inline constexpr int kNanBytes = 0xff;    // NaN in every dtype
inline constexpr int kOtherBytes = 0x3f;  // neither NaN nor 0 in any

/// The forward pass of a case. Collective over the context, which must outlive it, as must the
/// case.
struct ForwardRun {
  ForwardRun(const ShardedCase& sharded_case, Context& context);
  /// Unwritten elements keep `unwritten` bytes. If the correct result is NaN, only another run with
  /// other bytes shows them.
  void run(int unwritten = kNanBytes) { run(unwritten, called.own()); }
  /// Computes with values other than the calls' own.
  void run_others() { run(kNanBytes, called.others()); }
  /// The tensors of a call, in device memory.
  [[nodiscard]] ring::LocalTensors tensors() const { return with(called.own()); }
  [[nodiscard]] ring::LocalTensors with(const ring::CallValues& values) const;

  HostMemoryPool host;
  Attention attention;
  CaseShards shards;
  DeviceTensors moved;  ///< the shards in device memory
  CalledValues called;

 private:
  void run(int unwritten, const ring::CallValues& values);
};

/// Collective.
[[nodiscard]] bool on_any_rank(Control& ranks, bool fact, std::string_view what);

/// The error allowed by verify_sharded() for this many rows that are not 0. `rounding` is that of
/// partial results; `merge` is the error of merging two of them, in float32 roundings.
[[nodiscard]] double allowed_error(std::int64_t rows, double unsharded, int shards, double rounding,
                                   double merge = 3);

}  // namespace annulus::verification
