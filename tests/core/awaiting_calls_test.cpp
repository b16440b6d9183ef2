#include <gtest/gtest.h>

#include <annulus/core/awaiting_calls.hpp>
#include <annulus/core/device.hpp>

namespace annulus {
namespace {

// A device without a GPU behind it.
class PretendedGpu final : public Device {
 public:
  explicit PretendedGpu(int index) : index_(index) {}
  [[nodiscard]] Place place() const noexcept override { return Place::cuda(index_); }
  [[nodiscard]] MemoryPool& memory() noexcept override { return host_.memory(); }
  [[nodiscard]] MemoryPool& staging() override { return host_.staging(); }
  using Device::make_stream;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer, bool urgent) override {
    return host_.make_stream(std::move(name), std::move(watchdog), tracer, urgent);
  }
  using Device::copy;
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override {
    host_.copy(source, destination, stream);
  }

 private:
  int index_;
  HostDevice host_;
};

// Two contexts open the same GPU twice. Their calls that wait for other ranks must still take
// turns.
TEST(AwaitingCalls, AreOnesOfTheGpuNotOfTheDeviceObject) {
  PretendedGpu first(0);
  PretendedGpu second(0);
  PretendedGpu other(1);
  EXPECT_EQ(&first.awaiting_calls(), &second.awaiting_calls());
  EXPECT_NE(&first.awaiting_calls(), &other.awaiting_calls());
  const auto stream = first.make_stream("compute", Watchdog(Watchdog::kUsual), nullptr);
  first.awaiting_calls().last = stream->record();
  EXPECT_EQ(second.awaiting_calls().last, first.awaiting_calls().last);
  EXPECT_EQ(other.awaiting_calls().last, nullptr);
}

}  // namespace
}  // namespace annulus
