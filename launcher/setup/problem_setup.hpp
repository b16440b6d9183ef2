#pragma once

#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/random_scores.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The problem that the options describe, and its layout on the mesh.
struct ProblemSetup {
  AttentionOptions problem;  ///< with its layout and the choices of the options
  MeshShape mesh;
  ring::OperandLayout layout;
  std::string why_layout;             ///< see set_layout()
  verification::OperandFills fills;   ///< of bias and dense mask
  std::vector<std::string> warnings;  ///< one sentence each
};

/// The limit for a mesh that need not exist, since the plans of all its ranks are held in memory.
inline constexpr int kMaximumPlannedRanks = 1 << 16;

/// The mesh of the options; by default all `ranks` are on sp. With `ranks` = 0 there is no
/// communicator, and the mesh must be given in full, with at most 65536 ranks. It depends on
/// nothing else, so all ranks agree without communicating.
[[nodiscard]] MeshShape set_up_mesh(const Options& options, int ranks);

/// The options with a mesh that a command makes itself, and without specs, which would name axes of
/// the old mesh.
[[nodiscard]] Options on_mesh(Options options, std::string mesh);

/// Determines mesh, specs (given, or by the sharding rules of the mode), default sequence layout,
/// dtype and mask of a problem of `shape`. Reads the small files that the mask needs (segment ids,
/// cu_seqlens, lengths, blocks) whole, on every rank, and only the headers of bias and dense mask.
/// --bias-policy is applied to the problem's mask. Does not communicate. Throws UserErrors.
[[nodiscard]] ProblemSetup set_up_problem(const Options& options, const AttentionShape& shape,
                                          DType dtype, int ranks);

/// set_up_problem() for a context's ranks, with checked choices (check_choices()), its cost model,
/// and, if the options leave it open, the sequence layout with the shortest predicted time
/// (ring::choose_layout()). Collective over the context.
[[nodiscard]] ProblemSetup settled_problem(const Options& options, const AttentionShape& shape,
                                           DType dtype, Context& context);
/// Sets the layout of the problem, and the reason for it.
void set_layout(ProblemSetup& setup, ring::LayoutChoice choice);

/// "contiguous: predicted 0.728 ms, zigzag 0.783 ms".
[[nodiscard]] std::string why_layout_text(const ProblemSetup& setup);

/// The visible pairs of all batches, per query head.
[[nodiscard]] double visible_pairs(const AttentionProblem& problem);

/// ring::shard_operands() with errors that name options and dimensions.
[[nodiscard]] ring::ShardedOperands shard_operands(const ProblemSetup& setup);

/// The options of the tuning chain.
[[nodiscard]] ring::TuningOptions tuning_options(const Options& options);

/// Throws UserErrors naming --schedule, --impl or --weights if their value cannot serve the
/// problem. Does not communicate.
void check_choices(const AttentionOptions& problem, const ring::ShardedOperands& operands,
                   const Registry& registry, Place place, Presence presence = Presence::required);

}  // namespace annulus::launcher
