#include "cuda/dropout_arguments.hpp"

#include <annulus/attention/philox.hpp>
#include <annulus/attention/problem.hpp>

namespace annulus::cuda {

DropoutArguments dropout_arguments(const Dropout& dropout, std::int64_t first_batch,
                                   std::int64_t first_head) {
  const PhiloxKey key = philox_key(dropout.seed());
  return {dropout.threshold(),
          {key[0], key[1]},
          Dropout::third_word(first_head),
          Dropout::fourth_word(first_batch),
          static_cast<float>(dropout.keep_scale()),
          nullptr};
}

}  // namespace annulus::cuda
