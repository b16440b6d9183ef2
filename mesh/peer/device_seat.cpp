#include "peer/device_seat.hpp"

#include <array>
#include <cuda_runtime_api.h>
#include <fstream>
#include <unistd.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus::peer {

std::string node_identity() {
  // Drawn anew at every start of the kernel.
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (std::string id; std::getline(file, id) && !id.empty()) return id;
  std::array<char, 256> host{};
  return gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "";
}

std::string pci_bus_id(int device) {
  std::array<char, 32> text{};
  check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device),
             "cudaDeviceGetPCIBusId");
  return text.data();
}

}  // namespace annulus::peer
