#pragma once

#include <span>

#include <annulus/mesh/group.hpp>

namespace annulus {

/// Checks, before anything is queued, that every peer is a rank of a group of `size` ranks and that
/// the messages of `rank` to itself pair up in order, with equal lengths. Throws InternalError.
void check_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank,
                    int size);

/// Copies the messages of `rank` to itself.
void copy_self_messages(std::span<const Send> sends, std::span<const Receive> receives, int rank);

}  // namespace annulus
