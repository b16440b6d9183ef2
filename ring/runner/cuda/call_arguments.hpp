#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/ring/call_argument_write.hpp>

namespace annulus::ring::cuda {

/// See LocalOperations::write.
void write(const CallArgumentWrite& write, Stream& stream);

}  // namespace annulus::ring::cuda
