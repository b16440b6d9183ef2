#include "cudnn/cudnn_handle.hpp"

#include <map>
#include <mutex>
#include <vector>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {
namespace {

// By device.
struct IdleHandles {
  std::mutex mutex;
  std::map<int, std::vector<cudnnHandle_t>> idle;
};

IdleHandles& idle_handles() {
  static auto* const handles = new IdleHandles;  // never destroyed: threads may end after it
  return *handles;
}

class ThreadHandles {
 public:
  ThreadHandles() = default;
  ThreadHandles(const ThreadHandles&) = delete;
  ThreadHandles& operator=(const ThreadHandles&) = delete;
  ~ThreadHandles() {
    IdleHandles& shared = idle_handles();
    const std::lock_guard lock(shared.mutex);
    for (const auto& [device, handle] : own_) shared.idle[device].push_back(handle);
  }

  cudnnHandle_t of(int device) {
    if (const auto known = own_.find(device); known != own_.end()) return known->second;
    cudnnHandle_t handle = taken(device);
    if (handle == nullptr) check_cudnn(cudnnCreate(&handle), "cudnnCreate");
    return own_[device] = handle;
  }

 private:
  static cudnnHandle_t taken(int device) {
    IdleHandles& shared = idle_handles();
    const std::lock_guard lock(shared.mutex);
    std::vector<cudnnHandle_t>& idle = shared.idle[device];
    if (idle.empty()) return nullptr;
    cudnnHandle_t const handle = idle.back();
    idle.pop_back();
    return handle;
  }

  std::map<int, cudnnHandle_t> own_;
};

}  // namespace

cudnnHandle_t cudnn_handle(cudaStream_t stream) {
  thread_local ThreadHandles handles;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  cudnnHandle_t const handle = handles.of(device);
  check_cudnn(cudnnSetStream(handle, stream), "cudnnSetStream");
  return handle;
}

}  // namespace annulus
