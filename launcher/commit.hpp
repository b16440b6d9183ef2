#pragma once

#include <string_view>

namespace annulus::launcher {

/// The commit that the program was built from: "1a2b3c4d5e", with "-dirty" appended if files
/// differed from it; "unknown" outside of a checkout. Only the program itself links it, since it
/// changes with every commit and nothing else should have to be relinked.
[[nodiscard]] std::string_view commit() noexcept;

}  // namespace annulus::launcher
