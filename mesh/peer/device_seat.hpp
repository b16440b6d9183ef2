#pragma once

#include <string>

namespace annulus::peer {

/// "0000:1b:00.0": the same in every process of a node, whatever CUDA_VISIBLE_DEVICES says.
[[nodiscard]] std::string pci_bus_id(int device);

}  // namespace annulus::peer
