#include <algorithm>

#include <annulus/core/call_memory.hpp>

namespace annulus {

std::vector<CallMemory::Piece> CallMemory::take(std::span<const Request> requests) {
  std::erase_if(pieces_, [](const auto& piece) { return piece.second.expired(); });
  std::vector<Piece> taken;
  for (const Request& request : requests) {
    Piece best;
    for (const auto& [pool, held] : pieces_) {
      const Piece piece = pool == &request.pool ? held.lock() : nullptr;
      if (!piece || std::ranges::count(taken, piece) > 0) continue;
      const bool fits =
          piece->bytes() >= request.bytes && piece->bytes() <= request.bytes + request.bytes / 4;
      if (fits && (!best || piece->bytes() < best->bytes())) best = piece;
    }
    if (!best && request.bytes == 0) best = std::make_shared<const Buffer>();
    if (!best) {
      best = std::make_shared<const Buffer>(request.pool.allocate(request.bytes));
      pieces_.emplace_back(&request.pool, best);
    }
    taken.push_back(std::move(best));
  }
  return taken;
}

}  // namespace annulus
