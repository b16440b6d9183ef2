#pragma once

#include <memory>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The device that this rank computes on, for --device: "cpu"; "cuda", the GPU that bind_gpus()
/// gives the rank among those that it sees (with --share-gpus several ranks may get the same); or
/// "auto", cuda where every rank finds a GPU, else cpu. Collective over the mesh; throws
/// UnsupportedError on all ranks when a GPU, or a transport between GPUs, was asked for and one
/// rank has none.
[[nodiscard]] std::unique_ptr<Device> open_device(const Options& options, Mesh& mesh);

}  // namespace annulus::launcher
