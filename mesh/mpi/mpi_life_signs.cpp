#include "mpi/mpi_life_signs.hpp"

#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "mpi/mpi_endpoint.hpp"

namespace annulus {
namespace {

class MpiLifeSigns final : public LifeSigns {
 public:
  MpiLifeSigns(Communicator communicator, Watchdog::Seconds interval)
      : communicator_(std::move(communicator)), interval_(interval), last_given_(Clock::now()) {
    check_mpi(MPI_Comm_rank(communicator_.get(), &rank_), "MPI_Comm_rank");
    int size = 0;
    check_mpi(MPI_Comm_size(communicator_.get(), &size), "MPI_Comm_size");
    sends_.assign(static_cast<std::size_t>(size), MPI_REQUEST_NULL);
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    any_thread_may_give_ = level >= MPI_THREAD_SERIALIZED;
  }

  ~MpiLifeSigns() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    for (MPI_Request& send : sends_) {
      if (send != MPI_REQUEST_NULL) MPI_Request_free(&send);
    }
  }
  MpiLifeSigns(const MpiLifeSigns&) = delete;
  MpiLifeSigns& operator=(const MpiLifeSigns&) = delete;

  void give() override {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (now - last_given_ < interval_) return;
    last_given_ = now;
    (void)take_all();  // takes what has come, so that the others' sends finish
    for (int peer = 0; peer < static_cast<int>(sends_.size()); ++peer) {
      MPI_Request& send = sends_[static_cast<std::size_t>(peer)];
      int taken = 1;
      if (send != MPI_REQUEST_NULL) {
        check_mpi(MPI_Test(&send, &taken, MPI_STATUS_IGNORE), "MPI_Test");
      }
      if (peer == rank_ || taken == 0) continue;
      check_mpi(MPI_Isend(nullptr, 0, MPI_BYTE, peer, kTag, communicator_.get(), &send),
                "MPI_Isend");
    }
  }

  [[nodiscard]] bool any_thread_may_give() const override { return any_thread_may_give_; }

  bool heard() override {
    const std::lock_guard lock(mutex_);
    return take_all();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kTag = static_cast<int>(MpiTag::life);

  // Whether any sign has come.
  bool take_all() {
    bool any = false;
    for (;;) {
      int waiting = 0;
      MPI_Status status;
      check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, kTag, communicator_.get(), &waiting, &status),
                "MPI_Iprobe");
      if (waiting == 0) return any;
      check_mpi(MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, kTag, communicator_.get(),
                         MPI_STATUS_IGNORE),
                "MPI_Recv");
      any = true;
    }
  }

  // A thread may give signs while another one waits for a device: see Watchdog::computing(). MPI
  // may permit only one thread at a time.
  static inline std::mutex mutex_;
  Communicator communicator_;
  Watchdog::Seconds interval_;
  Clock::time_point last_given_;
  int rank_ = 0;
  bool any_thread_may_give_ = false;
  std::vector<MPI_Request> sends_;  // by peer
};

}  // namespace

std::shared_ptr<LifeSigns> make_mpi_life_signs(Communicator communicator,
                                               Watchdog::Seconds interval) {
  return std::make_shared<MpiLifeSigns>(std::move(communicator), interval);
}

}  // namespace annulus
