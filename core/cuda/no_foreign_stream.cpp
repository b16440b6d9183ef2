#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>

namespace annulus {
namespace {

constexpr const char* kReason = "this build has no CUDA";

}  // namespace

std::unique_ptr<ForeignStream> make_foreign_cuda_stream(void* /*raw*/, int /*device*/) {
  throw UnsupportedError(kReason);
}

int current_cuda_device() {
  throw UnsupportedError(kReason);
}

}  // namespace annulus
