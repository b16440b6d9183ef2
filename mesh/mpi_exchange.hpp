#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus {

/// What every message of a group needs to know.
struct MpiEndpoint {
  MPI_Comm communicator = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::size_t chunk_bytes = 0;
  std::vector<int> world_ranks;  ///< rank in MPI_COMM_WORLD of every rank of the group

  /// "rank 1", or "rank 1 (mpirun rank 5)" where the two differ.
  [[nodiscard]] std::string name_of(int peer) const;
};

/// Data and control calls of a group share its communicator but never each other's messages.
enum class MpiTag : int { data = 1, control = 2 };

/// Nonblocking sends and receives that count as one operation.
class MpiExchange final : public HostOperation {
 public:
  /// `endpoint` must outlive the operation's work.
  MpiExchange(const MpiEndpoint& endpoint, MpiTag tag, std::vector<Send> sends,
              std::vector<Receive> receives, ExchangeLabel label);
  /// Withdraws what is still pending, as after a timeout.
  ~MpiExchange() override;
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  void start() override;
  bool test() override;
  [[nodiscard]] std::uint64_t pieces_finished() const override;
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] TraceLabel label() const override;
  /// "rank 3, rank 5": the peers that something is still to come from.
  [[nodiscard]] std::string missing_senders() const;

 private:
  enum class Direction : std::uint8_t { receive, send };
  /// One MPI message: a whole message of the exchange, or a piece of one.
  struct Piece {
    Direction direction;
    int peer;
    std::size_t bytes;
  };

  void post_receive(const Receive& receive);
  void post_send(const Send& send);
  void check_length(const Piece& piece, const MPI_Status& status) const;
  /// Bytes still pending with every peer in one direction; −1 where nothing is.
  [[nodiscard]] std::vector<std::int64_t> pending(Direction direction) const;
  [[noreturn]] void fail(int code, int completed) const;

  const MpiEndpoint& endpoint_;
  MpiTag tag_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  ExchangeLabel label_;
  std::vector<MPI_Request> requests_;  // MPI_REQUEST_NULL once complete
  std::vector<Piece> pieces_;          // what requests_[i] is
  std::vector<int> indices_;           // scratch of test()
  std::vector<MPI_Status> statuses_;   // likewise
};

}  // namespace annulus
