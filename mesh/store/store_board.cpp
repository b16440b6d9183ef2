#include "store/store_board.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include <annulus/core/error.hpp>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

constexpr double kMissed = 2.5;  // intervals without a heartbeat that make a rank silent
const char* const kComputing = "computing";

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

StoreBoard::StoreBoard(std::shared_ptr<KeyValueStore> store, std::string prefix, int rank, int size,
                       double interval)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      size_(size),
      interval_(interval) {}

StoreBoard::~StoreBoard() {
  store_->remove_later(key_of(rank_));
  if (rank_ == 0) store_->remove_later(prefix_ + kComputing);
}

std::string StoreBoard::key_of(int rank) const {
  return prefix_ + std::to_string(rank);
}

StoreBoard::Entry StoreBoard::read(int rank) {
  const auto value = store_->get(key_of(rank), 0);
  if (!value || value->size() != sizeof(Entry)) return {};
  const auto entry = value_at<Entry>(*value, 0);
  if (entry.kind == Kind::aborted) abort(entry.value);
  return entry;
}

void StoreBoard::publish(Kind kind, int value) {
  std::string text;
  append(text, Entry{++number_, kind, value});
  store_->set(key_of(rank_), text);
}

void StoreBoard::beat(State state) {
  const std::lock_guard lock(mutex_);
  const double now = clock_seconds();
  if (now - sent_ < interval_) return;
  sent_ = now;
  if (state == State::computing) {
    computed_ = now;
    publish(Kind::computing, -1);
    std::string sign;
    append(sign, rank_);
    append(sign, number_.load());
    store_->set(prefix_ + kComputing, sign);
  } else {
    publish(Kind::waiting, awaited_);
  }
}

void StoreBoard::look(const Peers& peers, double now) {
  looked_ = now;
  auto sign = store_->get(prefix_ + kComputing, 0);
  if (sign != sign_) {
    sign_ = std::move(sign);
    computed_ = now;
  }
  watched_.clear();
  if (!peers) return;
  for (const int peer : peers()) {
    if (peer == rank_) continue;
    watched_.push_back(peer);
    const std::uint32_t number = read(peer).number;
    const auto [known, fresh] = seen_.try_emplace(peer, Seen{number, now});
    if (known->second.number != number) known->second = {number, now};
  }
}

double StoreBoard::silence(const Peers& peers) {
  const std::lock_guard lock(mutex_);
  const double now = clock_seconds();
  if (now - looked_ >= interval_) look(peers, now);
  double silence = now - computed_;
  for (const int peer : watched_) {
    const double silent = now - seen_[peer].heard;
    if (silent > kMissed * interval_) silence = std::max(silence, silent);
  }
  return silence;
}

std::vector<int> StoreBoard::silent_ranks() {
  const std::lock_guard lock(mutex_);
  const double now = clock_seconds();
  std::vector<int> silent;
  for (const int peer : watched_) {
    if (now - seen_[peer].heard > kMissed * interval_) silent.push_back(peer);
  }
  return silent;
}

void StoreBoard::wait_for(int awaited) {
  const std::lock_guard lock(mutex_);
  awaited_ = awaited;
}

std::optional<int> StoreBoard::absent(int awaited, double patience) {
  const std::optional<int> found = follow(awaited, patience);
  const std::lock_guard lock(mutex_);
  publish(Kind::gave_up, found.value_or(-1));
  return found;
}

// This rank keeps sending heartbeats here, since other ranks follow the chain at the same time.
std::optional<int> StoreBoard::follow(int awaited, double patience) {
  for (int steps = 0; awaited != rank_ && steps < size_; ++steps) {
    const Entry first = read(awaited);
    Entry entry = first;
    for (const double begin = clock_seconds();
         entry.kind == Kind::waiting && entry.number == first.number &&
         clock_seconds() - begin < patience;
         entry = read(awaited)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      beat(State::waiting);
    }
    if (entry.kind == Kind::gave_up) {
      if (entry.value < 0) return {};
      return entry.value;
    }
    const bool in_a_call = entry.kind == Kind::waiting && entry.value >= 0;
    if (!in_a_call || entry.number == first.number) return awaited;
    awaited = entry.value;
  }
  return {};
}

void StoreBoard::abort(int exit_code) noexcept {
  std::fflush(nullptr);
  try {
    publish(Kind::aborted, exit_code);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store has ended before
  }
  std::_Exit(exit_code);
}

}  // namespace annulus
