#include "self/self_messages.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {
void check_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank,
                    int size) {
  const auto check_peer = [size](const auto& message) {
    if (message.peer < 0 || message.peer >= size) {
      throw InternalError(
          fmt::format("message with rank {} in a group of {} ranks", message.peer, size));
    }
  };
  std::for_each(sends.begin(), sends.end(), check_peer);
  std::for_each(receives.begin(), receives.end(), check_peer);
  for_each_self_message(sends, receives, rank, [rank](const Send* send, const Receive* receive) {
    if (send == nullptr || receive == nullptr) {
      throw InternalError(
          fmt::format("rank {} {} itself without the counterpart in the same exchange", rank,
                      send == nullptr ? "receives from" : "sends to"));
    }
    if (send->bytes != receive->bytes) {
      throw InternalError(fmt::format("rank {} sends {} bytes to itself and receives {}", rank,
                                      send->bytes, receive->bytes));
    }
  });
}

void copy_self_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank) {
  for_each_self_message(sends, receives, rank, [](const Send* send, const Receive* receive) {
    if (send->bytes > 0) std::memmove(receive->data, send->data, send->bytes);
  });
}

}  // namespace annulus
