#pragma once

#include <memory>

#include <annulus/ring/context.hpp>

#include "launcher/commands/commands.hpp"

namespace annulus::launcher {

/// The ranks of the job on this mesh, and this one's device for --device, --transport and
/// --share-gpus. Collective over them; throws UserErrors naming the options on all ranks.
[[nodiscard]] std::unique_ptr<Context> open_context(const CommandContext& command,
                                                    const MeshShape& mesh);
/// On the mesh that the options ask for.
[[nodiscard]] std::unique_ptr<Context> open_context(const CommandContext& command);

}  // namespace annulus::launcher
