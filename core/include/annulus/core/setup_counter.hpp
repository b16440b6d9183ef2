#pragma once

#include <cstdint>

namespace annulus {

/// How often this process has done something that belongs before the steady state: taken memory
/// from the system, built a kernel's plan, made a stream or an event, recorded or mapped something.
/// A repeated call must leave it as it is; tests hold it to that.
[[nodiscard]] std::uint64_t setup_count() noexcept;
void count_setup() noexcept;

}  // namespace annulus
