#pragma once

#include <memory>
#include <string>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>

namespace annulus::launcher {

/// The device that this rank computes on, for --device: "cpu", "cuda" (the GPU whose index is the
/// rank's position on its node, among those that CUDA_VISIBLE_DEVICES leaves), or "auto" (cuda
/// where every rank finds a GPU of its own, else cpu). Collective over the mesh; throws
/// UnsupportedError on all ranks when a GPU was asked for and one rank has none.
[[nodiscard]] std::unique_ptr<Device> open_device(const std::string& name, Mesh& mesh);

}  // namespace annulus::launcher
