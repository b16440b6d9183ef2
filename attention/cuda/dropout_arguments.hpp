#pragma once

#include <cstdint>

namespace annulus {
class Dropout;
}  // namespace annulus

// Each kernel includes this, and a CUDA compiler parses it three times for each: so it includes no
// header of the host.
namespace annulus::cuda {

/// See annulus::Dropout.
struct DropoutArguments {
  std::uint32_t threshold;    ///< 0: nothing drops
  std::uint32_t key[2];       ///< the seed
  std::uint32_t first_head;   ///< third counter word of local head 0
  std::uint32_t first_batch;  ///< fourth counter word of local batch 0
  float keep_scale;           ///< multiplies the probabilities that are kept
  /// In device memory: two words in place of `key`. Null: none.
  const std::uint32_t* called_key;
};

/// The arguments of a call whose first batch and head have these global indices.
[[nodiscard]] DropoutArguments dropout_arguments(const Dropout& dropout, std::int64_t first_batch,
                                                 std::int64_t first_head);

}  // namespace annulus::cuda
