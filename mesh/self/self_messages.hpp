#pragma once

#include <algorithm>
#include <span>

#include <annulus/mesh/group.hpp>

namespace annulus {

/// Calls pair(const Send*, const Receive*) for the messages of `rank` to itself, in order; null for
/// a side that has no more messages.
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

/// Checks, before anything is queued, that every peer is a rank of a group of `size` ranks and that
/// the messages of `rank` to itself pair up in order, with equal lengths. Throws InternalError.
void check_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank,
                    int size);

/// Copies the messages of `rank` to itself.
void copy_self_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank);

}  // namespace annulus
