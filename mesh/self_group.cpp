#include <cstring>
#include <utility>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mpi.hpp>

#include "self_messages.hpp"

namespace annulus {
namespace {

// A copy in its turn of the stream.
class SelfExchange final : public HostOperation {
 public:
  SelfExchange(std::span<const Send> sends, std::span<const Receive> receives, ExchangeLabel label)
      : sends_(sends.begin(), sends.end()),
        receives_(receives.begin(), receives.end()),
        label_(std::move(label)) {}

  void start() override { copy_self_messages(sends_, receives_, 0); }
  bool test() override { return true; }
  [[nodiscard]] std::string describe() const override { return "copy of " + label_.what; }
  [[nodiscard]] TraceLabel label() const override {
    return {TraceCategory::transfer, label_.what, label_.step, 0, 0};
  }

 private:
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  ExchangeLabel label_;
};

class SelfGroup final : public Group {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] std::string transport() const override { return "self"; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    check_messages(sends, receives, rank(), size());
    HostStream::of(stream).submit(
        std::make_unique<SelfExchange>(sends, receives, std::move(label)));
  }
  void all_gather(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    copy(send, receive, bytes, stream, "all-gather");
  }
  void all_to_all(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    copy(send, receive, bytes, stream, "all-to-all");
  }
  void reduce_scatter(const float* send, float* receive, std::size_t count,
                      Stream& stream) override {
    copy(send, receive, count * sizeof(float), stream, "reduce-scatter");
  }

  void barrier() override {}
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text) override {
    return {text};
  }
  [[nodiscard]] std::vector<double> sum(std::span<const double> values) override {
    return {values.begin(), values.end()};
  }
  [[nodiscard]] std::vector<double> max(std::span<const double> values) override {
    return {values.begin(), values.end()};
  }
  [[noreturn]] void abort(int exit_code) noexcept override { abort_job(exit_code); }

 private:
  void copy(const void* send, void* receive, std::size_t bytes, Stream& stream, const char* what) {
    const Send out{0, send, bytes};
    const Receive in{0, receive, bytes};
    exchange({&out, 1}, {&in, 1}, stream, {what, -1});
  }
};

}  // namespace

std::unique_ptr<Group> make_self_group() {
  return std::make_unique<SelfGroup>();
}

}  // namespace annulus
