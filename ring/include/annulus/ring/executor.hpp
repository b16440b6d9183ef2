#pragma once

#include <memory>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Local shards of one call. Head dimensions are innermost with stride 1; other strides are free.
struct LocalTensors {
  ConstTensorView query;  ///< [b,t,n,D]
  ConstTensorView key;    ///< [b,s,k,D]
  ConstTensorView value;  ///< [b,s,k,Dv]
  TensorView output;      ///< [b,t,n,Dv], the problem's dtype
  TensorView lse;         ///< [b,n,t], float32
};

struct ExecutorOptions {
  int threads = 1;           ///< CPU threads per rank
  Tracer* tracer = nullptr;  ///< must outlive the executor
};

/// Obeys the plan of one rank, over and over. All memory is taken when it is made: run() allocates
/// nothing of its own.
///
/// Two streams: transfers go to "communication", everything else to "compute". A step's transfers
/// are posted before its blocks are computed; while a CPU kernel computes, it moves them along.
class Executor {
 public:
  /// `group` is the group along the plan's key/value sequence axes. `implementation`, `group` and
  /// `device` must outlive the executor.
  Executor(AttentionProblem problem, RankPlan plan, const Implementation& implementation,
           Group& group, Device& device, Watchdog watchdog, ExecutorOptions options);
  ~Executor();

  /// Collective over the group. When it returns, the tensors are the caller's again. Throws
  /// TimeoutError or LibraryError, after which the job can only be aborted (Group::abort).
  void run(const LocalTensors& tensors);

  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }

 private:
  /// A packed or receive buffer of the plan: K and V as tensors [b, slots, k, D or Dv], interleaved
  /// in one piece of memory.
  struct KvStorage {
    Tensor memory;  // empty when the buffer reuses another's
    TensorView key;
    TensorView value;
  };

  void allocate();
  void pack();
  void post(const Step& step, int index);
  void compute(const Block& block, int step);
  /// K and V of any buffer of the plan, the input included.
  [[nodiscard]] ConstTensorView key_of(int buffer) const;
  [[nodiscard]] ConstTensorView value_of(int buffer) const;
  [[nodiscard]] void* slot_address(const Transfer& transfer) const;

  AttentionProblem problem_;
  RankPlan plan_;
  const Implementation& implementation_;
  Group& group_;
  Device& device_;
  ExecutorOptions options_;
  std::unique_ptr<LocalOperations> operations_;
  std::vector<KvStorage> buffers_;  // by plan index; that of the input is unused
  Tensor accumulator_;              // float32 [b,t,n,Dv]; unused when the output itself is float32
  Tensor lse_;                      // float64 [b,n,t]
  Tensor partial_output_;
  Tensor partial_lse_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  LocalTensors tensors_;
  SoftmaxState state_;
  // Last, so that they go first: what they still have in flight uses the buffers above.
  std::unique_ptr<Stream> compute_stream_;
  std::unique_ptr<Stream> communication_stream_;
};

}  // namespace annulus::ring
