#include "mpi/mpi_heartbeats.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <annulus/mesh/mpi_group.hpp>

#include "control/bytes_of.hpp"
#include "control/heartbeat_state.hpp"
#include "control/tree_control.hpp"
#include "mpi/mpi_endpoint.hpp"
#include "mpi/mpi_messenger.hpp"
#include "mpi/posted_messages.hpp"

namespace annulus {
namespace {

constexpr int kHeartbeatTag = static_cast<int>(MpiTag::heartbeat);

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A number is agreed on, since MPI may give a new communicator the identity of a freed one.
std::uint32_t mesh_number(const std::shared_ptr<const MpiRanks>& ranks, const Watchdog& watchdog) {
  static std::atomic<std::uint32_t> meshes = 0;
  std::string number;
  append(number, ++meshes + (static_cast<std::uint32_t>(::getpid()) << 16U));
  TreeControl control(std::make_unique<MpiMessenger>(ranks, watchdog, MpiMessenger::Tags(), false));
  return value_at<std::uint32_t>(control.broadcast(number, "start of the mesh"), 0);
}

HeartbeatState make_state(MPI_Comm communicator, Watchdog::Seconds interval,
                          const Watchdog& watchdog) {
  const auto ranks =
      std::make_shared<MpiRanks>(communicator, all_members(communicator), kMpiChunkBytes);
  return {mesh_number(ranks, watchdog), ranks->rank, ranks->size(), interval.count(),
          seconds_now()};
}

// Communicators of heartbeats that have ended. A message that reaches a rank after it has freed the
// communicator would be taken for one of a later communicator, to which MPI gives the same
// identity; if the sender is no rank of that one, Open MPI 4.1 crashes. So each rank sends an empty
// message at the end, and frees the communicator when all neighbours have sent theirs. Open MPI
// does not wait for other ranks there.
class EndedHeartbeats {
 public:
  void add(Communicator communicator, std::size_t missing) {
    ended_.push_back({std::move(communicator), missing});
    free_finished();
  }
  void free_finished() {
    std::erase_if(ended_, [](Ended& one) {
      int from = 0;
      std::string taken;
      while (one.missing > 0 && take_message(one.communicator.get(), kHeartbeatTag,
                                             HeartbeatState::kMaximumBytes, from, taken)) {
        if (taken.empty()) --one.missing;
      }
      return one.missing == 0;
    });
  }

 private:
  struct Ended {
    Communicator communicator;
    std::size_t missing;  // neighbours that may still send
  };
  std::vector<Ended> ended_;
};

class MpiHeartbeats final : public Heartbeats {
 public:
  MpiHeartbeats(Communicator communicator, Watchdog::Seconds interval, const Watchdog& watchdog)
      : communicator_(std::move(communicator)),
        state_(make_state(communicator_.get(), interval, watchdog)),
        posted_(state_.neighbours().size()) {
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    any_thread_may_beat_ = level >= MPI_THREAD_SERIALIZED;
    const std::lock_guard lock(mutex_);
    ended().free_finished();
  }
  ~MpiHeartbeats() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    const std::lock_guard lock(mutex_);
    try {
      for (const int neighbour : state_.neighbours()) {
        PostedMessage().post(communicator_.get(), neighbour, kHeartbeatTag, "");
      }
      ended().add(std::move(communicator_), state_.neighbours().size() - goodbyes_);
    } catch (...) {
      // MPI has failed, so nobody can use it any more.
    }
  }
  MpiHeartbeats(const MpiHeartbeats&) = delete;
  MpiHeartbeats& operator=(const MpiHeartbeats&) = delete;

  void beat(State state) override {
    const std::lock_guard lock(mutex_);
    int from = 0;
    std::string taken;
    while (take_message(communicator_.get(), kHeartbeatTag, HeartbeatState::kMaximumBytes, from,
                        taken)) {
      if (taken.empty()) {
        ++goodbyes_;
      } else {
        state_.take(from, taken, seconds_now());
      }
    }
    const auto message = state_.due(state == State::computing, seconds_now());
    if (!message) return;
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      if (!posted_[i].is_free()) continue;
      posted_[i].post(communicator_.get(), state_.neighbours()[i], kHeartbeatTag, *message);
    }
  }

  [[nodiscard]] double silence(const Peers& peers) override {
    const std::lock_guard lock(mutex_);
    return state_.silence(peers, seconds_now());
  }
  [[nodiscard]] std::vector<int> silent_ranks() override {
    const std::lock_guard lock(mutex_);
    return state_.silent_ranks();
  }
  [[nodiscard]] bool any_thread_may_beat() const override { return any_thread_may_beat_; }

 private:
  // Not destroyed, since MPI ends before static objects do.
  static EndedHeartbeats& ended() {
    static auto& all = *new EndedHeartbeats;
    return all;
  }

  // A thread may send heartbeats while another one waits for a device: see Watchdog::computing().
  // MPI may permit only one thread at a time.
  static inline std::mutex mutex_;
  Communicator communicator_;
  HeartbeatState state_;
  std::vector<PostedMessage> posted_;  // by neighbour
  std::size_t goodbyes_ = 0;           // neighbours that have ended
  bool any_thread_may_beat_ = false;
};

}  // namespace

std::shared_ptr<Heartbeats> make_mpi_heartbeats(Communicator communicator,
                                                Watchdog::Seconds interval,
                                                const Watchdog& watchdog) {
  return std::make_shared<MpiHeartbeats>(std::move(communicator), interval, watchdog);
}

}  // namespace annulus
