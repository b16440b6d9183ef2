#include "control/heartbeat_state.hpp"

#include <algorithm>
#include <set>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

constexpr double kMissed = 2.5;        // intervals without a heartbeat that make a rank silent
constexpr double kFresh = 0.75;        // intervals after which a computing rank is news
constexpr double kMaximumOften = 0.1;  // intervals between two messages at least
constexpr int kMentions = 3;           // messages that mention a rank's return

struct Head {
  std::uint32_t mesh;
  std::uint32_t number;
  float computed_before;  // seconds since a rank is known to have computed
};

// A finding in a message. The time is relative, as clocks of ranks differ.
struct News {
  int rank;
  std::uint32_t number;
  float silent_for;  // seconds; −1: it is not silent
};

}  // namespace

HeartbeatState::HeartbeatState(std::uint32_t mesh, int rank, int size, double interval, double now)
    : mesh_(mesh), rank_(rank), interval_(interval), sent_(now), listened_(now) {
  std::set<int> all;
  for (int step = 1; step <= size / 2; step *= 2) {
    all.insert((rank + step) % size);
    all.insert((rank + size - step) % size);
  }
  all.erase(rank);
  neighbours_.assign(all.begin(), all.end());
  heard_.assign(neighbours_.size(), Neighbour{now});
}

HeartbeatState::Neighbour* HeartbeatState::neighbour(int rank) {
  const auto found = std::lower_bound(neighbours_.begin(), neighbours_.end(), rank);
  if (found == neighbours_.end() || *found != rank) return nullptr;
  return &heard_[static_cast<std::size_t>(found - neighbours_.begin())];
}

void HeartbeatState::find(int rank, std::uint32_t number, bool silent, double since) {
  const auto [known, fresh] = findings_.try_emplace(rank, Finding{number, silent, since});
  Finding& finding = known->second;
  if (fresh) {
    news_ = true;
    finding.mentions = kMentions;
    return;
  }
  const bool newer =
      number > finding.number || (number == finding.number && silent && !finding.silent);
  if (newer) {
    if (silent != finding.silent) {
      news_ = true;
      finding.mentions = kMentions;
      finding.since = since;
    }
    finding.number = number;
    finding.silent = silent;
  } else if (silent != finding.silent) {
    // The sender has missed what this rank knows.
    finding.mentions = std::max(finding.mentions, 1);
    news_ = true;
  }
}

void HeartbeatState::take(int from, const std::string& message, double now) {
  const auto head = value_at<Head>(message, 0);
  if (head.mesh != mesh_) return;
  computed_ = std::max(computed_, now - static_cast<double>(head.computed_before));
  if (Neighbour* const sender = neighbour(from); sender != nullptr) {
    *sender = {now, head.number};
    if (findings_.contains(from)) find(from, head.number, false, 0);
  }
  for (std::size_t at = sizeof(Head); at < message.size(); at += sizeof(News)) {
    const auto news = value_at<News>(message, at);
    if (news.rank == rank_) continue;  // this rank knows that it is alive
    const bool silent = news.silent_for >= 0;
    const Neighbour* const known = neighbour(news.rank);
    if (known != nullptr && silent && known->number > news.number &&
        !findings_.contains(news.rank)) {
      findings_.emplace(news.rank, Finding{known->number, false, 0});
    }
    if (!silent && !findings_.contains(news.rank)) continue;  // no news
    find(news.rank, news.number, silent, now - static_cast<double>(news.silent_for));
  }
}

void HeartbeatState::look_for_silence(double now) {
  for (std::size_t i = 0; i < neighbours_.size(); ++i) {
    // A heartbeat sent while this rank did not listen may still be on its way.
    if (now - listened_ > interval_) heard_[i].heard = now;
    if (now - heard_[i].heard <= kMissed * interval_) continue;
    const auto known = findings_.find(neighbours_[i]);
    const bool is_known = known != findings_.end() && known->second.silent &&
                          known->second.number >= heard_[i].number;
    if (!is_known) find(neighbours_[i], heard_[i].number, true, heard_[i].heard);
  }
  listened_ = now;
}

std::optional<std::string> HeartbeatState::due(bool computing, double now) {
  look_for_silence(now);
  if (computing) computed_ = now;
  const double since = now - sent_;
  const bool due = since >= interval_;
  const bool tells = news_ || computed_ - computed_sent_ >= kFresh * interval_;
  if (!due && !(tells && since >= kMaximumOften * interval_)) return std::nullopt;
  sent_ = now;
  computed_sent_ = computed_;
  news_ = false;
  return message(now);
}

std::string HeartbeatState::message(double now) {
  std::string text;
  append(text, Head{mesh_, ++number_, static_cast<float>(now - computed_)});
  // A message names a limited number of ranks; the next message goes on where this one ends.
  auto next = findings_.upper_bound(last_told_);
  for (std::size_t i = 0; i < findings_.size() && text.size() < kMaximumBytes; ++i, ++next) {
    if (next == findings_.end()) next = findings_.begin();
    auto& [rank, finding] = *next;
    if (finding.mentions == 0 && !finding.silent) continue;
    finding.mentions = std::max(finding.mentions - 1, 0);
    append(text, News{rank, finding.number,
                      finding.silent ? static_cast<float>(now - finding.since) : -1.0F});
    last_told_ = rank;
  }
  return text;
}

double HeartbeatState::silence(const Heartbeats::Peers& peers, double now) const {
  double silence = now - computed_;
  if (!peers || findings_.empty()) return silence;
  for (const int peer : peers()) {
    const auto found = findings_.find(peer);
    if (found == findings_.end() || !found->second.silent) continue;
    silence = std::max(silence, now - found->second.since);
  }
  return silence;
}

std::vector<int> HeartbeatState::silent_ranks() const {
  std::vector<int> silent;
  for (const auto& [rank, finding] : findings_) {
    if (finding.silent) silent.push_back(rank);
  }
  return silent;
}

}  // namespace annulus
