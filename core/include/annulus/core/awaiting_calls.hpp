#pragma once

#include <memory>
#include <mutex>

#include <annulus/core/place.hpp>
#include <annulus/core/stream.hpp>

namespace annulus {

/// The calls on one GPU whose kernels wait for other ranks. The calls run one at a time, in the
/// order of submission, which is the same on all ranks. Two calls at once could deadlock: each
/// could occupy a GPU on which the other call has yet to begin. All devices that this process opens
/// on a GPU share one object.
struct AwaitingCalls {
  std::mutex mutex;             ///< held while a call is submitted
  std::shared_ptr<Event> last;  ///< the end of the last submitted call; null before the first
};

/// The object of the GPU at `place`. It lives as long as any result.
[[nodiscard]] std::shared_ptr<AwaitingCalls> awaiting_calls(Place place);

}  // namespace annulus
