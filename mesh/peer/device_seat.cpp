#include "peer/device_seat.hpp"

#include <array>
#include <cuda_runtime_api.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus::peer {

std::string pci_bus_id(int device) {
  std::array<char, 32> text{};
  check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
             "cudaDeviceGetPCIBusId");
  return text.data();
}

}  // namespace annulus::peer
