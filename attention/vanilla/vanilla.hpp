#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

/// Dense attention on the host, written to be read: see DenseHead.
[[nodiscard]] std::unique_ptr<Implementation> make_vanilla_implementation();

}  // namespace annulus
