#pragma once

#include <cstddef>
#include <string>

namespace annulus {

/// A 128-bit hash of a buffer, as hexadecimal digits. Not cryptographic: it serves to notice that
/// two ranks hold different values.
[[nodiscard]] std::string digest(const void* data, std::size_t bytes);

}  // namespace annulus
