#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
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
  /// `group` is the group along the plan's key/value sequence axes, for memory of `device`. What
  /// `selection` points to, `group` and `device` must outlive the executor. Throws UnsupportedError
  /// when no candidate can compute one of the plan's blocks.
  Executor(AttentionProblem problem, RankPlan plan, const Selection& selection, Group& group,
           Device& device, Watchdog watchdog, ExecutorOptions options);
  ~Executor();

  /// Collective over the group. When it returns, the tensors are the caller's again. Throws
  /// TimeoutError or LibraryError, after which the job can only be aborted (Group::abort).
  void run(const LocalTensors& tensors);

  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }
  /// Names of the implementations that compute the blocks, joined by "+"; "none" without blocks.
  [[nodiscard]] std::string implementations() const;

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
  void choose_kernels(const Selection& selection);
  /// What the kernel is called with.
  [[nodiscard]] AttentionBlock call_of(const Block& block) const;
  /// K and V of any buffer of the plan, the input included.
  [[nodiscard]] ConstTensorView key_of(int buffer) const;
  [[nodiscard]] ConstTensorView value_of(int buffer) const;
  [[nodiscard]] void* slot_address(const Transfer& transfer) const;

  AttentionProblem problem_;
  RankPlan plan_;
  Group& group_;
  Device& device_;
  ExecutorOptions options_;
  std::unique_ptr<LocalOperations> operations_;
  std::map<const Implementation*, std::unique_ptr<Kernel>> kernels_;
  std::map<const Block*, const Implementation*> implementations_;  // of the blocks of plan_
  std::vector<KvStorage> buffers_;  // by plan index; that of the input is unused
  Tensor accumulator_;              // float32 [b,t,n,Dv]; unused when the output itself is float32
  Tensor lse_;                      // [b,n,t]; float64 on the CPU, float32 on a device
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
