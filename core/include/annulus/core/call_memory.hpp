#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <annulus/core/memory.hpp>

namespace annulus {

/// Memory that a call needs only while it runs. The calls of a device run one after the other, so
/// objects share the same pieces: 64 objects of one shape take no more memory than one.
class CallMemory {
 public:
  struct Request {
    MemoryPool& pool;
    std::size_t bytes;
  };
  using Piece = std::shared_ptr<const Buffer>;

  /// A piece for each request of one object, which uses all pieces at once. Shares pieces of other
  /// objects that are large enough and at most a quarter too large; all other pieces are new. A
  /// piece goes back to its pool with its last holder.
  [[nodiscard]] std::vector<Piece> take(std::span<const Request> requests);

 private:
  std::vector<std::pair<const MemoryPool*, std::weak_ptr<const Buffer>>> pieces_;
};

}  // namespace annulus
