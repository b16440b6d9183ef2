#include <map>

#include <annulus/core/awaiting_calls.hpp>

namespace annulus {

std::shared_ptr<AwaitingCalls> awaiting_calls(Place place) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<AwaitingCalls>> by_device;
  const std::lock_guard lock(mutex);
  std::weak_ptr<AwaitingCalls>& known = by_device[place.is_host() ? -1 : place.device];
  std::shared_ptr<AwaitingCalls> calls = known.lock();
  if (!calls) known = calls = std::make_shared<AwaitingCalls>();
  return calls;
}

}  // namespace annulus
