#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cudnn.h>
#include <memory>
#include <optional>

#include <annulus/core/dtype.hpp>

namespace annulus {

/// All that a plan for cuDNN's scaled dot-product attention depends on. Strides count elements; the
/// head dimensions have stride 1.
struct SdpaDescriptor {
  using Strides = std::array<std::int64_t, 3>;

  bool backward = false;          ///< the gradients are computed, not the output
  DType dtype = DType::bfloat16;  ///< of all tensors but the LSE
  std::int64_t batch = 0, rows = 0, columns = 0, heads = 0, kv_heads = 0;
  std::int64_t head_dim = 0, value_dim = 0;
  Strides query{}, key{}, value{};  ///< of batch, position, head
  Strides output{};                 ///< likewise; not of a backward plan, nor is the next one
  Strides lse{};                    ///< of batch, head, position
  float scale = 1;
  /// Local row r sees local column c only if c ≤ r + right, and only if c > r − left. With
  /// bottom_right the r of both is counted so that the last row stands on the last column.
  std::optional<std::int64_t> left, right;
  bool bottom_right = false;
  /// Each batch has lengths of its own, which run() is given. Not with bottom_right: cuDNN would
  /// take that for the corner of the lengths.
  bool padded = false;

  bool operator==(const SdpaDescriptor&) const = default;
};

[[nodiscard]] std::size_t hash_of(const SdpaDescriptor& descriptor) noexcept;

/// One built plan: slow to make, cheap to run, for the device that it was built on. Output and
/// gradients have the inputs' dtype, the LSE is float32. What rows at or past the length of their
/// batch get is not defined, nor what their keys' gradients are.
class SdpaPlan {
 public:
  /// Throws UnsupportedError with cuDNN's words if it has no engine for this.
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
    // For a backward plan, whose output, LSE and gradients are contiguous, [batch, position, head,
    // dim] and [batch, head, position].
    const void* grad_output = nullptr;
    void* grad_query = nullptr;
    void* grad_key = nullptr;
    void* grad_value = nullptr;
  };
  /// On the handle's stream; any thread, any handle of the device. Throws CudnnError, among others
  /// for addresses, other than the LSE's, that are not multiples of 16.
  void run(cudnnHandle_t handle, const Arguments& arguments) const;

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
};

/// The plan for the current device, which all of the process share: built unless it is known.
/// Throws what the constructor of SdpaPlan does, also from memory.
[[nodiscard]] std::shared_ptr<const SdpaPlan> shared_sdpa_plan(const SdpaDescriptor& descriptor);

}  // namespace annulus
