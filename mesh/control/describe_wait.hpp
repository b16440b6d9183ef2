#pragma once

#include <functional>
#include <optional>
#include <string>

#include "control/messenger.hpp"

namespace annulus {

/// The text of a timeout: "start: waiting for rank 2 to arrive". `peer` is the mesh rank that this
/// rank waits for, and `absent` the missing rank at the end of the chain of waits, if there is one.
[[nodiscard]] std::string describe_wait(const Messenger::Call& call, int peer,
                                        std::optional<int> absent,
                                        const std::function<std::string(int rank)>& name_of);

}  // namespace annulus
