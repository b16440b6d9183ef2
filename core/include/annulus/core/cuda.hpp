#pragma once

#include <memory>
#include <string>
#include <vector>

#include <annulus/core/device.hpp>

/// The CUDA side of core without CUDA's own types, so that callers are the same with and without
/// CUDA.
namespace annulus {

struct CudaDeviceInfo {
  std::string name;            ///< "NVIDIA H200"
  int compute_capability = 0;  ///< 90 for 9.0
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::string uuid;
  std::string bus_id;  ///< "0000:1b:00.0": the same in every process of a node
};

struct CudaVersions {
  std::string built;   ///< runtime at build time; "not built"
  std::string loaded;  ///< runtime in use
  std::string driver;  ///< newest CUDA version that the driver supports
};

/// Why no GPU can be used, such as "this build has no CUDA" or "no CUDA device: …"; empty if one
/// can.
[[nodiscard]] std::string cuda_unavailable_reason();
/// True if GPUs seem to be there but cannot be used: the driver fails, or is too old for this
/// build. False where there is no driver or no GPU, and where CUDA_VISIBLE_DEVICES hides all GPUs.
[[nodiscard]] bool cuda_is_broken();
/// Devices that CUDA_VISIBLE_DEVICES leaves visible; empty when there are none or no CUDA.
[[nodiscard]] std::vector<CudaDeviceInfo> cuda_devices();
[[nodiscard]] CudaVersions cuda_versions();

/// The device with this index among the visible ones. Calls on it, its streams and its memory may
/// come from any thread, under any current device, and leave that device current. Throws
/// UnsupportedError with the reason if there is none.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int index);

/// Page-locked host memory, for staging between files and device.
[[nodiscard]] std::unique_ptr<MemoryPool> make_pinned_memory_pool();

}  // namespace annulus
