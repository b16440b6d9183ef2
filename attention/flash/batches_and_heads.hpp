#pragma once

#include <cstdint>

namespace annulus::flash {

/// Batches and query heads of a block: global indices.
struct BatchesAndHeads {
  std::int64_t first_batch = 0;
  std::int64_t batches = 1;
  std::int64_t first_head = 0;
  std::int64_t heads = 1;
};

}  // namespace annulus::flash
