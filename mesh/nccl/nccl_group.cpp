#include <algorithm>
#include <exception>
#include <nccl.h>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/handle.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/nccl_group.hpp>

namespace annulus {
namespace {

struct NcclCommunicatorTraits {
  using Raw = ncclComm_t;
  static Raw null() noexcept { return nullptr; }
  // Abort, not destroy: destroying waits for peers, and at this point nothing is in flight that
  // anybody still wants.
  static void release(Raw raw) noexcept { (void)ncclCommAbort(raw); }
};

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void check_nccl(ncclResult_t code, const char* call) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  throw LibraryError(fmt::format("{}: {}", call, ncclGetErrorString(code)));
}

std::string hexadecimal(const ncclUniqueId& id) {
  std::string text;
  for (const char byte : id.internal) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

ncclUniqueId from_hexadecimal(const std::string& text) {
  ncclUniqueId id{};
  for (std::size_t i = 0; i < sizeof(id.internal); ++i) {
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return id;
}

class NcclGroup final : public Group {
 public:
  NcclGroup(Group& host, Place place, Watchdog watchdog)
      : host_(host), place_(place), watchdog_(watchdog) {
    const std::string mine = collectively(host_, [&] {
      if (host_.rank() != 0) return std::string();
      ncclUniqueId id{};
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
      return hexadecimal(id);
    });
    const ncclUniqueId id = from_hexadecimal(host_.gather_text(mine).front());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t raw = nullptr;
    collectively(host_, [&] {
      check_nccl(ncclCommInitRankConfig(&raw, host_.size(), id, host_.rank(), &config),
                 "ncclCommInitRankConfig");
      communicator_.reset(raw);
      wait_until_settled("bringing up NCCL");
    });
  }

  [[nodiscard]] int rank() const noexcept override { return host_.rank(); }
  [[nodiscard]] int size() const noexcept override { return host_.size(); }
  [[nodiscard]] Place place() const noexcept override { return place_; }
  [[nodiscard]] std::string transport() const override { return "nccl"; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    const cudaStream_t raw = CudaStream::of(stream).raw();
    check_nccl(ncclGroupStart(), "ncclGroupStart");
    for (const Send& send : sends) {
      check_nccl(ncclSend(send.data, send.bytes, ncclInt8, send.peer, communicator_.get(), raw),
                 "ncclSend");
    }
    for (const Receive& receive : receives) {
      check_nccl(
          ncclRecv(receive.data, receive.bytes, ncclInt8, receive.peer, communicator_.get(), raw),
          "ncclRecv");
    }
    finish_group(fmt::format("step {}: posting {}", label.step, label.what).c_str());
  }
  void all_gather(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    check_nccl(ncclAllGather(send, receive, bytes, ncclInt8, communicator_.get(),
                             CudaStream::of(stream).raw()),
               "ncclAllGather");
    wait_until_settled("all-gather");
  }
  void all_to_all(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (int peer = 0; peer < size(); ++peer) {
      const std::size_t offset = static_cast<std::size_t>(peer) * bytes;
      sends.push_back({peer, static_cast<const char*>(send) + offset, bytes});
      receives.push_back({peer, static_cast<char*>(receive) + offset, bytes});
    }
    exchange(sends, receives, stream, {"all-to-all", -1});
  }
  void reduce_scatter(const float* send, float* receive, std::size_t count,
                      Stream& stream) override {
    check_nccl(ncclReduceScatter(send, receive, count, ncclFloat32, ncclSum, communicator_.get(),
                                 CudaStream::of(stream).raw()),
               "ncclReduceScatter");
    wait_until_settled("reduce-scatter");
  }

  void barrier() override { host_.barrier(); }
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text) override {
    return host_.gather_text(text);
  }
  [[nodiscard]] std::vector<double> sum(std::span<const double> values) override {
    return host_.sum(values);
  }
  [[nodiscard]] std::vector<double> max(std::span<const double> values) override {
    return host_.max(values);
  }
  [[noreturn]] void abort(int exit_code) noexcept override {
    host_.abort(exit_code);
    std::terminate();  // never reached; the compiler cannot know
  }

 private:
  void finish_group(const char* what) {
    check_nccl(ncclGroupEnd(), what);
    wait_until_settled(what);
  }

  // A non-blocking communicator takes its time to accept work; errors of earlier work show here
  // too.
  void wait_until_settled(const char* what) {
    ncclResult_t state = ncclInProgress;
    watchdog_.wait(
        [&] {
          check_nccl(ncclCommGetAsyncError(communicator_.get(), &state), "ncclCommGetAsyncError");
          check_nccl(state, what);
          return state != ncclInProgress;
        },
        [&] { return fmt::format("{}: waiting for the other ranks of the NCCL group", what); });
  }

  Group& host_;
  Place place_;
  Watchdog watchdog_;
  Handle<NcclCommunicatorTraits> communicator_;
};

}  // namespace

NcclVersions nccl_versions() {
  int loaded = 0;
  (void)ncclGetVersion(&loaded);
  return {version_text(NCCL_VERSION_CODE), version_text(loaded)};
}

std::unique_ptr<Group> make_nccl_group(Group& host, Place place, Watchdog watchdog) {
  return std::make_unique<NcclGroup>(host, place, watchdog);
}

}  // namespace annulus
