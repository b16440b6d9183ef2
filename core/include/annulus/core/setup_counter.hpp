#pragma once

#include <cstdint>

namespace annulus {

/// Counts actions that belong only to preparation: taking memory from the system, building a
/// kernel's plan, making a stream or an event, recording, mapping. A repeated attention call must
/// not raise the count, as tests check.
[[nodiscard]] std::uint64_t setup_count() noexcept;
void count_setup() noexcept;

}  // namespace annulus
