#pragma once

#include <cstdint>
#include <string>

#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// One problem drawn at random, with all that is needed to run it. It has its plan options, and a
/// backward pass if it has gradients, its inputs are finite, and the pass can be planned for the
/// layout.
struct RandomProblem : ShardedCase {
  MeshShape mesh;
  bool draws_backward = false;  ///< for half of the problems; never without `backward`
  /// The command that repeats just this problem:
  /// "mpirun -np RANKS annulus verify --random-case SEED:INDEX --device cpu".
  std::string command;
};

/// Draw number `index` of `seed` for a job of `ranks` ranks: shape (odd and uneven sizes, a few
/// empty), dtype, heads, masks alone and combined, modifiers, mesh, specs, layout and schedule.
/// Every draw is a legal problem and the same on every machine. No communication.
///
/// For the CPU, one problem in twelve is for `vanilla`, half of them with a softmax in float64,
/// some with tensors in float64. Sequences have up to 200 positions, now and then up to 1200, and a
/// problem takes a few milliseconds of one core. For GPUs, four of five problems suit fast kernels:
/// head dimensions 64, 128 and 256, and lengths of up to 2048, many one off a multiple of 128, the
/// height of a tile. Half of the fast problems have block masks.
///
/// Every second problem with lengths, a diagonal, dropout or sinks gets some of these values with
/// its calls; on GPUs, half of these problems pass them in device memory.
///
/// Every third problem that hides anything has inputs that are not finite: see
/// with_non_finite_entries().
[[nodiscard]] RandomProblem draw_problem(std::uint64_t seed, int index, int ranks,
                                         Place::Kind device = Place::Kind::host);

}  // namespace annulus::verification
