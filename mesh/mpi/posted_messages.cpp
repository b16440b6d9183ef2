#include "mpi/posted_messages.hpp"

#include <chrono>
#include <cstddef>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include <annulus/mesh/mpi.hpp>

namespace annulus {

PostedMessage::~PostedMessage() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0 || request_ == MPI_REQUEST_NULL) return;
  // A send cannot be cancelled.
  static std::mutex mutex;
  static std::list<std::vector<char>> untaken;
  const std::lock_guard lock(mutex);
  untaken.push_back(std::move(bytes_));
  MPI_Request_free(&request_);
}

bool PostedMessage::is_free() {
  int taken = 1;
  if (request_ != MPI_REQUEST_NULL) {
    check_mpi(MPI_Test(&request_, &taken, MPI_STATUS_IGNORE), "MPI_Test");
  }
  return taken != 0;
}

void PostedMessage::post(MPI_Comm communicator, int to, int tag, const std::string& bytes) {
  bytes_.assign(bytes.begin(), bytes.end());
  check_mpi(MPI_Isend(bytes_.data(), static_cast<int>(bytes_.size()), MPI_BYTE, to, tag,
                      communicator, &request_),
            "MPI_Isend");
}

bool take_message(MPI_Comm communicator, int tag, std::size_t most, int& from, std::string& bytes) {
  int waiting = 0;
  MPI_Status status;
  check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, tag, communicator, &waiting, &status), "MPI_Iprobe");
  if (waiting == 0) return false;
  from = status.MPI_SOURCE;
  bytes.resize(most);
  check_mpi(
      MPI_Recv(bytes.data(), static_cast<int>(most), MPI_BYTE, from, tag, communicator, &status),
      "MPI_Recv");
  int count = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
  bytes.resize(static_cast<std::size_t>(count));
  return true;
}

void PostedMessages::post(int to, Kind kind, const std::string& text) {
  posted_.remove_if([](PostedMessage& message) { return message.is_free(); });
  posted_.emplace_back().post(communicator_, to, tag_of(kind), text);
}

bool PostedMessages::take(Kind kind, int& from, std::string& text) {
  constexpr std::size_t kShort = 64;
  return take_message(communicator_, tag_of(kind), kShort, from, text);
}

double PostedMessages::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void PostedMessages::pause() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace annulus
