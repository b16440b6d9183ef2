#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/awaiting_calls.hpp>
#include <annulus/core/bytes.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_memory.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/foreign_stream.hpp>

#include "cuda/call_order.hpp"
#include "cuda/copy.hpp"
#include "cuda/cuda_recording.hpp"

namespace annulus {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

class CudaMemoryPool final : public MemoryPool {
 public:
  /// `make_room` returns other memory to the system when none is left.
  explicit CudaMemoryPool(int device, std::function<void()> make_room = {})
      : MemoryPool(Place::cuda(device)), make_room_(std::move(make_room)) {}
  ~CudaMemoryPool() override { release(); }

 protected:
  void* system_allocate(std::size_t bytes) override {
    const DeviceGuard guard(place().device);
    void* data = cuda::allocate(bytes);
    if (data == nullptr && make_room_) {
      make_room_();
      data = cuda::allocate(bytes);
    }
    return data;
  }
  void system_free(void* data, std::size_t /*bytes*/) noexcept override { (void)cudaFree(data); }
  [[nodiscard]] std::string system_state() const override {
    return cuda::memory_state(place().device);
  }

 private:
  std::function<void()> make_room_;
};

/// A pool per stream, whose order makes memory safe to reuse.
class StreamPools {
 public:
  explicit StreamPools(int device) : device_(device) {}

  [[nodiscard]] MemoryPool& of(std::uint64_t stream) {
    const std::lock_guard lock(mutex_);
    if (const auto found = pools_.find(stream); found != pools_.end()) return *found->second;
    // Streams end without notice, so idle pools are dropped. Freeing their memory waits for their
    // work.
    if (pools_.size() >= kMaximumIdle) {
      std::erase_if(pools_, [](const auto& one) { return one.second->statistics().in_use == 0; });
    }
    return *pools_.emplace(stream, std::make_unique<CudaMemoryPool>(device_)).first->second;
  }
  void trim() {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, pool] : pools_) pool->trim();
  }

 private:
  static constexpr std::size_t kMaximumIdle = 16;
  int device_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::unique_ptr<CudaMemoryPool>> pools_;  // by id
};

class PinnedMemoryPool final : public MemoryPool {
 public:
  PinnedMemoryPool() : MemoryPool(Place::host()) {}
  ~PinnedMemoryPool() override { release(); }

 protected:
  void* system_allocate(std::size_t bytes) override {
    void* data = nullptr;
    const cudaError_t code = cudaMallocHost(&data, bytes);
    if (code == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    check_cuda(code, "cudaMallocHost");
    return data;
  }
  void system_free(void* data, std::size_t /*bytes*/) noexcept override {
    (void)cudaFreeHost(data);
  }
};

class CurrentCudaDevice final : public CurrentDevice {
 public:
  explicit CurrentCudaDevice(int index) : guard_(index) {}

 private:
  DeviceGuard guard_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index)
      : index_(index), results_(index), memory_(index, [this] { results_.trim(); }) {}
  [[nodiscard]] Place place() const noexcept override { return Place::cuda(index_); }
  [[nodiscard]] std::unique_ptr<CurrentDevice> make_current() const override {
    return std::make_unique<CurrentCudaDevice>(index_);
  }
  [[nodiscard]] MemoryPool& memory() noexcept override { return memory_; }
  [[nodiscard]] MemoryPool& memory_of(ForeignStream& stream) override {
    return results_.of(stream.id());
  }
  [[nodiscard]] MemoryPool& staging() override { return staging_; }
  using Device::make_stream;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer, bool urgent) override {
    return std::make_unique<CudaStream>(std::move(name), index_, watchdog, tracer, urgent);
  }
  [[nodiscard]] std::unique_ptr<Recording> record(Stream& stream,
                                                  const std::function<void()>& body) override {
    const DeviceGuard guard(index_);
    return record_graph(CudaStream::of(stream), body);
  }
  void begin_call(Stream& stream, ForeignStream* caller) override {
    const DeviceGuard guard(index_);
    Device::begin_call(stream, caller);
    order_.begin(stream, caller != nullptr && caller->is_captured());
  }
  void end_call(Stream& stream, ForeignStream* caller) override {
    order_.end(stream, caller != nullptr && caller->is_captured());
    Device::end_call(stream, caller);
  }
  void await_calls(Stream& stream) override {
    const DeviceGuard guard(index_);
    order_.begin(stream, false);
  }
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override {
    copy(std::array{TensorCopy{source, destination}}, stream);
  }
  void copy(std::span<const TensorCopy> copies, Stream& stream) override {
    const DeviceGuard guard(index_);
    std::vector<TensorCopy> here;
    for (const TensorCopy& one : copies) {
      if (!(one.source.shape() == one.destination.shape()) ||
          one.source.dtype() != one.destination.dtype()) {
        throw InternalError(fmt::format(
            "copy of {} {} to {} {}", name_of(one.source.dtype()), to_string(one.source.shape()),
            name_of(one.destination.dtype()), to_string(one.destination.shape())));
      }
      if (one.source.place() == place() && one.destination.place() == place()) {
        here.push_back(one);
      } else {
        copy_to_host_or_back(one.source, one.destination, stream);
      }
    }
    cuda::copy(here, stream);
  }

 private:
  static void copy_to_host_or_back(const ConstTensorView& source, const TensorView& destination,
                                   Stream& stream) {
    if (!source.is_contiguous() || !destination.is_contiguous()) {
      throw InternalError("copy between host and device of tensors with gaps");
    }
    check_cuda(cudaMemcpyAsync(destination.data(), source.data(), source.bytes(), cudaMemcpyDefault,
                               CudaStream::of(stream).raw()),
               "cudaMemcpyAsync");
  }

  int index_;
  CallOrder order_;
  StreamPools results_;
  CudaMemoryPool memory_;
  PinnedMemoryPool staging_;
};

}  // namespace

namespace cuda {

void* allocate(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  check_cuda(code, "cudaMalloc");
  return data;
}

std::string memory_state(int device) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return fmt::format("{} of the device's {} are free", human_bytes(free), human_bytes(total));
}

std::string bus_id(int device) {
  std::array<char, 32> text{};
  check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
             "cudaDeviceGetPCIBusId");
  return text.data();
}

}  // namespace cuda

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
      return "no CUDA device: no NVIDIA driver";  // the runtime would call it too old
    }
    return fmt::format("no CUDA device: {}", cudaGetErrorString(code));
  }
  return count > 0 ? "" : "no CUDA device is visible";
}

bool cuda_is_broken() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  int driver = 0;
  const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  return has_driver && code != cudaSuccess && code != cudaErrorNoDevice;
}

std::vector<CudaDeviceInfo> cuda_devices() {
  std::vector<CudaDeviceInfo> devices;
  if (!cuda_unavailable_reason().empty()) return devices;
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    std::string uuid;
    for (const char byte : properties.uuid.bytes) {
      uuid += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    }
    devices.push_back({properties.name, properties.major * 10 + properties.minor,
                       properties.multiProcessorCount, properties.totalGlobalMem, uuid,
                       cuda::bus_id(index)});
  }
  return devices;
}

CudaVersions cuda_versions() {
  int runtime = 0;
  int driver = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  (void)cudaDriverGetVersion(&driver);
  return {version_text(CUDART_VERSION), version_text(runtime),
          driver == 0 ? "no driver" : version_text(driver)};
}

std::unique_ptr<Device> make_cuda_device(int index) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    throw UnsupportedError(reason);
  }
  const DeviceGuard guard(index);  // throws unless there is a device of this index
  return std::make_unique<CudaDevice>(index);
}

std::unique_ptr<MemoryPool> make_pinned_memory_pool() {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    throw UnsupportedError(reason);
  }
  return std::make_unique<PinnedMemoryPool>();
}

}  // namespace annulus
