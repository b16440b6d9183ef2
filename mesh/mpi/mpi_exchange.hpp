#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/group.hpp>

#include "mpi/mpi_endpoint.hpp"

namespace annulus {

/// Nonblocking sends and receives as one operation.
class MpiExchange final : public HostOperation {
 public:
  /// `endpoint` must outlive the operation's work.
  MpiExchange(const MpiEndpoint& endpoint, std::vector<Send> sends, std::vector<Receive> receives,
              ExchangeLabel label);
  /// Cancels pending requests, as after a timeout.
  ~MpiExchange() override;
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  void start() override;
  bool test() override;
  [[nodiscard]] std::uint64_t pieces_finished() const override;
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::vector<int> peers() const override;
  [[nodiscard]] TraceLabel label() const override;
  /// Records a span for every message to or from another rank, from its post to its completion.
  void trace(Tracer& tracer, const std::string& stream, std::int64_t begin_ns,
             std::int64_t end_ns) const override;

 private:
  enum class Direction : std::uint8_t { receive, send };
  /// One MPI message: a whole message of the exchange, or a piece of one.
  struct Piece {
    Direction direction;
    int peer;
    std::size_t bytes;
    std::int64_t* finished_ns;  ///< of its message, in finished_ns_
  };

  void post_receive(const Receive& receive, std::int64_t& finished_ns);
  void post_send(const Send& send, std::int64_t& finished_ns);
  void check_length(const Piece& piece, const MPI_Status& status) const;
  /// Bytes still pending with every peer in one direction; −1 if nothing is pending.
  [[nodiscard]] std::vector<std::int64_t> pending(Direction direction) const;
  [[noreturn]] void fail(int code, int completed) const;

  const MpiEndpoint& endpoint_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  ExchangeLabel label_;
  std::vector<MPI_Request> requests_;      // MPI_REQUEST_NULL once complete
  std::vector<Piece> pieces_;              // what requests_[i] is
  std::vector<std::int64_t> finished_ns_;  // receives, then sends: when the last piece was complete
  std::vector<int> indices_;               // scratch of test()
  std::vector<MPI_Status> statuses_;       // likewise
};

}  // namespace annulus
