#pragma once

#include <cstdint>
#include <span>

#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// A host array on the device of `memory`, there when it returns; empty stays empty.
[[nodiscard]] Tensor upload(std::span<const std::int32_t> values, MemoryPool& memory);
[[nodiscard]] Buffer upload(std::span<const std::int64_t> values, MemoryPool& memory);

}  // namespace annulus
