#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cudnn.h>
#include <memory>
#include <optional>

#include <annulus/core/dtype.hpp>

namespace annulus {

/// Everything that a plan for cuDNN's scaled dot-product attention depends on. Strides count
/// elements; the head dimensions have stride 1.
struct SdpaDescriptor {
  using Strides = std::array<std::int64_t, 3>;

  bool backward = false;          ///< the gradients are computed, not the output
  DType dtype = DType::bfloat16;  ///< of all tensors but the LSE
  std::int64_t batch = 0, rows = 0, columns = 0, heads = 0, kv_heads = 0;
  std::int64_t head_dim = 0, value_dim = 0;
  Strides query{}, key{}, value{};  ///< of batch, position, head
  Strides output{};                 ///< likewise; a backward plan uses neither this nor lse
  Strides lse{};                    ///< of batch, head, position
  float scale = 1;
  /// Local row r sees local column c only if r − left < c ≤ r + right. With bottom_right, rows are
  /// counted so that the last row has the number of the last column.
  std::optional<std::int64_t> left, right;
  bool bottom_right = false;
  /// Each batch has lengths of its own, which are arguments of run(). It excludes bottom_right, as
  /// cuDNN would then take the corner of the lengths.
  bool padded = false;

  bool operator==(const SdpaDescriptor&) const = default;
};

[[nodiscard]] std::size_t hash_of(const SdpaDescriptor& descriptor) noexcept;

/// A plan for the device that it was built on: slow to build, cheap to run. Output and gradients
/// have the inputs' dtype, the LSE is float32. The results of rows at or past the length of their
/// batch are undefined, and so are the gradients of keys at or past it.
class SdpaPlan {
 public:
  /// Throws UnsupportedError, with cuDNN's message, if cuDNN has no engine for the descriptor.
  SdpaPlan(const SdpaDescriptor& descriptor, cudnnHandle_t handle);
  ~SdpaPlan();
  SdpaPlan(const SdpaPlan&) = delete;
  SdpaPlan& operator=(const SdpaPlan&) = delete;

  [[nodiscard]] std::size_t workspace_bytes() const noexcept;

  /// Output and LSE are results of a forward plan and inputs of a backward one.
  struct Arguments {
    const void* query;
    const void* key;
    const void* value;
    void* output;
    void* lse;
    void* workspace;  ///< workspace_bytes()
    /// int32 [batch] on the device, at least 1 each; null unless padded.
    const void* query_lengths;
    const void* kv_lengths;
    // For a backward plan. Its output and gradients are contiguous [batch, position, head, dim],
    // its LSE is contiguous [batch, head, position].
    const void* grad_output = nullptr;
    void* grad_query = nullptr;
    void* grad_key = nullptr;
    void* grad_value = nullptr;
  };
  /// Runs on the handle's stream, with any handle of the device and in any thread. Throws
  /// CudnnError, also for addresses that are not multiples of 16 (except the LSE's).
  void run(cudnnHandle_t handle, const Arguments& arguments) const;

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
};

/// Returns the process's plan for the current device, and builds it if there is none. Throws the
/// errors of SdpaPlan's constructor; a refusal is remembered and thrown again.
[[nodiscard]] std::shared_ptr<const SdpaPlan> shared_sdpa_plan(const SdpaDescriptor& descriptor);

}  // namespace annulus
