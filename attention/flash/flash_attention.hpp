#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <annulus/attention/implementation.hpp>

#include "flash/decode/decode_attention.hpp"
#include "flash/kernels.hpp"
#include "flash/lists/device_lists.hpp"

namespace annulus::flash {

/// The compiled kernel for a problem; `ids`: masked tiles compare segment ids.
[[nodiscard]] KernelInfo find_kernel(const AttentionProblem& problem, bool ids);

/// Blocks of one problem on one device of compute capability 9.0: keeps the work lists of the
/// blocks that it has seen, and their space on the device. Blocks of few rows go to a kernel of
/// their own. One call at a time.
class FlashAttention {
 public:
  /// Both must outlive it.
  FlashAttention(const AttentionProblem& problem, Device& device);

  /// Why the copies or the kernel's stores cannot take a tensor; empty if they can.
  [[nodiscard]] static std::string layout_obstacle(const char* name, const ConstTensorView& tensor);

  /// Does in advance what the first run() of such a block would do before it launches.
  void prepare(const AttentionBlock& block);
  /// result := the softmax state of the block, and of block.state if there is one. The result's
  /// output is float32 or the problem's dtype, its LSE float32 or float64. Ordered by `stream`.
  void run(const AttentionBlock& block, const SoftmaxState& result, Stream& stream);

 private:
  // A block's geometry, and the work that it makes.
  struct Entry {
    PositionRanges rows;
    PositionRanges columns;
    std::int64_t first_batch = 0;
    std::int64_t batches = 0;
    std::int64_t first_head = 0;
    std::int64_t heads = 0;
    bool unmasked = false;

    KernelInfo kernel;
    bool batch_has_list = false;
    bool head_has_list = false;
    std::int32_t tiles_per_list = 0;
    bool needs_repair = false;
    std::optional<DeviceLists> lists;
    // Launches on two streams may run at the same time, so each stream has its own.
    struct Counters {
      std::optional<cudaStream_t> stream;  // no value: none has taken them yet
      Tensor values;
    };
    std::vector<Counters> counters;
  };

  [[nodiscard]] Entry& find(const AttentionBlock& block);
  [[nodiscard]] Entry make_entry(const AttentionBlock& block);
  [[nodiscard]] Tensor make_counters(const Entry& entry, cudaStream_t stream);
  [[nodiscard]] const Tensor& counters_for(Entry& entry, cudaStream_t stream);
  [[nodiscard]] Arguments arguments_of(const Entry& entry, const Tensor& counters,
                                       const AttentionBlock& block,
                                       const SoftmaxState& result) const;

  const AttentionProblem& problem_;
  Device& device_;
  decode::DecodeAttention decode_;
  int multiprocessors_;
  std::vector<Entry> entries_;
};

}  // namespace annulus::flash
