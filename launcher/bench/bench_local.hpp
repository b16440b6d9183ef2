#pragma once

#include <map>
#include <memory>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/ring/attention.hpp>

namespace annulus::launcher {

/// The blocks of one rank's plan, without the hops between them and the merges after them: what the
/// local kernel alone can do. A device records and replays them. Queries, keys, values and rows of
/// a bias or a mask repeat those of the rank's own shard, as the time does not depend on the
/// numbers. Each block is computed by the same implementation as in the plan.
class LocalBlocks {
 public:
  /// The references must outlive it. Not collective.
  LocalBlocks(const AttentionProblem& problem, const Attention& attention,
              const ring::LocalTensors& shards, Context& context);
  /// Computes every block once; the first call prepares the others.
  void run();

 private:
  void submit();
  [[nodiscard]] const Tensor& rows_of_others(const ring::RankPlan& plan, int buffer,
                                             const ConstTensorView& own);

  const AttentionProblem& problem_;
  Device& device_;
  int threads_;
  std::unique_ptr<Stream> stream_;
  Tensor query_, key_, value_, lse_;
  std::map<DType, Tensor> outputs_;
  std::map<int, Tensor> scores_;  // rows of a bias or a mask that other ranks send, by buffer
  struct Call {
    AttentionBlock block;
    SoftmaxState result;
    Kernel* kernel = nullptr;
  };
  std::map<const Implementation*, std::unique_ptr<Kernel>> kernels_;
  std::vector<Call> calls_;
  std::unique_ptr<Recording> recording_;
  bool warm_ = false;
};

}  // namespace annulus::launcher
