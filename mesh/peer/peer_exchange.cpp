#include "peer/peer_exchange.hpp"

#include <utility>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>

#include "peer/stream_operations.hpp"

namespace annulus::peer {
namespace {

void copy(void* destination, const void* source, std::size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, stream),
             "cudaMemcpyAsync between peers");
}

}  // namespace

PeerExchange::PeerExchange(FlagBlock& flags, std::vector<OutgoingMessage> outgoing,
                           std::vector<IncomingMessage> incoming, std::vector<OwnCopy> copies)
    : flags_(flags),
      outgoing_(std::move(outgoing)),
      incoming_(std::move(incoming)),
      copies_(std::move(copies)) {}

PeerExchange::~PeerExchange() {
  if (std::uncaught_exceptions() > exceptions_) flags_.let_everybody_pass();
}

void PeerExchange::offer(Stream& stream) {
  flags_.check();
  const DeviceGuard guard(stream.place().device);
  StreamOperations operations(CudaStream::of(stream).raw());
  for (const OutgoingMessage& message : outgoing_) operations.write(message.peer_ready, kRaised);
  operations.submit();
}

void PeerExchange::take(Stream& stream) {
  auto* const raw = CudaStream::of(stream).raw();
  const DeviceGuard guard(stream.place().device);
  StreamOperations operations(raw);
  for (const OwnCopy& own : copies_) copy(own.destination, own.source, own.bytes, raw);
  for (const IncomingMessage& message : incoming_) {
    operations.wait_and_lower(message.ready.address());
    operations.submit();
    copy(message.destination, message.source, message.bytes, raw);
    operations.write(message.peer_done, kRaised);
  }
  operations.submit();
}

void PeerExchange::reclaim(Stream& stream) {
  const DeviceGuard guard(stream.place().device);
  StreamOperations operations(CudaStream::of(stream).raw());
  for (const OutgoingMessage& message : outgoing_) {
    operations.wait_and_lower(message.done.address());
  }
  operations.submit();
}

}  // namespace annulus::peer
