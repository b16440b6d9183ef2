#pragma once

#include <cstdint>

#include <annulus/attention/dropout.hpp>
#include <annulus/attention/philox.hpp>

namespace annulus::cuda {

/// See annulus::Dropout.
struct DropoutArguments {
  std::uint32_t threshold;    ///< 0: nothing drops
  std::uint32_t key[2];       ///< the seed
  std::uint32_t first_head;   ///< the third word of a counter, of local head 0
  std::uint32_t first_batch;  ///< the fourth, of local batch 0
  float keep_scale;           ///< of the probabilities that are kept
};

/// Of a call whose batches and heads begin at these global ones.
[[nodiscard]] inline DropoutArguments dropout_arguments(const Dropout& dropout,
                                                        std::int64_t first_batch,
                                                        std::int64_t first_head) {
  const PhiloxKey key = philox_key(dropout.seed());
  return {dropout.threshold(),
          {key[0], key[1]},
          Dropout::third_word(first_head),
          Dropout::fourth_word(first_batch),
          static_cast<float>(dropout.keep_scale())};
}

}  // namespace annulus::cuda
