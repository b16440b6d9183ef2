#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// The heartbeats of one rank: when to send them, their contents, and what it has learned from
/// others. Its owner carries the messages and supplies the time, in seconds.
///
/// Ranks r and r ± 2^k are neighbours: at most 2·log2 P of them. A rank sends to all of its
/// neighbours once per interval, and passes on at once the news that a rank computes. A neighbour
/// that has missed two heartbeats is silent; this news spreads from rank to rank, as does its
/// return. A few ranks that do not listen for a while do not cut off the others. A message has 12
/// bytes, and 12 more for each of at most kMaximumNews ranks that are or were silent.
class HeartbeatState {
 public:
  /// `mesh` excludes messages of an earlier mesh that are still on their way.
  HeartbeatState(std::uint32_t mesh, int rank, int size, double interval, double now);

  [[nodiscard]] const std::vector<int>& neighbours() const noexcept { return neighbours_; }

  static constexpr std::size_t kMaximumNews = 16;
  /// The largest message, in bytes.
  static constexpr std::size_t kMaximumBytes = 12 + 12 * kMaximumNews;

  /// Takes a message of a neighbour.
  void take(int from, const std::string& message, double now);
  /// The message that is due to all neighbours, if any. To be called often, after taking all
  /// messages that have arrived. `computing`: this rank makes progress of its own.
  [[nodiscard]] std::optional<std::string> due(bool computing, double now);

  /// See Heartbeats.
  [[nodiscard]] double silence(const Heartbeats::Peers& peers, double now) const;
  [[nodiscard]] std::vector<int> silent_ranks() const;

 private:
  struct Neighbour {
    double heard;              // time of its last heartbeat
    std::uint32_t number = 0;  // of that heartbeat
  };
  /// The state of a rank that is silent or has been silent. Of two findings, the one with the
  /// larger heartbeat number is newer; of equal numbers, silence is newer.
  struct Finding {
    std::uint32_t number;
    bool silent;
    double since;      // if it is silent
    int mentions = 0;  // remaining messages that mention it, if it is not
  };

  [[nodiscard]] Neighbour* neighbour(int rank);
  void find(int rank, std::uint32_t number, bool silent, double since);
  void look_for_silence(double now);
  [[nodiscard]] std::string message(double now);

  static constexpr double kNever = -std::numeric_limits<double>::infinity();

  std::uint32_t mesh_;
  int rank_;
  double interval_;
  std::vector<int> neighbours_;   // ascending
  std::vector<Neighbour> heard_;  // of neighbours_
  std::map<int, Finding> findings_;
  int last_told_ = -1;  // the last rank of the last message's news
  double computed_ = kNever;       // when somebody is last known to have computed
  double computed_sent_ = kNever;  // as the last message said
  std::uint32_t number_ = 0;
  double sent_;
  double listened_;
  bool news_ = false;
};

}  // namespace annulus
