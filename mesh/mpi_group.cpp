#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "mpi_exchange.hpp"

namespace annulus {
namespace {

MpiEndpoint make_endpoint(MPI_Comm communicator, std::size_t chunk_bytes) {
  if (chunk_bytes < 1 || chunk_bytes > std::numeric_limits<int>::max()) {
    throw ArgumentError("chunk_bytes", std::to_string(chunk_bytes), "1 to 2^31 - 1");
  }
  MpiEndpoint endpoint{communicator, 0, 1, chunk_bytes, {}};
  check_mpi(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(communicator, &endpoint.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &endpoint.size), "MPI_Comm_size");

  std::vector<int> ranks(static_cast<std::size_t>(endpoint.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  endpoint.world_ranks.resize(ranks.size());
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Group world = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(communicator, &group), "MPI_Comm_group");
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(MPI_Group_translate_ranks(group, endpoint.size, ranks.data(), world,
                                      endpoint.world_ranks.data()),
            "MPI_Group_translate_ranks");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return endpoint;
}

// Receives everybody's part into scratch memory and adds the parts in order of rank at the end, so
// that the order of arrival leaves no trace in the sum.
class MpiReduceScatter final : public HostOperation {
 public:
  MpiReduceScatter(const MpiEndpoint& endpoint, const float* send, float* receive,
                   std::size_t count)
      : receive_(receive),
        count_(count),
        parts_(static_cast<std::size_t>(endpoint.size) * count),
        exchange_(endpoint, MpiTag::data, sends(endpoint, send, count),
                  receives(endpoint, parts_.data(), count), {"reduce-scatter", -1}) {}

  void start() override { exchange_.start(); }
  bool test() override {
    if (!exchange_.test()) return false;
    for (std::size_t k = 0; k < count_; ++k) {
      float sum = parts_[k];
      for (std::size_t i = k + count_; i < parts_.size(); i += count_) sum += parts_[i];
      receive_[k] = sum;
    }
    return true;
  }
  [[nodiscard]] std::string describe() const override { return exchange_.describe(); }
  [[nodiscard]] TraceLabel label() const override { return exchange_.label(); }

 private:
  static std::vector<Send> sends(const MpiEndpoint& endpoint, const float* send,
                                 std::size_t count) {
    std::vector<Send> result;
    for (int peer = 0; peer < endpoint.size; ++peer) {
      result.push_back(
          {peer, send + static_cast<std::size_t>(peer) * count, count * sizeof(float)});
    }
    return result;
  }
  static std::vector<Receive> receives(const MpiEndpoint& endpoint, float* parts,
                                       std::size_t count) {
    std::vector<Receive> result;
    for (int peer = 0; peer < endpoint.size; ++peer) {
      result.push_back(
          {peer, parts + static_cast<std::size_t>(peer) * count, count * sizeof(float)});
    }
    return result;
  }

  float* receive_;
  std::size_t count_;
  std::vector<float> parts_;
  MpiExchange exchange_;
};

class MpiGroup final : public Group {
 public:
  MpiGroup(Communicator communicator, Watchdog watchdog, std::size_t chunk_bytes)
      : communicator_(std::move(communicator)),
        watchdog_(std::move(watchdog)),
        endpoint_(make_endpoint(communicator_.get(), chunk_bytes)) {}

  [[nodiscard]] int rank() const noexcept override { return endpoint_.rank; }
  [[nodiscard]] int size() const noexcept override { return endpoint_.size; }
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] std::string transport() const override { return "mpi"; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    submit({sends.begin(), sends.end()}, {receives.begin(), receives.end()}, stream,
           std::move(label));
  }
  void all_gather(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    all_pairs(send, 0, receive, bytes, stream, "all-gather");
  }
  void all_to_all(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    all_pairs(send, bytes, receive, bytes, stream, "all-to-all");
  }
  void reduce_scatter(const float* send, float* receive, std::size_t count,
                      Stream& stream) override {
    HostStream::of(stream).submit(
        std::make_unique<MpiReduceScatter>(endpoint_, send, receive, count));
  }

  void barrier() override { (void)gather("barrier", ""); }
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text) override {
    return gather("gather_text", text);
  }
  [[nodiscard]] std::vector<double> sum(std::span<const double> values) override {
    return reduce("sum", values, [](double a, double b) { return a + b; });
  }
  [[nodiscard]] std::vector<double> max(std::span<const double> values) override {
    return reduce("max", values, [](double a, double b) { return std::isnan(b) || b > a ? b : a; });
  }
  [[noreturn]] void abort(int exit_code) noexcept override { abort_job(exit_code); }

 private:
  [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(endpoint_.size); }

  void submit(std::vector<Send> sends, std::vector<Receive> receives, Stream& stream,
              ExchangeLabel label) {
    HostStream::of(stream).submit(std::make_unique<MpiExchange>(
        endpoint_, MpiTag::data, std::move(sends), std::move(receives), std::move(label)));
  }

  // Every rank sends to every rank, itself included. `send_stride` is the distance between what
  // two neighbouring ranks are sent: 0 when all get the same.
  void all_pairs(const void* send, std::size_t send_stride, void* receive, std::size_t bytes,
                 Stream& stream, const char* what) {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (std::size_t i = 0; i < count(); ++i) {
      const int peer = static_cast<int>(i);
      sends.push_back({peer, static_cast<const std::byte*>(send) + i * send_stride, bytes});
      receives.push_back({peer, static_cast<std::byte*>(receive) + i * bytes, bytes});
    }
    submit(std::move(sends), std::move(receives), stream, {what, -1});
  }

  // The machinery of all control calls: everybody's bytes to everybody, first the lengths, then
  // what is not empty. Plain messages rather than a collective, so that a timeout can name who is
  // missing.
  [[nodiscard]] std::vector<std::string> gather(const char* call, const std::string& text) {
    const std::uint64_t length = text.size();
    std::vector<std::uint64_t> lengths(count());
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (std::size_t i = 0; i < count(); ++i) {
      sends.push_back({static_cast<int>(i), &length, sizeof(length)});
      receives.push_back({static_cast<int>(i), &lengths[i], sizeof(length)});
    }
    run_control(call, std::move(sends), std::move(receives));

    std::vector<std::string> texts(count());
    sends.clear();
    receives.clear();
    for (std::size_t i = 0; i < count(); ++i) {
      const int peer = static_cast<int>(i);
      if (length > 0) sends.push_back({peer, text.data(), text.size()});
      if (lengths[i] == 0) continue;
      texts[i].resize(lengths[i]);
      receives.push_back({peer, texts[i].data(), texts[i].size()});
    }
    run_control(call, std::move(sends), std::move(receives));
    return texts;
  }

  void run_control(const char* call, std::vector<Send> sends, std::vector<Receive> receives) {
    MpiExchange exchange(endpoint_, MpiTag::control, std::move(sends), std::move(receives),
                         {call, -1});
    exchange.start();
    watchdog_.wait([&] { return exchange.test(); },
                   [&] {
                     const std::string missing = exchange.missing_senders();
                     return missing.empty() ? exchange.describe()
                                            : fmt::format("{}: waiting for {}", call, missing);
                   });
  }

  template <class Combine>
  [[nodiscard]] std::vector<double> reduce(const char* call, std::span<const double> values,
                                           Combine&& combine) {
    const std::string mine(reinterpret_cast<const char*>(values.data()), values.size_bytes());
    const std::vector<std::string> texts = gather(call, mine);
    std::vector<double> result(values.size());
    for (std::size_t i = 0; i < count(); ++i) {
      if (texts[i].size() != mine.size()) {
        throw InternalError(fmt::format("{}: {} gave {} bytes and {} gave {}", call,
                                        endpoint_.name_of(static_cast<int>(i)), texts[i].size(),
                                        endpoint_.name_of(rank()), mine.size()));
      }
      std::vector<double> theirs(values.size());
      if (!theirs.empty()) std::memcpy(theirs.data(), texts[i].data(), texts[i].size());
      for (std::size_t k = 0; k < result.size(); ++k) {
        result[k] = i == 0 ? theirs[k] : combine(result[k], theirs[k]);
      }
    }
    return result;
  }

  Communicator communicator_;
  Watchdog watchdog_;
  MpiEndpoint endpoint_;
};

}  // namespace

std::unique_ptr<Group> make_mpi_group(Communicator communicator, Watchdog watchdog,
                                      std::size_t chunk_bytes) {
  return std::make_unique<MpiGroup>(std::move(communicator), std::move(watchdog), chunk_bytes);
}

}  // namespace annulus
