#include "mpi/mpi_messenger.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>

#include "control/bytes_of.hpp"
#include "control/describe_wait.hpp"
#include "mpi/posted_messages.hpp"

namespace annulus {
namespace {

// The first message carries the length and this much of the text; the rest follows in pieces.
constexpr std::size_t kFirstBytes = 4096;

// The number of polls between two checks for questions of a roll call.
constexpr int kPollsPerAnswer = 8;
constexpr Watchdog::Seconds kRollCall{2};

}  // namespace

MpiMessenger::MpiMessenger(std::shared_ptr<const MpiRanks> ranks, Watchdog watchdog, Tags tags,
                           bool of_mesh)
    : ranks_(std::move(ranks)),
      watchdog_(std::move(watchdog)),
      tags_(tags),
      of_mesh_(of_mesh),
      roll_call_(
          std::min(kRollCall, watchdog_.timeout()).count(),
          std::make_unique<PostedMessages>(ranks_->communicator, tags_.question, tags_.answer)) {}

void MpiMessenger::abort(int exit_code) noexcept {
  abort_job(exit_code);
}

void MpiMessenger::send(std::string_view what, std::span<const int> to, const std::string& text) {
  std::string first;
  append(first, std::uint64_t{text.size()});
  first.append(text, 0, kFirstBytes);
  std::vector<std::pair<int, MPI_Request>> requests;
  for (const int peer : to) {
    const auto post = [&](const char* data, std::size_t bytes) {
      requests.emplace_back(peer, MPI_REQUEST_NULL);
      check_mpi(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, ranks_->member(peer), tags_.text,
                          ranks_->communicator, &requests.back().second),
                "MPI_Isend");
    };
    post(first.data(), first.size());
    for (std::size_t at = kFirstBytes; at < text.size(); at += ranks_->chunk_bytes) {
      post(text.data() + at, std::min(ranks_->chunk_bytes, text.size() - at));
    }
  }
  for (auto& [peer, request] : requests) {
    const Call call{what, fmt::format("take {}", human_bytes(text.size())), false};
    wait(call, peer, [&posted = request] {
      int done = 0;
      check_mpi(MPI_Test(&posted, &done, MPI_STATUS_IGNORE), "MPI_Test");
      return done != 0;
    });
  }
}

std::string MpiMessenger::receive(const Call& call, int from) {
  const auto take = [&](const Call& piece, char* data, std::size_t bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Status status;
    check_mpi(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, ranks_->member(from), tags_.text,
                        ranks_->communicator, &request),
              "MPI_Irecv");
    try {
      wait(piece, from, [&] {
        int done = 0;
        check_mpi(MPI_Test(&request, &done, &status), "MPI_Test");
        return done != 0;
      });
    } catch (...) {
      // A late message must not be written to freed memory.
      if (request != MPI_REQUEST_NULL) {
        MPI_Cancel(&request);
        MPI_Request_free(&request);
      }
      throw;
    }
    int count = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
    return static_cast<std::size_t>(count);
  };
  std::string first(sizeof(std::uint64_t) + kFirstBytes, '\0');
  first.resize(take(call, first.data(), first.size()));
  const auto length = value_at<std::uint64_t>(first, 0);
  std::string text = first.substr(sizeof(std::uint64_t));
  text.resize(length);
  for (std::size_t at = kFirstBytes; at < length; at += ranks_->chunk_bytes) {
    const Call rest{call.what, fmt::format("give {} more", human_bytes(length - at)), false};
    (void)take(rest, text.data() + at, std::min(ranks_->chunk_bytes, length - at));
  }
  return text;
}

void MpiMessenger::wait(const Call& call, int peer, const std::function<bool()>& done) {
  const int awaited = ranks_->member(peer);
  int polls = 0;
  watchdog_.wait(
      [&] {
        if (++polls % kPollsPerAnswer == 0) roll_call_.respond(awaited);
        return done();
      },
      [&] { return describe_wait(call, peer); },
      of_mesh_ ? Watchdog::Peers([awaited] { return std::vector{awaited}; }) : Watchdog::Peers());
}

std::string MpiMessenger::describe_wait(const Call& call, int peer) {
  const int awaited = ranks_->member(peer);
  return annulus::describe_wait(call, awaited, roll_call_.absent(awaited),
                                [&](int rank) { return ranks_->name_of_member(rank); });
}

}  // namespace annulus
