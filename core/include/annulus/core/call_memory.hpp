#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <annulus/core/memory.hpp>

namespace annulus {

/// Memory of which a call needs nothing once it has ended. The calls of a device run one after the
/// other, so that objects hold the same pieces: sixty-four of one shape take no more than one.
class CallMemory {
 public:
  struct Request {
    MemoryPool& pool;
    std::size_t bytes;
  };
  using Piece = std::shared_ptr<const Buffer>;

  /// A piece for each request of one object, which uses all of them at once. Pieces that other
  /// objects hold are taken where they are large enough and at most a quarter larger; the others
  /// are new. A piece goes back to its pool with its last holder.
  [[nodiscard]] std::vector<Piece> take(std::span<const Request> requests);

 private:
  std::vector<std::pair<const MemoryPool*, std::weak_ptr<const Buffer>>> pieces_;
};

}  // namespace annulus
