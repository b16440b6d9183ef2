#pragma once

#include <memory>

#include <annulus/ring/context.hpp>

#include "launcher/options/command_context.hpp"

namespace annulus::launcher {

/// The context of all ranks of the job on this mesh, with this rank's device for --device,
/// --transport and --share-gpus. Collective over all ranks; throws UserErrors naming the options on
/// all of them.
[[nodiscard]] std::unique_ptr<Context> open_context(const CommandContext& command,
                                                    const MeshShape& mesh);
/// On the mesh that the options ask for.
[[nodiscard]] std::unique_ptr<Context> open_context(const CommandContext& command);

}  // namespace annulus::launcher
