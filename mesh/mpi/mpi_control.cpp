#include "mpi/mpi_control.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

// What a message is: a part of a call, its result, or the text of an error.
constexpr char kGood = '.';
constexpr char kError = '!';
// The first message carries the length and this much of the text; the rest follows in pieces.
constexpr std::size_t kFirstBytes = 4096;

// Polls between two checks for roll calls.
constexpr int kPollsPerAnswer = 8;
constexpr Watchdog::Seconds kRollCall{2};

template <class Value>
void append(std::string& text, const Value& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(Value));
}

template <class Value>
Value value_at(const std::string& text, std::size_t offset) {
  Value value;
  std::memcpy(&value, text.data() + offset, sizeof(Value));
  return value;
}

}  // namespace

MpiControl::MpiControl(std::shared_ptr<const MpiEndpoint> endpoint, Watchdog watchdog)
    : endpoint_(std::move(endpoint)),
      watchdog_(std::move(watchdog)),
      roll_call_(endpoint_->communicator.get(), endpoint_->members,
                 static_cast<int>(MpiTag::roll_call), static_cast<int>(MpiTag::here)) {
  const int own = rank();
  if (own > 0) parent_ = own & (own - 1);
  for (int bit = 1; (own & bit) == 0 && own + bit < size(); bit <<= 1) {
    children_.push_back(own + bit);
  }
}

void MpiControl::barrier(std::string_view what) {
  (void)combine_all({what, "arrive"}, {},
                    [](std::string& /*whole*/, const std::string& /*part*/) {});
}

// Ranks that have nothing to say are not mentioned, so that most agreements are short.
std::vector<std::string> MpiControl::gather_text(const std::string& text, std::string_view what) {
  std::string mine;
  if (!text.empty()) {
    append(mine, rank());
    append(mine, std::uint64_t{text.size()});
    mine += text;
  }
  const std::string all =
      combine_all({what, "give its text"}, std::move(mine),
                  [](std::string& whole, const std::string& part) { whole += part; });
  std::vector<std::string> texts(static_cast<std::size_t>(size()));
  for (std::size_t at = 0; at < all.size();) {
    const int from = value_at<int>(all, at);
    const auto length = value_at<std::uint64_t>(all, at + sizeof(int));
    at += sizeof(int) + sizeof(std::uint64_t);
    texts.at(static_cast<std::size_t>(from)) = all.substr(at, length);
    at += length;
  }
  return texts;
}

// Straight to rank 0, which takes them one by one: the texts may be long.
std::vector<std::string> MpiControl::collect_text(const std::string& text, std::string_view what) {
  ++calls_;
  if (rank() > 0) {
    send(what, {0}, MpiTag::text, head_of(what) + text);
    return {};
  }
  std::vector<std::string> texts{text};
  for (int peer = 1; peer < size(); ++peer) {
    texts.push_back(
        body_of(receive({what, "give its text", false}, peer, MpiTag::text), what, peer));
  }
  return texts;
}

std::vector<double> MpiControl::sum(std::span<const double> values, std::string_view what) {
  return reduce(what, values, [](double a, double b) { return a + b; });
}

std::vector<double> MpiControl::max(std::span<const double> values, std::string_view what) {
  return reduce(what, values, [](double a, double b) { return std::isnan(b) || b > a ? b : a; });
}

void MpiControl::abort(int exit_code) noexcept {
  abort_job(exit_code);
}

std::vector<double> MpiControl::reduce(std::string_view what, std::span<const double> values,
                                       const std::function<double(double, double)>& combine) {
  const auto add = [&](std::string& whole, const std::string& part) {
    if (part.size() != whole.size()) {
      throw InternalError(fmt::format("{}: one rank gave {} numbers and another one {}", what,
                                      whole.size() / sizeof(double), part.size() / sizeof(double)));
    }
    for (std::size_t at = 0; at < whole.size(); at += sizeof(double)) {
      const double both = combine(value_at<double>(whole, at), value_at<double>(part, at));
      std::memcpy(whole.data() + at, &both, sizeof(double));
    }
  };
  const std::string all = combine_all(
      {what, fmt::format("give {}", human_bytes(values.size_bytes()))},
      std::string(reinterpret_cast<const char*>(values.data()), values.size_bytes()), add);
  std::vector<double> result(values.size());
  if (!result.empty()) std::memcpy(result.data(), all.data(), all.size());
  return result;
}

std::string MpiControl::combine_all(const Call& call, std::string part, const Combine& combine) {
  ++calls_;
  std::string whole = std::move(part);
  std::string error;
  for (const int child : children_) {
    const std::string theirs = receive(call, child, MpiTag::up);
    if (!error.empty()) continue;
    try {
      if (theirs.front() == kError) throw InternalError(theirs.substr(1));
      combine(whole, body_of(theirs.substr(1), call.what, child));
    } catch (const InternalError& failure) {
      error = failure.what();
    }
  }
  // An error goes the same way as a result, so that it is everybody's.
  if (parent_ >= 0) {
    send(call.what, {parent_}, MpiTag::up,
         error.empty() ? kGood + head_of(call.what) + whole : kError + error);
  }
  std::string message = parent_ >= 0    ? receive(call, parent_, MpiTag::down)
                        : error.empty() ? kGood + whole
                                        : kError + error;
  // The ranks of the largest subtree have the longest way.
  send(call.what, {children_.rbegin(), children_.rend()}, MpiTag::down, message);
  if (message.front() == kError) throw InternalError(message.substr(1));
  return message.substr(1);
}

std::string MpiControl::head_of(std::string_view call) const {
  std::string head;
  append(head, calls_);
  append(head, std::uint64_t{call.size()});
  return head.append(call);
}

// Ranks that are out of step must not take each other's parts: what they would make of them is
// anything but what went wrong.
std::string MpiControl::body_of(const std::string& part, std::string_view call, int from) const {
  const std::string expected = head_of(call);
  if (part.starts_with(expected)) return part.substr(expected.size());
  const auto number = value_at<std::uint64_t>(part, 0);
  const auto length = value_at<std::uint64_t>(part, sizeof number);
  throw InternalError(
      fmt::format("{} is in another call than {}: '{}', its call {}, and not '{}', call {}",
                  endpoint_->name_of(from), endpoint_->name_of(rank()),
                  part.substr(sizeof number + sizeof length, length), number, call, calls_));
}

void MpiControl::send(std::string_view what, const std::vector<int>& to, MpiTag tag,
                      const std::string& text) {
  std::string first;
  append(first, std::uint64_t{text.size()});
  first.append(text, 0, kFirstBytes);
  std::vector<std::pair<int, MPI_Request>> requests;
  for (const int peer : to) {
    const auto post = [&](const char* data, std::size_t bytes) {
      requests.emplace_back(peer, MPI_REQUEST_NULL);
      check_mpi(
          MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, endpoint_->member(peer),
                    static_cast<int>(tag), endpoint_->communicator.get(), &requests.back().second),
          "MPI_Isend");
    };
    post(first.data(), first.size());
    for (std::size_t at = kFirstBytes; at < text.size(); at += endpoint_->chunk_bytes) {
      post(text.data() + at, std::min(endpoint_->chunk_bytes, text.size() - at));
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

std::string MpiControl::receive(const Call& call, int from, MpiTag tag) {
  const auto take = [&](const Call& piece, char* data, std::size_t bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Status status;
    check_mpi(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, endpoint_->member(from),
                        static_cast<int>(tag), endpoint_->communicator.get(), &request),
              "MPI_Irecv");
    try {
      wait(piece, from, [&] {
        int done = 0;
        check_mpi(MPI_Test(&request, &done, &status), "MPI_Test");
        return done != 0;
      });
    } catch (...) {
      // A late message must not be written to memory that is gone.
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
  for (std::size_t at = kFirstBytes; at < length; at += endpoint_->chunk_bytes) {
    const Call rest{call.what, fmt::format("give {} more", human_bytes(length - at)), false};
    (void)take(rest, text.data() + at, std::min(endpoint_->chunk_bytes, length - at));
  }
  return text;
}

void MpiControl::wait(const Call& call, int peer, const std::function<bool()>& done) const {
  int polls = 0;
  watchdog_.wait(
      [&] {
        if (++polls % kPollsPerAnswer == 0) roll_call_.answer();
        return done();
      },
      [&] { return describe_wait(call, peer); });
}

std::string MpiControl::describe_wait(const Call& call, int peer) const {
  const std::vector<int> members = roll_call_.absent(std::min(kRollCall, watchdog_.timeout()));
  const auto is_absent = [&](int rank) {
    return std::find(members.begin(), members.end(), endpoint_->member(rank)) != members.end();
  };
  std::string absent;
  for (int i = 0; i < size(); ++i) {
    if (is_absent(i)) absent += (absent.empty() ? "" : ", ") + endpoint_->name_of(i);
  }
  const std::string name = endpoint_->name_of(peer);
  const auto wait = [&](const std::string& who) {
    return fmt::format("{}: waiting for {} to {}", call.what, who, call.deed);
  };
  if (call.by_all && !absent.empty()) return wait(absent);
  if (is_absent(peer)) return wait(name);
  const std::string text = wait(name + ", which still responds,");
  return absent.empty() ? text : fmt::format("{}; no response from {}", text, absent);
}

}  // namespace annulus
