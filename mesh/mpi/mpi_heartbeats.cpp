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

class MpiHeartbeats final : public Heartbeats {
 public:
  MpiHeartbeats(Communicator communicator, Watchdog::Seconds interval, const Watchdog& watchdog)
      : communicator_(std::move(communicator)),
        state_(make_state(communicator_.get(), interval, watchdog)),
        posted_(state_.neighbours().size()) {
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    any_thread_may_beat_ = level >= MPI_THREAD_SERIALIZED;
  }

  void beat(State state) override {
    const std::lock_guard lock(mutex_);
    int from = 0;
    std::string taken;
    while (take_message(communicator_.get(), kTag, HeartbeatState::kMaximumBytes, from, taken)) {
      state_.take(from, taken, seconds_now());
    }
    const auto message = state_.due(state == State::computing, seconds_now());
    if (!message) return;
    for (std::size_t i = 0; i < posted_.size(); ++i) {
      if (!posted_[i].is_free()) continue;
      posted_[i].post(communicator_.get(), state_.neighbours()[i], kTag, *message);
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
  static constexpr int kTag = static_cast<int>(MpiTag::heartbeat);

  // A thread may send heartbeats while another one waits for a device: see Watchdog::computing().
  // MPI may permit only one thread at a time.
  static inline std::mutex mutex_;
  Communicator communicator_;
  HeartbeatState state_;
  std::vector<PostedMessage> posted_;  // by neighbour
  bool any_thread_may_beat_ = false;
};

}  // namespace

std::shared_ptr<Heartbeats> make_mpi_heartbeats(Communicator communicator,
                                                Watchdog::Seconds interval,
                                                const Watchdog& watchdog) {
  return std::make_shared<MpiHeartbeats>(std::move(communicator), interval, watchdog);
}

}  // namespace annulus
