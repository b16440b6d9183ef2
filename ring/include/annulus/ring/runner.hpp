#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/call_watch.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// A tensor of the caller, by what it holds. The runner only reads inputs.
struct CallTensor {
  Content content;
  TensorView view;
};
/// The tensors of one call, in any order: one for each content of the caller's buffers.
using CallTensors = std::span<const CallTensor>;

struct RunnerOptions {
  int threads = 1;           ///< CPU threads per rank
  Tracer* tracer = nullptr;  ///< must outlive the runner
  /// True if a device records calls and replays them while the tensors stay where they are.
  bool replay = true;
  /// Watches calls of a device while nobody waits for them; may be null, must outlive the runner.
  CallWatch* watch = nullptr;
};

/// Executes the plan of one rank, any number of times. All memory is allocated by prepare(); calls
/// allocate nothing as long as the strides stay the same.
///
/// Computing tasks run on the stream "compute", and the exchanges of each group on a stream of
/// their own. Streams wait for each other where the plan says so. A CPU kernel advances transfers
/// while it computes. A device records a call whose tensors it has seen before and replays it from
/// then on, so the host submits one graph. If the transport needs uniform calls on all ranks, only
/// the first call is not recorded. While a tracer is enabled, calls are not replayed; all ranks
/// must enable theirs for the same calls.
class Runner {
 public:
  /// Waits for calls under way, as wait() does, unless one has failed.
  virtual ~Runner() = default;
  Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  /// Prepares the transfers. Collective over the groups, once, before any call. Every rank tries to
  /// prepare all its transfers; then the ranks whose transfers could not be prepared throw
  /// AgreedFailure.
  virtual void connect() = 0;

  /// The shapes that the caller's tensors must have: contiguous, without memory.
  [[nodiscard]] virtual std::vector<CallTensor> expected() const = 0;
  /// Throws ArgumentError naming a tensor whose shape, dtype, place or strides do not fit the plan.
  virtual void check(CallTensors tensors) const = 0;
  /// True if the runner is ready for tensors with this layout.
  [[nodiscard]] virtual bool is_ready_for(CallTensors tensors) const = 0;
  /// Prepares for tensors with these strides, and with addresses that are at least as well aligned
  /// as these; tensors without memory count as aligned. Waits for calls under way. Returns the
  /// blocks that a kernel refuses; the runner is ready only if there are none. Does not
  /// communicate, but if the transport needs the same calls on all ranks, all ranks must call it
  /// alike.
  [[nodiscard]] virtual std::vector<Refusal> prepare(CallTensors tensors) = 0;

  /// Computes what a call computes, on tensors that the runner is ready for, and waits for it.
  /// Sends and receives nothing, so buffers for other ranks' shards hold arbitrary values. Not
  /// collective. Throws what a kernel throws, after which the runner can only be destroyed.
  virtual void rehearse(CallTensors tensors) = 0;
  /// Runs only the kernels of a call, one after the other, without transfers, copies and
  /// reductions, and waits for them. The kernels read the data that the last call left in the
  /// buffers, and overwrite its results. Not collective. Throws like rehearse().
  virtual void run_kernels(CallTensors tensors) = 0;

  /// Sets the call arguments of later calls: see apply_values(). `planned` is the problem that the
  /// runner was made for. Throws ArgumentError.
  virtual void set_values(const CallValues& values, const AttentionProblem& planned,
                          const Mask& mask) = 0;

  /// Submits a call. It runs after earlier work on `caller`, and later work there sees its results;
  /// if `caller` is null, it is ordered with no other stream. Collective over the groups. On a
  /// device the host does not wait, unless the tensors have other strides or alignment than before.
  /// Throws LibraryError or TimeoutError, after which the job can only be aborted (Control::abort).
  /// Tensors that were not prepared and that a kernel refuses are an error of this kind too, since
  /// other ranks may have begun.
  virtual void submit(CallTensors tensors, ForeignStream* caller) = 0;
  /// Returns when all calls are done; the tensors are then the caller's again. Throws like
  /// submit(). Also throws UserError if a call read a length from device memory that was out of
  /// bounds; the runner stays usable.
  virtual void wait() = 0;

  /// True if kernels of this rank wait for data that other ranks send. A caller cannot capture
  /// calls with such kernels.
  [[nodiscard]] virtual bool awaits_arrivals() const noexcept = 0;
  /// Later calls refuse to be captured, like calls of a rank whose kernels wait.
  virtual void refuse_capture() noexcept = 0;
  /// True if a graph of the caller holds calls. Such a runner must stay as it is until the graph
  /// has been destroyed; preparing it for other tensors keeps what the graph needs.
  [[nodiscard]] virtual bool is_captured() = 0;

  [[nodiscard]] virtual const RankPlan& plan() const noexcept = 0;
  /// Bytes of memory besides the caller's tensors, without the workspace of kernels.
  [[nodiscard]] virtual std::size_t extra_bytes() const noexcept = 0;
  /// The number of calls that were replayed from a recording.
  [[nodiscard]] virtual std::size_t replays() const noexcept = 0;
};

/// `implementations` and `groups` are the plan's, the groups for memory of `device`. Everything
/// passed by reference must outlive the runner. Not collective.
[[nodiscard]] std::unique_ptr<Runner> make_runner(
    const AttentionProblem& problem, RankPlan plan,
    std::span<const Implementation* const> implementations, std::vector<Group*> groups,
    Device& device, const Watchdog& watchdog, RunnerOptions options);

}  // namespace annulus::ring
