#pragma once

#include <cstdint>

namespace annulus {

/// Counts what this process should do only during preparation: taking memory from the system,
/// building a kernel's plan, making a stream or an event, recording or mapping something. A
/// repeated attention call must not raise the count; tests check that.
[[nodiscard]] std::uint64_t setup_count() noexcept;
void count_setup() noexcept;

}  // namespace annulus
