#include <cstddef>
#include <fstream>
#include <vector>

#include <cblas.h>
#include <fmt/format.h>

#include <annulus/attention/cuda_versions.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/mesh/mpi_runtime.hpp>
#include <annulus/mesh/nccl_group.hpp>
#include <annulus/ring/machine.hpp>

namespace annulus {

std::string_view library_version() {
  return ANNULUS_VERSION;
}

std::string mpi_library() {
  const MpiRuntime* const mpi = loaded_mpi_runtime();
  return mpi == nullptr ? "no MPI" : mpi->library();
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string device_name(Place place) {
  if (place.is_host()) return cpu_name();
  const std::vector<CudaDeviceInfo> gpus = cuda_devices();
  const auto index = static_cast<std::size_t>(place.device);
  return index < gpus.size() ? gpus[index].name : "unknown";
}

std::string library_versions(Place place) {
  const std::string whole = mpi_library();
  const std::string mpi = whole.substr(0, whole.find(','));
  if (place.is_host()) {
    // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH …", of the library that was loaded.
    const std::string blas(openblas_get_config());
    return fmt::format("{}, {}", mpi, blas.substr(0, blas.find(' ', blas.find(' ') + 1)));
  }
  const CudaVersions cuda = cuda_versions();
  return fmt::format("{}, CUDA {}, driver {}, cuDNN {}, NCCL {}", mpi, cuda.loaded, cuda.driver,
                     cudnn_versions().loaded, nccl_versions().loaded);
}

}  // namespace annulus
