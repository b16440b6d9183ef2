#pragma once

#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/random_scores.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The problem that the options state together, and how it lies on the mesh.
struct ProblemSetup {
  AttentionOptions problem;  ///< with its layout, and with what the options choose
  MeshShape mesh;
  ring::OperandLayout layout;
  verification::OperandFills fills;   ///< of bias and dense mask
  std::vector<std::string> warnings;  ///< one sentence each
};

/// The mesh that the options ask for; by default all `ranks` on sp. `ranks` = 0: no communicator,
/// the mesh must be given in full, with 65536 ranks at most. Depends on nothing else, so that all
/// ranks agree without communicating.
[[nodiscard]] MeshShape set_up_mesh(const Options& options, int ranks);

/// These options with another mesh, which a command makes itself, and without their specs, which
/// name axes of their own mesh.
[[nodiscard]] Options on_mesh(Options options, std::string mesh);

/// Settles mesh, specs (given, else the sharding rules of the mode), sequence layout, dtype and
/// mask of a problem of `shape`. Reads the small files that the mask needs (segment ids,
/// cu_seqlens, lengths, blocks) whole, on every rank, and only the headers of bias and dense mask.
/// --bias-policy is applied to the problem's mask. Does not communicate. Throws UserErrors.
[[nodiscard]] ProblemSetup set_up_problem(const Options& options, const AttentionShape& shape,
                                          DType dtype, int ranks);

/// The visible pairs of all batches, per query head.
[[nodiscard]] double visible_pairs(const AttentionProblem& problem);

/// ring::shard_operands() with errors that name options and dimensions.
[[nodiscard]] ring::ShardedOperands shard_operands(const ProblemSetup& setup);

/// How to decide what the options leave open.
[[nodiscard]] ring::TuningOptions tuning_options(const Options& options);

/// Throws UserErrors naming --schedule, --impl or --weights if what they name cannot do this. Does
/// not communicate.
void check_choices(const AttentionOptions& problem, const ring::ShardedOperands& operands,
                   const Registry& registry, Place place, Presence presence = Presence::required);

}  // namespace annulus::launcher
