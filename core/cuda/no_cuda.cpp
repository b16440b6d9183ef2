#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr const char* kReason = "this build has no CUDA";

}  // namespace

std::string cuda_unavailable_reason() {
  return kReason;
}
bool cuda_is_broken() {
  return false;
}
std::vector<CudaDeviceInfo> cuda_devices() {
  return {};
}
CudaVersions cuda_versions() {
  return {"not built", "not built", "not built"};
}
std::unique_ptr<Device> make_cuda_device(int /*index*/) {
  throw UnsupportedError(kReason);
}
std::unique_ptr<MemoryPool> make_pinned_memory_pool() {
  throw UnsupportedError(kReason);
}

}  // namespace annulus
