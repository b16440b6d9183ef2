#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/merge_plan.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Local shards of one call, where the device computes. Head dimensions are innermost with stride
/// 1; other strides are free, but choose the kernels: those for half types on GPUs want multiples
/// of 16 bytes, addresses too.
struct LocalTensors {
  ConstTensorView query;  ///< [b,t,n,D]
  ConstTensorView key;    ///< [b,s,k,D]
  ConstTensorView value;  ///< [b,s,k,Dv]
  TensorView output;      ///< [b,t,n,Dv], the problem's dtype
  TensorView lse;         ///< [b,n,t], float32

  bool operator==(const LocalTensors&) const = default;
};

struct ExecutorOptions {
  int threads = 1;           ///< CPU threads per rank
  Tracer* tracer = nullptr;  ///< must outlive the executor
  /// Whether a device records the call and replays it while the tensors stay where they are.
  bool replay = true;
};

/// Obeys the plan of one rank, over and over. All memory is taken when it is made ready for tensors
/// of certain strides: run() allocates nothing of its own, as long as they do not change.
///
/// Two streams: transfers go to "communication", everything else to "compute". A step's transfers
/// are posted before its blocks are computed; while a CPU kernel computes, it moves them along. A
/// device records the second call with the same tensors and replays it from then on: the host then
/// submits one graph. A tracer that is enabled sees calls that are not replayed.
class Executor {
 public:
  /// `group` is the group along the plan's key/value sequence axes, for memory of `device`. What
  /// `selection` points to, `group` and `device` must outlive the executor. Each block goes to the
  /// first candidate that can compute it, and whose kernel can be prepared for it; throws
  /// UnsupportedError with every reason when there is none.
  Executor(AttentionProblem problem, RankPlan plan, Selection selection, Group& group,
           Device& device, const Watchdog& watchdog, ExecutorOptions options);
  ~Executor();

  /// Makes the transfers ready. Collective over the group, once, before run().
  void connect();

  /// Makes ready for tensors of these strides (and of addresses that are as well aligned), instead
  /// of the contiguous ones assumed at first: kernels are chosen and prepared anew. Nothing happens
  /// if it is ready for them already. Not collective: ranks that agree on the outcome before run()
  /// leave nobody waiting. Throws ArgumentError naming a tensor whose shape, dtype, place or
  /// strides do not fit, and UnsupportedError as the constructor; run() may follow all the same,
  /// with others.
  void prepare(const LocalTensors& tensors);

  /// Collective over the group. When it returns, the tensors are the caller's again. Throws
  /// TimeoutError or LibraryError, after which the job can only be aborted (Control::abort): also
  /// for tensors that prepare() would refuse, since the other ranks may be under way.
  void run(const LocalTensors& tensors);

  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }
  /// Names of the implementations that compute the blocks, joined by "+"; "none" without blocks.
  [[nodiscard]] std::string implementations() const;
  /// Who computes the blocks of all steps, in their order.
  [[nodiscard]] std::vector<const Implementation*> block_implementations() const;
  /// (name, reason) of every candidate that could not compute some blocks.
  [[nodiscard]] const std::vector<std::pair<std::string, std::string>>& passed_over()
      const noexcept {
    return passed_over_;
  }
  /// Bytes taken beyond the caller's tensors, apart from the workspace of kernels: buffers of
  /// transfers and partial results.
  [[nodiscard]] std::size_t extra_bytes() const noexcept;
  /// Whether results are merged that a kernel has rounded to the problem's dtype, which is not
  /// float32: it costs one more rounding than an unsharded call has.
  [[nodiscard]] bool merges_rounded() const;

 private:
  /// A packed or receive buffer of the plan: K and V as tensors [b, slots, k, D or Dv], interleaved
  /// in one piece of memory.
  struct KvStorage {
    TensorView key;
    TensorView value;
  };
  /// A block with what it needs, apart from the caller's tensors.
  struct Call {
    const Block* block;
    const Implementation* implementation;
    Kernel* kernel;
  };
  /// Memory of results: outputs of `rows` of the rank for up to `heads` heads, and their LSE.
  struct SlotStorage {
    LocalRange rows;
    std::int64_t heads = 0;
    Buffer output;  // none for a slot that is the output itself
    Buffer lse;
  };
  /// One call that was recorded, and the tensors it is for.
  struct Replay {
    LocalTensors tensors;
    std::unique_ptr<Recording> recording;
  };

  void find_long_blocks();
  void set_up();
  void choose_kernels(std::vector<Selection>& selections);
  void plan_results();
  [[nodiscard]] bool prepare_kernels(std::vector<Selection>& selections);
  void explain(const std::vector<Selection>& selections);
  void allocate_exchange();
  void submit();
  bool pack();
  void take(std::size_t index);
  void compute(std::size_t index, int step);
  void combine(const Combination& combination, int step);
  void wait_for_all();
  [[nodiscard]] Recording* replay_for(const LocalTensors& tensors);
  /// What the kernel is called with.
  [[nodiscard]] AttentionBlock arguments_of(const Block& block) const;
  /// Where results of these rows and heads lie. Heads of slots after the first are counted from the
  /// first of their group.
  [[nodiscard]] SoftmaxState results(const Part& part) const;
  /// K and V of any buffer of the plan, the input included.
  [[nodiscard]] ConstTensorView key_of(int buffer) const;
  [[nodiscard]] ConstTensorView value_of(int buffer) const;
  [[nodiscard]] void* slot_address(const Transfer& transfer) const;
  [[nodiscard]] std::string describe_wait() const;
  [[nodiscard]] bool awaits_only_itself() const;
  void give_up() noexcept;

  AttentionProblem problem_;
  RankPlan plan_;
  Selection selection_;
  Group& group_;
  Device& device_;
  ExecutorOptions options_;
  DType lse_dtype_;
  std::unique_ptr<LocalOperations> operations_;
  std::map<const Implementation*, std::unique_ptr<Kernel>> kernels_;
  std::vector<Call> calls_;  // of all steps, in their order
  std::vector<std::pair<std::string, std::string>> passed_over_;
  MergePlan merges_;
  std::vector<SlotStorage> slots_;
  Buffer exchange_;                           // of all packed and receive buffers
  std::vector<KvStorage> buffers_;            // by plan index; that of the input is unused
  std::vector<bool> overwrites_;              // by step: it receives where an earlier one computed
  std::vector<bool> is_long_;                 // by call: its end is marked
  std::uint32_t marked_call_ = 0;             // the last call whose end is marked, counted from 1
  std::vector<std::uint32_t> marked_before_;  // by step: the last such call of earlier steps
  LocalTensors tensors_;
  bool ready_ = false;  // for tensors that lie as tensors_ do
  // After what they use, so that they go first.
  std::unique_ptr<Stream> compute_stream_;
  std::unique_ptr<Stream> communication_stream_;
  std::vector<std::unique_ptr<PreparedExchange>> exchanges_;  // by step; null where nothing moves
  std::vector<Replay> replays_;
};

}  // namespace annulus::ring
