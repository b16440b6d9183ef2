#include "self_messages.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {
namespace {

// Calls pair(send, receive) for the messages of `rank` to itself, in order; a side that has run out
// is null.
template <class Pair>
void for_each_self_message(std::span<const Send> sends, std::span<const Receive> receives, int rank,
                           Pair&& pair) {
  const auto is_self = [rank](const auto& message) { return message.peer == rank; };
  auto send = std::find_if(sends.begin(), sends.end(), is_self);
  auto receive = std::find_if(receives.begin(), receives.end(), is_self);
  while (send != sends.end() || receive != receives.end()) {
    const bool has_send = send != sends.end();
    const bool has_receive = receive != receives.end();
    pair(has_send ? &*send : nullptr, has_receive ? &*receive : nullptr);
    if (has_send) send = std::find_if(send + 1, sends.end(), is_self);
    if (has_receive) receive = std::find_if(receive + 1, receives.end(), is_self);
  }
}

}  // namespace

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
