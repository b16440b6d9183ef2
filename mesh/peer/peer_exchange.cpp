#include "peer/peer_exchange.hpp"

#include <cstddef>
#include <span>
#include <utility>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>

namespace annulus::peer {
namespace {

std::ptrdiff_t distance(const void* from, const void* to) {
  return static_cast<const std::byte*>(to) - static_cast<const std::byte*>(from);
}

// The number of leading copies with equal lengths and distances, which form rows of one 2D copy.
std::size_t rows_of(std::span<const MemoryCopy> copies) {
  constexpr std::ptrdiff_t kMaximumPitch = std::int64_t{1} << 31;
  std::size_t rows = 1;
  for (; rows < copies.size(); ++rows) {
    const MemoryCopy& before = copies[rows - 1];
    const MemoryCopy& next = copies[rows];
    const std::ptrdiff_t source = distance(before.source, next.source);
    const std::ptrdiff_t destination = distance(before.destination, next.destination);
    const auto bytes = static_cast<std::ptrdiff_t>(before.bytes);
    if (next.bytes != before.bytes || source < bytes || destination < bytes ||
        source >= kMaximumPitch || destination >= kMaximumPitch ||
        source != distance(copies[0].source, copies[1].source) ||
        destination != distance(copies[0].destination, copies[1].destination)) {
      break;
    }
  }
  return rows;
}

// One copy takes some microseconds, however small.
void copy_all(std::span<const MemoryCopy> copies, CudaStream& stream) {
  if (copies.empty()) return;
  auto* const raw = stream.raw();
  while (!copies.empty()) {
    const MemoryCopy& first = copies.front();
    const std::size_t rows = rows_of(copies);
    if (rows == 1) {
      check_cuda(
          cudaMemcpyAsync(first.destination, first.source, first.bytes, cudaMemcpyDefault, raw),
          "cudaMemcpyAsync between peers");
    } else {
      const auto pitch = [&](const void* a, const void* b) {
        return static_cast<std::size_t>(distance(a, b));
      };
      check_cuda(
          cudaMemcpy2DAsync(first.destination, pitch(first.destination, copies[1].destination),
                            first.source, pitch(first.source, copies[1].source), first.bytes, rows,
                            cudaMemcpyDefault, raw),
          "cudaMemcpy2DAsync between peers");
    }
    copies = copies.subspan(rows);
  }
}

}  // namespace

PeerExchange::PeerExchange(FlagBlock& flags, std::vector<OutgoingMessages> outgoing,
                           std::vector<IncomingMessages> incoming, std::vector<MemoryCopy> copies)
    : flags_(flags),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      copies_(std::move(copies)) {}

void PeerExchange::offer(Stream& stream) {
  flags_.check();
  for (const OutgoingMessages& messages : outgoing_) {
    raise(messages.peer_ready, CudaStream::of(stream));
  }
}

void PeerExchange::take(Stream& stream) {
  CudaStream& cuda = CudaStream::of(stream);
  const DeviceGuard guard(stream.place().device);
  copy_all(copies_, cuda);
  for (const IncomingMessages& messages : incoming_) {
    wait_and_lower(messages.ready.address(), cuda);
    copy_all(messages.copies, cuda);
    raise(messages.peer_done, cuda);
  }
}

void PeerExchange::reclaim(Stream& stream) {
  for (const OutgoingMessages& messages : outgoing_) {
    wait_and_lower(messages.done.address(), CudaStream::of(stream));
  }
}

}  // namespace annulus::peer
