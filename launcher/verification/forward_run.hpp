#pragma once

#include <cstdint>

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
  /// Elements that it does not write keep `unwritten` bytes. Where they must be NaN, only a further
  /// run that begins with other bytes shows them.
  void run(int unwritten = kNanBytes) { run(unwritten, called.own()); }
  /// Computes with other values in the place of those that come with calls.
  void run_others() { run(kNanBytes, called.others()); }
  /// Of a call, where the device computes.
  [[nodiscard]] ring::LocalTensors tensors() const { return with(called.own()); }
  [[nodiscard]] ring::LocalTensors with(const ring::CallValues& values) const;

  HostMemoryPool host;
  Attention attention;
  CaseShards shards;
  DeviceTensors moved;  ///< the shards where the device computes
  CalledValues called;

 private:
  void run(int unwritten, const ring::CallValues& values);
};

/// See verify_sharded(), for results of so many rows; `rounding` is that of partial results, and
/// `merge` what merging two of them adds, in float32 roundings.
[[nodiscard]] double allowed_error(std::int64_t rows, double unsharded, int shards, double rounding,
                                   double merge = 3);

}  // namespace annulus::verification
