#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace annulus::ring::simulation {

enum class What : std::uint8_t { step_ends, flow_starts, flow_ends };

struct Event {
  double time;
  std::uint32_t id;  // of a rank or a flow
  What what;

  bool operator<(const Event& other) const {
    return std::tie(time, what, id) < std::tie(other.time, other.what, other.id);
  }
};

/// The next event of every rank and every message, the earliest first. Events of the same time
/// always come in the same order. The queue is a binary heap that knows the place of each event, so
/// an event can move when its time changes. Every message that starts or ends changes the times of
/// all others on its links. If outdated events stayed in the heap, they would outnumber the
/// messages.
class EventQueue {
 public:
  [[nodiscard]] bool empty() const noexcept { return heap_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return heap_.size(); }
  [[nodiscard]] const Event& top() const { return heap_.front(); }

  /// Adds an event, replacing the one of the same rank or message.
  void set(const Event& event) {
    std::uint32_t& known = place_of(event);
    if (known == kAbsent) {
      known = static_cast<std::uint32_t>(heap_.size());
      heap_.push_back(event);
    }
    const std::size_t place = known;
    heap_[place] = event;
    if (rise(place) == place) sink(place);
  }

  void pop() {
    place_of(heap_.front()) = kAbsent;
    const Event last = heap_.back();
    heap_.pop_back();
    if (heap_.empty()) return;
    put(0, last);
    sink(0);
  }

 private:
  static constexpr std::uint32_t kAbsent = std::numeric_limits<std::uint32_t>::max();

  [[nodiscard]] std::uint32_t& place_of(const Event& event) {
    std::vector<std::uint32_t>& places = event.what == What::step_ends ? ranks_ : flows_;
    if (event.id >= places.size()) places.resize(event.id + std::size_t{1}, kAbsent);
    return places[event.id];
  }

  void put(std::size_t place, const Event& event) {
    heap_[place] = event;
    place_of(event) = static_cast<std::uint32_t>(place);
  }

  // rise() and sink() move an event to its right place; rise() returns that place.
  std::size_t rise(std::size_t place) {
    const Event event = heap_[place];
    while (place > 0 && event < heap_[(place - 1) / 2]) {
      put(place, heap_[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    put(place, event);
    return place;
  }

  void sink(std::size_t place) {
    const Event event = heap_[place];
    for (std::size_t child = 2 * place + 1; child < heap_.size(); child = 2 * place + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < event)) break;
      put(place, heap_[child]);
      place = child;
    }
    put(place, event);
  }

  std::vector<Event> heap_;
  std::vector<std::uint32_t> ranks_, flows_;  // the places of their events in the heap
};

}  // namespace annulus::ring::simulation
