#pragma once

#include <cstddef>
#include <string>

namespace annulus {

/// 128 bits that stand for the bytes of a buffer, as hexadecimal digits. Not cryptographic: for
/// noticing that two ranks hold different values.
[[nodiscard]] std::string digest(const void* data, std::size_t bytes);

}  // namespace annulus
