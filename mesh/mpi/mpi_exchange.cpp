#include "mpi/mpi_exchange.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/mpi.hpp>

#include "self/self_messages.hpp"

namespace annulus {
namespace {

// Calls piece(offset, bytes) for each MPI message that carries a part of `bytes`; an empty message
// counts as one.
template <class Piece>
void for_each_piece(std::size_t bytes, std::size_t chunk_bytes, Piece&& piece) {
  std::size_t offset = 0;
  do {
    const std::size_t length = std::min(chunk_bytes, bytes - offset);
    piece(offset, length);
    offset += length;
  } while (offset < bytes);
}

}  // namespace

MpiExchange::MpiExchange(const MpiEndpoint& endpoint, std::vector<Send> sends,
                         std::vector<Receive> receives, ExchangeLabel label)
    : endpoint_(endpoint),
      sends_(std::move(sends)),
      receives_(std::move(receives)),
      label_(std::move(label)) {
  check_messages(sends_, receives_, endpoint_.rank, endpoint_.size());
}

MpiExchange::~MpiExchange() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    // Cancels receives, which must not write into a buffer that is about to be freed. A send cannot
    // be cancelled.
    if (pieces_[i].direction == Direction::receive) MPI_Cancel(&requests_[i]);
    MPI_Request_free(&requests_[i]);
  }
}

void MpiExchange::start() {
  // Reserves room first, since nothing may fail between posting a request and storing it.
  std::size_t pieces = 0;
  const auto count = [&](std::size_t bytes) {
    for_each_piece(bytes, endpoint_.chunk_bytes, [&](std::size_t, std::size_t) { ++pieces; });
  };
  for (const Receive& receive : receives_) count(receive.bytes);
  for (const Send& send : sends_) count(send.bytes);
  requests_.reserve(pieces);
  pieces_.reserve(pieces);
  finished_ns_.assign(receives_.size() + sends_.size(), 0);
  std::int64_t* finished_ns = finished_ns_.data();
  // Posts receives first, so that no message arrives unexpectedly because of this rank's own order.
  for (const Receive& receive : receives_) {
    if (receive.peer != endpoint_.rank) post_receive(receive, *finished_ns);
    ++finished_ns;
  }
  for (const Send& send : sends_) {
    if (send.peer != endpoint_.rank) post_send(send, *finished_ns);
    ++finished_ns;
  }
  copy_self_messages(sends_, receives_, endpoint_.rank);
}

void MpiExchange::post_receive(const Receive& receive, std::int64_t& finished_ns) {
  for_each_piece(receive.bytes, endpoint_.chunk_bytes, [&](std::size_t offset, std::size_t bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Irecv(static_cast<std::byte*>(receive.data) + offset, static_cast<int>(bytes),
                        MPI_BYTE, endpoint_.member(receive.peer), static_cast<int>(MpiTag::data),
                        endpoint_.communicator, &request),
              "MPI_Irecv");
    requests_.push_back(request);
    pieces_.push_back({Direction::receive, receive.peer, bytes, &finished_ns});
  });
}

void MpiExchange::post_send(const Send& send, std::int64_t& finished_ns) {
  for_each_piece(send.bytes, endpoint_.chunk_bytes, [&](std::size_t offset, std::size_t bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Isend(static_cast<const std::byte*>(send.data) + offset, static_cast<int>(bytes),
                        MPI_BYTE, endpoint_.member(send.peer), static_cast<int>(MpiTag::data),
                        endpoint_.communicator, &request),
              "MPI_Isend");
    requests_.push_back(request);
    pieces_.push_back({Direction::send, send.peer, bytes, &finished_ns});
  });
}

bool MpiExchange::test() {
  if (requests_.empty()) return true;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int completed = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &completed,
                                indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS) fail(code, completed);
  if (completed == MPI_UNDEFINED) return true;  // all were complete before
  const std::int64_t now = completed > 0 ? monotonic_ns() : 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(completed); ++i) {
    const Piece& piece = pieces_[static_cast<std::size_t>(indices_[i])];
    check_length(piece, statuses_[i]);
    *piece.finished_ns = now;
  }
  return std::all_of(requests_.begin(), requests_.end(),
                     [](MPI_Request request) { return request == MPI_REQUEST_NULL; });
}

std::uint64_t MpiExchange::pieces_finished() const {
  return static_cast<std::uint64_t>(
      std::count(requests_.begin(), requests_.end(), MPI_REQUEST_NULL));
}

void MpiExchange::check_length(const Piece& piece, const MPI_Status& status) const {
  if (piece.direction == Direction::send) return;
  int bytes = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  if (static_cast<std::size_t>(bytes) != piece.bytes) {
    throw LibraryError(fmt::format("{} from {}: got a message of {} bytes, expected {}",
                                   label_.what, endpoint_.name_of(piece.peer), bytes, piece.bytes));
  }
}

void MpiExchange::fail(int code, int completed) const {
  if (code == MPI_ERR_IN_STATUS && completed != MPI_UNDEFINED) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(completed); ++i) {
      const int error = statuses_[i].MPI_ERROR;
      if (error == MPI_SUCCESS || error == MPI_ERR_PENDING) continue;
      const Piece& piece = pieces_[static_cast<std::size_t>(indices_[i])];
      throw MpiError(
          fmt::format("{} of {} bytes {} {}", label_.what, piece.bytes,
                      piece.direction == Direction::receive ? "expected from" : "sent to",
                      endpoint_.name_of(piece.peer)),
          error);
    }
  }
  throw MpiError("MPI_Testsome", code);
}

std::vector<std::int64_t> MpiExchange::pending(Direction direction) const {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(endpoint_.size()), -1);
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (requests_[i] == MPI_REQUEST_NULL || piece.direction != direction) continue;
    auto& sum = bytes[static_cast<std::size_t>(piece.peer)];
    sum = std::max<std::int64_t>(sum, 0) + static_cast<std::int64_t>(piece.bytes);
  }
  return bytes;
}

std::string MpiExchange::describe() const {
  std::string waits;
  const auto append = [&](Direction direction, const char* format) {
    const auto bytes = pending(direction);
    for (int peer = 0; peer < endpoint_.size(); ++peer) {
      const std::int64_t count = bytes[static_cast<std::size_t>(peer)];
      if (count < 0) continue;
      waits += waits.empty() ? "" : ", ";
      waits += fmt::format(fmt::runtime(format), human_bytes(static_cast<std::uint64_t>(count)),
                           label_.what, endpoint_.name_of(peer));
    }
  };
  append(Direction::receive, "{} of {} from {}");
  append(Direction::send, "{} of {} to be taken by {}");
  const std::string step = label_.step >= 0 ? fmt::format("step {}: ", label_.step) : "";
  return step + (waits.empty() ? label_.what + ": nothing pending" : "waiting for " + waits);
}

std::vector<int> MpiExchange::peers() const {
  std::vector<int> peers;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] != MPI_REQUEST_NULL) peers.push_back(endpoint_.member(pieces_[i].peer));
  }
  return peers;
}

TraceLabel MpiExchange::label() const {
  return {TraceCategory::transfer, label_.what, label_.step};
}

void MpiExchange::trace(Tracer& tracer, const std::string& stream, std::int64_t begin_ns,
                        std::int64_t /*end_ns*/) const {
  const std::int64_t* finished_ns = finished_ns_.data();
  const auto record = [&](const auto& messages, bool incoming) {
    for (const auto& message : messages) {
      const std::int64_t end_ns = *finished_ns++;
      if (message.peer == endpoint_.rank) continue;
      TraceSpan span{label(), stream, begin_ns, end_ns};
      span.label.messages.push_back(
          {endpoint_.member(message.peer), static_cast<std::int64_t>(message.bytes), incoming});
      tracer.record(span);
    }
  };
  record(receives_, true);
  record(sends_, false);
}

}  // namespace annulus
